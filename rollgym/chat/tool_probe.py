"""How a chat template renders tools, found by rendering made-up calls.

As for text, the source of the template is not read: only its output counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.chat.template_probe import Apply, TemplateFacts, TemplateMessage
from rollgym.chat.tokenizer import Codec
from rollgym.chat.tool_formats import ToolFormat, find_format
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall
from rollgym.core.tools import text_tool

AUTO = "auto"
_TOOL = text_tool("qztool", "qzdescription", "qzargument", "qzmeaning")
_CALL = ToolCall(name="qztool", arguments={"qzargument": "qzvalue"}, id="qzcall001")
_VARIABLES = ("tools", "xml_tools")
"""Template variables that hold tools; the second one is SmolLM3's."""
_FIRST, _RESULT, _SECOND = "qzfirst", "qzresult", "qzsecond"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """The form in which a model reads tools and results, and writes calls."""

    format: ToolFormat
    native: bool
    """True where the template renders tools; otherwise the system message describes them, and results are
    user messages."""
    reason: str = ""
    """Why the template's own form is not used."""
    variable: str = "tools"
    """The template variable that holds the tools."""
    verbatim: bool = True
    """True where a reply with a call is rendered from its text; otherwise from the parsed call."""
    parallel: bool = True
    """True where a message may have several calls."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a call, besides those that end any reply."""
    end_id: int | None = None
    """The token with which the template ends a call."""
    written: str = ""
    """All text that the template itself wrote in the trials."""


def probe_tools(apply: Apply, codec: Codec, facts: TemplateFacts, wanted: str = AUTO) -> ToolFacts:
    """Probe a template; one that cannot render tools gets them through the prompt.

    Args:
        apply: Renders messages as text.
        codec: The tokenizer.
        facts: The template's properties without tools.
        wanted: Name of a format, or ``auto`` for the template's own.
    """
    native, reason = _native(apply, codec, facts)
    if wanted != AUTO:
        chosen = find_format(wanted)
        if native is not None and native.format is chosen:
            return native
        return ToolFacts(
            format=chosen,
            native=False,
            reason=f"tool_format={wanted} was set",
            written=native.written if native else "",
        )
    return native or ToolFacts(format=find_format("json"), native=False, reason=reason)


def template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as chat templates take it: with arguments as an object, not as text."""
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _messages(
    calls: Sequence[dict[str, Any]], assistant: TemplateMessage | None = None
) -> list[TemplateMessage]:
    assistant = assistant or {"role": "assistant", "content": "", "tool_calls": list(calls)}
    results: list[TemplateMessage] = [
        {"role": "tool", "content": f"{_RESULT}{n or ''}", "tool_call_id": call["id"], "name": _TOOL.name}
        for n, call in enumerate(calls)
    ]
    return [{"role": "user", "content": _FIRST}, assistant, *results]


def _native(apply: Apply, codec: Codec, facts: TemplateFacts) -> tuple[ToolFacts | None, str]:
    """Return how the template renders tools, or ``None`` and the reason why they are described instead."""
    call = template_call(_CALL)
    messages = _messages([call])
    for variable in _VARIABLES:
        given = {variable: [_TOOL.to_openai()]}
        try:
            opening = apply(messages[:1], tools=given)
        except UsageError as error:
            return None, f"the template refuses tools ({error})"
        if all(word in opening for word in (_TOOL.name, _TOOL.description, "qzargument")):
            break
    else:
        return None, "the template does not show tools"
    try:
        called = apply(messages[:2], tools=given, generation=False)
        whole = apply(messages, tools=given)
    except UsageError as error:
        return None, f"the template refuses calls or results ({error})"
    written = whole[len(opening) :] if whole.startswith(opening) else whole.rpartition(_FIRST)[2]
    if _TOOL.name not in written or "qzvalue" not in written or _RESULT not in written:
        return None, "the template does not show calls or results"
    name = _find_format(written.partition(_RESULT)[0])
    if name is None:
        return None, "the template writes calls in an unknown form"
    format = find_format(name)
    end = max((t for t in codec.added if t.strip() and called.rstrip().endswith(t)), key=len, default="")
    stops = [codec.added[token] for token in (*format.stops, end) if token in codec.added]
    shown = [opening, whole]
    return ToolFacts(
        format=format,
        native=True,
        variable=variable,
        verbatim=_is_verbatim(apply, given, written, whole, facts),
        parallel=_is_parallel(apply, given),
        end_id=codec.added.get(end),
        stop_ids=tuple(number for number in dict.fromkeys(stops) if number not in facts.stop_ids),
        written="\0".join(_without_words(text) for text in shown),
    ), ""


def _find_format(written: str) -> str | None:
    """Return the name of the format in which a template writes a call."""
    if "<tool_call>" in written:
        return "hermes" if _reads(find_format("hermes"), written) else None
    for name in ("gemma", "functiongemma"):
        if find_format(name).opens in written:
            return name
    if "[TOOL_CALLS]" in written:
        return "mistral"
    if "to=functions." in written:
        return "harmony"
    return "llama" if _bare_json(written) else None


def _reads(format: ToolFormat, written: str) -> bool:
    """Whether the format's parser finds the call in the text that the template wrote."""
    end = written.rfind("</tool_call>") + len("</tool_call>")
    calls = format.parse(written[:end]).calls
    return [(call.name, call.arguments) for call in calls] == [(_CALL.name, _CALL.arguments)]


def _bare_json(written: str) -> str:
    """Return the text of a call that is written as a JSON object, from the start; empty if it is not."""
    start = written.find("{")
    try:
        value, end = json.JSONDecoder().raw_decode(written, max(start, 0))
    except ValueError:
        return ""
    named = isinstance(value, dict) and value.get("name") == _TOOL.name
    return written[:end] if named and ("parameters" in value or "arguments" in value) else ""


def _is_verbatim(apply: Apply, given: dict[str, Any], written: str, whole: str, facts: TemplateFacts) -> bool:
    """Whether the text of a call, as the content of a message, is rendered like the call itself."""
    before = written.partition(_RESULT)[0]
    end = before.rfind("</tool_call>")
    text = before[: end + len("</tool_call>")] if end >= 0 else _bare_json(before)
    if not text:
        return False
    raw: TemplateMessage = {"role": "assistant", "content": text.removeprefix(facts.lead)}
    call = template_call(_CALL)
    messages = _messages([call], raw)
    try:
        same = apply(messages, tools=given) == whole
        apply([*messages, raw, *messages[2:]], tools=given)  # a second call in the same turn of the user
        apply([*messages, raw, {"role": "user", "content": _SECOND}], tools=given)
    except UsageError:
        return False
    return same


def _is_parallel(apply: Apply, given: dict[str, Any]) -> bool:
    calls = [template_call(_CALL), {**template_call(_CALL), "id": "qzcall002"}]
    try:
        text = apply(_messages(calls), tools=given)
    except UsageError:
        return False
    return text.count("qzvalue") == 2 and f"{_RESULT}1" in text


def _without_words(text: str) -> str:
    for word in (_TOOL.name, _TOOL.description, "qzargument", "qzmeaning", "qzvalue", _FIRST, _RESULT):
        text = text.replace(word, "\0")
    return text
