"""Asynchronous training: the staleness bound and its metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lessons import Tail
from training import SMALL, lines, merged

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.runtime import scheduler_config
from rollgym.trainer.tracking.checkpoint import Checkpoints
from rollgym.trainer.train_state import TrainState

Run = Callable[..., Path]


def oldest_by_step(folder: Path) -> dict[int, int]:
    """The oldest weight version of any token that a step trained on."""
    found: dict[int, int] = {}
    for episode in lines(folder / "episodes.jsonl"):
        versions = [version for turn in episode["turns"] for version, _ in turn["version_spans"]]
        found[episode["step"]] = min([found.get(episode["step"], 10**9), *versions])
    return found


@pytest.mark.parametrize(
    ("staleness", "more"),
    [
        (0, {}),
        (1, {}),
        (3, {"pace_slow_groups": True}),
        (1, {"on_stale": "replay"}),
        (2, {"on_stale": "replay", "on_weight_update": "restart"}),
    ],
)
def test_no_token_is_older_than_the_bound(train_here: Run, staleness: int, more: dict[str, Any]) -> None:
    rollout = {"max_staleness": staleness, "max_in_flight": 6, **more}
    folder = train_here("run", rollout=rollout, stop={"steps": 8})
    ages = {step: step - 1 - oldest for step, oldest in oldest_by_step(folder).items()}
    assert set(ages) == set(range(1, 9))
    assert max(ages.values()) <= staleness
    logged = {line["step"]: line["staleness_max"] for line in lines(folder / "metrics.jsonl")}
    assert logged == ages


def test_episodes_run_while_the_learner_trains(train_here: Run) -> None:
    """Episodes end between a take and the next version only where staleness allows it."""

    def ended_while_training(folder: Path) -> int:
        training, ended = False, 0
        for event in lines(folder / "events.jsonl"):
            if event["kind"] == "group_taken":
                training = True
            elif event["kind"] == "weights_updated":
                training = False
            elif event["kind"] == "episode_finished" and training:
                ended += 1
        return ended

    quiet = {"evaluation": {"every": 0}}
    ahead = train_here(
        "ahead", rollout={"max_staleness": 1, "groups": 1, "max_in_flight": 2}, stop={"steps": 6}, **quiet
    )
    turns = train_here("turns", rollout={"groups": 1, "max_in_flight": 2}, stop={"steps": 6}, **quiet)
    assert ended_while_training(ahead) > 0
    assert ended_while_training(turns) == 0


def test_sync_is_the_special_case_of_staleness_0() -> None:
    def settings(**rollout: Any) -> Any:
        return scheduler_config(load(TrainConfig, merged(SMALL, {"rollout": rollout})))

    assert (settings().order, settings().max_ahead, settings().max_staleness) == ("strict", 2, 0)
    ahead = settings(max_staleness=2)
    assert (ahead.order, ahead.max_ahead, ahead.max_staleness) == ("ready", 6, 2)


def test_a_setting_without_effect_is_rejected() -> None:
    for rollout in ({"on_weight_update": "restart"}, {"on_stale": "mask"}, {"pace_slow_groups": True}):
        with pytest.raises(UsageError, match=r"rollout.max_staleness"):
            load(TrainConfig, merged(SMALL, {"rollout": rollout}))
    with pytest.raises(UsageError, match=r"on_stale=replay"):
        load(TrainConfig, merged(SMALL, {"rollout": {"max_staleness": 1, "on_weight_update": "restart"}}))
    rejecting = {"loss": {"name": "grpo", "reject_tokens": [0.5, 2]}, "learner": {"old_logprobs": "rollout"}}
    with pytest.raises(UsageError, match=r"old_logprobs=recompute"):
        load(TrainConfig, merged(SMALL, rejecting))


def count_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the learner's updates for the environment `lessons.Tail`."""
    update = Learner.update

    def counted(learner: Learner, batch: Batch) -> Any:
        Tail.updates += 1
        return update(learner, batch)

    monkeypatch.setattr(Learner, "update", counted)


def test_tokens_older_than_the_bound_are_masked(train_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow task in eight: its first turn is older than the bound when it ends."""
    count_updates(monkeypatch)
    folder = train_here(
        "run",
        envs=[{"id": "lessons:Tail"}],
        rollout={"max_staleness": 1, "on_stale": "mask", "groups": 2, "max_in_flight": 24},
        stop={"steps": 16},
        evaluation={"every": 0, "on_start": False},
    )
    metrics = lines(folder / "metrics.jsonl")
    assert max(line["staleness_max"] for line in metrics) > 1
    masked = [line for line in metrics if line["masked_token_frac"]]
    assert masked
    assert all(line["masked_token_frac"] < 1 for line in metrics), "some token of every batch is trained on"
    assert all(line["turns_discarded"] == 0 for line in metrics)
    assert all(line["staleness_p50"] <= line["staleness_p99"] <= line["staleness_max"] for line in metrics)


def test_an_asynchronous_run_resumes_without_losing_a_task(train_here: Run) -> None:
    changes = {"rollout": {"max_staleness": 2}, "checkpoints": {"every": 2}}
    folder = train_here("run", **changes, stop={"steps": 4})
    pending = state_of(folder).unfinished_groups
    assert pending, "episodes were played ahead when the run ended"
    train_here("run", **changes, stop={"steps": 8}, resume=True)
    groups = [one["spec"]["group_id"] for one in lines(folder / "episodes.jsonl")]
    assert len(groups) == 8 * 2 * 4
    assert all(groups.count(name) == 4 for name in set(groups)), "no task is trained on twice"
    after = state_of(folder)
    trained = [int(name[1:]) for name in set(groups)]
    assert sorted([*trained, *after.unfinished_groups]) == list(range(after.next_group)), (
        "and none is left out"
    )
    assert set(pending) & set(trained), "those that were pending are trained on"


def state_of(folder: Path) -> TrainState:
    """The state in the newest checkpoint."""
    found = Checkpoints(folder / "checkpoints", 2).newest(lambda note: None)
    assert found is not None
    return TrainState.from_json(found[1])
