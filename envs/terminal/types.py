"""A terminal task and its checks, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollgym.core.seeding import stable_digest
from rollgym.envs.terminal.harness import Entry, make_entry

EPOCH = 1_700_000_000
"""Modification time of files where no other is needed."""
Tree = dict[str, Entry]
"""Files by relative path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A hidden check of the files that the agent leaves.

    Example:
        >>> Check(kind="text", path="answer.txt", expected="42")
    """

    kind: Literal["text", "same", "absent", "mode", "listing", "run"]
    """``text``: the file has this text, up to white space at the ends of lines; ``same``: content with this
    SHA-256; ``absent``: no such path; ``mode``: permissions in octal; ``listing``: the files below a folder,
    one relative path per line, sorted; ``run``: the command prints this and exits with code 0."""
    path: str = ""
    expected: str = ""
    command: str = ""
    """Run by bash in a copy of the files, in a sandbox that the agent has not used."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files added to the copy before the command: inputs that the agent has not seen."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as the harness reads them."""
        return {**asdict(self), "files": dict(self.files)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A task: what to do, the files to begin with, the checks."""

    family: str
    kind: str
    level: int
    instruction: str
    parameters: Mapping[str, Any]
    """Values that the instruction states, for an expert."""
    tree: Tree
    checks: tuple[Check, ...]

    @property
    def key(self) -> str:
        """A hash of the content: equal only for equal tasks, and the same on every machine.

        Compressed files are left out: libraries compress differently. What is in them decides the checks.
        """
        texts = [(path, entry["content"]) for path, entry in sorted(self.tree.items()) if _is_text(entry)]
        return stable_digest("terminal", self.kind, self.level, self.instruction, texts, self.checks).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """The container image of a task: one that the Docker engine has, or one to build."""

    name: str
    context: Tree | None = None
    """``environment/`` with a Dockerfile, from which the image is built."""
    seconds: float = 600.0
    """Time limit of the build."""
    source: str = ""
    """Path of ``environment/``, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """A task of a task folder: its tests are a program, ``tests/test.sh``."""

    name: str
    instruction: str
    root: str
    """Path of the working folder inside; empty until the image is known."""
    tree: Tree
    env: Mapping[str, str]
    tests: Tree
    tests_env: Mapping[str, str]
    agent_seconds: float
    """Seconds that all commands of the agent may take together."""
    verifier_seconds: float
    solution: str | None = None
    """``solution/solve.sh``."""
    image: TaskImage | None = None
    """The image without which it cannot run. Then `root`, `tree` and `env` come from the image."""
    needs: str = ""
    """Why it cannot run without the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of judging the files of an episode."""

    reward: float
    success: bool
    passed: int
    of: int


def _is_text(entry: Entry) -> bool:
    try:
        return "\0" not in entry["content"].decode()
    except UnicodeDecodeError:
        return False


def file(text: str | bytes, *, mode: int = 0o644, mtime: int = EPOCH) -> Entry:
    """A file of a tree."""
    return make_entry("file", mode, mtime, text if isinstance(text, bytes) else text.encode())


def folder(*, mode: int = 0o755, mtime: int = EPOCH) -> Entry:
    """A folder of a tree; only empty ones need an entry."""
    return make_entry("folder", mode, mtime)
