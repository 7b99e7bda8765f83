"""Sharded checkpoints, which load with any number of processes and any strategy.

Every rank writes its fragments of parameters and Adam moments into its own file: a flat range of a parameter,
or a box of it where that is several ranges, as of columns. ``shards.json``, written last, lists which file
holds which range or box: a reader takes what it needs.

    shard-00001-of-00002.safetensors    weight/NAME, exp_avg/NAME, exp_avg_sq/NAME: one dimension each, or
                                        those of the parameter for a box
    shards.json                         strategy, world, steps; parameters: shape, steps; parts: file, ranges,
                                        boxes: offsets and sizes (format 2; format 1 has no boxes)

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
from rollgym.trainer.learner.boxes import Box, boxes_of_range

MANIFEST = "shards.json"
FORMATS = (1, 2)
WHOLE_WEIGHTS, WHOLE_OPTIMIZER = "learner.safetensors", "optimizer.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
OTHER_MODEL = (
    "The checkpoint in {path} does not match this model or learner config: parameter names or shapes differ."
)
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a parameter in this process's memory; filling its tensors changes the learner."""

    name: str
    start: int
    """First element of a flat range; 0 for a box."""
    stop: int
    """End of a flat range; the number of elements of a box."""
    tensors: dict[str, Tensor]
    """``weight`` and, after the first optimizer step, `MOMENTS`."""
    box: Box | None = None
    """The ranges of each dimension, if the part is not one flat range; tensors have its sizes then."""


class Checkpoint(Protocol):
    """A source of weights and moments, read by ranges and boxes."""

    steps: int

    @property
    def parameter_steps(self) -> Mapping[str, int]:
        """Optimizer steps that each parameter has seen."""

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor | None:
        """Return a range of a weight or a moment; ``None`` to keep the current values."""

    def read_box(self, name: str, key: str, box: Box) -> Tensor | None:
        """Return a box of a weight or a moment; ``None`` to keep the current values."""


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
            if fragment.box is None:
                values = checkpoint.read(fragment.name, key, fragment.start, fragment.stop)
            else:
                values = checkpoint.read_box(fragment.name, key, fragment.box)
            if values is not None:
                tensor.copy_(values)


def write_part(path: Path, rank: int, world: int, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Write one rank's file atomically; returns its entry in the manifest."""
    from safetensors.torch import save_file

    name = f"shard-{rank:05d}-of-{world:05d}.safetensors"
    held = [fragment for fragment in fragments if fragment.stop > fragment.start]
    tensors = {
        f"{k}/{part.name}": t.cpu().clone(memory_format=torch.contiguous_format)
        for part in held
        for k, t in part.tensors.items()
    }
    temporary = path / f".{name}.part"
    try:
        save_file(tensors, temporary)
        os.replace(temporary, path / name)
    except Exception as error:
        raise RunError(f"Cannot write the checkpoint part {path / name}: {one_line(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    boxes = {part.name: {"offsets": part.box.offsets, "sizes": part.box.sizes} for part in held if part.box}
    ranges = {part.name: [part.start, part.stop] for part in held if part.box is None}
    return {"file": name, "ranges": ranges, **({"boxes": boxes} if boxes else {})}


def format_of(parts: Sequence[Mapping[str, Any]]) -> int:
    """Return the format of a checkpoint with these entries: the oldest that can express them."""
    return 2 if any("boxes" in part for part in parts) else 1


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
        if manifest.get("format") not in FORMATS:
            raise ResultsError(
                f"{MANIFEST} has format {manifest.get('format')!r}, expected one of {FORMATS}."
            )
        self.path = path
        self.steps = int(manifest["steps"])
        self.shapes: Shapes = {n: entry["shape"] for n, entry in manifest["parameters"].items()}
        self.parameter_steps = {n: int(entry["steps"]) for n, entry in manifest["parameters"].items()}
        self._parts = [
            (stack.enter_context(safe_open(path / part["file"], "pt")), part["ranges"], part.get("boxes", {}))
            for part in manifest["parts"]
        ]

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start)
        missing = stop - start
        for file, ranges, boxes in self._parts:
            first, last = ranges.get(name, (0, 0))
            low, high = max(start, first), min(stop, last)
            if low < high:
                stored = file.get_slice(f"{key}/{name}")
                values[low - start : high - start] = stored[low - first : high - first]
                missing -= high - low
            if name in boxes:
                at = 0
                for wanted in boxes_of_range(start, stop, self.shapes[name]):
                    into = values[at : at + wanted.numel].view(wanted.sizes)
                    missing -= self._from_box(file, f"{key}/{name}", _box(boxes[name]), wanted, into)
                    at += wanted.numel
        self._check(name, missing)
        return values

    def read_box(self, name: str, key: str, box: Box) -> Tensor:
        values = torch.empty(box.sizes)
        missing = box.numel
        for file, ranges, boxes in self._parts:
            if name in boxes:
                missing -= self._from_box(file, f"{key}/{name}", _box(boxes[name]), box, values)
            if name in ranges:
                missing -= self._from_range(
                    file, f"{key}/{name}", ranges[name], box, values, self.shapes[name]
                )
        self._check(name, missing)
        return values

    def _check(self, name: str, missing: int) -> None:
        if missing:
            raise RunError(f"The checkpoint in {self.path} is incomplete: {name} lacks {missing} elements.")

    @staticmethod
    def _from_box(file: Any, key: str, stored: Box, wanted: Box, into: Tensor) -> int:
        """Copy what a stored box has of a wanted one; returns the number of elements."""
        common = stored.intersect(wanted)
        if common is None:
            return 0
        into[common.slices(wanted)] = file.get_slice(key)[common.slices(stored)]
        return common.numel

    @staticmethod
    def _from_range(
        file: Any, key: str, stored: Sequence[int], wanted: Box, into: Tensor, shape: Sequence[int]
    ) -> int:
        """Copy what a stored range has of a wanted box; returns the number of elements."""
        copied = 0
        source = file.get_slice(key)
        for piece in boxes_of_range(stored[0], stored[1], shape):
            common = piece.intersect(wanted)
            if common is None:
                continue
            # All columns of the common rows are read: they lie in one piece.
            rows = piece.rows_of(common)
            flat = rows.flat_range(shape)
            assert flat is not None
            values = source[flat[0] - stored[0] : flat[1] - stored[0]].view(rows.sizes)
            into[common.slices(wanted)] = values[common.slices(rows)]
            copied += common.numel
        return copied


def _box(entry: Mapping[str, Sequence[int]]) -> Box:
    return Box(tuple(entry["offsets"]), tuple(entry["sizes"]))


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
        return self._whole(name, key).reshape(-1)[start:stop]

    def read_box(self, name: str, key: str, box: Box) -> Tensor:
        return self._whole(name, key)[box.slices()]

    def _whole(self, name: str, key: str) -> Tensor:
        whole: Tensor = self._file.get_tensor(name) if key == "weight" else self._state[name][key]
        return whole
