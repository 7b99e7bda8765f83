"""Rewards from plain settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rollgym.chat import Tokenizer, load_tokenizer
from rollgym.core.errors import UnknownName, UsageError
from rollgym.engines.base import Engine
from rollgym.models.zoo import model_folder
from rollgym.rewards.composite import ENVIRONMENT, CompositeScorer
from rollgym.rewards.function_ref import function_name, reward_target
from rollgym.rewards.scoring import Scorer, check_timeout

Kind = Literal["function", "http", "judge"]

_READ: dict[str, tuple[str, ...]] = {
    "function": ("target", "workers", "memory_mb"),
    "http": ("url", "header_env", "retries", "concurrency", "allow_plain_http"),
    "judge": ("model", "template", "pattern", "lowest", "highest", "max_tokens", "temperature", "longest"),
}
"""The settings of each kind, besides the common ones."""
_NEEDED = {"function": "target", "http": "url"}
_COMMON = ("kind", "name", "weight", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """One reward. ``None`` means the default of its kind; settings of another kind are rejected."""

    kind: Kind
    """``function`` (in worker processes), ``http`` (a web service) or ``judge`` (a language model)."""
    name: str = ""
    """Name in records. Default: the function's name, or the kind."""
    weight: float = 1.0
    """Factor of its score; 0 only records it."""
    timeout: float = 60.0
    """Seconds for one score."""

    target: str | None = None
    """function: ``module:function``; from Python also the function itself."""
    workers: int | None = None
    """function: number of worker processes (default 1)."""
    memory_mb: float | None = None
    """function: resident memory in MB beyond which a worker is killed."""

    url: str | None = None
    """http: address that episodes are posted to."""
    header_env: Mapping[str, str] | None = None
    """http: header name to the environment variable that holds its value."""
    retries: int | None = None
    """http: attempts after the first (default 3)."""
    concurrency: int | None = None
    """http: episodes at once (default 16)."""
    allow_plain_http: bool | None = None
    """http: allow unencrypted http over a network."""

    model: str | None = None
    """judge: a folder in Hugging Face format, or a Hugging Face Hub id."""
    template: str | None = None
    """judge: the prompt, with ``{transcript}`` for the episode."""
    pattern: str | None = None
    """judge: a regular expression for the number in the reply."""
    lowest: float | None = None
    """judge: lower bound; smaller scores are clipped (default 0)."""
    highest: float | None = None
    """judge: upper bound; greater scores are clipped (default 10)."""
    max_tokens: int | None = None
    """judge: tokens of a reply (default 256)."""
    temperature: float | None = None
    """judge: sampling temperature (default 0)."""
    longest: int | None = None
    """judge: characters of a transcript; of a longer one the middle is left out."""

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
                    f"kind={self.kind} has no setting {field.name}; "
                    f"its settings are {', '.join((*_COMMON[1:], *_READ[self.kind]))}."
                )
        needed = _NEEDED.get(self.kind)
        if needed is not None and not getattr(self, needed):
            raise UsageError(f"kind={self.kind} requires {needed}.")
        if not math.isfinite(self.weight):
            raise UsageError(f"The weight of a reward must be finite, not {self.weight}.")
        check_timeout(self.timeout)
        if self.name == ENVIRONMENT:
            raise UsageError(f"{ENVIRONMENT!r} is the name of the environment's reward: choose another name.")

    @property
    def called(self) -> str:
        """The name in records."""
        return self.name or function_name(self.target or "") or self.kind

    @property
    def given(self) -> dict[str, Any]:
        """The settings of its kind that are not ``None``."""
        values = {name: getattr(self, name) for name in _READ[self.kind]}
        return {name: value for name, value in values.items() if value is not None}


def check_names(rewards: Sequence[RewardSettings]) -> None:
    """Raise a `UsageError` where two rewards have the same name."""
    names = [reward.called for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"Two rewards are called {name!r}: give each a different name.")


def make_scorer(
    settings: RewardSettings | Sequence[RewardSettings],
    *,
    keep_environment: bool = True,
    engine: Engine | None = None,
    tokenizer: Tokenizer | None = None,
) -> CompositeScorer:
    """Make the scorer of one or several rewards; the caller closes it.

    A judge without a ``model`` uses ``engine``, which stays open and whose ``tokenizer`` must be given too.
    """
    rewards = [settings] if isinstance(settings, RewardSettings) else list(settings)
    check_names(rewards)
    scorers = {reward.called: (_make(reward, engine, tokenizer), reward.weight) for reward in rewards}
    return CompositeScorer(scorers, keep_environment=keep_environment)


def _make(reward: RewardSettings, engine: Engine | None, tokenizer: Tokenizer | None) -> Scorer:
    # Imported here: a function reward must not import an HTTP client, nor torch.
    options = {**reward.given, "timeout": reward.timeout, "name": reward.called}
    if reward.kind == "function":
        from rollgym.rewards.function import FunctionScorer

        return FunctionScorer(**options)
    if reward.kind == "http":
        from rollgym.rewards.http import HttpScorer

        return HttpScorer(**options)
    from rollgym.rewards.judge import JudgeScorer

    model = options.pop("model", None)
    if model is not None:
        folder = model_folder(model)
        return JudgeScorer(lambda: _open_engine(folder), load_tokenizer(folder), **options)
    if engine is None or tokenizer is None:
        raise UsageError(
            f"The judge {reward.called!r} requires model (a folder), or an engine and its tokenizer."
        )
    return JudgeScorer(engine, tokenizer, **options)


def _open_engine(folder: Path) -> Engine:
    from rollgym.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(folder)
