"""Does a suite's result hold? Its files against one another, against the suite, and against the environments.

What is checked of every episode: it is one the suite asks for, with the suite's seeds and limits; what its
line says twice agrees; the numbers follow from the episodes; no file has changed since they were written. A
sample is played again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rollgym.bench.folder import (
    REPORT,
    entry_folder,
    read_results_manifest,
    read_results_summary,
    recorded_suite,
)
from rollgym.bench.markdown import markdown
from rollgym.bench.suite import Entry, Suite, Who, known_suites, plan_entry, read_suite
from rollgym.bench.summary import Part, suite_summary
from rollgym.errors import RollgymError, UsageError, one_line
from rollgym.evalplan import Plan
from rollgym.evaluate import IDENTITY
from rollgym.replay import Replayed, Settings, changed_versions, choose, replay
from rollgym.store import EPISODES, SUMMARY, load_run, read_json
from rollgym.summary import summarise
from rollgym.types import Episode, EpisodeSpec, Outcome

SAMPLE = 20
NOT_FROM_EPISODES = ("out", "agent_notes")
"""Of an entry's summary: where it was written, and what the agent said of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that does not hold."""

    where: str
    what: str


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What verifying a result found."""

    suite: str
    agent: str
    episodes: int = 0
    replayed: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems

    def add(self, where: str, what: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(where=where, what=what))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
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
    """Check a folder of results. ``suite`` is what it must be of, where that is none of rollgym's own."""
    manifest = read_results_manifest(out)
    recorded = recorded_suite(manifest, out)
    summary = read_results_summary(out)
    agent = manifest["agent"]
    verdict = Verdict(suite=f"{recorded.name} {recorded.version}", agent=agent["name"])
    _check_suite(recorded, manifest, suite, verdict)
    who = Who(
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
            part, played = _check_entry(out, recorded, recorded.entry(name), who, verdict)
        except RollgymError as error:
            verdict.add(name, str(error))
        else:
            parts.append(part)
            genuine.append((*part[:2], played))
    _check_summary(out, recorded, manifest, parts, summary, verdict)
    if forged:
        verdict.notes.append("nothing is played again: the suite is not the one the results claim")
    else:
        settings = Settings(workers=workers, modules=modules, weak_sandbox=weak_sandbox)
        _replay(genuine, settings, who, sample, seed, verdict, on_episode)
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
            f"the results are of {recorded.name} {recorded.version}, but this is {ours.name} {ours.version}: "
            "verify them with the rollgym that they were made with",
        )
    elif ours.fingerprint != recorded.fingerprint:
        verdict.add("suite", f"it is not {ours.name} {ours.version} as this rollgym knows it")


def _check_entry(
    out: Path, suite: Suite, entry: Entry, who: Who, verdict: Verdict
) -> tuple[Part, list[Episode]]:
    """The entry's part of the results, and those of its episodes that are as the suite asks for."""
    folder = entry_folder(out, entry.name)
    manifest, episodes = load_run(folder)
    planned = plan_entry(suite, entry, who)
    verdict.episodes += len(episodes)
    for name in (*IDENTITY, "success_means", "episodes"):
        expected = msgspec.json.decode(msgspec.json.encode(planned.manifest[name]))
        if not (name == "env" and entry.data) and manifest.get(name) != expected:
            verdict.add(
                entry.name, f"manifest, {name}: {manifest.get(name)!r}, but the suite says {expected!r}"
            )
    genuine = _check_specs(entry, planned, episodes, verdict)
    _check_lines(entry.name, folder / EPISODES, verdict)
    said = read_json(folder / SUMMARY)
    _differences(f"{entry.name}, summary", said, summarise(manifest, episodes), verdict, NOT_FROM_EPISODES)
    return (entry, manifest, episodes), genuine


def _check_specs(entry: Entry, planned: Plan, episodes: list[Episode], verdict: Verdict) -> list[Episode]:
    """Check that the episodes are those the suite asks for, each once; those of which this holds."""
    name, genuine = entry.name, []
    wanted = {spec.episode_id: spec for spec in planned.specs}
    seen: set[str] = set()
    for episode in episodes:
        episode_id = episode.spec.episode_id
        where = f"{name}/{episode_id}"
        if episode_id not in wanted:
            verdict.add(where, "it is no episode of the suite")
        elif episode_id in seen:
            verdict.add(where, "it is there twice")
        else:
            recorded, right = _spec(episode.spec, entry), _spec(wanted[episode_id], entry)
            if not _differences(where, recorded, right, verdict, source="the suite asks for"):
                genuine.append(episode)
        seen.add(episode_id)
    missing = [episode_id for episode_id in wanted if episode_id not in seen]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        verdict.add(name, f"missing episodes: {len(missing)} ({', '.join(missing[:3])}{more})")
    return genuine


def _spec(spec: EpisodeSpec, entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(spec)
    # A file of data lies elsewhere here; the task set's hash stands for it.
    found["env_kwargs"] = {key: value for key, value in spec.env_kwargs.items() if key != entry.data}
    return found


def _check_lines(name: str, path: Path, verdict: Verdict) -> None:
    """What a line of JSON says twice agrees."""
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
        said = raw.get("success")
        if said is not None and said != last.get("success"):
            verdict.add(where, f"success: {said} is recorded, but the last turn says {last.get('success')}")


def _check_summary(
    out: Path,
    suite: Suite,
    manifest: Mapping[str, Any],
    parts: list[Part],
    said: dict[str, Any],
    verdict: Verdict,
) -> None:
    right = suite_summary(suite, manifest, parts, out)
    if len(parts) == len(manifest["entries"]):
        _differences("summary", said, right, verdict, ("files",))
    for name, now in right["files"].items():
        before = said["files"].get(name) if isinstance(said.get("files"), dict) else None
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
        if (out / REPORT).read_text(encoding="utf-8") != markdown(said):
            verdict.add(REPORT, "it does not say what the summary says")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        verdict.add(REPORT, f"it cannot be compared with the summary: {one_line(error)}")


def _differences(
    where: str,
    said: Any,
    expected: Any,
    verdict: Verdict,
    but: tuple[str, ...] = (),
    source: str = "the episodes give",
    limit: int = 5,
) -> int:
    """Name the places where what is said is not what follows from the rest; how many there are."""
    found = list(_walk("", said, msgspec.json.decode(msgspec.json.encode(expected)), but))
    for place, one, other in found[:limit]:
        verdict.add(where, f"{place}: {_short(one)} is recorded, but {source} {_short(other)}")
    if len(found) > limit:
        verdict.add(where, f"{len(found) - limit} more differences")
    return len(found)


def _walk(place: str, said: Any, expected: Any, but: tuple[str, ...] = ()) -> list[tuple[str, Any, Any]]:
    if isinstance(said, dict) and isinstance(expected, dict):
        keys = [key for key in dict.fromkeys([*expected, *said]) if key not in but]
        pairs = [(f"{place}.{key}".lstrip("."), said.get(key), expected.get(key)) for key in keys]
    elif isinstance(said, list) and isinstance(expected, list) and len(said) == len(expected):
        pairs = [
            (f"{place}[{n}]", one, other) for n, (one, other) in enumerate(zip(said, expected, strict=True))
        ]
    else:
        return [] if said == expected else [(place, said, expected)]
    return [difference for pair in pairs for difference in _walk(*pair)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 90 else f"{text[:87]}..."


def _replay(
    parts: list[Part],
    settings: Settings,
    who: Who,
    sample: int,
    seed: int,
    verdict: Verdict,
    on_episode: Callable[[Replayed], None],
) -> None:
    """Play a sample again, every entry in its turn. Episodes that are not the suite's are not among them."""
    for number, (entry, manifest, episodes) in enumerate(parts):
        share = 0 if not sample else (sample + len(parts) - 1 - number) // len(parts)
        if sample and not share:
            continue
        picked = choose(sorted(episodes, key=lambda e: e.spec.episode_id), share, seed)
        kwargs = {entry.data: who.data[entry.name]} if entry.data else {}
        try:
            done = replay(picked, replace(settings, env_kwargs=kwargs), on_episode)
            verdict.notes += changed_versions(picked, manifest.get("versions"))
        except UsageError as error:
            verdict.add(entry.name, str(error))
            continue
        verdict.replayed += len(done)
        for one in done:
            if one.difference is not None:
                verdict.add(f"{entry.name}/{one.episode_id}", f"played again, {one.difference}")
    verdict.notes[:] = dict.fromkeys(verdict.notes)
