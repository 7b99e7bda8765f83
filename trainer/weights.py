"""Weights as a file that whatever loads a Hugging Face folder can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"


def write_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of a model into its folder."""
    from safetensors.torch import save_file

    path = folder / WEIGHTS
    save_file(dict(tensors), path, {"format": "pt"})
    # Readable by whoever may read the folder: a server may run as somebody else.
    path.chmod(folder.stat().st_mode & 0o666)
