"""Runs a suite: one evaluation per entry, resumable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollgym.bench.results import REPORT, entry_folder, make_manifest, open_results
from rollgym.bench.suite import AgentSpec, Entry, Suite, plan_entry
from rollgym.bench.summary import Part, markdown, suite_summary
from rollgym.core.errors import RunError, UsageError
from rollgym.core.files import replacing
from rollgym.core.types import Outcome
from rollgym.evaluation.plan import Plan
from rollgym.evaluation.replay import finished_episodes
from rollgym.evaluation.runner import Evaluation, check_agent, open_folder
from rollgym.io.run_dir import MANIFEST, SUMMARY, read_manifest, set_failed_aside, write_json
from rollgym.utils.async_runner import run_to_end

RunEvaluation = Callable[[Evaluation], None]
"""Runs an evaluation; a command also shows its progress."""


def run_quietly(evaluation: Evaluation) -> None:
    """Run an evaluation without output."""
    run_to_end(evaluation.run, evaluation.stop)


def chosen(suite: Suite, agent_spec: AgentSpec, only: Sequence[str] = ()) -> list[Entry]:
    """The entries to run: those in ``only``, or all whose data is available."""
    for name in agent_spec.data:
        if not suite.entry(name).data:
            raise UsageError(f"Entry {name!r} of suite {suite.name} does not take --data.")
    wanted = [suite.entry(name).name for name in only] or [entry.name for entry in suite.entries]
    lacking = [name for name in only if suite.entry(name).data and name not in agent_spec.data]
    if lacking:
        needed = suite.entry(lacking[0])
        raise UsageError(f"Entry {needed.name!r} needs data: pass --data {needed.name}=... ({needed.data}).")
    entries = [e for e in suite.entries if e.name in wanted and (not e.data or e.name in agent_spec.data)]
    if not entries:
        raise UsageError(f"All chosen entries of suite {suite.name} need --data.")
    return entries


class SuiteRun:
    """One run of a suite into a results folder."""

    def __init__(
        self,
        suite: Suite,
        agent_spec: AgentSpec,
        out: Path,
        *,
        only: Sequence[str] = (),
        resume: bool = False,
        keep_failed: bool = False,
    ) -> None:
        """Check all arguments before anything runs or is written."""
        self.suite = suite
        self.agent_spec = agent_spec
        self.out = out
        self.keep_failed = keep_failed
        """Keep the failed episodes of an earlier run instead of running them again."""
        self.stopped = False
        self.trouble: list[str] = []
        """The errors of entries that ended early, one sentence each."""
        self.entries = chosen(suite, agent_spec, only)
        self.plans: dict[str, Plan] = {e.name: plan_entry(suite, e, agent_spec) for e in self.entries}
        for number, planned in enumerate(self.plans.values()):
            # An expert is a different agent in each environment; a model is the same one, and slow to load.
            if number == 0 or agent_spec.agent == "expert":
                check_agent(planned.request)
        self.manifest = open_results(out, make_manifest(suite, self.entries, agent_spec), resume)
        self._parts: dict[str, Part] = {}
        self._playing: Evaluation | None = None

    def run(self, run_evaluation: RunEvaluation = run_quietly) -> dict[str, Any]:
        """Run the missing episodes and return the summary, which is written after every entry."""
        for entry in self.entries:
            self._load(entry)
        for entry in self.entries:
            if not self.stopped:
                self._run_entry(entry, run_evaluation)
        return self.finish()

    def stop(self) -> None:
        """End early; finished episodes are kept."""
        self.stopped = True
        if self._playing is not None:
            self._playing.stop()

    def finish(self) -> dict[str, Any]:
        """Summarize all finished episodes and write the result."""
        parts = [self._parts[entry.name] for entry in self.entries if entry.name in self._parts]
        summary = suite_summary(self.suite, self.manifest, parts, self.out)
        write_json(self.out / SUMMARY, summary)
        with replacing(self.out / REPORT) as file:
            file.write(markdown(summary).encode())
        return {**summary, "out": str(self.out)}

    def _run_entry(self, entry: Entry, run_evaluation: RunEvaluation) -> None:
        path = entry_folder(self.out, entry.name)
        begun = (path / MANIFEST).exists()
        if begun and not self.keep_failed:
            set_failed_aside(path)
        planned = self.plans[entry.name]
        folder = open_folder(planned, path, begun)
        self._playing = evaluation = Evaluation(planned, folder)
        gave_up = False
        try:
            if evaluation.missing:
                run_evaluation(evaluation)
        except RunError as error:
            gave_up = True
            self.trouble.append(f"{entry.name}: {error}")
            # A dead endpoint would fail the other entries, too; a broken environment would not.
            self.stopped |= any(e.outcome is Outcome.ENGINE_ERROR for e in folder.done)
        finally:
            self._playing = None
            self.stopped |= evaluation.stopped and not gave_up
            evaluation.close()
            self._parts[entry.name] = (entry, read_manifest(path), tuple(folder.done))
        self.finish()

    def _load(self, entry: Entry) -> None:
        """Load the episodes of an earlier run: they count even if this run ends before the entry."""
        path = entry_folder(self.out, entry.name)
        if (path / MANIFEST).exists():
            episodes, _ = finished_episodes(path)
            self._parts[entry.name] = (entry, read_manifest(path), tuple(episodes))
