"""Simulates one scenario: representative steps at the event or tick level, then a long run of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollgym.core.errors import UsageError
from rollgym.rollout.config import SchedulerConfig
from rollgym.simulation.event_level import simulate_events
from rollgym.simulation.samples import StepSample, ages, discarded_share, mean, mean_age
from rollgym.simulation.scenario import Failures, Scenario
from rollgym.simulation.step_level import LongRun, Stretch, simulate_steps
from rollgym.simulation.tick_level import simulate_ticks

Level = Literal["auto", "events", "ticks"]
LEVELS: tuple[Level, ...] = ("auto", "events", "ticks")
EVENT_TURNS = 8_000
"""Turns up to which representative steps are simulated at the event level; a turn costs about 0.3 ms."""
STEPS = 12
"""Representative steps."""
VARIANT_STEPS = 5
"""Representative steps of a variant, which is compared with as many steps of the run."""
CHECK_TURNS = 6_000
"""Turns of the reduced run that compares the two levels."""
CHECK_STEPS = 8
Notify = Callable[[str], object]
"""Called with what is being simulated."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The tick level against the real scheduler, on the same run at a reduced size."""

    scale: float
    """Groups of a step, as a fraction of those of the run."""
    steps: int
    step_seconds: tuple[float, float]
    """Mean step of the tick level and of the real scheduler."""
    staleness: tuple[float, float]
    discarded: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative error of the step time."""
        ticks, events = self.step_seconds
        return ticks / events - 1.0 if events else 0.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulation of one scenario."""

    scenario: Scenario
    level: Level
    samples: tuple[StepSample, ...]
    """Representative steps, without those before the run is in full swing."""
    long: LongRun
    evaluation_seconds: float = 0.0
    stretch: Stretch = Stretch()

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step without failures."""
        return mean(sample.seconds for sample in self.samples)


def warm_up(scenario: Scenario) -> int:
    """First steps that do not count: the run is not in full swing until all batches ahead have started."""
    return scenario.bound + 2


def choose_level(scenario: Scenario, level: Level, steps: int) -> Level:
    """The level at which representative steps are simulated."""
    if level != "auto":
        return level
    turns = scenario.turns_per_step * (steps + warm_up(scenario))
    exact_only = scenario.scheduler.pace_slow_groups or scenario.scheduler.max_overtakes is not None
    return "events" if turns <= (3 if exact_only else 1) * EVENT_TURNS else "ticks"


def simulate(
    scenario: Scenario,
    seconds: float,
    *,
    steps: int = STEPS,
    level: Level = "auto",
    stretch: Stretch | None = None,
    notify: Notify = lambda what: None,
) -> Simulation:
    """Simulate a run of ``seconds``.

    Args:
        scenario: The run.
        seconds: Its duration, failures included.
        steps: Representative steps to simulate.
        level: The level of these: ``events`` (the real scheduler) or ``ticks`` (every turn, in ticks).
        stretch: The effect of missing engines, if it is known. Default: it is measured.
        notify: Called with what is being simulated.
    """
    if steps < 1 or seconds <= 0:
        raise UsageError(
            f"A simulation needs at least one step and some time, got {steps} and {seconds:g} s."
        )
    level = choose_level(scenario, level, steps)
    samples = representative(scenario, steps, level, notify)
    if stretch is None and loses_engines(scenario.failures) and scenario.engine.engines > 1:
        stretch = measure_stretch(scenario, samples, level, notify)
    evaluation = evaluation_seconds(scenario, samples)

    def on_step(done: float) -> None:
        notify(f"long run, {done:.0%}")

    stretch = stretch or Stretch()
    long = simulate_steps(
        scenario, samples, seconds, stretch=stretch, evaluation_seconds=evaluation, on_step=on_step
    )
    return Simulation(scenario, level, tuple(samples), long, evaluation, stretch)


def again(simulation: Simulation, scenario: Scenario, seconds: float) -> Simulation:
    """Simulate the long run of a scenario whose steps are those of another simulation."""
    evaluation = evaluation_seconds(scenario, simulation.samples)
    stretch = simulation.stretch
    long = simulate_steps(
        scenario, simulation.samples, seconds, stretch=stretch, evaluation_seconds=evaluation
    )
    return replace(simulation, scenario=scenario, long=long, evaluation_seconds=evaluation)


def representative(
    scenario: Scenario, steps: int, level: Level, notify: Notify = lambda what: None
) -> list[StepSample]:
    """Simulate steps of a run in full swing, without failures."""
    skip = warm_up(scenario)
    quiet = replace(scenario, failures=Failures())
    name = "real scheduler" if level == "events" else "tick level"

    def on_step(step: int) -> None:
        notify(f"{name}, step {step + 1} of {steps + skip}")

    if level == "events":
        return simulate_events(quiet, steps + skip, on_step=on_step).steps[skip:]
    return simulate_ticks(quiet, steps + skip, on_step=on_step)[skip:]


def loses_engines(failures: Failures) -> bool:
    """Whether engines are missing or slow at times."""
    return any(value is not None for value in (failures.node, failures.engine, failures.straggler))


def measure_stretch(
    scenario: Scenario, samples: Sequence[StepSample], level: Level, notify: Notify = lambda what: None
) -> Stretch:
    """How much longer steps take without a tenth of the engines, or without those of one node."""
    engine = scenario.engine
    missing = min(engine.engines - 1, max(1, round(scenario.nodes.engines_each), round(engine.engines / 10)))
    fewer = replace(engine, engines=engine.engines - missing, lent=min(engine.lent, engine.engines - missing))
    few = representative(replace(scenario, engine=fewer), min(VARIANT_STEPS, len(samples)), level, notify)
    ratio = mean(s.seconds for s in few) / mean(s.seconds for s in samples[: len(few)])
    return Stretch(missing / engine.engines, max(1.0, ratio))


def evaluation_seconds(scenario: Scenario, samples: Sequence[StepSample]) -> float:
    """Seconds of an evaluation: its slowest episode, with the load that training puts on the engines."""
    count = scenario.learner.evaluation_episodes
    if not count or not scenario.learner.evaluation_every:
        return 0.0
    engine, rng = scenario.engine, np.random.default_rng((scenario.seed, 6))
    training = mean(sample.generating for sample in samples) if scenario.bound else 0.0
    load = round((training + min(count, scenario.scheduler.max_in_flight) / 2) / engine.engines)
    unit = engine.seconds_per_unit(max(load, 1))
    seconds = []
    for number in rng.integers(1 << 20, size=min(count, 1000)):
        plan = scenario.latencies.group(scenario.seed + 1, int(number), 1)
        turns = int(plan.turns[0])
        seconds.append(plan.start[0] + unit * plan.work[0, :turns].sum() + plan.step[0, :turns].sum())
    rounds = -(-count // scenario.scheduler.max_in_flight)
    return float(max(seconds)) * rounds


def reduced(scenario: Scenario, scale: float) -> Scenario:
    """The same run with fewer groups and engines."""
    config = scenario.scheduler
    batch = max(2, round(scenario.batch * scale))
    scale = batch / scenario.batch
    smaller: SchedulerConfig = replace(
        config,
        max_in_flight=max(scenario.members, round(config.max_in_flight * scale)),
        max_ahead=max(batch, round(config.ahead * scale)),
    )
    engines = max(1, round(scenario.engine.engines * scale))
    lent = min(engines, round(scenario.engine.lent * engines / scenario.engine.engines))
    engine = replace(scenario.engine, engines=engines, lent=lent)
    return replace(scenario, scheduler=smaller, batch=batch, engine=engine, failures=Failures())


def check_ticks(scenario: Scenario, notify: Notify = lambda what: None) -> Accuracy:
    """Compare the tick level with the real scheduler on a reduced run."""
    steps = CHECK_STEPS + warm_up(scenario)
    scale = min(1.0, CHECK_TURNS / (scenario.turns_per_step * steps))
    small = reduced(scenario, scale)
    ticks = representative(small, CHECK_STEPS, "ticks", notify)
    events = representative(small, CHECK_STEPS, "events", notify)
    return Accuracy(
        small.batch / scenario.batch,
        CHECK_STEPS,
        (mean(s.seconds for s in ticks), mean(s.seconds for s in events)),
        (mean_age(ages(ticks)), mean_age(ages(events))),
        (discarded_share(ticks), discarded_share(events)),
    )
