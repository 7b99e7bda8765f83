"""Options of the ``lm`` agent, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollgym.agents.parsing import make_parser
from rollgym.agents.prompting import load_template
from rollgym.chat.tool_formats import find_format
from rollgym.core.errors import UnknownName, UsageError
from rollgym.engines.base import Sampling

_CHOICES = {
    "history": ("full", "none", "actions"),
    "reasoning": ("keep", "strip", "verbatim"),
    "overflow": ("stop", "drop_oldest", "truncate_observation"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Prompting, sampling and parsing of the ``lm`` agent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    """Tokens of one reply; fewer where the context has less room."""
    parser: str = "raw"
    """``answer``, ``action``, ``boxed``, ``listed``, ``last_line``, ``raw`` or ``regex:PATTERN``; several
    are tried in order, as ``answer|listed|last_line``."""
    template: str = "plain"
    """Template of the instructions: ``plain``, ``reason`` or the path of a text file."""
    instructions: bool = True
    """Show the environment's instructions and tools; a policy trained on one game may not need them."""
    system: bool = True
    """Show them as a system message; otherwise at the start of the first observation."""
    history: str = "full"
    """Earlier turns the model sees: ``full``, ``none`` or ``actions``. With ``none`` each turn is a separate
    conversation, for environments whose observation contains the whole state; with ``actions`` it lists the
    earlier replies after the observation."""
    format_reminder: bool = False
    """End each observation with the reply format, and with the valid actions where they are few."""
    format_examples: int = 0
    """Number of made-up turns before the first, each of which plays one of the listed valid actions: a small
    model picks up the reply format from them better than from words."""
    reasoning: str = "keep"
    """``keep`` leaves the ``<think>`` blocks of earlier replies to the chat template; ``strip`` removes
    them, which starts a new row after each reply that has some; ``verbatim`` keeps them in the row even where
    the template would drop them."""
    overflow: str = "stop"
    """If the context lacks room for a whole reply. ``stop``: replies get shorter, and the episode ends as
    ``token_limit`` when the context is full. ``drop_oldest``: drop the older half of the turns, which starts
    a new row. ``truncate_observation``: cut out the middle of the observation. Where the latter two do not
    help, they act as ``stop``."""
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template, as a JSON object, such as ``{"enable_thinking": false}``."""
    date: str | None = None
    """Date (YYYY-MM-DD) for a chat template that writes today's date."""
    tool_format: str = "auto"
    """Form of tool calls: ``auto`` (the chat template's own, or ``json``), ``hermes``, ``llama``,
    ``mistral``, ``harmony``, ``gemma``, ``functiongemma`` or ``json``."""

    def __post_init__(self) -> None:
        for name in ("parser", "template", "tool_format"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be text, not {getattr(self, name)!r}.")
        make_parser(self.parser)
        load_template(self.template)
        if self.tool_format != "auto":
            find_format(self.tool_format)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}.")
        for name in ("instructions", "system", "format_reminder"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        if type(self.format_examples) is not int or self.format_examples < 0:
            raise UsageError(
                f"format_examples must be a whole number of at least 0, not {self.format_examples!r}."
            )
        if not isinstance(self.chat_kwargs, Mapping):
            raise UsageError(f"chat_kwargs must be a JSON object, not {self.chat_kwargs!r}.")
        try:
            self.sampling()
        except (TypeError, ValueError) as error:
            raise UsageError(f"Agent 'lm': {error}.") from None

    def sampling(self, seed: int = 0, stop_ids: tuple[int, ...] = (), room: int | None = None) -> Sampling:
        """Return the sampling of one reply of at most ``room`` tokens."""
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
    """Device, precision and batching of the embedded engine."""

    device: str | None = None
    """Such as ``cpu`` or ``cuda:1``. Default: CUDA if available, otherwise the CPU."""
    dtype: str = "auto"
    """``auto``, ``float32``, ``bfloat16`` or ``float16``. ``auto``, as in training: bfloat16 on CUDA, and on
    a CPU that is fast at it for a model of at least 20 million parameters; otherwise float32. The choice is
    in the records."""
    max_batch: int = 64
    """Replies generated at once."""
    context_length: int | None = None
    """Tokens of context; below the model's own, to save memory."""
    threads: int | None = None
    """CPU threads. Default: one for a tiny model, otherwise all cores. Set 1 on a shared machine."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise UsageError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}.")
        for name in ("max_batch", "context_length", "threads"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}.")


def read_options(options: Mapping[str, Any]) -> tuple[PolicyOptions, EngineOptions]:
    """Make the options from plain values, such as those of a command line."""
    policy_names = [option.name for option in fields(PolicyOptions)]
    engine_names = [option.name for option in fields(EngineOptions)]
    for name in options:
        if name not in (*policy_names, *engine_names):
            raise UnknownName("option of agent 'lm'", name, ["model", *policy_names, *engine_names])
    return (
        PolicyOptions(**{name: options[name] for name in policy_names if name in options}),
        EngineOptions(**{name: options[name] for name in engine_names if name in options}),
    )
