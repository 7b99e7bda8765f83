"""Weights as files that other software can load from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


def holds_weights(file: Path) -> bool:
    """Whether a file of a model folder holds weights, or says which files do."""
    return file.name.endswith(_SUFFIXES)


def remove_weights(folder: Path) -> None:
    """Remove the weights of a model folder: others than those written next would be read with them."""
    for file in folder.iterdir():
        if file.is_file() and holds_weights(file):
            file.unlink()


def write_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of a model into its folder, in place of any there."""
    from safetensors.torch import save_file

    remove_weights(folder)
    path = folder / WEIGHTS
    save_file(dict(tensors), path, {"format": "pt"})
    # Readable by whoever may read the folder: a server may run as somebody else.
    path.chmod(folder.stat().st_mode & 0o666)
