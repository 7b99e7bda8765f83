"""Evaluation: fixed episodes, written as they end, summarized with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollgym.core.agent import Agent
from rollgym.core.errors import RunError, one_line
from rollgym.core.serialization import jsonable
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.evaluation.metrics import summarize
from rollgym.evaluation.plan import Plan, Request, plan
from rollgym.evaluation.run_warnings import RunWarning, warnings_of
from rollgym.io.run_dir import EVENTS, RunFolder, set_failed_aside
from rollgym.pool.base import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.rollout.events import EventLog
from rollgym.rollout.inflight import EpisodeBatch
from rollgym.rollout.retry import RetryPolicy
from rollgym.utils.async_runner import run_to_end

__all__ = ["Evaluation", "Plan", "Request", "check_agent", "evaluate", "first_error", "open_folder", "plan"]

IDENTITY = ("env", "agent", "split", "seed", "per_task", "limits", "task_set")
"""Manifest fields that must agree before results can be resumed."""
GIVE_UP_AFTER = 10
"""Episodes after which an evaluation ends if all of them failed."""
WARN_AFTER = 8
"""Episodes after which warnings are shown, before the evaluation has ended."""
RETRY = RetryPolicy(max_retries=2, outcomes=frozenset({Outcome.WORKER_LOST}))
"""Per episode. An engine or endpoint that fails is a result of the evaluation and not retried here."""


class Evaluation:
    """Runs a plan's episodes and writes them to a folder."""

    def __init__(
        self, plan: Plan, folder: RunFolder, on_episode: Callable[[Episode], None] = lambda episode: None
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.stopped = False
        self.exit_code = 0
        """130 or 143 if a signal ended it early."""
        self.agent_notes: dict[str, Any] = {}
        """The agent's own description and totals, if it has any."""
        self.warned: set[str] = set()
        """Names of the warnings shown while it ran."""
        self.on_warning: Callable[[RunWarning], object] = lambda warning: None
        self.on_episode = on_episode
        self._batch: EpisodeBatch | None = None

    @property
    def missing(self) -> list[EpisodeSpec]:
        """The specs without an episode."""
        done = {episode.spec.episode_id for episode in self.folder.done}
        return [spec for spec in self.plan.specs if spec.episode_id not in done]

    async def run(self) -> None:
        """Run the missing episodes. `stop` ends early; finished episodes are kept."""
        request = self.plan.request
        agent = request.make_agent()
        pool: EnvPool = (
            LocalPool(request.workers, modules=request.modules)
            if request.workers
            else InlinePool(request.modules)
        )
        try:
            with EventLog(self.folder.path / EVENTS) as log:
                await self._run(pool, agent, log)
        finally:
            await pool.close()
            await agent.close()
            for name, notes in (("describe", agent.describe()), ("totals", agent.totals())):
                if notes:
                    self.agent_notes[name] = jsonable(notes, f"agent.{name}()", lenient=True)

    def close(self) -> dict[str, Any]:
        """Write the summary of all finished episodes and close the folder."""
        try:
            summary = summarize(self.plan.manifest, self.folder.done)
            summary |= {"agent_notes": self.agent_notes, "out": str(self.folder.path)}
            self.folder.finish(summary)
        finally:
            self.folder.close()
        return summary

    def stop(self) -> None:
        """End early: start no new episodes, and discard those in flight."""
        self.stopped = True
        if self._batch is not None:
            self._batch.stop()

    async def _run(self, pool: EnvPool, agent: Agent, log: EventLog) -> None:
        request = self.plan.request
        self._batch = EpisodeBatch(
            pool,
            agent,
            # A little more than one episode per worker keeps each busy while an action is generated.
            max_in_flight=request.concurrency or max(agent.default_concurrency, 2 * request.workers),
            retry=RETRY,
            log=log,
            on_episode=self._keep,
            give_up=lambda lost: lost >= GIVE_UP_AFTER and not self.folder.done,
        )
        if self.stopped:
            return
        try:
            await self._batch.run(self.missing)
        except RunError:
            raise
        except Exception as error:
            # Not an outcome of an episode: a full disk, for example.
            raise RunError(f"The evaluation stopped: {one_line(error)}") from error

    def _keep(self, episode: Episode) -> None:
        self.folder.append(episode)
        self.on_episode(episode)
        done = self.folder.done
        if len(done) == WARN_AFTER:
            for warning in warnings_of(done):
                if warning.name == "all_failed":
                    continue  # if all others fail, too, the evaluation ends with the error
                self.warned.add(warning.name)
                self.on_warning(warning)
        if len(done) >= GIVE_UP_AFTER and all(episode.outcome.failed for episode in done):
            raise RunError(f"All of the first {len(done)} episodes failed: {first_error(done)}")


def evaluate(
    request: Request, out: Path, *, resume: bool = False, keep_failed: bool = False
) -> dict[str, Any]:
    """Evaluate an agent and return the summary, as ``rollgym eval`` does.

    Each episode is written to ``out`` as soon as it has ended.

    Args:
        request: The environment, the agent and the number of episodes.
        out: Folder for the results.
        resume: Run only the episodes that are missing in ``out``.
        keep_failed: With ``resume``: keep failed episodes instead of running them again.

    Example:
        >>> evaluate(Request(env_id="rollgym/Sokoban-v0", agent="expert", episodes=20), Path("runs/expert"))
    """
    todo = plan(request)
    check_agent(request)
    folder = open_folder(todo, out, resume, keep_failed=keep_failed)
    evaluation = Evaluation(todo, folder)
    try:
        run_to_end(evaluation.run, evaluation.stop)
    finally:
        summary = evaluation.close()
    return summary


def check_agent(request: Request) -> list[str]:
    """Create the agent once, so that a wrong name or option is reported before anything is written.

    Returns:
        The agent's notes on where its settings came from, one sentence each.
    """
    agent = request.make_agent()
    run_to_end(agent.close)
    return [str(note) for note in agent.notes]


def first_error(episodes: Iterable[Episode]) -> str:
    """The message and outcome of the first failed episode."""
    for episode in episodes:
        if episode.error is not None:
            return f"{episode.error.message} ({episode.outcome})"
    return "no message"


def open_folder(plan: Plan, path: Path, resume: bool, *, keep_failed: bool = True) -> RunFolder:
    """Open the folder for a plan's results, new or resumed; failed episodes are kept or run again."""
    if resume:
        if not keep_failed:
            RunFolder.check(path, plan.manifest, IDENTITY)
            set_failed_aside(path)
        return RunFolder.resume(path, plan.manifest, IDENTITY)
    return RunFolder.create(path, plan.manifest)
