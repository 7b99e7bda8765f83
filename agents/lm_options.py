"""The options of the token agent, checked once, with a sentence for each mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollgym.agents.parsing import make_parser
from rollgym.agents.prompting import load_template
from rollgym.engines import Sampling
from rollgym.errors import UnknownName, UsageError

POLICIES = {
    "reasoning": ("keep", "strip"),
    "overflow": ("stop", "drop_oldest", "truncate_observation"),
}
"""What may become of thinking in the history, and of a conversation that is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmOptions:
    """How the model is asked and how its replies are read."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    """Of one reply. Less where the context has no room for so many."""
    parser: str = "raw"
    """``answer``, ``action``, ``boxed``, ``listed``, ``last_line``, ``raw`` or ``regex:PATTERN``; several in
    the order in which they are tried, as ``answer|listed|last_line``."""
    template: str = "plain"
    """Of the instructions: ``plain``, ``reason`` or the path of a text file."""
    instructions: bool = True
    """Whether the model is told the environment's instructions at all; a policy of one game knows them."""
    system: bool = True
    """Whether they are a system message; if not, they lead the first observation."""
    remember: bool = True
    """Whether the model sees the turns before this one. Without, each turn is a conversation of its own:
    for games whose observation says everything, at a fraction of the context."""
    remind: bool = False
    """Whether each observation ends with the form of a reply, and the valid actions where they are few."""
    practice: int = 0
    """How many made-up turns stand before the first, each of which plays one of the valid actions that the
    environment lists: a small model learns the form of a reply from them better than from words."""
    reasoning: str = "keep"
    """``keep`` leaves the ``<think>`` blocks of earlier replies in the history; ``strip`` takes them out,
    which begins a row to train on after each reply that has some."""
    overflow: str = "stop"
    """What happens where the context has no room for a whole reply. ``stop``: replies get shorter, and the
    episode ends as ``token_limit`` when there is no room at all. ``drop_oldest``: the older half of the turns
    is forgotten, which begins a row. ``truncate_observation``: the middle of the observation is left out.
    Where these do not help any more, it is as with ``stop``."""
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the model's chat template is told, as a JSON object, such as ``{"enable_thinking": false}``."""
    date: str | None = None
    """The day (YYYY-MM-DD) that a chat template is told where it asks for today's."""

    def __post_init__(self) -> None:
        for name in ("parser", "template"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be text, not {getattr(self, name)!r}.")
        make_parser(self.parser)
        load_template(self.template)
        for name, known in POLICIES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}.")
        for name in ("instructions", "system", "remember", "remind"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        if type(self.practice) is not int or self.practice < 0:
            raise UsageError(f"practice must be a whole number of at least 0, not {self.practice!r}.")
        if not isinstance(self.chat_kwargs, Mapping):
            raise UsageError(f"chat_kwargs must be a JSON object, not {self.chat_kwargs!r}.")
        try:
            self.sampling()
        except (TypeError, ValueError) as error:
            raise UsageError(f"Agent 'lm' cannot sample like that: {error}.") from None

    def sampling(self, seed: int = 0, stop_ids: tuple[int, ...] = (), room: int | None = None) -> Sampling:
        """How one reply is drawn, with at most ``room`` tokens."""
        for name in ("max_tokens", "top_k"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        return Sampling(
            max_tokens=self.max_tokens if room is None else min(self.max_tokens, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_ids=stop_ids,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the model of a folder is run."""

    device: str | None = None
    """Such as ``cpu`` or ``cuda:1``; CUDA where there is one, else the processor."""
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16``; float32 on a processor, else bfloat16."""
    max_batch: int = 64
    """How many replies are generated at once."""
    context_length: int | None = None
    """Less than the model's own, where memory is short."""
    threads: int | None = None
    """On a processor; without, one for a tiny model, else all cores. Give 1 where others use them too."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UsageError(f"dtype must be float32, bfloat16 or float16, not {self.dtype!r}.")
        for name in ("max_batch", "context_length", "threads"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}.")


def read_options(given: Mapping[str, Any]) -> tuple[LmOptions, EngineOptions]:
    """The options from plain values, such as those of a command line."""
    own = [option.name for option in fields(LmOptions)]
    engine = [option.name for option in fields(EngineOptions)]
    for name in given:
        if name not in (*own, *engine):
            raise UnknownName("option of agent 'lm'", name, ["model", *own, *engine])
    return (
        LmOptions(**{name: given[name] for name in own if name in given}),
        EngineOptions(**{name: given[name] for name in engine if name in given}),
    )
