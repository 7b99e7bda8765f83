"""The run folder, its checkpoints, evaluations and curriculum.

runs/NAME/manifest.json     environments, seed, versions and hashes
          config.yaml       every setting, defaults included
          plan.json         layout, strategy, ranks, engines, devices
          engines.json      engines that outlive the process, while it runs (`runtime: ray`)
          metrics.jsonl     one line per training step
          evaluations.jsonl one line per evaluation
          episodes.blocks   every training episode
          steps.jsonl       what decided each step, for exact resumption and `rollgym replay --train`
          events.jsonl      the newest events of the scheduler (`rollgym trace`); older ones are beside it
          checkpoints/      the newest checkpoints and the best policy
          model/            the policy before training
          final/            the trained policy, in Hugging Face format, with rollgym_model.json
          summary.json      the result, written last
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollgym.cluster.errors import ActorLost
from rollgym.config.loader import Settings, fingerprint
from rollgym.core.types import SCHEMA_VERSION, Group
from rollgym.evaluation.metrics import exclusion_note
from rollgym.evaluation.plan import Plan
from rollgym.evaluation.run_warnings import FEW_VALID, RunWarning, as_json, warnings_of
from rollgym.io.run_dir import BLOCKS, EPISODES, EVENTS, MANIFEST, STEPS, SUMMARY, read_json, write_json
from rollgym.rollout.events import EventLog
from rollgym.rollout.scheduler import Scheduler
from rollgym.trainer.config import TrainConfig, env_labels, plays_in
from rollgym.trainer.curriculum import pass_rate_weights, updated_pass_rates
from rollgym.trainer.learner.protocol import Metrics
from rollgym.trainer.run_files import PLAN, create_folder, plan_line, plan_lines, versions, write_config
from rollgym.trainer.run_tasks import domain_success, evaluation_summary, held_out, make_task_sampler
from rollgym.trainer.step_log import LoggedStep, batch_digest, read_groups, read_steps, step_fields
from rollgym.trainer.tracking.checkpoint import Checkpoints
from rollgym.trainer.tracking.configured import tracker_makers, wandb_settings
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.tracking.jsonl import EVALUATIONS, METRICS, RunLogger, read_evaluations, with_new_files
from rollgym.trainer.train_state import GracefulStop, TrainState

if TYPE_CHECKING:
    from rollgym.trainer.learner.layout import LayoutChoice
    from rollgym.trainer.runtime import Components, RunPlan

FINAL, REFERENCE = "final", "reference"


class TrainRun:
    """The folder of one run, its checkpoints, evaluations and curriculum.

    The folder is claimed before any component is made; `components` is set afterwards.

    With ``resume`` the run continues from the newest checkpoint in ``folder``; otherwise the folder is made.
    ``kind`` is the command that writes it, and ``settings`` the config as the user gave it, for
    ``config.yaml``.
    """

    components: Components
    scheduler: Scheduler
    """Of the current stage; `open_stage` makes it."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        console: Console,
        *,
        resume: bool = False,
        stop: GracefulStop | None = None,
        kind: str = "train",
        settings: Settings | None = None,
    ) -> None:
        self.config = config
        self.kind = kind
        self.settings = settings or config
        self.folder = folder
        self.console = console
        self.stop = stop or GracefulStop()
        self.stop.notify = console.note
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoints.keep)
        self.state = TrainState(kl_coef=config.loss.kl_coef, entropy_coef=config.loss.entropy_coef)
        self.fresh = True
        """Whether the run has no checkpoint yet."""
        self.warnings: list[RunWarning] = []
        """Problems found before the first step."""
        self._resume_from: Path | None = None
        self._saved_step = -1
        self._held_out: dict[int, Plan] = {}
        self._evaluation: tuple[int, list[dict[str, Any]]] = (-1, [])  # the last one and its weights' version
        self._plan_shown: RunPlan = {}
        self._logged: list[LoggedStep] = []
        """Steps after the checkpoint to resume from, in the step log."""
        self._reweighed = 0
        """Entries of ``state.reweighed`` that the step log has."""
        self._few_valid_noted = False
        if not resume:
            create_folder(folder, config, self.settings, kind)
        self.logger = RunLogger(
            folder,
            tensorboard=config.tracking.tensorboard,
            wandb=wandb_settings(config.tracking),
            others=tracker_makers(config.tracking),
            episodes=config.tracking.episodes,
        )
        with ExitStack() as undo:
            undo.callback(self.logger.close, failed=True)
            self.events = undo.enter_context(EventLog(folder / EVENTS))
            if resume:
                self._rewind()
            undo.pop_all()

    def close(self) -> None:
        """Flush and close all files."""
        self.events.close()
        self.logger.close()

    def _rewind(self) -> None:
        """Go back to the newest checkpoint, or to the start if there is none.

        Asynchronous runs keep the steps after it, which `restore` trains again from the log: playing them
        again would give other batches.
        """
        self.state.marks = dict.fromkeys((METRICS, EVALUATIONS, BLOCKS, STEPS, EVENTS), 0)
        if (self.folder / EPISODES).exists():
            self.state.marks[EPISODES] = 0
        newest = self.checkpoints.newest(self.console.note)
        if newest is not None:
            self._resume_from, state = newest
            self.state = TrainState.from_json(state)
            self.fresh = False
            self._saved_step = self.state.step
        self._logged = self._steps_after_checkpoint()
        marks = self._logged[-1].marks if self._logged else self.state.marks
        self._reweighed = len(self.state.reweighed)
        self.logger.rewind(marks)
        self.events.rewind(marks.get(EVENTS, self.events.size))
        write_config(self.folder, self.settings)
        manifest = read_json(self.folder / MANIFEST)
        before, now = manifest.get("versions") or {}, versions(self.config)
        for name in sorted(now):
            if name in before and before[name] != now[name]:
                self.console.note(
                    f"{name} was {before[name]} and is {now[name]} now: the weights will not be bit for bit "
                    "those of an uninterrupted run."
                )
        manifest |= {"config_sha256": fingerprint(self.settings), "versions": {**before, **now}}
        write_json(self.folder / MANIFEST, manifest)

    async def restore(self) -> None:
        """Load the checkpoint into the learner and sync the engine; nothing for a new run."""
        if self._resume_from is not None:
            components, learner = self.components, self.components.learner
            await components.compute(learner.load, self._resume_from)
            learner.set_coefficients(self.state.coefficients)
            if (self.folder / REFERENCE).is_dir():
                await components.compute(learner.set_reference, self.folder / REFERENCE)
            await self._train_again()
            await components.sync_weights(self.state.version)
            if components.past is not None:
                await components.compute(components.past.restore, self._resume_from)
                await components.past.load()
            self.console.note(f"resuming after step {self.state.step}")

    def _steps_after_checkpoint(self) -> list[LoggedStep]:
        """The steps in the step log that follow the checkpoint without a gap and are complete."""
        config, marks = self.config, self.state.marks
        if EVENTS not in marks or not config.rollout.max_staleness or config.tracking.episodes != "all":
            return []
        if self.fresh or marks.get(STEPS, 0) > self.logger.sizes()[STEPS]:
            return []
        sizes = self.logger.sizes()
        steps: list[LoggedStep] = []
        for logged in read_steps(self.folder, marks):
            logged = msgspec.structs.replace(logged, marks=with_new_files(logged.marks))
            complete = all(logged.marks.get(name, size + 1) <= size for name, size in sizes.items())
            if logged.step != self.state.step + len(steps) + 1 or not complete:
                break
            steps.append(logged)
        return steps

    async def _train_again(self) -> None:
        """Train on the batches that were logged after the checkpoint: no finished step is lost."""
        if not self._logged:
            return
        first, last = self._logged[0].step, self._logged[-1].step
        self.console.note(f"training again on the logged batches of steps {first} to {last}")
        components = self.components
        async with components.training():
            for logged in self._logged:
                groups = read_groups(self.folder, logged, self.state.marks, self.config.rollout.group_size)
                rollout, metrics = await components.train_on(groups, self.state.kl_coef, self.state.version)
                components.learner.adapt_coefficients(metrics)
                self.state = logged.apply(self.state)
                if batch_digest(rollout.batch) != logged.batch:
                    self.console.note(
                        f"the batch of step {logged.step} differs from the logged one: the weights will not "
                        "be bit for bit those before"
                    )
        self._logged = []
        self._reweighed = len(self.state.reweighed)

    async def go_back(self, lost: ActorLost) -> None:
        """Replace a lost component and continue from the newest checkpoint."""
        runtime = self.components.runtime
        if runtime is None or not self.checkpoints.steps():
            raise lost
        self.console.note(f"{str(lost).rstrip('.')}; going back to the last checkpoint")
        self._rewind()
        self._evaluation = (-1, [])
        await runtime.rebuild()
        await self.restore()

    async def save_stopped(self) -> None:
        """Save the last finished step after a request to stop."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        if not self.fresh:
            await self.save()

    def open_stage(self) -> Scheduler:
        """A paused scheduler for the environments of the current curriculum stage, at the saved position."""
        config, state = self.config, self.state
        staged = config.curriculum is not None and config.curriculum.kind == "stages"
        envs = config.envs[: state.stage + 1] if staged else config.envs
        tasks = make_task_sampler(config, envs, state.stage, state.reweighed)
        scheduler = self.components.make_scheduler(tasks, self.events, state.next_group)
        scheduler.buffer.version = state.version
        scheduler.buffer.requeue(state.unfinished_groups, state.first_attempts)
        self.scheduler = scheduler
        return scheduler

    def show_plan(self) -> None:
        """Print and save the plan, at the start and whenever it changed."""
        plan = self.components.plan
        if plan == self._plan_shown:
            return
        self._plan_shown = plan
        self.console.block(plan_lines(plan))
        write_json(self.folder / PLAN, {"schema": SCHEMA_VERSION, **plan})
        self.update_manifest("plan", plan_line(plan))

    async def keep_reference(self) -> None:
        """Use the policy after the warm start as the reference of the KL penalty."""
        if self.config.loss.kl_coef:
            components, folder = self.components, self.folder / REFERENCE
            await components.compute(components.export, folder)
            await components.compute(components.learner.set_reference, folder)

    async def renew_past(self) -> None:
        """Give the past version of the policy the current weights, if a role has it and they are due."""
        components, state = self.components, self.state
        if components.past is not None and state.step % self.config.past.every == 0:
            await components.compute(components.past.export, components.export)
            await components.past.load()
            state.past_step = state.step

    def note_layout(self, choice: LayoutChoice) -> None:
        """Print and save how the learner lays out sequences."""
        self.update_manifest("learner_layout", choice.to_json())
        self.console.note(str(choice))

    def reweigh(self, groups: Sequence[Group]) -> Metrics:
        """Set the shares of the environments by their pass rates, from the next group on."""
        settings, state = self.config.curriculum, self.state
        if settings is None or settings.kind != "pass_rate":
            return {}
        state.pass_rates = updated_pass_rates(state.pass_rates, groups, self.config, settings.momentum)
        weights = pass_rate_weights(state.pass_rates, self.config, settings)
        sampler, first = self.scheduler.buffer.sampler, self.scheduler.buffer.next_group
        sampler.reweigh(first, weights)
        state.reweighed = [*state.reweighed, (first, weights)]
        labels = env_labels(self.config)
        return {f"share/{label}": sampler.share(number, first) for number, label in enumerate(labels)}

    def note_position(self) -> None:
        """Store the scheduler's position in the task stream, before the next group starts."""
        buffer = self.scheduler.buffer
        self.state.next_group = buffer.next_group
        self.state.unfinished_groups = unfinished = buffer.unfinished_groups()
        attempts = buffer.first_attempts()
        self.state.first_attempts = {number: attempts[number] for number in unfinished if number in attempts}

    @property
    def tokens_due(self) -> bool:
        """Whether per-token values of the current step are saved."""
        settings = self.config.tracking
        every = settings.tokens_every if settings.episodes == "all" else 0
        return bool(every) and (self.state.step + 1) % every == 0

    def note_losses(self, groups: Sequence[Group]) -> Metrics:
        """Report and count the episodes that a batch lost.

        ``infra_retries``: episodes since the last step that were lost with a worker, engine, server or node
        and played again. ``episodes_missing``: episodes that failed too often and are missing.
        """
        scheduler = self.scheduler
        step, retried = self.state.step + 1, scheduler.new_infra_retries()
        if retried:
            self.console.note(
                f"step {step}: replayed {retried} episode{'s' * (retried != 1)} lost to infrastructure: "
                f"{scheduler.last_infra_error}"
            )
        expected = sum(group.size for group in groups)
        missing = expected - sum(len(group.episodes) for group in groups)
        if missing:
            self.console.note(
                f"step {step} trains on {expected - missing} of {expected} episodes, because {missing} "
                f"failed too often: {scheduler.last_error}"
            )
        return {"infra_retries": float(retried), "episodes_missing": float(missing)}

    def record(
        self, groups: Sequence[Group], metrics: Metrics, tokens: Sequence[dict[str, list[float]]] = ()
    ) -> None:
        """Write the metrics and episodes of a finished step."""
        episodes = [episode for group in groups for episode in group.episodes]
        if metrics.get("valid_actions", 1.0) < FEW_VALID and not self._few_valid_noted:
            self._few_valid_noted = True
            for warning in warnings_of(episodes):
                self.console.note(f"warning: step {self.state.step}: {warning.sentence}")
        self.logger.log_metrics(self.state.step, metrics)
        self.logger.log_episodes(self.state.step, episodes, tokens)
        self.console.step(self.state.step, metrics)

    def prepare_record(self, groups: Sequence[Group]) -> None:
        """Start to encode the episodes of the current step, while the learner trains on them."""
        if not self.tokens_due:
            episodes = [episode for group in groups for episode in group.episodes]
            self.logger.prepare_episodes(self.state.step + 1, episodes)

    async def log_step(self, groups: Sequence[Group], digest: str) -> None:
        """Write what decided a finished step into the step log; ``digest`` is that of its batch.

        Its episodes are in their file before: a step in the log can be trained again.
        """
        await self.logger.written()
        marks = self.logger.sizes() | {EVENTS: self.events.size}
        self.logger.log_step(step_fields(self.state, groups, digest, marks, self._reweighed))
        self._reweighed = len(self.state.reweighed)

    def advances(self, groups: Sequence[Group]) -> bool:
        """Move the curriculum to the next stage if the current one is mastered; returns whether it did."""
        settings, state = self.config.curriculum, self.state
        if settings is None or settings.kind != "stages" or state.stage + 1 >= len(self.config.envs):
            return False
        hardest = self.config.envs[state.stage]
        successes = [
            float(bool(episode.success))
            for group in groups
            for episode in group.episodes
            if plays_in(episode, hardest)
        ]
        if successes:
            rate = sum(successes) / len(successes)
            state.window = [*state.window, rate][-settings.window :]
        full = len(state.window) == settings.window
        if not full or sum(state.window) / settings.window < settings.advance_at:
            return False
        state.stage += 1
        state.window, state.next_group = [], 0
        state.unfinished_groups, state.first_attempts = [], {}
        self.console.note(f"curriculum: next environment {self.config.envs[state.stage].id}")
        return True

    async def after_step(self) -> None:
        """Evaluate and save a checkpoint if they are due."""
        step, every = self.state.step, self.config.evaluation.every
        if every and step % every == 0:
            await self.evaluate("training")
            await self.keep_best()
            self.stop.check()
        if step % self.config.checkpoints.every == 0:
            await self.save()
            self.stop.check()

    async def catch_up(self) -> None:
        """After a resume: run the evaluation that the interrupted run did not complete."""
        step, every = self.state.step, self.config.evaluation.every
        if every and step and step % every == 0 and self.state.evaluated < step:
            await self.evaluate("training")
            await self.keep_best()

    async def evaluate(self, phase: str) -> float | None:
        """Play the held-out tasks; returns the mean success over the environments."""
        self.console.phase("evaluate")
        rates: list[float] = []
        lines: list[dict[str, Any]] = []
        for number, label in enumerate(env_labels(self.config)):
            if number not in self._held_out:
                self._held_out[number] = held_out(self.config, self.config.envs[number])
            tasks = self._held_out[number]
            episodes = await self.scheduler.evaluate(tasks.specs)
            summary = evaluation_summary(tasks, episodes)
            warnings = warnings_of(episodes)
            domain = {"domain": self.config.envs[number].domain} if self.config.envs[number].domain else {}
            lines.append({"phase": phase, "env": label, **domain, **summary, "warnings": as_json(warnings)})
            for warning in warnings if phase != "before" else ():
                self.console.note(f"warning: {label}: {warning.sentence}")
            if note := exclusion_note(summary):
                self.console.note(f"evaluation of {label}: {note}")
            shown = label if len(self.config.envs) > 1 else ""
            if summary["success_rate"] is not None:
                rates.append(summary["success_rate"])
                low, high = summary["success_ci"]
                self.console.evaluated(self.state.step, summary["success_rate"], low, high, env=shown)
            elif summary["mean_return"] is not None:
                low, high = summary["return_ci"] or (math.nan, math.nan)
                step, mean = self.state.step, summary["mean_return"]
                self.console.evaluated(step, mean, low, high, env=shown, what="return")
        # All at once: a resumed run repeats an evaluation that was interrupted.
        for line in lines:
            self.logger.log_evaluation(self.state.step, line)
        self._evaluation = (self.state.version, lines)
        self.state.evaluated = self.state.step
        self.state.last = sum(rates) / len(rates) if rates else None
        return self.state.last

    async def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one."""
        if self._saved_step == self.state.step:
            return
        self.console.phase("save")
        # A sync of the disk can take seconds, in which other episodes go on.
        self.state.marks = await asyncio.to_thread(self.logger.marks) | {EVENTS: self.events.size}
        components = self.components
        with self.stop.deferred():
            await components.compute(
                self.checkpoints.save, self.state.step, self.state.to_json(), components.save
            )
        self._saved_step = self.state.step
        self.fresh = False

    async def finish(self, reason: str) -> None:
        """Write the last checkpoint, the last evaluation, the policy and the summary."""
        await self.save()  # first: a run resumed from it evaluates again, or trains further
        version, lines = self._evaluation
        if version == self.state.version:  # the same weights on the same tasks
            for line in lines:
                self.logger.log_evaluation(self.state.step, {**line, "phase": "after"})
        else:
            await self.evaluate("after")
        await self.keep_best()
        self.stop.check()
        with self.stop.deferred():
            await self.components.compute(self.components.export, self.folder / FINAL)
        write_json(self.folder / SUMMARY, self._summary(reason))

    async def keep_best(self) -> None:
        """Save the policy if the last evaluation was the best so far."""
        components, state = self.components, self.state
        if state.last is None or (state.best is not None and state.last <= state.best):
            return
        state.best, state.best_step = state.last, state.step
        with self.stop.deferred():
            await components.compute(
                self.checkpoints.save_best,
                state.step,
                state.to_json(),
                lambda folder: components.export(folder / "model"),
            )

    def update_manifest(self, key: str, value: Any) -> None:
        """Set a field of ``manifest.json``."""
        path = self.folder / MANIFEST
        write_json(path, {**read_json(path), key: value})

    def _summary(self, reason: str) -> dict[str, Any]:
        state = self.state
        return {
            "schema": SCHEMA_VERSION,
            "kind": self.kind,
            "ended": reason,
            "steps": state.step,
            "seconds": round(state.seconds, 1),
            "best_success": state.best,
            "best_step": state.best_step,
            "last_success": state.last,
            "domains": domain_success(read_evaluations(self.folder)),
            "warnings": as_json(self.warnings),
            "evaluations": [
                {
                    name: line[name]
                    for name in ("step", "phase", "env", "success_rate", "success_ci", "mean_return")
                }
                for line in read_evaluations(self.folder)
            ],
        }
