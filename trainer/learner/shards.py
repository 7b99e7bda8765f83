"""Checkpoints in parts, which load with any number of processes and any strategy.

Every rank writes the stretches of parameters and Adam moments that it holds, flat, into a file of its own.
``shards.json``, written last, says where which stretch is: whoever reads takes what it needs.

    shard-00001-of-00002.safetensors    weight/NAME, exp_avg/NAME, exp_avg_sq/NAME: one dimension each
    shards.json                         strategy, world, steps; parameters: shape, steps; parts: file, ranges

A checkpoint of `LocalLearner` (two files, no ``shards.json``) is read in the same way.
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

from rollgym.errors import ResultsError, RunError, one_line
from rollgym.store import read_json, write_json

MANIFEST = "shards.json"
LOCAL_WEIGHTS, LOCAL_OPTIMISER = "learner.safetensors", "optimiser.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A stretch of a parameter as it lies in memory, flat: filling its tensors changes the learner."""

    name: str
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """``weight`` and, where there are any, `MOMENTS`."""


class Checkpoint(Protocol):
    """Something to read from, by stretches."""

    steps: int

    @property
    def parameter_steps(self) -> Mapping[str, int]:
        """Optimiser steps that each parameter has seen."""

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor | None:
        """A stretch of a weight or a moment; ``None`` where the checkpoint leaves it as it is."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def adam_fragments(
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    span: Callable[[Tensor], tuple[int, int]] = lambda tensor: (0, tensor.numel()),
    local: Callable[[Tensor], Tensor] = _flat,
) -> list[Fragment]:
    """The fragments of parameters that an Adam holds as they are.

    ``span`` says which stretch is wanted, ``local`` what is here of it.
    """
    found = []
    for name, parameter in parameters.items():
        start, stop = span(parameter)
        held = {
            "weight": parameter,
            **{k: t for k, t in optimiser.state.get(parameter, {}).items() if k in MOMENTS},
        }
        here = {key: local(tensor) for key, tensor in held.items()}
        cut = {k: t[start:stop] if t.numel() > stop - start else t for k, t in here.items()}
        found.append(Fragment(name, start, stop, cut))
    return found


def begin_moments(
    parameters: Mapping[str, nn.Parameter], optimiser: torch.optim.Optimizer, steps: Mapping[str, int]
) -> None:
    """Have an Adam hold moments, to be filled, of parameters that were stepped so often."""
    for name, parameter in parameters.items():
        optimiser.state.pop(parameter, None)
        if steps[name]:
            moments = {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
            optimiser.state[parameter] = {"step": torch.tensor(float(steps[name])), **moments}


@torch.no_grad()
def fill(fragments: Sequence[Fragment], checkpoint: Checkpoint) -> None:
    """Read what belongs into these fragments."""
    for one in fragments:
        for key, tensor in one.tensors.items():
            if key in MOMENTS and not checkpoint.parameter_steps[one.name]:
                tensor.zero_()
            elif (found := checkpoint.read(one.name, key, one.start, one.stop)) is not None:
                tensor.copy_(found)


def write_part(path: Path, rank: int, world: int, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Write one rank's file, whole or not at all; returns what the manifest says of it."""
    from safetensors.torch import save_file

    name = f"shard-{rank:05d}-of-{world:05d}.safetensors"
    held = [one for one in fragments if one.stop > one.start]
    tensors = {f"{k}/{one.name}": t.cpu().clone() for one in held for k, t in one.tensors.items()}
    temporary = path / f".{name}.part"
    try:
        save_file(tensors, temporary)
        os.replace(temporary, path / name)
    except Exception as error:
        raise RunError(
            f"The checkpoint part {path / name} could not be written: {one_line(error)}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return {"file": name, "ranges": {one.name: [one.start, one.stop] for one in held}}


def write_manifest(
    path: Path,
    strategy: str,
    steps: int,
    parameters: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
) -> None:
    """Write the manifest: from now on the parts are a checkpoint."""
    head = {"format": 1, "strategy": strategy, "world": len(parts), "steps": steps}
    write_json(path / MANIFEST, {**head, "parameters": dict(parameters), "parts": list(parts)})


def has_shards(path: Path) -> bool:
    """Whether there is a checkpoint in parts."""
    return (path / MANIFEST).is_file()


def forget_shards(path: Path) -> None:
    """Remove what would have an older checkpoint in parts taken for the newest."""
    (path / MANIFEST).unlink(missing_ok=True)


@contextmanager
def open_checkpoint(path: Path, shapes: Shapes) -> Iterator[Checkpoint]:
    """The checkpoint in a folder, of either kind, if it is one of parameters of these names and shapes."""
    with ExitStack() as stack:
        try:
            kind: type[_Shards] | type[_Whole] = _Shards if has_shards(path) else _Whole
            found = kind(path, shapes, stack)
        except Exception as error:
            raise RunError(f"The checkpoint in {path} cannot be read: {one_line(error)}") from error
        if {n: tuple(s) for n, s in found.shapes.items()} != {n: tuple(s) for n, s in shapes.items()}:
            raise RunError(f"The checkpoint in {path} is of another model or other learner settings.")
        yield found


class _Shards:
    """Parts with a manifest."""

    def __init__(self, path: Path, shapes: Shapes, stack: ExitStack) -> None:
        from safetensors import safe_open

        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != 1:
            raise ResultsError(f"{MANIFEST} is of format {manifest.get('format')!r}, not 1.")
        self.path = path
        self.steps = int(manifest["steps"])
        self.shapes: Shapes = {n: one["shape"] for n, one in manifest["parameters"].items()}
        self.parameter_steps = {n: int(one["steps"]) for n, one in manifest["parameters"].items()}
        self._parts = [
            (stack.enter_context(safe_open(path / part["file"], "pt")), part["ranges"])
            for part in manifest["parts"]
        ]

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start)
        missing = stop - start
        for file, ranges in self._parts:
            first, last = ranges.get(name, (0, 0))
            low, high = max(start, first), min(stop, last)
            if low < high:
                stored = file.get_slice(f"{key}/{name}")
                found[low - start : high - start] = stored[low - first : high - first]
                missing -= high - low
        if missing:
            raise RunError(f"The checkpoint in {self.path} is incomplete: {missing} numbers of {name} lack.")
        return found


class _Whole:
    """What a `LocalLearner` wrote."""

    def __init__(self, path: Path, shapes: Shapes, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._file = stack.enter_context(safe_open(path / LOCAL_WEIGHTS, "pt"))
        self.shapes: Shapes = {n: self._file.get_slice(n).get_shape() for n in self._file.keys()}  # noqa: SIM118
        saved = torch.load(path / LOCAL_OPTIMISER, map_location="cpu", weights_only=True, mmap=True)
        self.steps = int(saved["steps"])
        state = saved["optimiser"]["state"]
        self._state = {name: state[number] for number, name in enumerate(shapes) if number in state}
        self.parameter_steps = {n: int(self._state[n]["step"]) if n in self._state else 0 for n in shapes}

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        whole: Tensor = self._file.get_tensor(name) if key == "weight" else self._state[name][key]
        return whole.reshape(-1)[start:stop]
