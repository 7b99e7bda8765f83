"""Weights of a policy for engines and model folders: named pieces, buckets of them, safetensors files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollgym.engines.weight_sync.wire import LocalShard, Part, Sent, ShardEncoder
from rollgym.io.run_dir import write_json
from rollgym.models.checkpoint_names import in_memory, to_checkpoint

if TYPE_CHECKING:
    from rollgym.trainer.learner.strategies.base import ParallelStrategy

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
Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that an engine knows by name, and the parameters it is computed from."""

    name: str
    numel: int
    parameters: tuple[nn.Parameter, ...]
    merge: Callable[[Sequence[Tensor]], Tensor]


def pieces_of(model: Any, numel: Callable[[nn.Parameter], int]) -> list[Piece]:
    """Return the weights of a policy; LoRA matrices are merged into the weights that they adapt."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    pieces: dict[str, Piece] = {}
    for name, parameter in plain.named_parameters():
        if "lora_" not in name:
            shown = _plain_name(name)
            pieces[shown] = Piece(shown, numel(parameter), (parameter,), lambda tensors: tensors[0])
    for name, module in plain.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        # peft wraps a module or, of fused experts, one parameter; wrappers of two parameters are nested.
        own = getattr(module, "parameter_name", "weight")
        weight = getattr(module.get_base_layer(), own)
        key = next(iter(module.lora_A))
        matrices = (module.lora_A[key].weight, module.lora_B[key].weight)
        shown = _plain_name(f"{name}.{own}")
        pieces[shown] = Piece(shown, numel(weight), (weight, *matrices), _lora_merge(module, key))
    return list(pieces.values())


def _plain_name(name: str) -> str:
    """Return a parameter's name without peft's wrappers."""
    return name.replace(".base_layer", "")


def _lora_merge(module: Any, key: str) -> Callable[[Sequence[Tensor]], Tensor]:
    transposed, scale = bool(module.fan_in_fan_out), float(module.scaling[key])
    inputs_first = getattr(module.get_base_layer(), "is_transposed", False)

    def merge(tensors: Sequence[Tensor]) -> Tensor:
        weight, a, b = tensors
        if weight.dim() == 3:  # [experts, outputs, inputs], with the matrices of all experts side by side
            a = a.reshape(len(weight), -1, a.shape[-1])
            b = b.reshape(b.shape[0], -1, len(weight))
            delta = torch.einsum("ore,eri->eio" if inputs_first else "ore,eri->eoi", b, a)
        else:
            delta = (b @ a).T if transposed else b @ a
        return weight + delta * scale

    return merge


def in_buckets(pieces: Iterable[Piece], max_bytes: int) -> list[list[Piece]]:
    """Group consecutive pieces into buckets of at most ``max_bytes``; a larger piece is alone in one."""
    buckets: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        need = piece.numel * 4
        if not buckets or size + need > max_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        size += need
    return buckets


def encode_pieces(
    pieces: Sequence[Piece], strategy: ParallelStrategy, encoder: ShardEncoder, *, full: bool
) -> tuple[Part, Sent]:
    """Return what this rank sends of a bucket, and its counts."""
    part: Part = []
    sent = Sent()
    for piece in pieces:
        shape = tuple(strategy.shape(piece.parameters[0]))
        if len(piece.parameters) == 1:
            shard = strategy.local_shard(piece.parameters[0])
        else:  # matrices are merged as a whole
            tensors = strategy.gather(piece.parameters)
            shard = None
            if strategy.rank == 0:
                shard = LocalShard(piece.merge(tensors), shape, (0,) * len(shape))
        if shard is not None:
            chunk, counts = encoder.encode(piece.name, shape, shard, full=full)
            part.append(chunk)
            sent = sent.plus(counts)
    return part, sent


def holds_weights(file: Path) -> bool:
    """Return whether a file of a model folder holds weights or an index of them."""
    return file.name.endswith(_SUFFIXES)


def write_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of a model into its folder, replacing any there."""
    _remove_weights(folder)
    _save(tensors, folder / WEIGHTS)


def write_model(path: Path, model: Any, buckets: Iterator[Bucket], count: int) -> None:
    """Write weights under Hugging Face names, one file per bucket; a single bucket is one plain file."""
    _remove_weights(path)
    index: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        name = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        named = to_checkpoint(model, dict(bucket))
        _save({key: in_memory(tensor) for key, tensor in named.items()}, path / name)
        index |= dict.fromkeys(named, name)
        total += sum(math.prod(tensor.shape) * tensor.element_size() for tensor in named.values())
    if count > 1:
        write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _remove_weights(folder: Path) -> None:
    """Remove the weights of a model folder: others than those written next would be read with them."""
    for file in folder.iterdir():
        if file.is_file() and holds_weights(file):
            file.unlink()


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path, {"format": "pt"})
    # Readable by everyone who may read the folder: a server may run as another user.
    path.chmod(path.parent.stat().st_mode & 0o666)
