"""The loop: evaluations, stop conditions, mixtures and the curriculum."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training import SMALL, Story, lines, merged

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.rollout.scheduler import Scheduler
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.train_state import TrainState, reason_to_stop

Run = Callable[..., Path]
PLAIN = "lessons:Yes"


def played(folder: Path) -> dict[int, list[str]]:
    """The environments of each step's groups."""
    found: dict[int, dict[str, str]] = {}
    for episode in lines(folder / "episodes.jsonl"):
        found.setdefault(episode["step"], {})[episode["spec"]["group_id"]] = episode["spec"]["env_id"]
    return {step: list(groups.values()) for step, groups in found.items()}


def phases(folder: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["phase"]) for line in lines(folder / "evaluations.jsonl")]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[list[Episode]]:
    """The episodes of every evaluation."""
    found: list[list[Episode]] = []
    real = Scheduler.evaluate

    async def spied(self: Scheduler, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        found.append(await real(self, specs))
        return found[-1]

    monkeypatch.setattr(Scheduler, "evaluate", spied)
    return found


def test_evaluation_episodes_do_not_affect_training(train_here: Run) -> None:
    """Rule 32."""
    often = Story.of(train_here("often", evaluation={"every": 1, "episodes": 9}))
    never = Story.of(train_here("never", evaluation={"every": 0, "episodes": 1}))
    assert len(often.evaluations) > len(never.evaluations)
    assert often.metrics == never.metrics
    assert often.episodes == never.episodes
    assert often.weights == never.weights
    assert {one["spec"]["split"] for one in often.episodes} == {"train"}
    assert [line["episodes"] for line in often.metrics] == [8.0] * 4


def test_held_out_tasks_are_the_same_at_every_evaluation_and_for_every_seed(
    train_here: Run, evaluated: list[list[Episode]]
) -> None:
    """Rule 32."""
    train_here("first")
    train_here("second", seed=5)
    assert len(evaluated) == 6
    specs = [[episode.spec for episode in episodes] for episodes in evaluated]
    assert all(one == specs[0] for one in specs)
    assert {spec.split for spec in specs[0]} == {"test"}


def test_an_evaluation_is_played_by_one_policy(train_here: Run, evaluated: list[list[Episode]]) -> None:
    """Rule 32."""
    train_here("run", evaluation={"every": 1}, stop={"steps": 3})
    versions = [{turn.policy_version for one in episodes for turn in one.turns} for episodes in evaluated]
    assert versions == [{0}, {1}, {2}, {3}]


def test_the_seed_of_the_evaluation_chooses_other_tasks(
    train_here: Run, evaluated: list[list[Episode]]
) -> None:
    train_here("first", stop={"steps": 0})
    train_here("second", stop={"steps": 0}, evaluation={"seed": 1})
    assert [one.spec.task for one in evaluated[0]] != [one.spec.task for one in evaluated[-1]]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, [(0, "before"), (5, "after")]),
        (2, [(0, "before"), (2, "training"), (4, "training"), (5, "after")]),
        (9, [(0, "before"), (5, "after")]),
    ],
)
def test_evaluations_come_at_the_start_every_so_often_and_at_the_end(
    train_here: Run, every: int, expected: list[tuple[int, str]]
) -> None:
    assert phases(train_here("run", evaluation={"every": every}, stop={"steps": 5})) == expected


def test_the_evaluation_of_the_untrained_policy_can_be_left_out(train_here: Run) -> None:
    folder = train_here("run", evaluation={"every": 2, "on_start": False}, stop={"steps": 3})
    assert phases(folder) == [(2, "training"), (3, "after")]


def test_every_step_has_one_line_and_all_its_episodes(train_here: Run) -> None:
    folder = train_here("run")
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {step: len(groups) for step, groups in played(folder).items()} == {1: 2, 2: 2, 3: 2, 4: 2}


def test_each_batch_is_played_by_the_weights_of_the_step_before(train_here: Run) -> None:
    for episode in lines(train_here("run") / "episodes.jsonl"):
        assert {turn["policy_version"] for turn in episode["turns"]} == {episode["step"] - 1}


def test_no_task_is_started_twice(train_here: Run) -> None:
    groups = [one["spec"]["group_id"] for one in lines(train_here("run") / "episodes.jsonl")]
    assert len(set(groups)) == 8
    assert sorted(set(groups)) == [f"g{number:06d}" for number in range(8)]


def test_training_ends_when_held_out_success_is_reached(
    train_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollgym.trainer import train_run as run

    real, left = run.evaluation_summary, [0.1, 0.2, 0.7, 0.3]
    monkeypatch.setattr(run, "evaluation_summary", lambda *args: real(*args) | {"success_rate": left.pop(0)})
    folder = train_here("run", evaluation={"every": 1}, stop={"steps": 9, "success": 0.6})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ended"] == "held-out success reached 0.700"
    assert summary["steps"] == 2


def test_a_policy_that_is_good_enough_from_the_start_is_not_trained(train_here: Run) -> None:
    folder = train_here("run", envs=[{"id": "lessons:Granted"}], stop={"success": 1.0})
    assert json.loads((folder / "summary.json").read_text())["steps"] == 0
    assert (folder / "metrics.jsonl").read_text() == ""


def test_training_ends_when_its_minutes_are_over(train_here: Run) -> None:
    folder = train_here("run", stop={"minutes": 1e-9})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ended"] == "1e-09 minutes are over"
    assert summary["steps"] == 0
    assert (folder / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("step", "last", "seconds", "expected"),
    [
        (9, 0.4, 119.0, None),
        (10, 0.4, 119.0, "all 10 steps are done"),
        (9, 0.5, 119.0, "held-out success reached 0.500"),
        (9, None, 119.0, None),
        (9, 0.4, 120.0, "2 minutes are over"),
    ],
)
def test_whichever_reason_comes_first_ends_the_run(
    step: int, last: float | None, seconds: float, expected: str | None
) -> None:
    stop = {"steps": 10, "success": 0.5, "minutes": 2}
    config = load(TrainConfig, merged(SMALL, {"stop": stop}))
    clock: Any = SimpleNamespace(seconds=seconds)
    assert reason_to_stop(config, TrainState(step=step, last=last), clock) == expected


def test_train_state_survives_json() -> None:
    state = TrainState(
        step=3, unfinished_groups=[4, 5], first_attempts={4: 1}, window=[0.5], best=0.25, marks={"a": 7}
    )
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_mixture_shares_every_batch_by_weight(train_here: Run) -> None:
    envs = [{"id": PLAIN, "weight": 3}, {"id": "lessons:No", "weight": 1}]
    folder = train_here("run", envs=envs, rollout={"groups": 4}, stop={"steps": 2})
    for groups in played(folder).values():
        assert sorted(groups) == ["lessons:No", PLAIN, PLAIN, PLAIN]
    evaluations = lines(folder / "evaluations.jsonl")
    assert [line["env"] for line in evaluations[:2]] == [PLAIN, "lessons:No"]


def test_success_over_several_environments_is_their_mean(train_here: Run) -> None:
    folder = train_here("run", envs=[{"id": "lessons:Granted"}, {"id": PLAIN}], stop={"steps": 1})
    assert json.loads((folder / "summary.json").read_text())["last_success"] == 0.5


def test_the_curriculum_opens_the_next_environment_when_the_last_is_mastered(train_here: Run) -> None:
    envs = [{"id": "lessons:Granted"}, {"id": "lessons:Favoured"}, {"id": PLAIN}, {"id": "lessons:No"}]
    curriculum = {"window": 2, "advance_at": 0.9}
    folder = train_here(
        "run", envs=envs, curriculum=curriculum, rollout={"groups": 3, "group_size": 2}, stop={"steps": 7}
    )
    first, second = {"lessons:Granted"}, {"lessons:Granted", "lessons:Favoured"}
    assert [set(groups) for groups in played(folder).values()] == [
        first,
        first,
        second,
        second,
        {*second, PLAIN},
        {*second, PLAIN},
        {*second, PLAIN},  # never mastered
    ]


def test_the_curriculum_waits_until_success_is_enough(train_here: Run) -> None:
    folder = train_here("run", envs=[{"id": PLAIN}, {"id": "lessons:No"}], curriculum={"window": 1})
    assert {name for groups in played(folder).values() for name in groups} == {PLAIN}


def test_rewards_without_variance_are_counted_and_give_no_gradient(train_here: Run) -> None:
    folder = train_here("run", envs=[{"id": "lessons:Even"}], stop={"steps": 2})
    for line in lines(folder / "metrics.jsonl"):
        assert line["zero_std_group_frac"] == 1.0
        assert line["grad_norm"] == 0.0


def test_groups_with_equal_returns_can_be_filtered_up_to_a_limit(train_here: Run) -> None:
    rollout = {"filter_zero_variance": True, "max_skipped": 3}
    folder = train_here("run", envs=[{"id": "lessons:Even"}], rollout=rollout, stop={"steps": 2})
    groups = sorted({one["spec"]["group_id"] for one in lines(folder / "episodes.jsonl")})
    assert groups == ["g000003", "g000007", "g000011", "g000015"]
    turns = lines(folder / "episodes.jsonl")[0]["length"]
    filtered = [line["turns_filtered"] for line in lines(folder / "metrics.jsonl")]
    assert filtered == [6 * turns * line["episodes"] / 2 for line in lines(folder / "metrics.jsonl")]


def test_an_adapted_kl_coefficient_is_recorded_and_moves(train_here: Run) -> None:
    folder = train_here("run", loss={"name": "grpo", "kl_coef": 0.1, "kl_target": 0.01})
    state = json.loads((folder / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert 0 < state["kl_coef"] != 0.1


def test_a_context_shorter_than_the_first_prompt_is_an_error(train_here: Run) -> None:
    envs = [{"id": "rollgym/Bandit-v0"}]
    with pytest.raises(UsageError, match=r"no episode has a turn.*raise model\.context"):
        train_here("run", envs=envs, model={"context": 32}, agent={"instructions": True})
