"""Settings stored with a trained policy: agent options and training environments.

`rollgym train` writes these as ``trained`` in ``rollgym_model.json`` beside the weights; agent ``lm``
reads them, so that a policy is evaluated as it was trained. The file is data: reading it imports nothing
and opens no other file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import UsageError
from rollgym.core.types import Limits
from rollgym.io.run_dir import read_json, write_json

MODEL_SETTINGS = "rollgym_model.json"
VERSION = 1
LARGEST = 1 << 20
"""Maximum size of the file in bytes."""


class TrainedEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training environment."""

    id: str
    kwargs: dict[str, Any] = {}


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agent options and environments of a policy during training.

    Example:
        >>> ModelSettings(options={"max_tokens": 8, "history": "none"}).options["max_tokens"]
        8
    """

    version: int = VERSION
    agent: str = "lm"
    options: dict[str, Any] = {}
    """All options of the agent."""
    template_text: str = ""
    """The prompt template, if it came from a file."""
    envs: list[TrainedEnv] = []


class _File(msgspec.Struct):
    """The part of the file that is read here; the rest describes the origin of the initial weights."""

    trained: ModelSettings | None = None


def write_model_settings(folder: Path, settings: ModelSettings) -> None:
    """Write the settings into a model folder, keeping other content of the file."""
    path = folder / MODEL_SETTINGS
    content = read_json(path) if path.is_file() else {}
    write_json(path, {**content, "trained": msgspec.to_builtins(settings)})


def read_model_settings(folder: Path) -> ModelSettings | None:
    """The settings in a model folder, ``None`` where it has none.

    Raises:
        UsageError: The file is too large, is not JSON, or does not have the expected fields.
    """
    path = folder / MODEL_SETTINGS
    if not path.is_file():
        return None
    how = "Delete the file and give the agent's settings with --agent-arg."
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    if len(data) > LARGEST:
        raise UsageError(f"{path} is larger than {LARGEST >> 20} MiB, so it is not a settings file. {how}")
    try:
        settings = msgspec.json.decode(data, type=_File).trained
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{path} does not hold the settings of a policy ({reason}). {how}") from None
    if settings is None:
        return None
    if settings.version > VERSION:
        raise UsageError(
            f"{path} has version {settings.version}, but this rollgym reads up to {VERSION}: upgrade rollgym."
        )
    if settings.agent != "lm":
        raise UsageError(f"{path} is for the agent {settings.agent!r}; 'lm' was expected. {how}")
    return settings


def settings_in_words(values: Mapping[str, Any]) -> str:
    """Settings as ``key=value`` words that a shell reads back."""
    return " ".join(shlex.quote(f"{key}={as_word(value)}") for key, value in values.items())


def as_word(value: Any) -> str:
    """A value as the command line reads it: JSON, or plain text where JSON would not read it as another."""
    if isinstance(value, str):
        try:
            msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return msgspec.json.encode(value).decode()


def eval_command(
    env_id: str,
    model: str,
    *,
    env_kwargs: Mapping[str, Any],
    modules: Sequence[str] = (),
    episodes: int,
    seed: int,
    split: str,
    limits: Limits,
) -> str:
    """The command that evaluates a trained policy, as one line for a shell."""
    words = ["rollgym", "eval", env_id, "--agent", "lm", "--model", model]
    words += ["--split", split, "--episodes", str(episodes), "--seed", str(seed)]
    for key, value in env_kwargs.items():
        words += ["--env-arg", f"{key}={as_word(value)}"]
    for module in modules:
        words += ["--env-module", module]
    for flag, limit in (
        ("--max-turns", limits.turns),
        ("--max-tokens", limits.tokens),
        ("--max-seconds", limits.seconds),
    ):
        if limit is not None:
            words += [flag, f"{limit:g}" if isinstance(limit, float) else str(limit)]
    return shlex.join(words)
