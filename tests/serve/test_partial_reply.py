"""Text of an unfinished reply: whatever follows, the finished reply starts with it."""

import random
from functools import cache

import pytest
from talkers import FAMILIES, HERMES_TOOLS, TOOL_FAMILIES, family, make

from rollgym.chat import BranchingConversation, ChatTemplate
from rollgym.core.messages import Message, ToolSpec
from rollgym.engines.base import Generation
from rollgym.serve.generation import find_stop
from rollgym.serve.partial_reply import MAX_PENDING, PartialReply, TokenText
from rollgym.serve.requests import ChatRequest, make_request
from rollgym.serve.visible_reply import visible_reply

MOVE = ToolSpec(name="move", description="Move.")
ASK = Message(role="user", content="You see a door.")
_PROMPT = "<|im_start|>assistant\n"
OPENS = HERMES_TOOLS.replace(f"{{{{- '{_PROMPT}' -}}}}", f"{{{{- '{_PROMPT}<think>\n' -}}}}")
CALL = '{"name": "move", "arguments": {"direction": "up"}}'
FRAGMENTS = [
    *(" ", "\n", "\n\n", "Hello", "go left", "é", "漢字", "🙂", "\ufffd", "a"),
    *("{", "[", "}", "]", "`", "```", "<", "|>", "STOP", "ST", "OP."),
    *("<think>", "</think>", "<thi", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<tool_", CALL),
    *("```json\n", "```python\n", "[TOOL_CALLS]", "[TOOL_CALLS][", "<|python_tag|>"),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant"),
    *("<|channel|>commentary to=functions.move <|constrain|>json<|message|>{}", "to=browser", "<|im_start|>"),
]  # fmt: skip
NAMES = [*sorted(TOOL_FAMILIES), "gemma", "smollm2", "qwen3", "opens reasoning"]


@cache
def template(name: str) -> ChatTemplate:
    if name == "opens reasoning":
        return ChatTemplate(make(template=OPENS, special=["<|im_start|>"], eos="<|im_end|>"))
    return ChatTemplate(family(name))


def check(name: str, ids: list[int], *, tools: bool, stops: tuple[str, ...], max_calls: int | None) -> int:
    """Check a reply token by token; returns how many characters came before its end."""
    chat = template(name)
    request: ChatRequest = make_request(
        model="m", messages=[ASK], tools=[MOVE] if tools else (), stops=stops, max_calls=max_calls
    )
    conversation = BranchingConversation.begin(chat, "", request.messages, request.tools)
    partial = PartialReply(
        chat, tools=tools, stops=stops, stop_ids=conversation.stop_ids, calls_as_text=max_calls == 0
    )
    ended = next((n for n, token_id in enumerate(ids) if token_id in conversation.stop_ids), len(ids))
    ids = ids[: ended + 1]
    seen: list[tuple[str, str]] = []
    for token_id in ids:  # also those after a stop string: an engine samples some at once
        partial.add(token_id)
        seen.append(partial.certain)
    for number in range(1, len(ids) + 1):
        if find_stop(chat.codec.decode(ids[:number], special=False), stops) is not None:
            ids = ids[:number]
            break
    whole = conversation.reply(ids)
    generation = Generation(
        token_ids=tuple(ids),
        logprobs=(0.0,) * len(ids),
        finish_reason="stop",
        version_spans=((0, len(ids)),) if ids else (),
    )
    message = visible_reply(request, conversation, whole, generation, name="x").message
    for number, (reasoning, text) in enumerate(seen):
        shown = chat.codec.decode(ids[: number + 1])
        assert message.reasoning.startswith(reasoning), (shown, whole)
        assert message.text.startswith(text), (shown, whole)
        assert not any(stop in reasoning or stop in text for stop in stops)
    return max((len(reasoning) + len(text) for reasoning, text in seen), default=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_certain_stays(name: str) -> None:
    rng = random.Random(name)
    early = 0
    for _ in range(400):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 8)))
        stops = ("STOP", "\n\n")[: rng.randint(0, 2)]
        ids = template(name).codec.encode([text], "\n")
        if rng.random() < 0.3:
            ids = ids[: rng.randint(0, len(ids))]  # cut off, perhaps inside a character
        tools = rng.random() < 0.6
        early += check(name, ids, tools=tools, stops=stops, max_calls=rng.choice((None, 0, 1)))
    assert early > 100  # text that did not wait for the end


@pytest.mark.parametrize(
    ("name", "tools", "text", "expected"),
    [
        ("qwen2.5 tools", True, "Hello you.\n<tool_call>\n{", ("", "Hello you.")),
        ("qwen2.5 tools", True, "Hello <tool_ca", ("", "Hello")),
        ("qwen2.5 tools", False, "Hello <tool_ca", ("", "Hello <tool_ca")),
        ("qwen3 tools", True, "<think>\nI see", ("I see", "")),
        ("qwen3 tools", True, "<think>\nI see\n</thi", ("I see", "")),
        ("qwen3 tools", True, "<think>\nI see\n</think>\n\nGo up", ("I see", "Go up")),
        ("qwen3 tools", True, "<thi", ("", "")),
        ("opens reasoning", True, "I see", ("", "")),
        ("opens reasoning", True, "I see</think>Go", ("I see", "Go")),
        ("llama3 tools", True, '{"name"', ("", "")),
        ("llama3 tools", True, "Go {", ("", "Go {")),
        ("gpt-oss tools", True, "<|channel|>analysis<|message|>I see", ("I see", "")),
        ("gemma", True, "See: ```json", ("", "See:")),
        ("gemma", True, "[1, 2] are", ("", "[1, 2] are")),
    ],
)
def test_text_is_certain_before_calls_and_after_reasoning(
    name: str, tools: bool, text: str, expected: tuple[str, str]
) -> None:
    partial = PartialReply(template(name), tools=tools)
    for token_id in template(name).codec.encode([text], "\n"):
        partial.add(token_id)
    assert partial.certain == expected


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_text_grows_in_whole_characters(name: str) -> None:
    codec = template(name).codec
    text = "Grüße, 漢字 and 🙂🙂 at last"
    ids, grown = codec.encode([text], "\n"), TokenText(codec, special=False)
    for token_id in ids:
        grown.add(token_id)
        assert "\ufffd" not in grown.text
        assert codec.decode(ids, special=False).startswith(grown.text)
    assert grown.text == codec.decode(ids, special=False)


def test_bytes_that_never_make_a_character_are_not_decoded_for_ever() -> None:
    codec = template("qwen2.5").codec
    (first, *_) = codec.encode(["🙂"])
    grown = TokenText(codec, special=False)
    for _ in range(3 * MAX_PENDING):
        grown.add(first)
    assert (grown.text, grown._done) == ("", 0)
