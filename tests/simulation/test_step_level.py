"""Weeks of steps with failures."""

from dataclasses import replace
from typing import Any

import pytest
from scenarios import make_scenario

from rollgym.core.errors import UsageError
from rollgym.simulation.samples import StepSample
from rollgym.simulation.scenario import LearnerTimes
from rollgym.simulation.step_level import LongRun, Stretch, simulate_steps

SAMPLE = StepSample(
    wait=20.0, wait_generate=15.0, wait_environment=5.0, train=70.0, sync=10.0, turns=100, in_flight=50.0,
    generating=20.0, progress=2.0, tokens={0: 90.0, 1: 10.0}, engine_busy=0.5,
)  # fmt: skip
DAY = 86_400.0


def run(seconds: float = 14 * DAY, stretch: Stretch | None = None, **how: Any) -> LongRun:
    settings = {name: how.pop(name) for name in ("replays_log", "waits_for_node") if name in how}
    evaluation = how.pop("evaluation_seconds", 0.0)
    scenario = replace(make_scenario(**how), **settings)
    return simulate_steps(scenario, [SAMPLE], seconds, stretch=stretch, evaluation_seconds=evaluation)


def test_without_failures_only_steps_take_time() -> None:
    result = run(DAY)
    assert result.steps == 864
    assert result.share("train") == pytest.approx(0.7)
    assert result.share("wait_generate") == pytest.approx(0.15)
    assert result.learner_busy == pytest.approx(0.7)
    assert result.turns == 86_400
    assert not result.failures
    assert sum(result.time.values()) == pytest.approx(result.seconds)


def test_checkpoints_and_evaluations_take_time_between_steps() -> None:
    learner = LearnerTimes(checkpoint=50.0, checkpoint_every=5, evaluation_every=10)
    result = run(DAY, learner=learner, evaluation_seconds=100.0)
    # Ten steps, two checkpoints, one evaluation.
    assert result.steps == pytest.approx(10 * DAY / 1200, abs=10)
    assert result.share("checkpoint") == pytest.approx(100 / 1200, rel=0.02)
    assert result.share("evaluation") == pytest.approx(100 / 1200, rel=0.02)


def lost_learner(every: int, replays_log: bool) -> LongRun:
    scenario = make_scenario(1, learner=LearnerTimes(checkpoint_every=every))
    failures = scenario.failures.model_copy(update={"learner": 6 * 3600.0, "learner_back": 600.0})
    scenario = replace(scenario, failures=failures, replays_log=replays_log)
    return simulate_steps(scenario, [SAMPLE], 60 * DAY)


def test_steps_after_a_checkpoint_are_repeated_from_the_log_or_played_again() -> None:
    log, played, often = lost_learner(20, True), lost_learner(20, False), lost_learner(5, True)
    assert log.failures["learner"] == pytest.approx(240, rel=0.2)
    # On average half of the steps between two checkpoints are lost.
    assert log.repeated_steps / log.failures["learner"] == pytest.approx(9.5, rel=0.2)
    assert log.time["repeated"] > 0.7 * 70.0 * log.repeated_steps
    assert played.time["repeated"] > log.time["repeated"]
    assert often.repeated_steps < log.repeated_steps / 2
    assert often.steps > log.steps > played.steps
    assert log.time["restart"] == pytest.approx(600.0 * log.failures["learner"])
    assert log.turns_lost == pytest.approx(100.0 * log.failures["learner"])


def test_lost_engines_stretch_steps_until_they_are_back() -> None:
    stretch = Stretch(missing=0.5, factor=1.4)
    quick = run(stretch=stretch, engine=3600.0, engine_back=60.0)
    long = run(stretch=stretch, engine=3600.0, engine_back=1800.0)
    assert quick.steps > long.steps
    assert quick.turns_lost == pytest.approx(long.turns_lost, rel=0.2)
    assert quick.turns_lost == pytest.approx(quick.failures["engine"] * 40.0 / 3)
    assert long.engines_present < quick.engines_present < 1.0
    assert run(engine=3600.0, engine_back=1800.0).steps > long.steps, "no stretch, no effect"


def test_a_lost_node_hits_what_runs_on_it() -> None:
    result = run(node=2 * 3600.0)
    kinds = {kind: count for kind, count in result.failures.items() if kind.startswith("node:")}
    assert sum(kinds.values()) == result.failures["node"]
    # Two nodes train, two generate, one has environments only.
    assert kinds["node:train"] == pytest.approx(0.4 * result.failures["node"], rel=0.3)
    assert result.time["restart"] > 0
    waiting = run(node=2 * 3600.0, waits_for_node=True)
    assert waiting.time["node"] > 0
    assert result.time["node"] == 0


def test_stragglers_slow_the_update() -> None:
    slow = run(straggler=3600.0, straggler_factor=2.0)
    assert slow.steps < run().steps
    assert slow.time["train"] / slow.steps > 75.0


def test_the_same_seed_gives_the_same_run() -> None:
    how: dict[str, Any] = {"node": 3600.0, "engine": 1800.0, "straggler": 9999.0}
    assert run(seed=1, **how) == run(seed=1, **how)
    assert run(seed=1, **how) != run(seed=2, **how)


def test_a_batch_larger_than_what_may_be_ahead_is_refused() -> None:
    with pytest.raises(UsageError, match="max_ahead=12"):
        replace(make_scenario(1), batch=13)
