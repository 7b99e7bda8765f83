"""The policy's weights in pieces that can be gathered one after another, and put together for an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgym.engines.checkpoint_names import in_memory, to_checkpoint
from rollgym.store import write_json
from rollgym.trainer.weights import INDEX, WEIGHTS, remove_weights

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
    for name, parameter in plain.named_parameters():
        if "lora_" not in name:
            shown = _plain_name(name)
            found[shown] = Piece(shown, count(parameter), (parameter,), lambda tensors: tensors[0])
    for name, module in plain.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        # peft wraps a module or, of fused experts, one parameter; wrappers of two parameters are nested.
        own = getattr(module, "parameter_name", "weight")
        weight = getattr(module.get_base_layer(), own)
        key = next(iter(module.lora_A))
        matrices = (module.lora_A[key].weight, module.lora_B[key].weight)
        shown = _plain_name(f"{name}.{own}")
        found[shown] = Piece(shown, count(weight), (weight, *matrices), _adding(module, key))
    return list(found.values())


def _plain_name(name: str) -> str:
    """The name that a parameter has without the wrappers of peft."""
    return name.replace(".base_layer", "")


def _adding(module: Any, key: str) -> Callable[[Sequence[Tensor]], Tensor]:
    turned, scale = bool(module.fan_in_fan_out), float(module.scaling[key])
    inputs_first = getattr(module.get_base_layer(), "is_transposed", False)

    def merge(tensors: Sequence[Tensor]) -> Tensor:
        weight, a, b = tensors
        if weight.dim() == 3:  # [experts, outputs, inputs], with matrices of all experts side by side
            a = a.reshape(len(weight), -1, a.shape[-1])
            b = b.reshape(b.shape[0], -1, len(weight))
            delta = torch.einsum("ore,eri->eio" if inputs_first else "ore,eri->eoi", b, a)
        else:
            delta = (b @ a).T if turned else b @ a
        return weight + delta * scale

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


def write_model(path: Path, model: Any, buckets: Iterator[Bucket], count: int) -> None:
    """Write weights as Hugging Face has them, a file for each bucket; one bucket is one plain file."""
    from safetensors.torch import save_file

    remove_weights(path)
    index: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        name = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        named = to_checkpoint(model, dict(bucket))
        save_file({key: in_memory(tensor) for key, tensor in named.items()}, path / name, {"format": "pt"})
        # Readable by whoever may read the folder: a server may run as somebody else.
        (path / name).chmod(path.stat().st_mode & 0o666)
        index |= dict.fromkeys(named, name)
        total += sum(math.prod(tensor.shape) * tensor.element_size() for tensor in named.values())
    if count > 1:
        write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
