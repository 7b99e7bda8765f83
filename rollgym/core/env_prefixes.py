"""Environments of other libraries by id: ``PREFIX:NAME``, such as ``textarena:TicTacToe-v0``.

A prefix belongs to an adapter, a class or function in `rollgym.adapters` that makes a text environment from
the name. `rollgym.core.registry.find_spec` resolves such ids, so every command and function that takes an
environment takes them. Resolving an id imports nothing; making the environment imports the other library.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from gymnasium.envs.registration import EnvSpec

from rollgym.core.errors import MissingExtra, UsageError, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPrefix:
    """A prefix of environment ids, and the adapter that makes its environments.

    Example:
        >>> EnvPrefix(name="mylib", entry_point="my_adapter:MyLibEnv", package="mylib", module="mylib",
        ...           versions=(1, 2), example="mylib:Maze", summary="Environments of mylib")
    """

    name: str
    entry_point: str
    """``module:callable`` that takes ``inner_id`` (the id without the prefix) and options by keyword."""
    package: str
    """The distribution that `pip install` takes."""
    module: str
    """The module that is imported from it."""
    versions: tuple[int, ...]
    """The series of versions that the adapter works with: ``(0, 7)`` for 0.7.*; ``()`` for any."""
    example: str
    """An id, for help and error messages."""
    summary: str
    from_files: bool = True
    """False where an id itself names code or an address: then one in a file of others is not opened."""

    @property
    def requirement(self) -> str:
        """What `pip install` takes: the package in the tested series."""
        return self.package + (f"=={'.'.join(map(str, self.versions))}.*" if self.versions else "")

    def spec(self, env_id: str) -> EnvSpec:
        """Gymnasium's spec of an id with this prefix; it imports nothing."""
        inner_id = env_id.partition(":")[2].strip()
        if not inner_id:
            raise UsageError(f"{env_id!r} lacks a name after the prefix; for example {self.example}.")
        # Gymnasium's ids allow no slashes outside the namespace, which addresses contain.
        gym_id = re.sub(r"[^\w:.-]+", "-", f"{self.name}:{inner_id}").strip("-")
        return EnvSpec(id=gym_id, entry_point=self.entry_point, kwargs={"inner_id": inner_id})

    def require(self) -> str:
        """Return the installed version; raises `UsageError` where it is absent or of another series."""
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            raise MissingExtra(
                f"Environments of {self.name} need the package {self.package}: "
                f"pip install '{self.requirement}'"
            ) from None
        if _numbers(installed)[: len(self.versions)] != self.versions:
            raise UsageError(
                f"Environments of {self.name} are tested with {self.requirement}, but {self.package} "
                f"{installed} is installed: pip install '{self.requirement}'"
            )
        return installed

    def load(self) -> ModuleType:
        """Import the library; raises `UsageError` where it is absent, broken or of another series."""
        installed = self.require()
        try:
            return importlib.import_module(self.module)
        except Exception as error:  # a library may raise anything while it is imported
            raise UsageError(f"{self.package} {installed} cannot be imported: {one_line(error)}.") from error


_prefixes: dict[str, EnvPrefix] = {}


def register_prefix(prefix: EnvPrefix) -> None:
    """Let ids that start with ``prefix.name:`` name environments."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", prefix.name):
        raise ValueError(f"a prefix consists of lower-case letters, digits and _, not {prefix.name!r}")
    _prefixes[prefix.name] = prefix


def find_prefix(env_id: str) -> EnvPrefix | None:
    """The prefix of an environment id, or ``None``."""
    name, colon, _ = env_id.partition(":")
    return _prefixes.get(name) if colon else None


def list_prefixes() -> list[EnvPrefix]:
    """All prefixes, sorted by name."""
    return [_prefixes[name] for name in sorted(_prefixes)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0]))
