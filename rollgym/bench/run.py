"""Playing a suite: entry after entry, each an evaluation of its own; nothing finished is played twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollgym.bench.folder import (
    REPORT,
    entry_folder,
    make_manifest,
    open_results,
    read_manifest,
)
from rollgym.bench.markdown import markdown
from rollgym.bench.suite import Entry, Suite, Who, plan_entry
from rollgym.bench.summary import Part, suite_summary
from rollgym.errors import RunError, UsageError
from rollgym.evalplan import Plan
from rollgym.evaluate import Evaluation, check_agent, open_folder
from rollgym.files import replacing
from rollgym.replay import finished_episodes
from rollgym.running import run_to_end
from rollgym.store import MANIFEST, SUMMARY, set_failed_aside, write_json
from rollgym.types import Outcome

Player = Callable[[Evaluation], None]
"""Plays an evaluation; a command shows its progress meanwhile."""


def play(evaluation: Evaluation) -> None:
    """Play an evaluation and show nothing."""
    run_to_end(evaluation.run, evaluation.stop)


def chosen(suite: Suite, who: Who, only: Sequence[str] = ()) -> list[Entry]:
    """The entries to play: those asked for, or all; without those whose data nobody gave."""
    for name in who.data:
        if not suite.entry(name).data:
            raise UsageError(f"Entry {name!r} of suite {suite.name} takes no --data.")
    wanted = [suite.entry(name).name for name in only] or [entry.name for entry in suite.entries]
    lacking = [name for name in only if suite.entry(name).data and name not in who.data]
    if lacking:
        needed = suite.entry(lacking[0])
        raise UsageError(f"Entry {needed.name!r} needs its data: --data {needed.name}=... ({needed.data}).")
    found = [e for e in suite.entries if e.name in wanted and (not e.data or e.name in who.data)]
    if not found:
        raise UsageError(f"Nothing of suite {suite.name} can be played without --data.")
    return found


class SuiteRun:
    """A suite being played into a folder."""

    def __init__(
        self,
        suite: Suite,
        who: Who,
        out: Path,
        *,
        only: Sequence[str] = (),
        resume: bool = False,
        keep_failed: bool = False,
    ) -> None:
        """Everything that can be known to be wrong is found here, before anything is played or written."""
        self.suite = suite
        self.who = who
        self.out = out
        self.keep_failed = keep_failed
        """Leave the failed episodes of an earlier run as they are, instead of playing them again."""
        self.stopped = False
        self.trouble: list[str] = []
        """Why entries ended early, a sentence each."""
        self.entries = chosen(suite, who, only)
        self.plans: dict[str, Plan] = {e.name: plan_entry(suite, e, who) for e in self.entries}
        for number, planned in enumerate(self.plans.values()):
            # An expert is another agent in every environment; a model is the same one, and slow to load.
            if number == 0 or who.agent == "expert":
                check_agent(planned.request)
        self.manifest = open_results(out, make_manifest(suite, self.entries, who), resume)
        self._parts: dict[str, Part] = {}
        self._playing: Evaluation | None = None

    def run(self, player: Player = play) -> dict[str, Any]:
        """Play what is missing and return the summary, which is on disk after every entry."""
        for entry in self.entries:
            self._look_at(entry)
        for entry in self.entries:
            if not self.stopped:
                self._play(entry, player)
        return self.finish()

    def stop(self) -> None:
        """Ask for an early end; what is finished is kept."""
        self.stopped = True
        if self._playing is not None:
            self._playing.stop()

    def finish(self) -> dict[str, Any]:
        """Sum up what is there, and write it."""
        found = [self._parts[entry.name] for entry in self.entries if entry.name in self._parts]
        summary = suite_summary(self.suite, self.manifest, found, self.out)
        write_json(self.out / SUMMARY, summary)
        with replacing(self.out / REPORT) as file:
            file.write(markdown(summary).encode())
        return {**summary, "out": str(self.out)}

    def _play(self, entry: Entry, player: Player) -> None:
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
                player(evaluation)
        except RunError as error:
            gave_up = True
            self.trouble.append(f"{entry.name}: {error}")
            # A dead endpoint would fail the other entries too; a broken environment is alone with it.
            self.stopped |= any(e.outcome is Outcome.ENGINE_ERROR for e in folder.done)
        finally:
            self._playing = None
            self.stopped |= evaluation.stopped and not gave_up
            evaluation.close()
            self._parts[entry.name] = (entry, read_manifest(path), tuple(folder.done))
        self.finish()

    def _look_at(self, entry: Entry) -> None:
        """Take up what an earlier run has played: it counts even if this one does not come that far."""
        path = entry_folder(self.out, entry.name)
        if (path / MANIFEST).exists():
            episodes, _ = finished_episodes(path)
            self._parts[entry.name] = (entry, read_manifest(path), tuple(episodes))
