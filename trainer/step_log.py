"""What decided each training step: enough to repeat a run's updates without its rollouts.

After every step ``steps.jsonl`` gets a line: the groups and episodes of the batch in order, a digest of the
batch, the sizes of the run's files, and the state of the run. (Older versions wrote it into the event log.)
The episodes themselves, with tokens and log-probs, are in ``episodes.blocks``. With both, a resumed run
trains again on the steps after its checkpoint, and `rollgym replay --train` trains again on all of them, with
bit-identical weights on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollgym.core.errors import ResultsError, boundary
from rollgym.core.files import open_inside
from rollgym.core.serialization import decode_episode
from rollgym.core.types import Episode, Group
from rollgym.io.episode_blocks import read_blocks
from rollgym.io.run_dir import BLOCKS, EPISODES, EVENTS, STEPS
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.train_state import TrainState

STEP = "step_trained"
"""Kind of these lines in event logs of older versions."""


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, as ``steps.jsonl`` has it."""

    step: int
    groups: list[tuple[str, list[str]]]
    """Group ids with the ids of their episodes, in the order of the batch."""
    batch: str
    """`batch_digest` of the batch."""
    marks: dict[str, int]
    """Sizes of the run's files after the step."""
    state: dict[str, Any]
    """`TrainState` after the step, with the ``reweighed`` entries of this step only."""

    def apply(self, state: TrainState) -> TrainState:
        """The state after this step, from the state before it."""
        reweighed = [*state.reweighed, *self.state["reweighed"]]
        return TrainState.from_json({**self.state, "marks": self.marks, "reweighed": reweighed})


@dataclass(frozen=True, slots=True)
class _Line:
    end: int
    content: bytes


def step_fields(
    state: TrainState, groups: Sequence[Group], digest: str, marks: dict[str, int], reweighed: int
) -> dict[str, Any]:
    """Fields of the line; ``reweighed`` is the number of ``state.reweighed`` entries logged before."""
    values = state.to_json()
    del values["marks"]
    values["reweighed"] = values["reweighed"][reweighed:]
    ids = [(group.group_id, [episode.spec.episode_id for episode in group.episodes]) for group in groups]
    return {"step": state.step, "groups": ids, "batch": digest, "marks": marks, "state": values}


def batch_digest(batch: Batch) -> str:
    """A digest of everything that the learner gets: tokens, positions and per-token arrays."""
    digest = blake2b(digest_size=16)
    for sequence in batch.sequences:
        digest.update(np.ascontiguousarray(sequence.inputs).data)
        digest.update(np.ascontiguousarray(sequence.action_positions).data)
    digest.update(np.ascontiguousarray(batch.episode_of).data)
    for name in sorted(batch.arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(batch.arrays[name]).data)
    return digest.hexdigest()


def read_steps(folder: Path, start: Mapping[str, int] | None = None) -> list[LoggedStep]:
    """The steps of a run after these sizes of its files; an incomplete last line is skipped."""
    start, steps = start or {}, list[LoggedStep]()
    if (folder / EPISODES).exists():  # an older version began this run
        marker = f'"kind":"{STEP}"'.encode()
        for line in _lines(folder / EVENTS, start.get(EVENTS, 0), None):
            if marker in line.content[:100]:
                steps.append(_logged_step(folder / EVENTS, line))
    if (folder / STEPS).exists():
        steps += [
            _logged_step(folder / STEPS, line) for line in _lines(folder / STEPS, start.get(STEPS, 0), None)
        ]
    return steps


def _logged_step(path: Path, line: _Line) -> LoggedStep:
    with boundary(ResultsError, f"{path}, the line that ends at byte {line.end}"):
        logged = msgspec.json.decode(line.content, type=LoggedStep)
    return msgspec.structs.replace(logged, marks={**logged.marks, path.name: line.end})


def read_groups(folder: Path, logged: LoggedStep, before: Mapping[str, int], size: int) -> list[Group]:
    """The groups of a logged step; its episodes follow the sizes ``before`` of the run's files.

    Raises:
        ResultsError: The files do not hold these episodes there.
    """
    path, episodes = folder / BLOCKS, list[Episode]()
    if EPISODES in logged.marks:  # an older version began this run
        lines = _lines(folder / EPISODES, before.get(EPISODES, 0), logged.marks[EPISODES])
        episodes += [decode_episode(line.content) for line in lines]
    if (start := before.get(BLOCKS, 0)) < (end := logged.marks.get(BLOCKS, 0)):
        blocks = read_blocks(path, start, end)
        episodes += [stored.episode for block in blocks for stored in block.read()]
    expected = [name for _, names in logged.groups for name in names]
    if [episode.spec.episode_id for episode in episodes] != expected:
        raise ResultsError(
            f"{path} does not hold the {len(expected)} episodes that the step log names for step "
            f"{logged.step}: restore that file."
        )
    groups, done = [], 0
    for group_id, names in logged.groups:
        members = tuple(episodes[done : done + len(names)])
        done += len(names)
        groups.append(Group(group_id=group_id, size=size, episodes=members))
    return groups


def _lines(path: Path, start: int, end: int | None) -> Iterator[_Line]:
    """The complete lines between two offsets, of a file that need not be as long."""
    try:
        with open_inside(path) as file:
            at = file.seek(start)
            while (end is None or at < end) and (line := file.readline()).endswith(b"\n"):
                at += len(line)
                yield _Line(at, line)
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {error.strerror}.") from None
