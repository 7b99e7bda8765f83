"""What decided each training step, in the event log: enough to repeat a run's updates without its rollouts.

After every step the event log gets an event ``step_trained``: the groups and episodes of the batch in order,
a digest of the batch, the sizes of the run's files, and the state of the run. The episodes themselves, with
tokens and log-probs, are in ``episodes.jsonl``. With both, a resumed run trains again on the steps after its
checkpoint, and `rollgym replay --train` trains again on all of them, with bit-identical weights on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from rollgym.io.run_dir import EPISODES, EVENTS
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.train_state import TrainState

STEP = "step_trained"


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, as the event log has it."""

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
    """Fields of the event; ``reweighed`` is the number of ``state.reweighed`` entries logged before."""
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


def read_steps(folder: Path, start: int = 0) -> list[LoggedStep]:
    """The steps in a run's event log after byte ``start``; an incomplete last line is skipped."""
    path, steps = folder / EVENTS, []
    marker = f'"kind":"{STEP}"'.encode()
    for line in _lines(path, start, None):
        if marker not in line.content[:100]:
            continue
        with boundary(ResultsError, f"{path}, the line that ends at byte {line.end}"):
            logged = msgspec.json.decode(line.content, type=LoggedStep)
        steps.append(msgspec.structs.replace(logged, marks={**logged.marks, EVENTS: line.end}))
    return steps


def read_groups(folder: Path, logged: LoggedStep, start: int, size: int) -> list[Group]:
    """The groups of a logged step; its episodes follow byte ``start`` of the episodes file.

    Raises:
        ResultsError: The file does not hold these episodes there.
    """
    path = folder / EPISODES
    lines = _lines(path, start, logged.marks[EPISODES])
    episodes: list[Episode] = [decode_episode(line.content) for line in lines]
    expected = [name for _, names in logged.groups for name in names]
    if [episode.spec.episode_id for episode in episodes] != expected:
        raise ResultsError(
            f"{path} does not hold the {len(expected)} episodes that the event log names for step "
            f"{logged.step}: restore that file."
        )
    groups, done = [], 0
    for group_id, names in logged.groups:
        members = tuple(episodes[done : done + len(names)])
        done += len(names)
        groups.append(Group(group_id=group_id, size=size, episodes=members))
    return groups


def _lines(path: Path, start: int, end: int | None) -> Iterator[_Line]:
    """The complete lines between two offsets."""
    try:
        with open_inside(path) as file:
            at = file.seek(start)
            while (end is None or at < end) and (line := file.readline()).endswith(b"\n"):
                at += len(line)
                yield _Line(at, line)
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {error.strerror}.") from None
