"""Replay of a training run: the same batches in the same order give the same weights, bit for bit on the CPU.

The step log says which episodes each step was trained on (`rollgym.trainer.step_log`), and
``episodes.blocks`` holds their tokens, log-probs and rewards. Whatever timing decided in an asynchronous run,
and however often it was killed and resumed, is in these two files. A replay makes every batch again, trains
the learner on it, and compares the batch, the learner's metrics and the weights of every kept checkpoint. It
plays no environment and samples no token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.registry import import_module
from rollgym.core.seeding import file_hash
from rollgym.io.run_dir import BLOCKS, EPISODES, EVENTS, MANIFEST, STEPS, read_json
from rollgym.trainer.config import TrainConfig, load_recorded
from rollgym.trainer.distillation import open_teachers
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.thread import LearnerThread
from rollgym.trainer.rollout_batch import make_rollout_batch
from rollgym.trainer.run_files import CONFIG
from rollgym.trainer.runtime import MODEL, learner_options
from rollgym.trainer.step_log import LoggedStep, batch_digest, read_groups, read_steps
from rollgym.trainer.tracking.checkpoint import STATE, SUMS, Checkpoints, verify_checkpoint
from rollgym.trainer.tracking.jsonl import read_metrics
from rollgym.trainer.train_run import FINAL, REFERENCE
from rollgym.trainer.train_state import TrainState

OnStep = Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class RunReplay:
    """The result of a replay."""

    run: str
    first_step: int
    last_step: int
    different: list[str] = field(default_factory=list)
    """The first differences: of the batch, the metrics or the weights."""
    weights: list[str] = field(default_factory=list)
    """The recorded weights that were compared."""
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """True if everything equals the recording."""
        return not self.different

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {**asdict(self), "same": self.same}

    def lines(self) -> list[str]:
        """The result as lines of text."""
        steps = f"steps {self.first_step} to {self.last_step} of {self.run}"
        lines = [*(f"note: {note}" for note in self.notes), *self.different]
        if not self.same:
            return [*lines, f"{steps}: different"]
        compared = f"; the weights equal {', '.join(self.weights)}" if self.weights else ""
        return [*lines, f"{steps}: the same batches and metrics{compared}"]


def replay_run(run: Path, *, trust_code: bool = False, on_step: OnStep = lambda step: None) -> RunReplay:
    """Train again on the recorded batches of a run and compare; stops at the first different step.

    A run with a warm start is replayed from its oldest kept checkpoint, any other run from its initial model.

    Args:
        run: The folder of a training run.
        trust_code: Import the modules that the run's config names.
        on_step: Called with each replayed step.

    Example:
        >>> replay_run(Path("runs/ahead")).same
        True
    """
    config = _config(run, trust_code)
    steps = read_steps(run)
    if not steps:
        raise ResultsError(
            f"{run / STEPS} has no finished training step: the run has none yet, or an older version "
            "recorded it."
        )
    numbers = [logged.step for logged in steps]
    if numbers != list(range(1, len(steps) + 1)):
        raise ResultsError(f"{run / STEPS} has a gap in its training steps, and cannot be replayed.")
    with LearnerThread() as thread:  # as in training: the number of CPU threads belongs to a thread
        return thread.submit(_Replayer(run, config).replay, steps, on_step).result()


def _config(run: Path, trust_code: bool) -> TrainConfig:
    logs = (EVENTS, EPISODES) if (run / EPISODES).is_file() else (STEPS, BLOCKS)
    for name in (MANIFEST, CONFIG, *logs):
        if not (run / name).is_file():
            raise UsageError(f"{run} is not the folder of a training run: it has no {name}.")
    if (kind := read_json(run / MANIFEST).get("kind")) != "train":
        raise UsageError(f"{run} is a run of `rollgym {kind}`: only runs of `rollgym train` can be replayed.")
    config = load_recorded(run / CONFIG)
    if config.imports and not trust_code:
        raise UsageError(
            f"The config of {run} imports {', '.join(config.imports)}: pass --trust-code to import "
            f"{'it' if len(config.imports) == 1 else 'them'}."
        )
    for name in config.imports:
        import_module(name)
    if config.runtime != "local":
        raise UsageError(
            f"{run} trained with runtime={config.runtime}: only runs with runtime=local can be replayed, "
            "because sums over several ranks depend on their number."
        )
    if config.tracking.episodes != "all":
        raise UsageError(
            f"{run} was recorded with tracking.episodes={config.tracking.episodes}: a replay needs its "
            "training episodes."
        )
    return config


class _Replayer:
    """A learner in the state that the run had."""

    def __init__(self, run: Path, config: TrainConfig) -> None:
        self._run, self._config = run, config
        self._checkpoints = Checkpoints(run / "checkpoints")

    def replay(self, steps: Sequence[LoggedStep], on_step: OnStep) -> RunReplay:
        """Repeat the steps and compare."""
        config, run = self._config, self._run
        self._learner = Learner(run / MODEL, config.learner, config.loss, learner_options(config))
        self._teachers = open_teachers(config, run, run / MODEL)
        state = self._start()
        result = RunReplay(run=str(run), first_step=state.step + 1, last_step=state.step)
        if state.step:
            result.notes.append(
                f"the run has a warm start: replayed from the checkpoint of step {state.step}"
            )
        recorded = {line["step"]: line for line in read_metrics(run)}
        kept = set(self._checkpoints.steps())
        for logged in steps[state.step :]:
            self._step(logged, state, recorded.get(logged.step, {}), result)
            state = logged.apply(state)
            result.last_step = logged.step
            on_step(logged.step)
            if logged.step in kept and result.same:
                self._compare_checkpoint(logged.step, result)
            if not result.same:
                return result
        if (run / FINAL).is_dir():
            self._compare_final(result)
        return result

    def _start(self) -> TrainState:
        """Restore the oldest state that the folder has."""
        config, kept = self._config, self._checkpoints.steps()
        state = TrainState(kl_coef=config.loss.kl_coef, entropy_coef=config.loss.entropy_coef)
        if config.warm_start is not None:
            if not kept:
                raise ResultsError(f"{self._run} has a warm start and no checkpoint to replay from.")
            path = self._checkpoints.path(kept[0])
            state = TrainState.from_json(verify_checkpoint(path))
            self._learner.load(path)
            self._learner.set_coefficients(state.coefficients)
        if (self._run / REFERENCE).is_dir():
            self._learner.set_reference(self._run / REFERENCE)
        return state

    def _step(
        self, logged: LoggedStep, state: TrainState, recorded: dict[str, Any], result: RunReplay
    ) -> None:
        config = self._config
        groups = read_groups(self._run, logged, state.marks, config.rollout.group_size)
        rollout = make_rollout_batch(groups, config, self._learner, state.kl_coef, state.version)
        if self._teachers is not None:
            rollout = self._teachers.add(rollout)
        if batch_digest(rollout.batch) != logged.batch:
            result.different.append(f"step {logged.step}: the batch differs from the recorded one")
            return
        metrics = self._learner.update(rollout.batch)
        self._learner.adapt_coefficients(metrics)
        for name, value in (metrics | rollout.metrics).items():
            if isfinite(value) and recorded.get(name) != value:
                result.different.append(
                    f"step {logged.step}: {name} was {recorded.get(name)} and is {value} now"
                )
                return

    def _compare_checkpoint(self, step: int, result: RunReplay) -> None:
        path = self._checkpoints.path(step)
        sums = read_json(path / SUMS).get("files", {})
        with tempfile.TemporaryDirectory() as folder:
            self._learner.save(Path(folder))
            for file in sorted(Path(folder).iterdir()):
                if file.name != STATE and sums.get(file.name) != file_hash(file):
                    result.different.append(f"step {step}: {file.name} differs from {path}")
                    return
        result.weights.append(f"checkpoint {step}")

    def _compare_final(self, result: RunReplay) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._learner.export(Path(folder))
            for file in sorted(Path(folder).glob("*.safetensors")):
                final = self._run / FINAL / file.name
                if not final.is_file() or file_hash(final) != file_hash(file):
                    result.different.append(f"step {result.last_step}: {file.name} differs from {final}")
                    return
        result.weights.append(FINAL)
