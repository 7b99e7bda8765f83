"""Settings reach the component that uses them, also after a resume."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training import SMALL, Story, lines, merged

from rollgym.chat import load_tokenizer
from rollgym.config.loader import load
from rollgym.engines.base import GenerateRequest, Generation
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.models.policy_settings import read_model_settings
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.config import LearnerOptions
from rollgym.trainer.learner.objective import GAP_LIMIT
from rollgym.trainer.run_tasks import held_out
from rollgym.trainer.runtime import engine_options, learner_options, scheduler_config

Run = Callable[..., Path]
TAUGHT = {"agent": "lessons:Teacher", "episodes": 12, "epochs": 3, "batch": 6, "learning_rate": 0.01}
ONCE: dict[str, Any] = {"mini_batches": 1, "epochs": 1}
"""Learner settings: one optimizer step per training step, so that metrics describe the rollout policy."""


def metrics(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines(folder / "metrics.jsonl")]


def test_the_learner_scores_at_the_sampling_temperature(train_here: Run) -> None:
    folder = train_here("run", agent={"temperature": 0.5}, stop={"steps": 2})
    assert max(metrics(folder, "train_rollout_logprob_diff_max")) < 1e-4
    assert min(metrics(folder, "entropy")) > 0.1, "at any temperature the tokens would have these log-probs"


def test_evaluations_and_the_exported_policy_have_their_own_temperature(
    train_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperatures: dict[bool, set[float]] = {True: set(), False: set()}
    generate = EmbeddedEngine.generate

    async def spied(self: EmbeddedEngine, request: GenerateRequest) -> Generation:
        temperatures[request.request_id.startswith("eval-")].add(request.sampling.temperature)
        return await generate(self, request)

    monkeypatch.setattr(EmbeddedEngine, "generate", spied)
    folder = train_here(
        "run",
        agent={"temperature": 0.5},
        evaluation={"temperature": 0.0},
        stop={"steps": 2},
        warm_start=TAUGHT,
    )
    assert temperatures == {True: {0.0}, False: {0.5}}
    settings = read_model_settings(folder / "final")
    assert settings is not None
    assert settings.options["temperature"] == 0.0
    assert max(metrics(folder, "train_rollout_logprob_diff_max")) < 1e-4


@pytest.mark.parametrize(
    ("env", "limits", "outcome"),
    [("lessons:Cut", {}, "truncated"), ("lessons:Yes", {"turns": 1}, "turn_limit")],
    ids=["the environment", "a limit"],
)
def test_the_critic_reads_the_last_observation_of_a_truncated_episode(
    train_here: Run, env: str, limits: dict[str, int], outcome: str
) -> None:
    """Rule 9: without the last observation, the value of the state after it would be of another state."""
    folder = train_here(
        "run",
        envs=[{"id": env, "limits": limits}],
        estimator="gae",
        loss={"name": "ppo"},
        learner={"critic": "separate"},
        stop={"steps": 2},
    )
    tokenizer = load_tokenizer(folder / "model")
    episodes = lines(folder / "episodes.jsonl")
    assert {one["outcome"] for one in episodes} == {outcome}
    for one in episodes:
        assert one["final_observation"] == f"turn {len(one['turns'])}"
        assert one["final_observation"] in tokenizer.decode(one["final_ids"])


def test_the_critic_bootstraps_after_truncation_and_not_after_termination(train_here: Run) -> None:
    """The same words and rewards, but one environment ends the task and the other cuts it short."""
    settings: dict[str, Any] = {
        "estimator": "gae",
        "loss": {"name": "ppo"},
        "learner": {"critic": "separate", "critic_rate": 0.01},
        "stop": {"steps": 3},
    }
    ended = Story.of(train_here("ended", envs=[{"id": "lessons:Yes"}], **settings))
    cut = Story.of(train_here("cut", envs=[{"id": "lessons:Cut"}], **settings))
    first = [[turn["action_ids"] for turn in one["turns"]] for one in ended.episodes[:8]]
    assert first == [[turn["action_ids"] for turn in one["turns"]] for one in cut.episodes[:8]]
    assert cut.metrics[0]["truncated_frac"] == 1
    assert cut.metrics[0]["value_loss"] == ended.metrics[0]["value_loss"], "a new critic predicts 0"
    assert cut.metrics[1]["value_loss"] != ended.metrics[1]["value_loss"]
    assert cut.weights != ended.weights


def test_the_reference_is_the_warm_started_policy(train_here: Run) -> None:
    settings = {"loss": {"name": "grpo", "kl_coef": 0.1}, "learner": ONCE, "stop": {"steps": 2}}
    taught = metrics(train_here("taught", warm_start=TAUGHT, **settings), "reference_kl")
    assert taught[0] == pytest.approx(0, abs=1e-9), "the policy has not moved from its warm start"
    assert taught[1] > 1e-7
    untaught = metrics(train_here("untaught", **settings), "reference_kl")
    assert untaught[0] == pytest.approx(0, abs=1e-9)


def test_a_resumed_run_keeps_the_warm_started_policy_as_its_reference(train_here: Run) -> None:
    settings: dict[str, Any] = {
        "warm_start": TAUGHT,
        "loss": {"name": "grpo", "kl_coef": 0.1},
        "learner": ONCE,
    }
    expected = metrics(train_here("whole", stop={"steps": 3}, **settings), "reference_kl")
    train_here("run", stop={"steps": 1}, **settings)
    found = metrics(train_here("run", stop={"steps": 3}, resume=True, **settings), "reference_kl")
    assert found == expected
    assert expected[2] < 0.05, "the policy before the warm start is farther away than two steps"


IN_REWARD: dict[str, Any] = {"name": "reinforce", "kl_coef": 0.5, "kl_in": "reward"}


def test_an_adapted_kl_coefficient_reaches_the_reward(train_here: Run) -> None:
    """The loss has no KL term, so the weights differ only where the rewards do."""
    settings: dict[str, Any] = {"loss": IN_REWARD, "estimator": "reinforce", "learner": ONCE}
    fixed = Story.of(train_here("fixed", **settings))
    adapted = Story.of(train_here("adapted", **{**settings, "loss": {**IN_REWARD, "kl_target": 1e-6}}))
    assert adapted.metrics[0] == fixed.metrics[0], "the first step begins with the same coefficient"
    assert adapted.weights != fixed.weights


def test_a_resumed_run_keeps_the_adapted_kl_coefficient(train_here: Run) -> None:
    settings: dict[str, Any] = {
        "loss": {**IN_REWARD, "kl_target": 1e-6},
        "estimator": "reinforce",
        "learner": ONCE,
    }
    expected = Story.of(train_here("whole", stop={"steps": 4}, **settings))
    train_here("run", stop={"steps": 2}, **settings)
    assert Story.of(train_here("run", stop={"steps": 4}, resume=True, **settings)) == expected


@pytest.mark.parametrize(("epochs", "parts"), [(1, 1), (3, 1), (2, 2)])
def test_the_schedule_counts_every_optimizer_step_of_the_run(
    train_here: Run, epochs: int, parts: int
) -> None:
    """Rule 24: it ends with the last step, for any number of epochs per batch."""
    chosen = {"epochs": epochs, "mini_batches": parts, "learning_rate": 0.01, "schedule": "linear"}
    folder = train_here("run", learner={**chosen, "min_lr_ratio": 0.1}, stop={"steps": 3})
    total = 3 * epochs * parts
    last = [step * epochs * parts - 1 for step in (1, 2, 3)]
    expected = [0.01 * (1 - 0.9 * number / (total - 1)) for number in last]
    assert metrics(folder, "learning_rate") == pytest.approx(expected)


def test_learner_options() -> None:
    """The same wherever they run; the seed depends on the run's seed."""
    chosen = {
        "agent": {"temperature": 0.7},
        "learner": {"epochs": 2, "mini_batches": 3},
        "stop": {"steps": 5},
    }
    one, other = (learner_options(load(TrainConfig, merged(SMALL, {**chosen, "seed": n}))) for n in (0, 1))
    assert one.seed != other.seed
    assert one == replace(other, seed=one.seed)
    assert one == LearnerOptions(
        temperature=0.7,
        total_steps=30,
        gap_limit=GAP_LIMIT["float32"],
        seed=one.seed,
    )


def test_the_aggregation_reaches_the_loss(train_here: Run) -> None:
    norms = []
    for constant in (9.0, 18.0):
        loss = {"name": "grpo", "aggregation": "constant", "aggregation_constant": constant}
        norms += metrics(
            train_here(f"run{constant}", loss=loss, learner=ONCE, stop={"steps": 1}), "grad_norm"
        )
    assert norms[0] > 0
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4)


def test_scheduler_config_and_engine_options() -> None:
    """Every setting of `rollout` and `engine` that they read, none at its default."""
    rollout = {
        "groups": 3,
        "group_size": 5,
        "oversample": 1,
        "max_retries_per_group": 6,
        "incomplete_groups": "drop",
        "max_in_flight": 7,
        "max_staleness": 2,
        "on_stale": "replay",
        "pace_slow_groups": True,
        "on_weight_update": "restart",
        "filter_zero_variance": True,
        "equal_tolerance": 0.5,
        "max_skipped": 4,
        "stall_seconds": 9.0,
    }
    engine = {"max_batch": 11, "cache_tokens": 4096, "threads": 2, "dtype": "bfloat16"}
    config = load(TrainConfig, merged(SMALL, {"rollout": rollout, "engine": engine}))
    scheduler = scheduler_config(config)
    names = (
        "max_in_flight", "on_stale", "pace_slow_groups", "on_weight_update", "filter_zero_variance",
        "equal_tolerance", "max_skipped",
    )  # fmt: skip
    assert [getattr(scheduler, name) for name in names] == [rollout[name] for name in names]
    assert (scheduler.stall_seconds, scheduler.max_staleness, scheduler.max_ahead, scheduler.order) == (
        9.0,
        2,
        9,
        "ready",
    )
    groups = scheduler.groups
    assert (groups.size, groups.oversample, groups.max_retries_per_group, groups.incomplete_groups) == (
        5,
        1,
        6,
        "drop",
    )
    assert engine_options(config) == {**engine, "return_routed_experts": True}, "router replay is on"


def test_held_out_episodes_follow_the_evaluation_settings() -> None:
    env = {"id": "rollgym/FrozenLake-v0", "kwargs": {"size": 6}, "limits": {"turns": 9}}
    asked = {"episodes": 5, "seed": 3}
    config, other = (
        load(TrainConfig, merged(SMALL, {"envs": [env], "evaluation": asked, "seed": seed}))
        for seed in (0, 1)
    )
    specs = held_out(config, config.envs[0]).specs
    assert len(specs) == 5
    assert {(one.split, one.limits.turns, one.env_kwargs["size"]) for one in specs} == {("test", 9, 6)}
    assert held_out(other, other.envs[0]).specs == specs, "whatever the run's seed is"
    moved = load(TrainConfig, merged(SMALL, {"envs": [env], "evaluation": {**asked, "seed": 4}}))
    assert [one.task for one in held_out(moved, moved.envs[0]).specs] != [one.task for one in specs]
