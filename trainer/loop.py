"""The training loop: rollout, batch, advantages, update, weight sync, record.

    groups  = await scheduler.take(...)              rollout: finished groups of episodes
    rollout, metrics = await components.train_on(groups, ...)
        rollout = make_rollout_batch(groups, ...)    reward shaping, tokens, advantages
        metrics = learner.update(rollout.batch)      optimizer steps
    await components.sync_weights(version)           the engine samples with the new weights
    run.record(groups, metrics)                      metrics.jsonl, episodes.blocks, console
    await run.log_step(groups, digest)                     events.jsonl: what decided this step

Concurrent loops and how they wait for one another:

Training (`TrainLoop.train_step`, this module)
    waits for: ``rollout.groups`` finished groups (`Scheduler.take`); the learner's thread; engines that
    finish or restart their requests (`Scheduler.updating`).
    unblocked by: the scheduler when a group is complete; the learner when an update is done.
Rollout (`rollgym.rollout.scheduler`, one task per running episode)
    waits for: a free slot of ``rollout.max_in_flight``; room to run ahead of the learner (with
    staleness 0 no group starts between `take` and `release`); the engine's replies; the environment.
    unblocked by: an episode that ends; `Scheduler.release` after a weight sync.
Engine (`rollgym.engines`)
    waits for: requests; with colocation, the learner to finish with the shared device.
    unblocked by: `GenerateRequest`s; `Components.sync_weights`.
Evaluation and checkpoints (`TrainRun.after_step`)
    wait for: the end of a step. No training step runs meanwhile.

With ``rollout.max_staleness`` > 0 episodes keep running while the learner trains. `take` returns no group
that is older than the bound, or the batch masks older tokens (``rollout.on_stale``). It is the same loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollgym.cluster.errors import ActorLost
from rollgym.rollout.scheduler import Scheduler
from rollgym.trainer.imitation.warm_start import warm_start
from rollgym.trainer.rollout_batch import staleness_metrics, token_diagnostics
from rollgym.trainer.runtime import Components
from rollgym.trainer.step_log import batch_digest
from rollgym.trainer.train_run import TrainRun
from rollgym.trainer.train_state import Clock, reason_to_stop


async def train(components: Components, run: TrainRun) -> str:
    """Train until a stop condition holds; returns that condition."""
    return await TrainLoop(components, run).train()


class TrainLoop:
    """The order of a run: warm start, stages of the curriculum, steps."""

    def __init__(self, components: Components, run: TrainRun) -> None:
        self.components, self.run, self.config = components, run, components.config
        self.scheduler: Scheduler
        run.components = components

    async def train(self) -> str:
        """Train until a stop condition holds; returns that condition."""
        components, run = self.components, self.run
        run.show_plan()
        await run.restore()
        clock = Clock(run.state.seconds)
        run.note_layout(await components.compute(components.learner.describe_layout))
        while True:
            try:
                async with run.open_stage() as self.scheduler:
                    if run.fresh:
                        await self.begin()
                    run.stop.check()
                    await run.catch_up()
                    await self.scheduler.resume()
                    reason = await self.train_stage(clock)
                    if reason is not None:
                        await self.scheduler.pause()
                        run.state.seconds = clock.seconds
                        await run.finish(reason)
                        return reason
            except ActorLost as lost:
                await run.go_back(lost)
                run.show_plan()

    async def begin(self) -> None:
        """Before the first step: evaluate the untrained policy, then warm-start it."""
        run = self.run
        if self.config.evaluation.on_start:
            await run.evaluate("before")
        if self.config.warm_start is not None:
            run.console.phase("imitate")
            await warm_start(self.components, run, self.scheduler)
            await run.keep_reference()
            await run.evaluate("warm_start")
            await run.keep_best()
        await run.renew_past()
        await run.save()

    async def train_stage(self, clock: Clock) -> str | None:
        """Train on the environments of one curriculum stage; ``None`` when the next stage is due."""
        run = self.run
        while (reason := reason_to_stop(self.config, run.state, clock)) is None:
            advances = await self.train_step()
            run.state.seconds = clock.seconds
            run.show_plan()
            run.stop.check()
            await run.after_step()
            if advances:
                return None
        return reason

    async def train_step(self) -> bool:
        """Train on one batch; returns whether the next curriculum stage is due."""
        components, run, scheduler = self.components, self.run, self.scheduler
        learner, state = components.learner, run.state
        stopwatch = Stopwatch()

        run.console.phase("generate")
        groups = await scheduler.take(self.config.rollout.groups, release=False)
        stopwatch.lap("generate")

        # From here on the weights change: a request to stop waits until they are those of a finished step.
        with run.stop.deferred():
            losses = run.note_losses(groups)
            run.prepare_record(groups)
            run.console.phase("train")
            async with components.training():
                rollout, metrics = await components.train_on(groups, state.kl_coef, state.version)
                digest = await components.compute(batch_digest, rollout.batch)
                tokens: Sequence[dict[str, list[float]]] = ()
                if run.tokens_due:
                    tokens = await components.compute(token_diagnostics, learner, rollout.batch, groups)
            state.coefficients = learner.adapt_coefficients(metrics)
            stopwatch.lap("train")

            run.console.phase("sync")
            async with scheduler.updating(state.version + 1):
                await components.sync_weights(state.version + 1)
            state.version += 1
            past_age = state.step - state.past_step
            state.step += 1
            await run.renew_past()
            shares = run.reweigh(groups)
            run.note_position()
            scheduler.release(len(groups))
            stopwatch.lap("sync")

            metrics |= (
                rollout.metrics
                | staleness_metrics(groups, state.version - 1, self.config.rollout.mask_bound)
                | (scheduler.step_metrics() if self.config.rollout.reports_turns else {})
                | components.colocation_metrics
                | components.sync_metrics
                | losses
                | shares
            )
            if components.past is not None:
                metrics["past_age"] = float(past_age)
            run.record(groups, metrics | stopwatch.metrics(rollout.metrics), tokens)
            advances = run.advances(groups)
            await run.log_step(groups, digest)
            return advances


class Stopwatch:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the last lap under this name."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def metrics(self, episodes: dict[str, float]) -> dict[str, float]:
        """Seconds by phase; the wait for episodes is split between generation and environments."""
        laps = dict(self._laps)
        busy = episodes["episode_generate"] + episodes["episode_step"]
        waited = laps["generate"]
        laps["environment"] = waited * episodes["episode_step"] / busy if busy else 0.0
        laps["generate"] = waited - laps["environment"]
        total = sum(self._laps.values())
        rates = {"seconds": total, "tokens_per_second": episodes["action_tokens"] / total}
        return {f"seconds_{name}": value for name, value in laps.items()} | rates
