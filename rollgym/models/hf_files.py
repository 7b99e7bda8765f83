"""Reads a model folder in Hugging Face format: vocabulary, and names and shapes of the weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollgym.core.errors import UsageError

_MOST_HEADER = 100 << 20
Shapes = dict[str, tuple[int, ...]]


class ExpertShape(NamedTuple):
    """The experts of a mixture-of-experts model."""

    layers: int
    """All layers of the model, also those without a router."""
    choices: int
    """Experts for each token in each layer."""
    experts: int
    """Experts to choose from."""


@dataclass(frozen=True, slots=True)
class HFModelFiles:
    """The metadata of a model folder."""

    path: Path
    vocabulary: int
    tied: bool
    """Whether the output layer shares the weights of the embedding."""
    shapes: Shapes
    """Empty if the folder has no safetensors files."""
    dtype: str = "float32"
    """The dtype in config.json; float32 if it has none or another."""
    experts: ExpertShape | None = None
    """``None``: not a mixture of experts, as far as config.json tells."""

    @classmethod
    def read(cls, path: str | Path) -> HFModelFiles:
        """Read a folder; raises `UsageError` if it is not a model folder."""
        folder = Path(path)
        config = _json(folder / "config.json", folder)
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        size = text.get("vocab_size", config.get("vocab_size"))
        if type(size) is not int or size < 1:
            raise UsageError(f"The config.json in {folder} has no valid vocab_size.")
        tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
        dtype = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if k in c), None)
        known = dtype if dtype in ("bfloat16", "float16") else "float32"
        return cls(folder.resolve(), size, tied, shapes_in(folder), known, _experts(text))

    def fitting(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors to send, checked: wrong ones could crash a server."""
        shapes = self.shapes
        if not shapes:
            return dict(tensors)
        tensors = self._renamed(tensors)
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if name in shapes or not (self.tied and name == "lm_head.weight")
        }
        _compare({name: tuple(tensor.shape) for name, tensor in kept.items()}, shapes)
        return kept

    def _renamed(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Rename weights from the names of the transformers module to those of the files."""
        if all(name in self.shapes for name in tensors if not (self.tied and name == "lm_head.weight")):
            return tensors
        from rollgym.models.checkpoint_names import model_on_meta, to_checkpoint

        model = model_on_meta(self.path)
        return tensors if model is None else to_checkpoint(model, tensors)

    def check_folder(self, path: Path) -> None:
        """Raise `UsageError` if a folder does not hold weights of this model."""
        if not path.is_dir():
            raise UsageError(f"Cannot read weights from {path}: the folder does not exist.")
        shapes = shapes_in(path)
        if not shapes:
            raise UsageError(f"Cannot read weights from {path}: it has no safetensors files.")
        if self.shapes:
            tied = {"lm_head.weight"} if self.tied else set()
            _compare(
                {name: shapes[name] for name in shapes.keys() - tied},
                {name: self.shapes[name] for name in self.shapes.keys() - tied},
            )


def _experts(config: Mapping[str, Any]) -> ExpertShape | None:
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    shape = ExpertShape(
        config.get("num_hidden_layers", 0),
        config.get("num_experts_per_tok", 0),
        next((config[name] for name in counts if config.get(name)), 0),
    )
    return shape if all(type(one) is int and one > 0 for one in shape) else None


def shapes_in(folder: Path) -> Shapes:
    """Return the names and shapes of all weights in safetensors files."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            shapes |= _header(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise UsageError(f"{file} is not a readable safetensors file: {error}.") from None
    return shapes


def _header(file: Path) -> Shapes:
    with file.open("rb") as source:
        (size,) = struct.unpack("<Q", source.read(8))
        if size > _MOST_HEADER:
            raise ValueError("its header is too long")
        header = json.loads(source.read(size))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _compare(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise UsageError(f"The engine's model has no weights called {_some(unknown)}.")
    if missing := sorted(expected.keys() - shapes.keys()):
        raise UsageError(f"The new weights lack {_some(missing)}.")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise UsageError(f"The new weights' {name} has the shape {shape}, not {expected[name]}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{folder} is not a model folder: it has no readable config.json.") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a JSON object.")
    return values
