"""Formats of tool calls in the text of a reply, by model family: how to read them and how to write them.

`ToolFormat.parse` never raises: a malformed call becomes `ParsedReply.error`, a sentence for the agent.

=============  ===========================================================  ============================
name           a call                                                       families
=============  ===========================================================  ============================
hermes         ``<tool_call>{"name": …, "arguments": …}</tool_call>``       Qwen2.5, Qwen3, SmolLM3
llama          ``{"name": …, "parameters": …}``, ``<|python_tag|>`` before  Llama 3.x
mistral        ``[TOOL_CALLS][{"name": …, "arguments": …}]``                Mistral
harmony        ``<|channel|>commentary to=functions.NAME<|message|>{…}``    GPT-OSS
gemma          ``<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>``   Gemma 4
functiongemma  the same with other tokens                                   FunctionGemma
json           a JSON code block with a name and arguments                  any: the prompt describes it
=============  ===========================================================  ============================

A module for each family. `base` has what they share, `call_json` calls as JSON, `reasoning` the text before.
"""

from __future__ import annotations

from rollgym.chat.tool_formats.base import ParsedReply, ToolFormat
from rollgym.chat.tool_formats.gemma import FUNCTION_GEMMA, GEMMA
from rollgym.chat.tool_formats.harmony import HARMONY, unfinished_channels
from rollgym.chat.tool_formats.hermes import HERMES
from rollgym.chat.tool_formats.json_block import JSON_BLOCK
from rollgym.chat.tool_formats.llama import LLAMA
from rollgym.chat.tool_formats.mistral import MISTRAL
from rollgym.chat.tool_formats.reasoning import (
    before_markers,
    opens_reasoning,
    split_reasoning,
    split_unfinished,
)
from rollgym.core.errors import UsageError

__all__ = [
    "FORMATS", "ParsedReply", "ToolFormat", "before_markers", "find_format", "opens_reasoning",
    "split_reasoning", "split_unfinished", "unfinished_channels",
]  # fmt: skip

FORMATS: dict[str, ToolFormat] = {
    format.name: format for format in (HERMES, LLAMA, MISTRAL, HARMONY, GEMMA, FUNCTION_GEMMA, JSON_BLOCK)
}
"""Formats by name."""


def find_format(name: str) -> ToolFormat:
    """Return a format by its name."""
    if name not in FORMATS:
        raise UsageError(f"tool_format must be auto or one of {', '.join(FORMATS)}, not {name!r}.")
    return FORMATS[name]
