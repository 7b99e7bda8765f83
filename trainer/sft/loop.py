"""The loop of training on data: batches in a fixed random order, validation, evaluation, checkpoints.

    batch   = make_batch(examples of the step)           tokens, and which of them are learned
    metrics = learner.update(batch)                      one optimizer step
    metrics |= validation loss, if it is due
    run.record(metrics)                                  metrics.jsonl, console
    run.after_step()                                     evaluation in the environments, checkpoint

The batch of a step depends on the seed and the number of the step alone, so a resumed run continues exactly.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np

from rollgym.cluster.errors import ActorLost
from rollgym.rollout.scheduler import Scheduler
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import TokenEpisode
from rollgym.trainer.imitation.examples import epoch_batches, supervised_batch
from rollgym.trainer.learner.protocol import LearnerProtocol, Metrics
from rollgym.trainer.runtime import Components
from rollgym.trainer.sft.config import DataRunConfig
from rollgym.trainer.sft.dataset import Dataset, Example
from rollgym.trainer.tracking.jsonl import read_metrics
from rollgym.trainer.train_run import TrainRun
from rollgym.trainer.train_state import Clock, reason_to_stop


class DataLoop(ABC):
    """The order of a run: evaluate and validate, then steps. A subclass adds an objective.

    Args:
        components: The learner, and the engine and environments for evaluations.
        run: The run folder.
        config: The settings.
        data: The examples.
    """

    kept: ClassVar[tuple[str, ...]] = ("entropy", "grad_norm", "learning_rate")
    """Metrics of an update that have a meaning for data that no policy sampled, besides the loss."""

    def __init__(self, components: Components, run: TrainRun, config: DataRunConfig, data: Dataset) -> None:
        self.components, self.run, self.config = components, run, config
        self.train_set, self.validation_set = data.train, data.validation
        self.total = components.config.stop.steps
        """Optimizer steps of the run."""
        self.losses: list[tuple[int, float]] = []
        """(step, validation loss) of every validation so far."""
        self.scheduler: Scheduler | None = None
        self._synced = 0
        """The step whose weights the engine has."""
        run.components = components

    @abstractmethod
    def make_batch(self, examples: Sequence[Example]) -> Batch:
        """The batch of a step."""

    def step_metrics(self, examples: Sequence[Example], found: Metrics) -> Metrics:
        """The metrics of a step, from those of the update on these examples."""
        return {"loss": found["policy_loss"], **{name: found[name] for name in self.kept if name in found}}

    @abstractmethod
    def measure(self, learner: LearnerProtocol, examples: Sequence[Example]) -> Metrics:
        """Metrics of the current weights on a validation set, ``validation_loss`` among them."""

    async def prepare(self) -> None:
        """Read what the run has recorded; the weights are those of the last checkpoint, or of the start."""
        self.losses = recorded_losses(self.run)

    async def train(self) -> str:
        """Train until a stop condition holds; returns that condition."""
        components, run = self.components, self.run
        clock = Clock(run.state.seconds)
        run.show_plan()
        await run.restore()
        run.note_layout(await components.compute(components.learner.describe_layout))
        while True:
            try:
                self._synced = run.state.step
                await self.prepare()
                async with self._stage():
                    return await self._train(clock)
            except ActorLost as lost:
                await run.go_back(lost)
                run.show_plan()

    @asynccontextmanager
    async def _stage(self) -> AsyncIterator[None]:
        """Open the scheduler of the evaluations; there is none without environments."""
        if not self.config.envs:
            yield
            return
        async with self.run.open_stage() as self.scheduler:
            yield

    async def _train(self, clock: Clock) -> str:
        run = self.run
        if run.fresh:
            await self._begin()
        run.stop.check()
        if self._reason_to_stop(clock) is None:
            await run.catch_up()
        batches = epoch_batches(
            len(self.train_set), self.config.batch_size, self.config.epochs, self.config.seed
        )
        for indices in itertools.islice(batches, run.state.step, None):
            if self._reason_to_stop(clock) is not None:
                break
            await self._step([self.train_set[index] for index in indices])
            run.state.seconds = clock.seconds
            run.stop.check()
            if self._reason_to_stop(clock) is None:  # otherwise `finish` evaluates and saves
                await self._after_step()
        reason = self._reason_to_stop(clock) or f"all {self.total} steps are done"
        run.state.seconds = clock.seconds
        await self._sync()
        await run.finish(reason)
        return reason

    async def _begin(self) -> None:
        """Before the first step: evaluate and validate the policy as it is, and save it."""
        run = self.run
        await run.evaluate("before")
        if self.validation_set:
            metrics = await self._validate()
            run.logger.log_metrics(0, metrics)
            run.console.note(f"validation loss {metrics['validation_loss']:.4f} before training")
        await run.save()

    async def _step(self, examples: Sequence[Example]) -> None:
        """Train on one batch."""
        components, run = self.components, self.run
        started = time.perf_counter()
        # From here on the weights change: a request to stop waits until they are those of a finished step.
        with run.stop.deferred():
            run.console.phase("learn")
            async with components.training():
                batch = self.make_batch(examples)
                found = await components.compute(components.learner.update, batch)
            seconds = time.perf_counter() - started
            num_tokens = sum(len(sequence.ids) for sequence in batch.sequences)
            run.state.step += 1
            metrics = self.step_metrics(examples, found)
            metrics |= {
                "epoch": run.state.step * self.config.epochs / self._steps_of_all_epochs,
                "sequences": float(len(batch.sequences)),
                "learned_tokens": float(sum(len(np.unique(row.action_positions)) for row in batch.sequences)),
                "tokens": float(num_tokens),
                "seconds_train": seconds,
                "tokens_per_second": num_tokens / seconds,
            }
            if self.validation_set and (
                run.state.step % self.config.validation.every == 0 or run.state.step == self.total
            ):
                metrics |= await self._validate()
            metrics["seconds"] = time.perf_counter() - started
            run.logger.log_metrics(run.state.step, metrics)
            run.console.step(run.state.step, metrics)

    async def _after_step(self) -> None:
        run, every = self.run, self.config.evaluation.every
        if every and run.state.step % every == 0:
            await self._sync()
        await run.after_step()

    async def _sync(self) -> None:
        """Send the learner's weights to the engine, if an environment will use them."""
        run = self.run
        if self.scheduler is None or self._synced == run.state.step:
            return
        run.console.phase("sync")
        with run.stop.deferred():
            run.state.version += 1
            async with self.scheduler.updating(run.state.version):
                await self.components.sync_weights(run.state.version)
            self._synced = run.state.step

    async def _validate(self) -> Metrics:
        """Measure the policy on the validation set; without envs, keep the one with the lowest loss."""
        components, run = self.components, self.run
        run.console.phase("validate")
        started = time.perf_counter()
        async with components.training():
            measured = await components.compute(self.measure, components.learner, self.validation_set)
        loss = measured["validation_loss"]
        self.losses.append((run.state.step, loss if math.isfinite(loss) else math.inf))
        if not self.config.envs and validations_since_best(self.losses) == 0:
            with run.stop.deferred():
                await components.compute(
                    run.checkpoints.save_best,
                    run.state.step,
                    run.state.to_json(),
                    lambda folder: components.export(folder / "model"),
                )
        return {**measured, "seconds_validate": time.perf_counter() - started}

    def _reason_to_stop(self, clock: Clock) -> str | None:
        patience = self.config.stop.patience
        if patience is not None and (waited := validations_since_best(self.losses)) >= patience:
            step, best = min(self.losses, key=lambda pair: (pair[1], pair[0]))
            found = f"best {best:.4f} at step {step}"
            return f"the validation loss has not improved for {waited} validations ({found})"
        return reason_to_stop(self.components.config, self.run.state, clock)

    @property
    def _steps_of_all_epochs(self) -> int:
        return self.config.epochs * -(-len(self.train_set) // self.config.batch_size)


class SFTLoop(DataLoop):
    """Supervised fine-tuning: the loss is the negative log-likelihood of the learned tokens."""

    def make_batch(self, examples: Sequence[Example]) -> Batch:
        """The batch of a step."""
        return supervised_batch([example.tokens for example in examples])

    def measure(self, learner: LearnerProtocol, examples: Sequence[Example]) -> Metrics:
        """The validation loss of the current weights."""
        return {"validation_loss": mean_loss(learner, [example.tokens for example in examples])}


def mean_loss(learner: LearnerProtocol, examples: Sequence[TokenEpisode]) -> float:
    """The mean negative log-likelihood of the learned tokens."""
    logprobs = learner.logprobs(supervised_batch(examples))
    return -math.fsum(logprobs.tolist()) / len(logprobs)


def validations_since_best(losses: Sequence[tuple[int, float]]) -> int:
    """The number of validations after the one with the lowest loss."""
    if not losses:
        return 0
    best = min(range(len(losses)), key=lambda number: (losses[number][1], number))
    return len(losses) - 1 - best


def recorded_losses(run: TrainRun) -> list[tuple[int, float]]:
    """(step, validation loss) in the run's ``metrics.jsonl``; infinite where it is not finite."""
    lines: list[dict[str, Any]] = read_metrics(run.folder)
    found = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    return [(int(step), math.inf if loss is None else float(loss)) for step, loss in found]
