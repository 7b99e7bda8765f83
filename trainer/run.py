"""A training run's folder and memory: what is written while it goes, and what it takes to go on.

runs/NAME/manifest.json     what it is, with versions and hashes
          config.yaml       every setting, defaults included
          plan.json         which part works where: layout, strategy, ranks, engines
          metrics.jsonl     one line per training step
          evaluations.jsonl one line per evaluation
          episodes.jsonl    every episode that was trained on
          events.jsonl      every change of the scheduler (`rollgym trace`)
          checkpoints/      the last ones and the best
          model/            what training started from
          final/            the policy at the end, in Hugging Face format, with rollgym_model.json
          summary.json      the result, written last
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.cluster.errors import ActorLost
from rollgym.command_line import command_line
from rollgym.config import dump, fingerprint
from rollgym.errors import UsageError, os_reason
from rollgym.evalplan import Plan, Request, plan
from rollgym.files import replacing
from rollgym.run_warnings import FEW_VALID, RunWarning, as_json, warnings_of
from rollgym.scheduler.events import EventLog
from rollgym.scheduler.scheduler import Scheduler
from rollgym.store import EPISODES, EVENTS, MANIFEST, SUMMARY, read_json, write_json
from rollgym.summary import exclusion_note, summarise
from rollgym.trainer.checkpoint import Checkpoints
from rollgym.trainer.config import EnvChoice, TrainConfig, env_labels
from rollgym.trainer.console import Console
from rollgym.trainer.journal import EVALUATIONS, METRICS, Journal, read_evaluations
from rollgym.trainer.learner import Metrics
from rollgym.trainer.plan_record import PLAN, RunPlan, plan_line, plan_lines
from rollgym.trainer.progress import Clock, Progress
from rollgym.types import SCHEMA_VERSION, Episode, Group
from rollgym.versions import package_versions

if TYPE_CHECKING:
    from rollgym.trainer.layout import LayoutChoice
    from rollgym.trainer.setup import Parts

CONFIG = "config.yaml"
FINAL, REFERENCE = "final", "reference"


class Run:
    """One run: its progress, its files, its watcher."""

    def __init__(self, config: TrainConfig, folder: Path, console: Console, *, resume: bool = False) -> None:
        self.config = config
        self.folder = folder
        self.console = console
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoints.keep)
        self.progress = Progress(kl_coef=config.loss.kl_coef)
        self.fresh = True
        """Whether nothing has been done yet."""
        self._from: Path | None = None
        self._saved_step = -1
        self._plans: dict[int, Plan] = {}
        self._plan_shown: RunPlan = {}
        self.warnings: list[RunWarning] = []
        """What looked wrong before the first step."""
        self._few_valid_said = False
        self._stop_asked = False
        self._whole = 0
        self._task: asyncio.Task[Any] | None = None
        if not resume:
            _begin_folder(folder, config)
        self.journal = Journal(
            folder,
            tensorboard=config.tracking.tensorboard,
            wandb={"project": config.tracking.wandb_project} if config.tracking.wandb_project else None,
            episodes=config.tracking.episodes,
        )
        try:
            if resume:
                self._go_on()
            self.events = EventLog(folder / EVENTS)
        except BaseException:
            self.journal.close(failed=True)
            raise

    def _go_on(self) -> None:
        """From the newest checkpoint, or from the start where there is none yet."""
        self.progress.marks = dict.fromkeys((METRICS, EVALUATIONS, EPISODES), 0)
        found = self.checkpoints.newest(self.console.note)
        if found is not None:
            self._from, state = found
            self.progress = Progress.from_json(state)
            self.fresh = False
            self._saved_step = self.progress.step
        self.journal.rewind(self.progress.marks)
        _write_config(self.folder, self.config)
        known = read_json(self.folder / MANIFEST)
        before, now = known.get("versions") or {}, _versions(self.config)
        for name in sorted(now):
            if name in before and before[name] != now[name]:
                self.console.note(
                    f"{name} was {before[name]} and is {now[name]} now: the weights will not be bit for bit "
                    "those of a run without this break."
                )
        known |= {"config_sha256": fingerprint(self.config), "versions": {**before, **now}}
        write_json(self.folder / MANIFEST, known)

    def close(self) -> None:
        """Flush everything."""
        self.events.close()
        self.journal.close()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is done in this block is done to its end before a request to stop is answered."""
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1

    def ask_to_stop(self) -> None:
        """End after the step under way, or now where none is: from within the loop."""
        self._stop_asked = True
        if self._whole:
            self.console.note("stopping when this step is done; Ctrl-C again ends the process at once")
        elif self._task is not None:
            self._task.cancel()

    def answer_stop(self) -> None:
        """Between two pieces of work: end here if that was asked for."""
        if self._stop_asked:
            raise asyncio.CancelledError

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """While the current task trains: a request to stop cancels it."""
        self._task = asyncio.current_task()
        try:
            yield
        finally:
            self._task = None

    @property
    def stop_asked(self) -> bool:
        """Whether the run was asked to stop early."""
        return self._stop_asked

    async def save_stopped(self, parts: Parts) -> None:
        """Keep the last finished step of a run that is asked to stop."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        if not self.fresh:
            await self.save(parts)

    async def restore(self, parts: Parts) -> None:
        """Bring the learner and the engine to where the run is."""
        if self._from is not None:
            await parts.compute(parts.learner.load, self._from)
            parts.learner.set_kl(self.progress.kl_coef)
            if (self.folder / REFERENCE).is_dir():
                await parts.compute(parts.learner.set_reference, self.folder / REFERENCE)
            await parts.renew(self.progress.version)
            self.console.note(f"going on after step {self.progress.step}")

    def show_plan(self, parts: Parts) -> None:
        """Print and keep which part works where, at the start and whenever that has changed."""
        if parts.plan == self._plan_shown:
            return
        self._plan_shown = parts.plan
        self.console.block(plan_lines(parts.plan))
        write_json(self.folder / PLAN, {"schema": SCHEMA_VERSION, **parts.plan})
        known = read_json(self.folder / MANIFEST)
        write_json(self.folder / MANIFEST, {**known, "plan": plan_line(parts.plan)})

    async def go_back(self, parts: Parts, lost: ActorLost) -> None:
        """A part of the run was lost: begin again at the newest checkpoint, with a new one in its place."""
        if parts.rebuild is None or not self.checkpoints.steps():
            raise lost
        self.console.note(f"{str(lost).rstrip('.')}; going back to the last checkpoint")
        self._go_on()
        await parts.rebuild()
        await self.restore(parts)

    async def keep_reference(self, parts: Parts) -> None:
        """What has been imitated is the policy that a KL penalty holds to."""
        if self.config.loss.kl_coef:
            await parts.compute(parts.export, self.folder / REFERENCE)
            await parts.compute(parts.learner.set_reference, self.folder / REFERENCE)

    def note_layout(self, choice: LayoutChoice) -> None:
        """Say how the learner lays out rows, and keep it with the run."""
        write_json(
            self.folder / MANIFEST, {**read_json(self.folder / MANIFEST), "learner_layout": choice.to_json()}
        )
        self.console.note(str(choice))

    def note_position(self, scheduler: Scheduler) -> None:
        """Remember which tasks come next, before any of them starts."""
        board = scheduler.board
        self.progress.next_ticket = board.next_ticket
        self.progress.again = board.tickets_to_play()
        self.progress.issues = board.issues()

    @property
    def tokens_due(self) -> bool:
        """Whether the numbers of single tokens of the step under way are to be kept."""
        settings = self.config.tracking
        every = settings.tokens_every if settings.episodes == "all" else 0
        return bool(every) and (self.progress.step + 1) % every == 0

    def note_losses(self, groups: Sequence[Group], scheduler: Scheduler) -> Metrics:
        """Numbers on what a batch lost on its way; whoever watches reads about it at once.

        ``infra_retries``: episodes since the last step that were lost with a worker, engine, server or node
        and played again. ``episodes_missing``: those that the batch should have and does not.
        """
        step, retried = self.progress.step + 1, scheduler.new_infra_retries()
        if retried:
            self.console.note(
                f"step {step}: played {_count(retried)} again that infrastructure lost: {scheduler.last_loss}"
            )
        asked = sum(group.size for group in groups)
        missing = asked - sum(len(group.episodes) for group in groups)
        if missing:
            self.console.note(
                f"step {step} trains on {asked - missing} of {asked} episodes, because {missing} failed too "
                f"often: {scheduler.last_error}"
            )
        return {"infra_retries": float(retried), "episodes_missing": float(missing)}

    def record(
        self, groups: Sequence[Group], metrics: Metrics, tokens: Sequence[dict[str, list[float]]] = ()
    ) -> None:
        """A training step is done."""
        episodes = [episode for group in groups for episode in group.episodes]
        if metrics.get("valid_actions", 1.0) < FEW_VALID and not self._few_valid_said:
            self._few_valid_said = True
            for warning in warnings_of(episodes):
                self.console.note(f"warning: step {self.progress.step}: {warning.sentence}")
        self.journal.record(self.progress.step, metrics)
        self.journal.keep(self.progress.step, episodes, tokens)
        self.console.step(self.progress.step, metrics)

    def advances(self, groups: Sequence[Group]) -> bool:
        """Whether the curriculum opens another environment now."""
        settings, progress = self.config.curriculum, self.progress
        if settings is None or progress.stage + 1 >= len(self.config.envs):
            return False
        hardest = self.config.envs[progress.stage]
        known = [
            float(bool(episode.success))
            for group in groups
            for episode in group.episodes
            if episode.spec.env_id == hardest.id and episode.spec.env_kwargs == hardest.kwargs
        ]
        if known:
            progress.window = [*progress.window, sum(known) / len(known)][-settings.window :]
        full = len(progress.window) == settings.window
        if not full or sum(progress.window) / settings.window < settings.advance_at:
            return False
        progress.stage += 1
        progress.window, progress.next_ticket, progress.again, progress.issues = [], 0, [], {}
        self.console.note(f"the curriculum goes on to {self.config.envs[progress.stage].id}")
        return True

    async def after_step(self, parts: Parts, scheduler: Scheduler) -> None:
        """Evaluate and save where it is due."""
        step, every = self.progress.step, self.config.evaluation.every
        if every and step % every == 0:
            await self.evaluate(scheduler, "training")
            await self.keep_best(parts)
            self.answer_stop()
        if step % self.config.checkpoints.every == 0:
            await self.save(parts)
            self.answer_stop()

    async def catch_up(self, parts: Parts, scheduler: Scheduler) -> None:
        """After resuming: the evaluation that the run was stopped before."""
        step, every = self.progress.step, self.config.evaluation.every
        if every and step and step % every == 0 and self.progress.evaluated < step:
            await self.evaluate(scheduler, "training")
            await self.keep_best(parts)

    async def evaluate(self, scheduler: Scheduler, phase: str) -> float | None:
        """Play the held-out tasks; returns the mean success over the environments."""
        self.console.phase("evaluate")
        found: list[float] = []
        lines: list[dict[str, Any]] = []
        for number, label in enumerate(env_labels(self.config)):
            wanted = self._plan(number)
            episodes = await scheduler.evaluate(wanted.specs)
            summary = _score(wanted, episodes)
            wrong = warnings_of(episodes)
            lines.append({"phase": phase, "env": label, **summary, "warnings": as_json(wrong)})
            for warning in wrong if phase != "before" else ():
                self.console.note(f"warning: {label}: {warning.sentence}")
            if note := exclusion_note(summary):
                self.console.note(f"evaluation of {label}: {note}")
            shown = label if len(self.config.envs) > 1 else ""
            if summary["success_rate"] is not None:
                found.append(summary["success_rate"])
                low, high = summary["success_ci"]
                self.console.evaluated(self.progress.step, summary["success_rate"], low, high, env=shown)
            elif summary["mean_return"] is not None:
                low, high = summary["return_ci"] or (math.nan, math.nan)
                step, mean = self.progress.step, summary["mean_return"]
                self.console.evaluated(step, mean, low, high, env=shown, what="return")
        # All at once: an evaluation that is stopped half-way is done again by the resumed run.
        for line in lines:
            self.journal.evaluated(self.progress.step, line)
        self.progress.evaluated = self.progress.step
        self.progress.last = sum(found) / len(found) if found else None
        return self.progress.last

    async def save(self, parts: Parts) -> None:
        """Write a checkpoint."""
        if self._saved_step == self.progress.step:
            return
        self.console.phase("save")
        self.progress.marks = self.journal.marks()
        with self.whole():
            await parts.compute(
                self.checkpoints.save, self.progress.step, self.progress.to_json(), parts.learner.save
            )
        self._saved_step = self.progress.step
        self.fresh = False

    async def finish(self, parts: Parts, scheduler: Scheduler, reason: str, clock: Clock) -> None:
        """The last checkpoint, the last evaluation, the policy, the summary."""
        await scheduler.pause()
        self.progress.seconds = clock.seconds
        await self.save(parts)  # first: going on from it evaluates again, or trains further
        await self.evaluate(scheduler, "after")
        await self.keep_best(parts)
        self.answer_stop()
        with self.whole():
            await parts.compute(parts.export, self.folder / FINAL)
        write_json(self.folder / SUMMARY, self._summary(reason))

    async def keep_best(self, parts: Parts) -> None:
        """Export the policy where no evaluation was better than the last."""
        progress = self.progress
        if progress.last is None or (progress.best is not None and progress.last <= progress.best):
            return
        progress.best, progress.best_step = progress.last, progress.step
        with self.whole():
            await parts.compute(
                self.checkpoints.save_best,
                progress.step,
                progress.to_json(),
                lambda to: parts.export(to / "model"),
            )

    def _plan(self, number: int) -> Plan:
        if number not in self._plans:
            self._plans[number] = held_out(self.config, self.config.envs[number])
        return self._plans[number]

    def _summary(self, reason: str) -> dict[str, Any]:
        progress = self.progress
        return {
            "schema": SCHEMA_VERSION,
            "kind": "train",
            "ended": reason,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "best_success": progress.best,
            "best_step": progress.best_step,
            "last_success": progress.last,
            "warnings": as_json(self.warnings),
            "evaluations": [
                {
                    name: line[name]
                    for name in ("step", "phase", "env", "success_rate", "success_ci", "mean_return")
                }
                for line in read_evaluations(self.folder)
            ],
        }


def _count(episodes: int) -> str:
    return f"{episodes} episode{'s' * (episodes != 1)}"


def held_out(config: TrainConfig, env: EnvChoice) -> Plan:
    """The held-out episodes of one environment: the same at every step, for every seed of a run."""
    request = Request(
        env_id=env.id,
        agent="lm",
        episodes=config.evaluation.episodes,
        seed=config.evaluation.seed,
        split=config.evaluation.split,
        env_kwargs=env.kwargs,
        limits=env.limits,
    )
    return plan(request)


def _score(wanted: Plan, episodes: Sequence[Episode]) -> dict[str, Any]:
    summary = summarise(wanted.manifest, episodes)
    names = (
        "success_rate", "success_ci", "mean_return", "return_ci", "episodes", "failed", "excluded",
        "many_excluded", "success_all", "outcomes", "length", "valid_actions", "split", "seed", "task_set",
        "content_hash",
    )  # fmt: skip
    return {name: summary[name] for name in names}


def _begin_folder(folder: Path, config: TrainConfig) -> None:
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder} already holds a run: give --resume to go on with it, or another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
    except OSError as error:
        raise UsageError(f"Cannot write the run to {folder}: {os_reason(error)}.") from None
    write_json(
        folder / MANIFEST,
        {
            "schema": SCHEMA_VERSION,
            "kind": "train",
            "name": config.name or folder.name,
            "command": command_line(),
            "envs": [{"id": env.id, "kwargs": env.kwargs} for env in config.envs],
            "seed": config.seed,
            "config_sha256": fingerprint(config),
            "versions": _versions(config),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def _versions(config: TrainConfig) -> dict[str, str]:
    """Packages and CPU: with the same ones, the same seed gives the same weights bit for bit."""
    import torch  # here: reading a configuration must not wait for it

    return {
        **{name: value for env in config.envs for name, value in package_versions(env.id).items()},
        **{name: version(name) for name in ("torch", "transformers")},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _write_config(folder: Path, config: TrainConfig) -> None:
    with replacing(folder / CONFIG) as file:
        file.write(dump(config).encode())
