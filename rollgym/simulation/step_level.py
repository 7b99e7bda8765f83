"""The step level: days and weeks of steps, with failures, checkpoints and evaluations.

Each step is drawn from simulated ones. Failures strike at random times; what they cost follows from the rules
of the runtime (`docs/ray.md`): an engine or environment actor costs the turns that played on it, a rank of
the learner costs a restart and the steps since the last checkpoint.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollgym.simulation.samples import StepSample, mean
from rollgym.simulation.scenario import Duty, Scenario

Cause = str
CAUSES: dict[Cause, str] = {
    "train": "update",
    "sync": "weight sync",
    "wait_generate": "waiting for replies",
    "wait_environment": "waiting for environments",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "restart": "restart of the learner",
    "node": "waiting for a lost node",
    "repeated": "steps repeated after a restart",
    "unfinished": "the unfinished last step",
}
"""What the time of a run goes to, as of the learner."""


@dataclass(slots=True)
class LongRun:
    """The result of a simulation at the step level."""

    seconds: float
    steps: int = 0
    """Finished steps, each counted once."""
    time: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by cause (`CAUSES`)."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures by kind."""
    repeated_steps: int = 0
    """Steps that were trained again after a restart."""
    turns: float = 0.0
    """Turns trained on."""
    turns_discarded: float = 0.0
    """Turns of stale groups and surplus episodes."""
    turns_lost: float = 0.0
    """Turns lost to failures: they are played again."""
    turns_filtered: float = 0.0
    masked: float = 0.0
    """Share of the trained tokens without a gradient."""
    engine_busy: float = 0.0
    """Share of the engines' time in which they generate."""
    engines_present: float = 1.0
    """Mean share of the engines that are not lost."""

    def share(self, cause: Cause) -> float:
        """Fraction of the whole time."""
        return self.time[cause] / self.seconds if self.seconds else 0.0

    @property
    def steps_per_day(self) -> float:
        """Finished steps per day."""
        return 86_400 * self.steps / self.seconds if self.seconds else 0.0

    @property
    def useful_steps_per_day(self) -> float:
        """Steps per day, without the share of tokens that have no gradient."""
        return self.steps_per_day * (1 - self.masked)

    @property
    def learner_busy(self) -> float:
        """Fraction of the time in which the learner does new work."""
        return self.share("train")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Factor of a step's time while engines are missing: linear in the missing share."""

    missing: float = 1.0
    factor: float = 1.0

    def at(self, missing: float) -> float:
        """The factor of a step's time without this share of the engines."""
        return 1.0 + (self.factor - 1.0) * missing / self.missing


def simulate_steps(
    scenario: Scenario,
    samples: Sequence[StepSample],
    seconds: float,
    *,
    stretch: Stretch | None = None,
    evaluation_seconds: float = 0.0,
    on_step: Callable[[float], object] = lambda done: None,
) -> LongRun:
    """Simulate a long run.

    Args:
        scenario: The run, with its failures.
        samples: Simulated steps, without the first ones.
        seconds: How long the run takes, failures included.
        stretch: The effect of missing engines.
        evaluation_seconds: Duration of one evaluation, during which no step runs.
        on_step: Called now and then with the part that is done.
    """
    return _Steps(scenario, samples, seconds, stretch or Stretch(), evaluation_seconds).run(on_step)


class _Steps:
    def __init__(
        self,
        scenario: Scenario,
        samples: Sequence[StepSample],
        seconds: float,
        stretch: Stretch,
        evaluation_seconds: float,
    ) -> None:
        self.scenario, self.samples, self.end = scenario, samples, seconds
        self.stretch, self.evaluation_seconds = stretch, evaluation_seconds
        self.rng = np.random.default_rng((scenario.seed, 4))
        self.failures_rng = np.random.default_rng((scenario.seed, 5))
        self.run_ = LongRun(seconds)
        self.clock = 0.0
        self.since_checkpoint: list[float] = []
        """Seconds to repeat each finished step after the last checkpoint."""
        self.away: list[tuple[float, float]] = []
        """Lost engines: until when, how many."""
        self.slow: list[tuple[float, Duty]] = []
        """Slow nodes: until when, of which kind."""
        self.nodes_away: list[float] = []
        """Times at which lost nodes of the learner are back."""
        self.next_at = {kind: self._draw(mean_time) for kind, mean_time in self._kinds().items()}
        self.present = 0.0
        self.in_flight_turns = mean(sample.in_flight * sample.progress for sample in samples)
        self.generating_turns = mean(sample.generating * sample.progress for sample in samples)
        self.run_.masked = _masked(samples)

    def run(self, on_step: Callable[[float], object]) -> LongRun:
        run, learner, samples = self.run_, self.scenario.learner, self.samples
        busy = 0.0
        while self.clock < self.end:
            sample = samples[int(self.rng.integers(len(samples)))]
            began = self.clock
            self._return_what_is_back()
            parts = self._parts(sample)
            if not self._pass(sum(parts.values())):
                continue  # the learner was lost: the step is played again
            if self.clock > self.end:
                run.time["unfinished"] += self.end - began
                break
            for cause, part in parts.items():
                run.time[cause] += part
            run.steps += 1
            run.turns += sample.turns
            run.turns_discarded += sample.discarded
            run.turns_filtered += sample.filtered
            busy += sample.engine_busy * sample.seconds
            self.present += (1 - self._missing()) * (self.clock - began)
            self.since_checkpoint.append(parts["train"] if self.scenario.replays_log else sum(parts.values()))
            # Between two steps.
            if learner.evaluation_every and run.steps % learner.evaluation_every == 0:
                self._spend("evaluation", self.evaluation_seconds)
            if run.steps % learner.checkpoint_every == 0:
                self._spend("checkpoint", learner.checkpoint)
                self.since_checkpoint.clear()
            if run.steps % 256 == 0:
                on_step(min(1.0, self.clock / self.end))
        run.seconds = max(self.end, self.clock)
        run.engine_busy = busy / max(run.seconds, 1e-9)
        trained = sum(run.time[cause] for cause in ("train", "sync", "wait_generate", "wait_environment"))
        run.engines_present = self.present / trained if trained else 1.0
        return run

    # Steps.

    def _parts(self, sample: StepSample) -> dict[Cause, float]:
        """Seconds of a step by cause, with what is missing or slow now."""
        factor = self.stretch.at(self._missing())
        train = sample.train * self._train_factor()
        longer = (factor - 1.0) * sample.seconds
        share = sample.wait_generate / sample.wait if sample.wait else 1.0
        return {
            "train": train,
            "sync": sample.sync,
            "wait_generate": sample.wait * share + max(0.0, longer),
            "wait_environment": sample.wait * (1 - share),
        }

    def _missing(self) -> float:
        """Share of the engines that do not generate, slow nodes in part."""
        scenario = self.scenario
        lost = sum(count for _, count in self.away)
        slow = sum(duty in ("generate", "both") for _, duty in self.slow) * scenario.nodes.engines_each
        lost += slow * (1 - 1 / scenario.failures.straggler_factor)
        return min(0.9, lost / scenario.engine.engines)

    def _train_factor(self) -> float:
        """The slowest rank sets the pace, and fewer nodes share the work."""
        nodes = self.scenario.nodes
        count = max(nodes.train + nodes.both, 1)
        factor = count / max(count - len(self.nodes_away), 1)
        if any(duty in ("train", "both") for _, duty in self.slow):
            factor *= self.scenario.failures.straggler_factor
        return factor

    def _spend(self, cause: Cause, seconds: float) -> None:
        self.clock += seconds
        self.run_.time[cause] += seconds

    # Failures.

    def _kinds(self) -> dict[str, float]:
        failures = self.scenario.failures
        times = {
            "node": failures.node,
            "engine": failures.engine,
            "env": failures.env,
            "learner": failures.learner,
            "straggler": failures.straggler,
        }
        return {kind: value for kind, value in times.items() if value is not None}

    def _draw(self, mean_time: float) -> float:
        return self.clock + float(self.failures_rng.exponential(mean_time))

    def _pass(self, seconds: float) -> bool:
        """Let a step pass with its failures; returns whether it could be finished."""
        end = self.clock + seconds
        while self.next_at:
            kind = min(self.next_at, key=self.next_at.__getitem__)
            at = max(self.next_at[kind], self.clock)
            if at > end or at > self.end:
                break
            self.next_at[kind] = at + float(self.failures_rng.exponential(self._kinds()[kind]))
            self.run_.failures[kind] += 1
            if self._fail(kind, at):
                self.run_.time["repeated"] += max(0.0, at - self.clock)
                self.clock = max(at, self.clock)
                self._restart(lost_node=kind == "node")
                return False
        self.clock = end
        return True

    def _fail(self, kind: str, at: float) -> bool:
        """Apply a failure; returns whether the learner was lost."""
        run, scenario, failures = self.run_, self.scenario, self.scenario.failures
        engines, actors = scenario.engine.engines, max(scenario.nodes.env_actors, 1)
        if kind == "engine":
            run.turns_lost += self.generating_turns / engines
            self.away.append((at + failures.engine_back, 1.0))
        elif kind == "env":
            run.turns_lost += self.in_flight_turns / actors
        elif kind == "straggler":
            self.slow.append((at + failures.straggler_lasts, self._duty()))
        elif kind == "node":
            duty = self._duty()
            run.failures[f"node:{duty}"] += 1
            run.turns_lost += self.in_flight_turns / actors
            if duty in ("generate", "both"):
                each = min(scenario.nodes.engines_each, engines)
                run.turns_lost += self.generating_turns * each / engines
                self.away.append((at + failures.node_back, each))
            if duty in ("train", "both"):
                if not scenario.waits_for_node:
                    self.nodes_away.append(at + failures.node_back)
                return True
        return kind == "learner"

    def _restart(self, *, lost_node: bool) -> None:
        """The learner goes back to its checkpoint; the scheduler starts again with the same groups."""
        run, failures = self.run_, self.scenario.failures
        run.turns_lost += self.in_flight_turns
        if lost_node and self.scenario.waits_for_node:
            self._spend("node", max(0.0, failures.node_back - failures.learner_back))
        self._spend("restart", failures.learner_back)
        run.repeated_steps += len(self.since_checkpoint)
        again = sum(self.since_checkpoint)
        self._spend("repeated", again)
        if not self.scenario.replays_log:
            run.turns_lost += len(self.since_checkpoint) * mean(sample.turns for sample in self.samples)

    def _return_what_is_back(self) -> None:
        self.away = [item for item in self.away if item[0] > self.clock]
        self.slow = [item for item in self.slow if item[0] > self.clock]
        before = len(self.nodes_away)
        self.nodes_away = [at for at in self.nodes_away if at > self.clock]
        if before and not self.nodes_away:  # all are back: the learner moves to the plan for all devices
            self.run_.turns_lost += self.in_flight_turns
            self._spend("restart", self.scenario.failures.learner_back)

    def _duty(self) -> Duty:
        """Roles of a random node."""
        nodes = self.scenario.nodes
        counts: dict[Duty, int] = {
            "train": nodes.train,
            "generate": nodes.generate,
            "both": nodes.both,
            "environments": nodes.environments,
        }
        at = float(self.failures_rng.random()) * max(nodes.total, 1)
        for duty, count in counts.items():
            at -= count
            if at < 0:
                return duty
        return "train"


def _masked(samples: Sequence[StepSample]) -> float:
    total = sum(sum(sample.tokens.values()) for sample in samples)
    return sum(sample.masked for sample in samples) / total if total else 0.0
