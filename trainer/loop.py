"""The training loop: episodes, credit, update, weights, and again.

    groups     = await scheduler.take(...)          episodes play all the while, each on its own
    experience = make_experience(groups, ...)       shaping, credit, tokens
    metrics    = learner.update(experience.batch)   better weights
    await engine.update_weights(...)                which the next episodes are played with

With ``rollout.staleness`` 0 nothing new starts between `take` and `release`; with more, episodes go on
playing while the learner works, and `take` gives nothing that is older. It is the same loop.

Everything else is bookkeeping: evaluation on held-out tasks, checkpoints, and numbers for whoever watches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollgym.cluster.errors import ActorLost
from rollgym.scheduler.scheduler import Scheduler
from rollgym.trainer.experience import age, make_experience, token_values
from rollgym.trainer.progress import Clock, reason_to_stop
from rollgym.trainer.run import Run
from rollgym.trainer.setup import Parts, scheduler_config
from rollgym.trainer.streams import make_stream
from rollgym.trainer.warm_start import warm_start


async def train(parts: Parts, run: Run) -> str:
    """Train until something says that it is enough; returns what."""
    clock = Clock(run.progress.seconds)
    run.show_plan(parts)
    await run.restore(parts)
    run.note_layout(await parts.compute(parts.learner.describe_layout))
    while True:
        try:
            async with open_scheduler(parts, run) as scheduler:
                if run.fresh:
                    await begin(parts, run, scheduler)
                run.answer_stop()
                await run.catch_up(parts, scheduler)
                await scheduler.resume()
                reason = await train_stage(parts, run, scheduler, clock)
                if reason is not None:
                    await run.finish(parts, scheduler, reason, clock)
                    return reason
        except ActorLost as lost:
            await run.go_back(parts, lost)
            run.show_plan(parts)


async def train_stage(parts: Parts, run: Run, scheduler: Scheduler, clock: Clock) -> str | None:
    """Train on the environments of one stage; ``None`` where the curriculum goes on to the next."""
    while (reason := reason_to_stop(parts.config, run.progress, clock)) is None:
        harder = await train_step(parts, run, scheduler)
        run.progress.seconds = clock.seconds
        run.show_plan(parts)
        run.answer_stop()
        await run.after_step(parts, scheduler)
        if harder:
            return None
    return reason


async def train_step(parts: Parts, run: Run, scheduler: Scheduler) -> bool:
    """One batch; True where the next stage of the curriculum is due."""
    config, progress = parts.config, run.progress
    watch = Stopwatch()
    run.console.phase("generate")
    groups = await scheduler.take(config.rollout.groups, release=False)
    watch.lap("generate")
    # From here on the weights change: a request to stop waits until they are those of a finished step.
    with run.whole():
        losses = run.note_losses(groups, scheduler)
        run.console.phase("train")
        async with parts.handover():
            experience = await parts.compute(
                make_experience, groups, config, parts.learner, progress.kl_coef, progress.version
            )
            metrics = await parts.compute(parts.learner.update, experience.batch)
            tokens: Sequence[dict[str, list[float]]] = ()
            if run.tokens_due:
                tokens = await parts.compute(token_values, parts.learner, experience.batch)
        progress.kl_coef = parts.learner.adapt_kl(metrics)
        watch.lap("train")
        run.console.phase("sync")
        async with scheduler.updating(progress.version + 1):
            await parts.renew(progress.version + 1)
        progress.version += 1
        progress.step += 1
        run.note_position(scheduler)
        scheduler.release(len(groups))
        watch.lap("sync")
        metrics |= experience.metrics | age(groups, progress.version - 1) | parts.moved | losses
        run.record(groups, metrics | watch.metrics(experience.metrics), tokens)
        return run.advances(groups)


async def begin(parts: Parts, run: Run, scheduler: Scheduler) -> None:
    """What comes before the first step: how good it is untaught, and what it learns from others."""
    await run.evaluate(scheduler, "before")
    if parts.config.warm_start is not None:
        run.console.phase("imitate")
        await warm_start(parts, run, scheduler)
        await run.keep_reference(parts)
        await run.evaluate(scheduler, "warm_start")
        await run.keep_best(parts)
    await run.save(parts)


def open_scheduler(parts: Parts, run: Run) -> Scheduler:
    """The scheduler of this stage, where the run left it, and paused."""
    config, progress = parts.config, run.progress
    envs = config.envs if config.curriculum is None else config.envs[: progress.stage + 1]
    scheduler = Scheduler(
        make_stream(config, envs, progress.stage),
        parts.pool,
        parts.agent,
        scheduler_config(config),
        log=run.events,
        scorer=parts.scorer,
        first_ticket=progress.next_ticket,
        paused=True,
    )
    scheduler.board.version = progress.version
    scheduler.board.play_again(progress.again, progress.issues)
    return scheduler


class Stopwatch:
    """Where a step's time went."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What has passed since the last lap goes to this name."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def metrics(self, episodes: dict[str, float]) -> dict[str, float]:
        """Seconds by name; of the wait for episodes, the environments' share apart."""
        laps = dict(self._laps)
        busy = episodes["episode_generate"] + episodes["episode_step"]
        waited = laps["generate"]
        laps["environment"] = waited * episodes["episode_step"] / busy if busy else 0.0
        laps["generate"] = waited - laps["environment"]
        total = sum(self._laps.values())
        rates = {"seconds": total, "tokens_per_second": episodes["action_tokens"] / total}
        return {f"seconds_{name}": value for name, value in laps.items()} | rates
