"""Verify a suite's results: the files against each other, the suite and the environments.

Every episode is checked: it belongs to the suite, with the suite's seeds and limits; redundant fields of its
line agree; the summary follows from the episodes; no file has changed since it was written. A sample is
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rollgym.bench.results import (
    REPORT,
    entry_folder,
    read_results_manifest,
    read_results_summary,
    recorded_suite,
)
from rollgym.bench.suite import AgentSpec, Entry, Suite, known_suites, plan_entry, read_suite
from rollgym.bench.summary import Part, markdown, suite_summary
from rollgym.core.errors import RollgymError, UsageError, one_line
from rollgym.core.text import shorten
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.evaluation.metrics import summarize
from rollgym.evaluation.plan import Plan
from rollgym.evaluation.replay import Replayed, Settings, changed_versions, choose, replay
from rollgym.evaluation.runner import IDENTITY
from rollgym.io.run_dir import EPISODES, SUMMARY, read_json, read_run

SAMPLE = 20
NOT_FROM_EPISODES = ("out", "agent_notes")
"""Keys of an entry's summary that do not follow from its episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One failed check."""

    where: str
    what: str


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The result of a verification."""

    suite: str
    agent: str
    episodes: int = 0
    replayed: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if all checks passed."""
        return not self.problems

    def add(self, where: str, text: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(where=where, what=text))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {"holds": self.holds, **asdict(self)}


def verify(
    out: Path,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    workers: int = 0,
    modules: tuple[str, ...] = (),
    data: Mapping[str, Any] | None = None,
    weak_sandbox: bool = False,
    suite: Suite | None = None,
    on_episode: Callable[[Replayed], None] = lambda done: None,
) -> Verdict:
    """Check a results folder.

    Args:
        out: The results folder.
        sample: Episodes to replay; 0 replays all.
        seed: Chooses the sample.
        workers: Worker processes for the replay; 0 replays in this process.
        modules: Modules to import first, with custom environments.
        data: Data of entries that need some, by entry.
        weak_sandbox: Accept recorded settings that weaken the sandbox.
        suite: The expected suite; default: the one of that name in rollgym.
        on_episode: Called after each replayed episode.
    """
    manifest = read_results_manifest(out)
    recorded = recorded_suite(manifest, out)
    summary = read_results_summary(out)
    agent = manifest["agent"]
    verdict = Verdict(suite=f"{recorded.name} {recorded.version}", agent=agent["name"])
    _check_suite(recorded, manifest, suite, verdict)
    agent_spec = AgentSpec(
        agent=agent["name"],
        options=agent["options"],
        modules=modules,
        data={**manifest["data"], **(data or {})},
        weak_sandbox=weak_sandbox,
    )
    forged = bool(verdict.problems)
    parts: list[Part] = []
    genuine: list[Part] = []
    for name in manifest["entries"]:
        try:
            part, played = _check_entry(out, recorded, recorded.entry(name), agent_spec, verdict)
        except RollgymError as error:
            verdict.add(name, str(error))
        else:
            parts.append(part)
            genuine.append((*part[:2], played))
    _check_summary(out, recorded, manifest, parts, summary, verdict)
    if forged:
        verdict.notes.append("nothing was replayed: the suite is not the one that the results name")
    else:
        settings = Settings(workers=workers, modules=modules, weak_sandbox=weak_sandbox)
        _replay(genuine, settings, agent_spec, sample, seed, verdict, on_episode)
    return verdict


def _check_suite(recorded: Suite, manifest: Mapping[str, Any], given: Suite | None, verdict: Verdict) -> None:
    if recorded.fingerprint != manifest["suite_hash"]:
        verdict.add("suite", f"its hash is {recorded.fingerprint}, but {manifest['suite_hash']} was recorded")
    shipped = known_suites().get(recorded.name)
    ours = given or (read_suite(shipped) if shipped else None)
    if ours is None:
        verdict.notes.append(
            f"rollgym has no suite {recorded.name!r}: checked against the copy in the results "
            "(--suite FILE names another)"
        )
    elif ours.version != recorded.version:
        verdict.add(
            "suite",
            f"the results belong to {recorded.name} {recorded.version}, but rollgym has {ours.name} "
            f"{ours.version}: verify them with the rollgym version that made them",
        )
    elif ours.fingerprint != recorded.fingerprint:
        verdict.add("suite", f"it differs from {ours.name} {ours.version} of this rollgym")


def _check_entry(
    out: Path, suite: Suite, entry: Entry, agent_spec: AgentSpec, verdict: Verdict
) -> tuple[Part, list[Episode]]:
    """Check an entry; returns its part of the results, and its episodes that belong to the suite."""
    folder = entry_folder(out, entry.name)
    manifest, episodes = read_run(folder)
    planned = plan_entry(suite, entry, agent_spec)
    verdict.episodes += len(episodes)
    for name in (*IDENTITY, "success_means", "episodes"):
        expected = msgspec.json.decode(msgspec.json.encode(planned.manifest[name]))
        if not (name == "env" and entry.data) and manifest.get(name) != expected:
            verdict.add(
                entry.name, f"manifest, {name}: {manifest.get(name)!r}, but the suite has {expected!r}"
            )
    genuine = _check_specs(entry, planned, episodes, verdict)
    _check_lines(entry.name, folder / EPISODES, verdict)
    recorded = read_json(folder / SUMMARY)
    _differences(
        f"{entry.name}, summary", recorded, summarize(manifest, episodes), verdict, NOT_FROM_EPISODES
    )
    return (entry, manifest, episodes), genuine


def _check_specs(entry: Entry, planned: Plan, episodes: list[Episode], verdict: Verdict) -> list[Episode]:
    """Check that the episodes are those of the suite, each once; returns those that pass."""
    name, genuine = entry.name, []
    wanted = {spec.episode_id: spec for spec in planned.specs}
    seen: set[str] = set()
    for episode in episodes:
        episode_id = episode.spec.episode_id
        where = f"{name}/{episode_id}"
        if episode_id not in wanted:
            verdict.add(where, "it is not an episode of the suite")
        elif episode_id in seen:
            verdict.add(where, "it is recorded twice")
        else:
            recorded, right = _spec(episode.spec, entry), _spec(wanted[episode_id], entry)
            if not _differences(where, recorded, right, verdict, source="the suite has"):
                genuine.append(episode)
        seen.add(episode_id)
    missing = [episode_id for episode_id in wanted if episode_id not in seen]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        verdict.add(name, f"missing episodes: {len(missing)} ({', '.join(missing[:3])}{more})")
    return genuine


def _spec(spec: EpisodeSpec, entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(spec)
    # The path of a data file differs between machines; the task set's hash identifies it.
    values["env_kwargs"] = {key: value for key, value in spec.env_kwargs.items() if key != entry.data}
    return values


def _check_lines(name: str, path: Path, verdict: Verdict) -> None:
    """Check that redundant fields of each line agree."""
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        raw = msgspec.json.decode(line)
        turns = raw.get("turns", [])
        where = f"{name}/{raw['spec']['episode_id']}"
        total = sum(turn.get("reward", 0.0) for turn in turns)
        if abs(raw.get("return", 0.0) - total) > 1e-9 * max(1.0, abs(total)):
            verdict.add(where, f"return: {raw.get('return')} is recorded, but the rewards sum to {total}")
        if raw.get("length") != len(turns):
            verdict.add(where, f"length: {raw.get('length')} is recorded, but there are {len(turns)} turns")
        if Outcome(raw["outcome"]).failed and turns and (turns[-1]["terminated"] or turns[-1]["truncated"]):
            verdict.add(where, f"outcome: {raw['outcome']} is recorded, but the last turn ended the episode")
        last = turns[-1].get("info", {}) if turns else raw.get("reset_info", {})
        success = raw.get("success")
        if success is not None and success != last.get("success"):
            verdict.add(where, f"success: {success} is recorded, but the last turn has {last.get('success')}")


def _check_summary(
    out: Path,
    suite: Suite,
    manifest: Mapping[str, Any],
    parts: list[Part],
    recorded: dict[str, Any],
    verdict: Verdict,
) -> None:
    right = suite_summary(suite, manifest, parts, out)
    if len(parts) == len(manifest["entries"]):
        _differences("summary", recorded, right, verdict, ("files",))
    for name, now in right["files"].items():
        before = recorded["files"].get(name) if isinstance(recorded.get("files"), dict) else None
        if before != now:
            verdict.add(name, f"the file has changed since: its hash is {now[:16]}, not {str(before)[:16]}")
    if right["failed"]:
        verdict.notes.append(
            f"{right['failed']} episodes ended by an error; {right['excluded']} are excluded from the score"
        )
    if right["left_out"]:
        verdict.notes.append(f"not played: {', '.join(right['left_out'])}")
    if right["other_tasks"]:
        verdict.add("summary", f"the tasks of {', '.join(right['other_tasks'])} are not those of the suite")
    try:
        if (out / REPORT).read_text(encoding="utf-8") != markdown(recorded):
            verdict.add(REPORT, "it does not match the summary")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        verdict.add(REPORT, f"it cannot be compared with the summary: {one_line(error)}")


def _differences(
    where: str,
    recorded: Any,
    expected: Any,
    verdict: Verdict,
    but: tuple[str, ...] = (),
    source: str = "the episodes give",
    limit: int = 5,
) -> int:
    """Add a problem for each difference; returns the number of differences."""
    differences = list(_walk("", recorded, msgspec.json.decode(msgspec.json.encode(expected)), but))
    for path, value, other in differences[:limit]:
        verdict.add(
            where, f"{path}: {shorten(repr(value), 90)} is recorded, but {source} {shorten(repr(other), 90)}"
        )
    if len(differences) > limit:
        verdict.add(where, f"{len(differences) - limit} more differences")
    return len(differences)


def _walk(path: str, recorded: Any, expected: Any, but: tuple[str, ...] = ()) -> list[tuple[str, Any, Any]]:
    if isinstance(recorded, dict) and isinstance(expected, dict):
        keys = [key for key in dict.fromkeys([*expected, *recorded]) if key not in but]
        pairs = [(f"{path}.{key}".lstrip("."), recorded.get(key), expected.get(key)) for key in keys]
    elif isinstance(recorded, list) and isinstance(expected, list) and len(recorded) == len(expected):
        pairs = [
            (f"{path}[{n}]", value, other)
            for n, (value, other) in enumerate(zip(recorded, expected, strict=True))
        ]
    else:
        return [] if recorded == expected else [(path, recorded, expected)]
    return [difference for pair in pairs for difference in _walk(*pair)]


def _replay(
    parts: list[Part],
    settings: Settings,
    agent_spec: AgentSpec,
    sample: int,
    seed: int,
    verdict: Verdict,
    on_episode: Callable[[Replayed], None],
) -> None:
    """Replay a sample of each entry, without episodes that do not belong to the suite."""
    for number, (entry, manifest, episodes) in enumerate(parts):
        share = 0 if not sample else (sample + len(parts) - 1 - number) // len(parts)
        if sample and not share:
            continue
        picked = choose(sorted(episodes, key=lambda e: e.spec.episode_id), share, seed)
        kwargs = {entry.data: agent_spec.data[entry.name]} if entry.data else {}
        try:
            done = replay(picked, replace(settings, env_kwargs=kwargs), on_episode)
            verdict.notes += changed_versions(picked, manifest.get("versions"))
        except UsageError as error:
            verdict.add(entry.name, str(error))
            continue
        verdict.replayed += len(done)
        for replayed in done:
            if replayed.difference is not None:
                verdict.add(f"{entry.name}/{replayed.episode_id}", f"replayed, {replayed.difference}")
    verdict.notes[:] = dict.fromkeys(verdict.notes)
