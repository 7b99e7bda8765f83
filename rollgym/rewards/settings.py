"""Rewards from plain settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rollgym.chat import Tokenizer, load_tokenizer
from rollgym.engines import Engine
from rollgym.errors import UnknownName, UsageError
from rollgym.pretrained import model_folder
from rollgym.rewards.given import function_name, reward_target
from rollgym.rewards.scoring import Scorer
from rollgym.rewards.weighted import ENVIRONMENT, Weighted

Kind = Literal["function", "http", "judge"]

_READ: dict[str, tuple[str, ...]] = {
    "function": ("target", "workers", "memory_mb"),
    "http": ("url", "header_env", "retries", "concurrency", "allow_plain_http"),
    "judge": ("model", "template", "pattern", "lowest", "highest", "max_tokens", "temperature", "longest"),
}
"""The settings of each kind, besides those that all have."""
_NEEDED = {"function": "target", "http": "url"}
_COMMON = ("kind", "name", "weight", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """One reward. What is ``None`` is left to its kind; a setting its kind does not read is refused."""

    kind: Kind
    """``function`` in worker processes, an ``http`` service, or a ``judge``, which is a language model."""
    name: str = ""
    """What it is called in records. Default: the function's name, or the kind."""
    weight: float = 1.0
    """What its score is multiplied by; 0 records it only."""
    timeout: float = 60.0
    """Seconds for one score."""

    target: str | None = None
    """function: ``module:function``; from Python also the function itself."""
    workers: int | None = None
    """function: how many processes."""
    memory_mb: float | None = None
    """function: resident memory beyond which a worker is killed."""

    url: str | None = None
    """http: where episodes are posted."""
    header_env: Mapping[str, str] | None = None
    """http: names of environment variables that hold the values of headers, by header."""
    retries: int | None = None
    """http: attempts after the first."""
    concurrency: int | None = None
    """http: episodes at once."""
    allow_plain_http: bool | None = None
    """http: send episodes unencrypted over a network."""

    model: str | None = None
    """judge: a folder in Hugging Face format, or an id of the Hugging Face Hub."""
    template: str | None = None
    """judge: the question, with ``{transcript}`` for the episode."""
    pattern: str | None = None
    """judge: a regular expression for the number in the reply."""
    lowest: float | None = None
    """judge: a smaller number counts as this."""
    highest: float | None = None
    """judge: a greater number counts as this."""
    max_tokens: int | None = None
    """judge: the longest reply."""
    temperature: float | None = None
    """judge: how freely it is drawn."""
    longest: int | None = None
    """judge: characters of an episode beyond which the middle is left out."""

    def __post_init__(self) -> None:
        target: Any = self.target
        if target is not None and not isinstance(target, str):
            object.__setattr__(self, "target", reward_target(target))
        if self.kind not in _READ:
            raise UnknownName("kind of reward", str(self.kind), _READ, f"Kinds: {', '.join(_READ)}.")
        for field in fields(self):
            is_read = field.name in _COMMON or field.name in _READ[self.kind]
            if not is_read and getattr(self, field.name) is not None:
                raise UsageError(
                    f"A reward of the kind {self.kind!r} does not read {field.name}; "
                    f"it reads {', '.join((*_COMMON[1:], *_READ[self.kind]))}."
                )
        needed = _NEEDED.get(self.kind)
        if needed is not None and not getattr(self, needed):
            raise UsageError(f"A reward of the kind {self.kind!r} needs {needed}.")
        if not math.isfinite(self.weight):
            raise UsageError(f"The weight of a reward must be finite, not {self.weight}.")
        if not 0 < self.timeout < math.inf:
            raise UsageError(f"The timeout of a reward must be positive and finite, not {self.timeout}.")
        if self.name == ENVIRONMENT:
            raise UsageError(f"{ENVIRONMENT!r} is the environment's own reward: choose another name.")

    @property
    def called(self) -> str:
        """Its name in records."""
        return self.name or function_name(self.target or "") or self.kind

    @property
    def given(self) -> dict[str, Any]:
        """The settings of its kind that were given."""
        values = {name: getattr(self, name) for name in _READ[self.kind]}
        return {name: value for name, value in values.items() if value is not None}


def check_names(rewards: Sequence[RewardSettings]) -> None:
    """Refuse rewards that records could not tell apart."""
    names = [one.called for one in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"Two rewards are called {name!r}: give each a different name.")


def make_scorer(
    settings: RewardSettings | Sequence[RewardSettings],
    *,
    keep_environment: bool = True,
    engine: Engine | None = None,
    tokenizer: Tokenizer | None = None,
) -> Weighted:
    """The scorer for one reward or several. Close it when the run is over.

    A judge without a ``model`` asks ``engine``, whose tokenizer must then be given too and which stays open.
    """
    listed = [settings] if isinstance(settings, RewardSettings) else list(settings)
    check_names(listed)
    made = {one.called: (_make(one, engine, tokenizer), one.weight) for one in listed}
    return Weighted(made, keep_environment=keep_environment)


def _make(one: RewardSettings, engine: Engine | None, tokenizer: Tokenizer | None) -> Scorer:
    # Imported here: whoever scores with a function needs no HTTP client, and nobody needs torch for it.
    options = {**one.given, "timeout": one.timeout, "name": one.called}
    if one.kind == "function":
        from rollgym.rewards.function import FunctionScorer

        return FunctionScorer(**options)
    if one.kind == "http":
        from rollgym.rewards.http import HttpScorer

        return HttpScorer(**options)
    from rollgym.rewards.judge import JudgeScorer

    model = options.pop("model", None)
    if model is not None:
        folder = model_folder(model)
        return JudgeScorer(lambda: _open_engine(folder), load_tokenizer(folder), **options)
    if engine is None or tokenizer is None:
        raise UsageError(
            f"The judge {one.called!r} needs a model (a folder), or an engine and its tokenizer."
        )
    return JudgeScorer(engine, tokenizer, **options)


def _open_engine(folder: Path) -> Engine:
    from rollgym.engines.torch import TorchEngine

    return TorchEngine(folder)
