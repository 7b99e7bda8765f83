"""Sharded checkpoints, which load with any number of processes and any strategy.

Every rank writes its fragments of parameters and Adam moments, flat, into its own file. ``shards.json``,
written last, lists which file holds which range: a reader takes what it needs.

    shard-00001-of-00002.safetensors    weight/NAME, exp_avg/NAME, exp_avg_sq/NAME: one dimension each
    shards.json                         strategy, world, steps; parameters: shape, steps; parts: file, ranges

A checkpoint of the ``single`` strategy (two files, no ``shards.json``) is read in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollgym.core.errors import ResultsError, RunError, one_line
from rollgym.io.run_dir import read_json

MANIFEST = "shards.json"
WHOLE_WEIGHTS, WHOLE_OPTIMIZER = "learner.safetensors", "optimizer.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
OTHER_MODEL = (
    "The checkpoint in {path} does not match this model or learner config: parameter names or shapes differ."
)
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of a flat parameter in this process's memory; filling its tensors changes the learner."""

    name: str
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """``weight`` and, after the first optimizer step, `MOMENTS`."""


class Checkpoint(Protocol):
    """A source of weights and moments, read by ranges."""

    steps: int

    @property
    def parameter_steps(self) -> Mapping[str, int]:
        """Optimizer steps that each parameter has seen."""

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor | None:
        """Return a range of a weight or a moment; ``None`` to keep the current values."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def adam_fragments(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    span: Callable[[Tensor], tuple[int, int]] = lambda tensor: (0, tensor.numel()),
    local: Callable[[Tensor], Tensor] = _flat,
) -> list[Fragment]:
    """Return fragments of parameters and their Adam moments.

    ``span`` returns the range of a parameter that is wanted, ``local`` its elements in this process, flat.
    """
    fragments = []
    for name, parameter in parameters.items():
        start, stop = span(parameter)
        held = {
            "weight": parameter,
            **{k: t for k, t in optimizer.state.get(parameter, {}).items() if k in MOMENTS},
        }
        here = {key: local(tensor) for key, tensor in held.items()}
        cut = {k: t[start:stop] if t.numel() > stop - start else t for k, t in here.items()}
        fragments.append(Fragment(name, start, stop, cut))
    return fragments


@torch.no_grad()
def fill(fragments: Sequence[Fragment], checkpoint: Checkpoint) -> None:
    """Read fragments from a checkpoint."""
    for fragment in fragments:
        for key, tensor in fragment.tensors.items():
            if key in MOMENTS and not checkpoint.parameter_steps[fragment.name]:
                tensor.zero_()
                continue
            values = checkpoint.read(fragment.name, key, fragment.start, fragment.stop)
            if values is not None:
                tensor.copy_(values)


def write_part(path: Path, rank: int, world: int, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Write one rank's file atomically; returns its entry in the manifest."""
    from safetensors.torch import save_file

    name = f"shard-{rank:05d}-of-{world:05d}.safetensors"
    held = [fragment for fragment in fragments if fragment.stop > fragment.start]
    tensors = {f"{k}/{part.name}": t.cpu().clone() for part in held for k, t in part.tensors.items()}
    temporary = path / f".{name}.part"
    try:
        save_file(tensors, temporary)
        os.replace(temporary, path / name)
    except Exception as error:
        raise RunError(f"Cannot write the checkpoint part {path / name}: {one_line(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return {"file": name, "ranges": {part.name: [part.start, part.stop] for part in held}}


def has_shards(path: Path) -> bool:
    """Return whether a folder holds a sharded checkpoint."""
    return (path / MANIFEST).is_file()


def remove_manifest(path: Path) -> None:
    """Invalidate an older sharded checkpoint in a folder, before another one is written there."""
    (path / MANIFEST).unlink(missing_ok=True)


@contextmanager
def open_checkpoint(path: Path, shapes: Shapes) -> Iterator[Checkpoint]:
    """Open the checkpoint of either kind in a folder; its parameters must have these names and shapes."""
    with ExitStack() as stack:
        try:
            kind: type[_Shards] | type[_Whole] = _Shards if has_shards(path) else _Whole
            checkpoint = kind(path, shapes, stack)
        except Exception as error:
            raise RunError(f"Cannot read the checkpoint in {path}: {one_line(error)}") from error
        if {n: tuple(s) for n, s in checkpoint.shapes.items()} != {n: tuple(s) for n, s in shapes.items()}:
            raise RunError(OTHER_MODEL.format(path=path))
        yield checkpoint


class _Shards:
    """A sharded checkpoint."""

    def __init__(self, path: Path, shapes: Shapes, stack: ExitStack) -> None:
        from safetensors import safe_open

        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != 1:
            raise ResultsError(f"{MANIFEST} has format {manifest.get('format')!r}, expected 1.")
        self.path = path
        self.steps = int(manifest["steps"])
        self.shapes: Shapes = {n: entry["shape"] for n, entry in manifest["parameters"].items()}
        self.parameter_steps = {n: int(entry["steps"]) for n, entry in manifest["parameters"].items()}
        self._parts = [
            (stack.enter_context(safe_open(path / part["file"], "pt")), part["ranges"])
            for part in manifest["parts"]
        ]

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start)
        missing = stop - start
        for file, ranges in self._parts:
            first, last = ranges.get(name, (0, 0))
            low, high = max(start, first), min(stop, last)
            if low < high:
                stored = file.get_slice(f"{key}/{name}")
                values[low - start : high - start] = stored[low - first : high - first]
                missing -= high - low
        if missing:
            raise RunError(f"The checkpoint in {self.path} is incomplete: {name} lacks {missing} elements.")
        return values


class _Whole:
    """A checkpoint of the ``single`` strategy."""

    def __init__(self, path: Path, shapes: Shapes, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._file = stack.enter_context(safe_open(path / WHOLE_WEIGHTS, "pt"))
        self.shapes: Shapes = {n: self._file.get_slice(n).get_shape() for n in self._file.keys()}  # noqa: SIM118
        saved = torch.load(path / WHOLE_OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        self.steps = int(saved["steps"])
        state = saved["optimizer"]["state"]
        self._state = {name: state[number] for number, name in enumerate(shapes) if number in state}
        self.parameter_steps = {n: int(self._state[n]["step"]) if n in self._state else 0 for n in shapes}

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        whole: Tensor = self._file.get_tensor(name) if key == "weight" else self._state[name][key]
        return whole.reshape(-1)[start:stop]
