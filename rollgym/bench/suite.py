"""Suites: versioned TOML files of entries, each an environment with tasks, limits and golden scores."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import RollgymError, UnknownName, UsageError
from rollgym.core.registry import env_info, is_registered
from rollgym.core.seeding import stable_digest
from rollgym.core.trust import check_recorded_env
from rollgym.core.types import Limits
from rollgym.evaluation.plan import Plan, Request, look_at, plan

SCHEMA = 1
"""Version of the suite file format. Newer files are refused."""
FOLDER = Path(__file__).parent / "suites"
KINDS = ("random", "baseline", "expert")
"""The agents that may have golden scores in a suite."""
NAME = "[a-z0-9][a-z0-9_-]*"
"""Pattern of entry names: each entry has a folder of that name."""
CLOSE = 1e-6
"""Golden scores are written with six decimals."""


class Golden(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The known score of one of rollgym's agents."""

    success: float
    score: float
    tolerance: float = 0.0
    """Allowed difference of the success rate; 0 for deterministic agents."""
    score_tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.success <= 1 or self.tolerance < 0 or self.score_tolerance < 0:
            raise ValueError("a golden success must be between 0 and 1, and a tolerance must not be negative")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One environment of a suite."""

    name: str
    env: str
    kwargs: dict[str, Any] = {}
    split: str = "test"
    tasks: int
    """Number of tasks, in the order of the suite's seed; 0 takes the whole split."""
    samples: int = 1
    """Episodes per task."""
    max_turns: int | None = None
    max_tokens: int | None = None
    success: str = ""
    """The environment's definition of success, which must not have changed."""
    task_set: str = ""
    """Hash of the task set; empty if the user provides the data."""
    content: str = ""
    """Hash of the tasks as played: ids, seeds and first observations."""
    data: str = ""
    """The argument that ``--data NAME=VALUE`` sets; without it the entry is skipped."""
    golden: dict[str, Golden] = {}

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.name):
            raise ValueError(f"an entry's name may contain a-z, 0-9, - and _, got {self.name!r}")
        if self.tasks < 0 or self.samples < 1:
            raise ValueError(f"entry {self.name!r} needs tasks >= 0 (0: all) and samples >= 1")
        self.limits  # noqa: B018
        unknown = [kind for kind in self.golden if kind not in KINDS]
        if unknown:
            raise ValueError(
                f"entry {self.name!r} has a golden score of {unknown[0]!r}, expected one of {KINDS}"
            )

    @property
    def limits(self) -> Limits:
        """The limits of an episode."""
        return Limits(turns=self.max_turns, tokens=self.max_tokens)

    def golden_of(self, agent: str, options: Mapping[str, Any]) -> tuple[str, Golden] | None:
        """The golden score that an agent must reach, with its kind; ``None`` if it has none."""
        if options or agent not in ("random", "expert"):
            return None
        # A suite can come from others: an unregistered name is not imported for this.
        has_expert = agent == "expert" and is_registered(self.env)
        kind = env_info(self.env).expert_is if has_expert else agent
        return (kind, self.golden[kind]) if kind in self.golden else None


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A benchmark: its entries and their known scores."""

    schema: int
    name: str
    version: int
    summary: str
    seed: int = 0
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not names or twice:
            raise ValueError(f"two entries are called {twice[0]!r}" if twice else "it has no entries")
        if self.version < 1 or self.seed < 0:
            raise ValueError("version must be at least 1 and seed at least 0")

    @property
    def fingerprint(self) -> str:
        """A hash of the whole suite."""
        return stable_digest(msgspec.json.encode(self, order="sorted").decode()).hex()[:16]

    def entry(self, name: str) -> Entry:
        """The entry of that name."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        names = [entry.name for entry in self.entries]
        raise UnknownName(f"entry of suite {self.name}", name, names, f"Entries: {', '.join(names)}.")

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values; `suite_from` reads them back."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


def known_suites() -> dict[str, Path]:
    """The suites that come with rollgym, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find_suite(name: str) -> Suite:
    """Find a suite by name, or read it from a file."""
    suites = known_suites()
    if name in suites:
        return read_suite(suites[name])
    path = Path(name)
    if path.is_file():
        return read_suite(path)
    raise UnknownName("suite", name, suites, f"Suites: {', '.join(suites)}; or pass a TOML file.")


def read_suite(path: Path) -> Suite:
    """Read a suite from its TOML file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The suite {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The suite {path} is not TOML: {error}.") from None
    return suite_from(values, str(path))


def suite_from(values: Any, where: str) -> Suite:
    """Convert plain values to a suite."""
    schema = values.get("schema") if isinstance(values, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(
            f"The suite {where} has schema {schema}, but this rollgym reads up to {SCHEMA}: upgrade rollgym."
        )
    try:
        return msgspec.convert(values, Suite)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{where} is not a suite: {error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """The agent that runs a suite, and how it runs."""

    agent: str
    options: Mapping[str, Any]
    workers: int = 0
    concurrency: int = 0
    modules: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``--data``, by entry."""
    weak_sandbox: bool = False
    """Accept suite settings that weaken the sandbox."""


def plan_entry(suite: Suite, entry: Entry, agent_spec: AgentSpec) -> Plan:
    """Plan the episodes of an entry and check them against the hashes in the suite."""
    where = f"Suite {suite.name} {suite.version}, entry {entry.name!r}"
    try:
        check_recorded_env(
            entry.env,
            _kwargs(entry, agent_spec),
            modules=agent_spec.modules,
            weak_sandbox=agent_spec.weak_sandbox,
        )
        planned = plan(_request(suite, entry, agent_spec))
    except RollgymError as error:
        raise type(error)(f"{where}: {error}") from error
    pins = (
        ("task set", entry.task_set, planned.manifest["task_set"]["hash"]),
        ("definition of success", entry.success, planned.manifest["success_means"]),
    )
    for name, pinned, now in pins:
        if pinned and pinned != now:
            raise UsageError(
                f"{where} was made for the {name} {pinned!r}, but {entry.env} has {now!r} here: results "
                "would not be comparable. Use the rollgym that the suite was made with, or a newer suite."
            )
    return planned


def _kwargs(entry: Entry, agent_spec: AgentSpec) -> dict[str, Any]:
    return {**entry.kwargs, **({entry.data: agent_spec.data[entry.name]} if entry.data else {})}


def _request(suite: Suite, entry: Entry, agent_spec: AgentSpec) -> Request:
    kwargs = _kwargs(entry, agent_spec)
    tasks = entry.tasks
    if not tasks:
        task_set = look_at(entry.env, kwargs, entry.limits).tasks
        if task_set is None:
            raise UsageError(
                f"{entry.env} has no task set, so tasks = 0 (all tasks) is not possible: set a number."
            )
        tasks = task_set.size(entry.split)
    return Request(
        env_id=entry.env,
        agent=agent_spec.agent,
        episodes=tasks * entry.samples,
        seed=suite.seed,
        split=entry.split,
        per_task=entry.samples,
        workers=agent_spec.workers,
        concurrency=agent_spec.concurrency,
        env_kwargs=kwargs,
        agent_options=agent_spec.options,
        modules=agent_spec.modules,
        limits=entry.limits,
    )
