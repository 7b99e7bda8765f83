"""Options of the chat agent, checked once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollgym.agents.parsing import make_parser
from rollgym.agents.prompting import history_limit, load_template
from rollgym.core.errors import UnknownName, UsageError

_KEY_NAMES = frozenset({"api_key", "apikey", "key", "token", "authorization", "password", "secret"})
_RESERVED = ("messages", "model", "stream", "tools")
REASONING = ("strip", "keep")
TOOLS = ("auto", "native", "prompted")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Endpoint, prompting, sampling and parsing of the chat agent."""

    model: str = ""
    """Model name at the endpoint."""
    base_url: str | None = None
    """Address up to and including ``/v1``. Default: ``OPENAI_BASE_URL``."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key; ``None`` to send none."""
    template: str = "plain"
    """``plain``, ``reason`` or the path of a text file."""
    history: str = "full"
    """Earlier turns in the prompt: ``full``, ``last:N`` or ``none``."""
    parser: str = "auto"
    """``answer``, ``action``, ``boxed``, ``last_line``, ``raw`` or ``regex:PATTERN``. ``auto``: ``raw`` in a
    role that writes free text (`RoleSpec.free_text`), else ``answer``."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """These three are sent only if given; otherwise the endpoint's defaults apply."""
    seed: bool | int = True
    """``True`` sends the episode's sampling seed, a number that number, ``False`` none."""
    timeout: float = 120.0
    """Seconds for one attempt, from the first byte to the last."""
    retries: int = 5
    """Attempts of one request after the first."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    """Prices per million tokens."""
    system: bool = True
    """Send the instructions as a system message; otherwise at the start of the first user message."""
    reasoning: str = "strip"
    """Reasoning of earlier turns in the history: ``strip`` or ``keep``."""
    tools: str = "auto"
    """Tools of the environment: ``native`` sends them in the request, ``prompted`` describes them in the
    prompt, ``auto`` tries the first and takes the second where the endpoint refuses it."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the request, as a JSON object."""

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("No model given: pass model=NAME.")
        for name in ("template", "history", "parser", "reasoning", "tools"):
            _check_text(name, getattr(self, name))
        history_limit(self.history)
        make_parser(self.parser_for(free_text=False))
        load_template(self.template)
        if self.reasoning not in REASONING:
            raise UsageError(f"reasoning must be {' or '.join(REASONING)}, not {self.reasoning!r}.")
        if self.tools not in TOOLS:
            raise UsageError(f"tools must be {', '.join(TOOLS[:-1])} or {TOOLS[-1]}, not {self.tools!r}.")
        if not isinstance(self.system, bool):
            raise UsageError(f"system must be true or false, not {self.system!r}.")
        self._check_numbers()
        _check_extra(self.extra_body)

    def _check_numbers(self) -> None:
        for name, low in (("temperature", 0.0), ("price_in", 0.0), ("price_out", 0.0)):
            _check_number(name, getattr(self, name), low, optional=name == "temperature")
        for name in ("top_p", "timeout", "requests_per_minute", "tokens_per_minute"):
            _check_number(name, getattr(self, name), 0.0, above=True, optional=name != "timeout")
        if self.top_p is not None and self.top_p > 1:
            raise UsageError(f"top_p must be at most 1, not {self.top_p}.")
        _check_whole("max_tokens", self.max_tokens, 1, optional=True)
        _check_whole("retries", self.retries, 0)
        if not isinstance(self.seed, bool):
            _check_whole("seed", self.seed, 0, hint="true, false or ")

    def parser_for(self, *, free_text: bool) -> str:
        """Return the parser of a role, which may write free text."""
        if self.parser != "auto":
            return self.parser
        return "raw" if free_text else "answer"

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of token counts at the given prices."""
        return (prompt_tokens * self.price_in + completion_tokens * self.price_out) / 1e6

    def request(self, sampling_seed: int) -> dict[str, Any]:
        """Return the body of a request without its messages."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        body: dict[str, Any] = {"model": self.model}
        body |= {name: value for name, value in sampling.items() if value is not None}
        if self.seed is not False:
            body["seed"] = sampling_seed if self.seed is True else self.seed
        return body | dict(self.extra_body)


def read_options(options: Mapping[str, Any]) -> ChatOptions:
    """Make the options from plain values, such as those of a command line."""
    option_names = [option.name for option in fields(ChatOptions)]
    for name in options:
        if name.lower() in _KEY_NAMES:
            raise UsageError(
                f"The chat agent takes no option {name!r}: a key given as an option would be recorded with "
                "the results. Put it in an environment variable and name that with api_key_env."
            )
        if name not in option_names:
            raise UnknownName("option of agent 'chat'", name, option_names)
    values = dict(options)
    model = values.get("model")
    if model is not None and (isinstance(model, bool) or not isinstance(model, (str, int, float))):
        raise UsageError(f"model must be the name of a model, not {model!r}.")
    values["model"] = "" if model is None else str(model).strip()
    if values.get("template", "") is None:
        del values["template"]
    if values.get("extra_body", "") is None:
        del values["extra_body"]
    return ChatOptions(**values)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text, not {value!r}.")


def _check_number(
    name: str, value: object, low: float, *, above: bool = False, optional: bool = False
) -> None:
    if value is None and optional:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < low or (above and value == low):  # type: ignore[operator]
        raise UsageError(
            f"{name} must be a number {'above' if above else 'of at least'} {low:g}, not {value!r}."
        )


def _check_whole(name: str, value: object, low: int, *, optional: bool = False, hint: str = "") -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise UsageError(f"{name} must be {hint}a whole number of at least {low}, not {value!r}.")


def _check_extra(extra: object) -> None:
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra_body must be a JSON object, not {extra!r}.")
    for name in _RESERVED:
        if name in extra:
            raise UsageError(f"extra_body must not hold {name!r}: the agent sets it.")
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra_body must be a JSON object: {error}.") from None
