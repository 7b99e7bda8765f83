"""The policy's weights in pieces that can be gathered one after another, and put together for an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rollgym.store import write_json
from rollgym.trainer.weights import WEIGHTS

INDEX = "model.safetensors.index.json"
BUCKET_BYTES = 256 * 2**20
Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that an engine knows by name, and the parameters that it is made of."""

    name: str
    numel: int
    parameters: tuple[nn.Parameter, ...]
    merge: Callable[[Sequence[Tensor]], Tensor]


def pieces_of(model: Any, count: Callable[[nn.Parameter], int]) -> list[Piece]:
    """The weights of a policy; low-rank matrices are added to what they change."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    found: dict[str, Piece] = {}
    adapted = {n: m for n, m in plain.named_modules() if hasattr(m, "base_layer")}
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            continue
        shown = name.replace(".base_layer.", ".")
        found[shown] = Piece(shown, count(parameter), (parameter,), lambda tensors: tensors[0])
    for name, module in adapted.items():
        weight = module.base_layer.weight
        key = next(iter(module.lora_A))
        parts = (weight, module.lora_A[key].weight, module.lora_B[key].weight)
        turned, scale = bool(module.fan_in_fan_out), float(module.scaling[key])
        shown = f"{name}.weight"
        found[shown] = Piece(shown, count(weight), parts, _adding(turned, scale))
    return list(found.values())


def _adding(turned: bool, scale: float) -> Callable[[Sequence[Tensor]], Tensor]:
    def merge(tensors: Sequence[Tensor]) -> Tensor:
        weight, a, b = tensors
        delta = b @ a
        return weight + (delta.T if turned else delta) * scale

    return merge


def in_buckets(pieces: Iterable[Piece], most: int) -> list[list[Piece]]:
    """Neighbours together, up to so many bytes; a larger piece is alone."""
    found: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        need = piece.numel * 4
        if not found or size + need > most:
            found.append([])
            size = 0
        found[-1].append(piece)
        size += need
    return found


def write_model(path: Path, buckets: Iterator[Bucket], count: int) -> None:
    """Write weights as Hugging Face has them, a file for each bucket; one bucket is one plain file."""
    from safetensors.torch import save_file

    (path / INDEX).unlink(missing_ok=True)
    index: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        name = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file({key: tensor.cpu().contiguous() for key, tensor in bucket}, path / name, {"format": "pt"})
        # Readable by whoever may read the folder: a server may run as somebody else.
        (path / name).chmod(path.stat().st_mode & 0o666)
        index |= {key: name for key, _ in bucket}
        total += sum(math.prod(tensor.shape) * tensor.element_size() for _, tensor in bucket)
    if count > 1:
        (path / WEIGHTS).unlink(missing_ok=True)
        write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
