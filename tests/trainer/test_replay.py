"""Replay of training runs, and exact resumption of asynchronous ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training import Forge, digest, lines, write

from rollgym.core.errors import UsageError
from rollgym.core.seeding import file_hash
from rollgym.core.types import Group
from rollgym.evaluation.run_results import load_run
from rollgym.io.episode_blocks import encode_blocks, episode_line, read_blocks, stored_episodes
from rollgym.trainer.replay import replay_run
from rollgym.trainer.step_log import read_groups, read_steps

Run = Callable[..., Path]
AHEAD: dict[str, Any] = {
    "rollout": {"max_staleness": 2, "max_in_flight": 7},
    "checkpoints": {"every": 4, "keep": 2},
    "evaluation": {"every": 3, "episodes": 4},
    "stop": {"steps": 8},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout": {"max_staleness": 0}},
        {"rollout": {"max_staleness": 1, "on_stale": "mask"}},
        {"loss": {"name": "grpo", "kl_coef": 0.05, "kl_target": 0.01, "reject_tokens": [0.5, 2]}},
        {"estimator": "gae", "learner": {"critic": "shared"}, "loss": {"name": "ppo", "entropy_coef": 0.01}},
    ],
    ids=["wait", "synchronous", "mask", "kl", "critic"],
)
def test_a_replay_has_the_same_batches_and_weights(train_here: Run, changes: dict[str, Any]) -> None:
    folder = train_here("run", **{**AHEAD, **changes})
    seen: list[int] = []
    result = replay_run(folder, on_step=seen.append)
    assert result.same, result.different
    assert seen == list(range(1, 9))
    assert result.weights == ["checkpoint 4", "checkpoint 8", "final"]


def test_a_run_with_a_warm_start_is_replayed_from_a_checkpoint(train_here: Run) -> None:
    warm = {"agent": "random", "only_successful": False, "episodes": 4, "epochs": 1}
    folder = train_here("run", **AHEAD, warm_start=warm)
    result = replay_run(folder)
    assert result.same, result.different
    assert (result.first_step, result.last_step) == (5, 8)
    assert "warm start" in result.notes[0]


def test_a_changed_recording_is_found_at_its_step(train_here: Run) -> None:
    folder = train_here("run", **AHEAD)
    path = folder / "episodes.blocks"
    last = list(read_blocks(path))[-1]
    first, *others = (stored.episode for stored in last.read())
    turn, *later = first.turns
    changed = replace(turn, logprobs=(turn.logprobs[0] - 0.5, *turn.logprobs[1:]))
    blocks = encode_blocks(last.step, [replace(first, turns=(changed, *later)), *others])
    path.write_bytes(path.read_bytes()[: last.start] + b"".join(blocks))
    result = replay_run(folder)
    assert result.different == ["step 8: the batch differs from the recorded one"]
    assert result.lines()[-1].endswith("different")


def test_what_cannot_be_replayed_is_refused(train_here: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not the folder of a training run: it has no manifest\.json"):
        replay_run(tmp_path)
    folder = train_here("run", stop={"steps": 1}, tracking={"tensorboard": False, "episodes": "none"})
    with pytest.raises(UsageError, match=r"tracking\.episodes=none"):
        replay_run(folder)


@pytest.mark.parametrize(
    ("moment", "call", "kept"),
    [
        ("rollgym.trainer.learner.learner:Learner.update", 7, 6),  # in the middle of step 7
        ("rollgym.trainer.train_run:TrainRun.log_step", 7, 6),  # step 7 has metrics and episodes only
        ("rollgym.trainer.train_run:TrainRun.after_step", 7, 7),  # step 7 is complete
        ("rollgym.trainer.train_run:TrainRun.evaluate", 3, 6),  # in the evaluation after step 6
    ],
)
def test_a_killed_run_continues_exactly_from_its_log(
    forge: Forge, tmp_path: Path, moment: str, call: int, kept: int
) -> None:
    """Checkpoints are at the steps 0, 4 and 8; the run is killed after step 6 or 7 and then resumed."""
    write(tmp_path, **AHEAD)
    train = ("train", "small.yaml", "--out", "run", "--plain")
    assert forge.run(tmp_path, *train, at=(moment, call)) == -9
    folder = tmp_path / "run"
    logged = {step.step: (step.groups, step.batch) for step in read_steps(folder)}
    assert max(logged) == kept
    metrics = [line for line in lines(folder / "metrics.jsonl") if line["step"] <= kept]
    assert forge.run(tmp_path, *train, "--resume") == 0, (tmp_path / "err.txt").read_text()
    after = {step.step: (step.groups, step.batch) for step in read_steps(folder)}
    assert list(after) == list(range(1, 9))
    assert {step: after[step] for step in logged} == logged, "the logged steps are kept, not played again"
    assert lines(folder / "metrics.jsonl")[:kept] == metrics, "nor written again"
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == list(range(1, 9))
    trained = [name for groups, _ in after.values() for name, _ in groups]
    assert len(set(trained)) == len(trained) == 16, "no group is trained on twice"
    evaluated = [line["step"] for line in lines(folder / "evaluations.jsonl")]
    assert evaluated == [0, 3, 6, 8]
    assert forge.run(tmp_path, "replay", "run", "--train", "--json") == 0, (tmp_path / "out.txt").read_text()
    result = json.loads((tmp_path / "out.txt").read_text())
    assert result["same"]
    assert (result["first_step"], result["last_step"]) == (1, 8)
    assert result["weights"] == ["checkpoint 4", "checkpoint 8", "final"]


def test_the_event_log_says_which_episodes_a_step_was_trained_on(train_here: Run) -> None:
    folder = train_here("run", **AHEAD)
    steps = read_steps(folder)
    start: dict[str, int] = {}
    found = []
    for logged in steps:
        groups: list[Group] = read_groups(folder, logged, start, 4)
        start = logged.marks
        found += [(logged.step, episode.spec.episode_id) for group in groups for episode in group.episodes]
    episodes = lines(folder / "episodes.jsonl")
    assert found == [(episode["step"], episode["spec"]["episode_id"]) for episode in episodes]
    taken = [event["group"] for event in lines(folder / "events.jsonl") if event["kind"] == "group_taken"]
    assert [name for logged in steps for name, _ in logged.groups] == taken[: 2 * len(steps)]


def as_older_version(folder: Path) -> None:
    """Give a finished run the files of version 0.2: episodes as lines, and steps in the event log."""
    ends: dict[int, int] = {}
    with open(folder / "episodes.jsonl", "wb") as file:
        for stored in stored_episodes(folder / "episodes.blocks"):
            file.write(episode_line(stored) + b"\n")
            ends[stored.step or 0] = file.tell()
    with open(folder / "events.jsonl", "ab") as file:
        for line in lines(folder / "steps.jsonl"):
            marks = {name: line["marks"][name] for name in ("metrics.jsonl", "evaluations.jsonl")}
            marks["episodes.jsonl"] = ends[line["step"]]
            event = {"t": 1.0, "kind": "step_trained", **line, "marks": marks}
            file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        size = file.tell()
    for name in ("episodes.blocks", "steps.jsonl"):
        (folder / name).unlink()
    for path in (folder / "checkpoints").glob("step-*"):
        state = json.loads((path / "state.json").read_text())
        marks = {name: state["marks"][name] for name in ("metrics.jsonl", "evaluations.jsonl")}
        state["marks"] = {**marks, "episodes.jsonl": ends.get(state["step"], 0), "events.jsonl": size}
        (path / "state.json").write_text(json.dumps(state))
        sums = json.loads((path / "sums.json").read_text())
        sums["files"]["state.json"] = file_hash(path / "state.json")
        (path / "sums.json").write_text(json.dumps(sums))


def test_a_run_of_an_older_version_is_read_resumed_and_replayed(train_here: Run) -> None:
    whole = train_here("whole", stop={"steps": 6})
    folder = train_here("run", stop={"steps": 4})
    before = lines(folder / "episodes.jsonl")
    as_older_version(folder)
    assert lines(folder / "episodes.jsonl") == before
    assert replay_run(folder).same
    train_here("run", stop={"steps": 6}, resume=True)
    assert digest(folder / "final" / "model.safetensors") == digest(whole / "final" / "model.safetensors")
    assert [step.step for step in read_steps(folder)] == list(range(1, 7))
    trained = [record["step"] for record in load_run(folder).to_records()]
    assert trained == [step for step in range(1, 7) for _ in range(8)]
    assert {line["step"] for line in lines(folder / "episodes.jsonl")} == {1, 2, 3, 4}
    result = replay_run(folder)
    assert result.same, result.different
    assert result.last_step == 6
