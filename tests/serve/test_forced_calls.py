"""``tool_choice``: the start of the call is part of the prompt, the rest is sampled."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dialect_wire import BODIES, DIALECTS, PATHS, ask
from scripted_replies import Scripted
from talkers import HERMES_TOOLS, TOOL_FAMILIES, make

from rollgym.chat import ChatTemplate, Conversation
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.types import Episode
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import token_episode

Serving = Callable[..., Any]
MOVE = ToolSpec(
    name="move",
    description="Move the player.",
    parameters={"type": "object", "properties": {"direction": {"type": "string"}}},
)
LOOK = ToolSpec(name="look", description="Look around.")
UP = ToolCall(name="move", arguments={"direction": "up"})
ASK = Message(role="user", content="You see a door.")
FAMILIES = [*sorted(TOOL_FAMILIES), "gemma", "smollm2"]
THINKING = HERMES_TOOLS.replace("assistant\n' -}}{%- endif", "assistant\n<think>\n' -}}{%- endif")


def choice(dialect: str, name: str | None) -> dict[str, Any]:
    """``tool_choice`` for one tool, or for any."""
    if dialect == "messages":
        return {"tool_choice": {"type": "tool", "name": name} if name else {"type": "any"}}
    if name is None:
        return {"tool_choice": "required"}
    named = {"type": "function", "name": name}
    return {"tool_choice": named if dialect == "responses" else {"type": "function", "function": named}}


def play(serving: Serving, scripted: Scripted, talk: Callable[[Any], Any]) -> list[Episode]:
    async def run() -> list[Episode]:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            finished = place.server.episodes()
            await talk(place)
        return [episode async for episode in finished]

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("forced", ["move", None])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_is_recorded_exactly(
    serving: Serving, name: str, dialect: str, forced: str | None, stream: bool
) -> None:
    final = "<|channel|>final<|message|>It opens." if name == "gpt-oss tools" else "It opens."
    scripted = Scripted(name, [[UP], final])
    begun = scripted.template.forced_call([forced] if forced else ["move", "look"])

    async def talk(place: Any) -> None:
        more = choice(dialect, forced)
        reply = await ask(place.http, dialect, "one", [ASK], [MOVE, LOOK], stream=stream, **more)
        (call,) = reply.tool_calls
        assert (call.name, call.arguments, reply.text) == ("move", UP.arguments, "")
        said = [ASK, reply, Message(role="tool", content="A hall.", tool_call_id=call.id)]
        assert (await ask(place.http, dialect, "one", said, [MOVE, LOOK], stream=stream)).text == "It opens."
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    # The ids that were not sampled end the prompt, and only sampled ids are actions.
    free = Conversation(scripted.template, tools=[MOVE, LOOK])
    free.observe(ASK.text)
    assert begun
    assert scripted.starts[0].prompt_ids == (*free.prompt_ids, *begun)
    first, second = episode.turns
    assert first.prompt_ids == scripted.starts[0].prompt_ids
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled
    # With the reply as a whole, the conversation continues through the template as if all was sampled.
    free.reply((*begun, *scripted.sampled[0]))
    free.observe([Message(role="tool", content="A hall.", name="move")])
    assert scripted.starts[1].prompt_ids == free.prompt_ids
    assert second.new_row == free.new_row
    sequences = token_episode(episode).sequences
    if not second.new_row:
        (row,) = sequences
        assert row.ids.tolist() == [*scripted.starts[1].prompt_ids, *scripted.sampled[1]]
    actions = [row.ids[row.action_positions].tolist() for row in sequences]
    assert [i for ids in actions for i in ids] == [i for ids in scripted.sampled for i in ids]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_commits_to_one_of_the_tools_and_to_nothing_else(name: str) -> None:
    template = Scripted(name, []).template
    tools = [ToolSpec(name=tool) for tool in ("move", "look")]
    for names in (["move"], ["move", "look"]):
        begun = template.forced_call(names)
        for tool in names:
            for arguments in ({}, {"direction": "up"}, {"n": 1, "x": [None]}):
                text = template.call_text([ToolCall(name=tool, arguments=arguments)], tools)
                ids = template.codec.encode([text], "\n")
                assert tuple(ids[: len(begun)]) == begun
        text = template.codec.decode(begun)
        assert template.tools.format.opens in text
        assert ("move" in text) == (len(names) == 1)
        assert "direction" not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_goes_wrong_is_text(serving: Serving, dialect: str, stream: bool) -> None:
    """A stop string counts in the sampled part only."""
    scripted = Scripted("qwen2.5 tools", ["never", "never"])
    stops = {"chat": {"stop": ["call>"]}, "messages": {"stop_sequences": ["call>"]}}.get(dialect, {})

    async def talk(place: Any) -> None:
        more = choice(dialect, "move") | stops
        reply = await ask(place.http, dialect, "one", [ASK], [MOVE], stream=stream, **more)
        assert not reply.tool_calls
        assert reply.text.startswith("<tool_call>")
        assert reply.text.endswith("never")
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    (turn,) = episode.turns
    assert turn.action_ids == scripted.sampled[0]
    assert turn.response is None
    assert turn.prompt_ids[-len(scripted.template.forced_call(["move"])) :] == (
        scripted.template.forced_call(["move"])
    )


def test_several_replies_begin_with_the_same_call(serving: Serving) -> None:
    scripted = Scripted("qwen2.5 tools", [[UP], [ToolCall(name="move", arguments={"direction": "down"})]])

    async def talk(place: Any) -> None:
        body = {"model": "policy", "messages": [ASK.to_openai()], "n": 2, "tools": [MOVE.to_openai()]}
        answer = await place.http.post("/session/one/v1/chat/completions", json=body | choice("chat", "move"))
        assert [len(each["message"]["tool_calls"]) for each in answer.json()["choices"]] == [1, 1]
        # The tokens of the forced start were read by the model, not written.
        assert answer.json()["usage"]["completion_tokens"] == sum(map(len, scripted.sampled))
        assert answer.json()["usage"]["prompt_tokens"] == len(scripted.starts[0].prompt_ids)
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.new_row for turn in episode.turns] == [False, True]


def test_where_a_call_cannot_be_forced_that_is_reported(serving: Serving) -> None:
    """The template opens reasoning and has no form for calls: a call there would be a thought."""
    plain = THINKING.replace("tools", "no_tools").replace("m.tool_calls", "m.no_calls")
    template = ChatTemplate(make(template=plain, special=["<|im_start|>"], eos="<|im_end|>"))
    assert template.opens_reasoning
    assert not template.tools.native
    assert template.forced_call(["move"]) == ()
    engine = ScriptedEngine(lambda request: [request.sampling.stop_ids[0]])

    async def run() -> None:
        async with serving(inner=engine, tokens=template) as place:
            for dialect in DIALECTS:
                for name in ("move", None):
                    body = BODIES[dialect]([ASK], [MOVE]) | {"model": "policy"} | choice(dialect, name)
                    for stream in (False, True):
                        answer = await place.http.post(
                            f"/v1/{PATHS[dialect]}", json=body | {"stream": stream}
                        )
                        assert answer.status_code == 200, answer.text
                        assert answer.headers["x-rollgym-ignored"] == "tool_choice"

    asyncio.run(run())


def test_a_template_that_closes_its_reasoning_before_a_call_does_so_in_the_prompt() -> None:
    """As Qwen3 does: a call without reasoning follows an empty thought."""
    source = HERMES_TOOLS.replace(
        "{{- '<|im_start|>assistant' -}}", "{{- '<|im_start|>assistant\n<think>\n\n</think>\n' -}}"
    )
    template = ChatTemplate(make(template=source, special=["<|im_start|>"], eos="<|im_end|>"))
    begun = template.codec.decode(template.forced_call(["move"]))
    assert begun.startswith("<think>\n\n</think>")
    conversation = Conversation(template, tools=[MOVE])
    conversation.observe("Go.")
    conversation.begin_reply(template.forced_call(["move"]))
    rest = template.call_text([UP], [MOVE]).removeprefix(begun)
    conversation.reply((*template.codec.encode([rest], "\n"), conversation.stop_ids[0]))
    assert [call.name for call in conversation.last_message.tool_calls] == ["move"]
    assert conversation.last_message.reasoning == ""


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["fly", ""])
def test_a_tool_that_is_not_offered_is_rejected(serving: Serving, dialect: str, name: str) -> None:
    async def run() -> None:
        async with serving() as place:
            body = BODIES[dialect]([ASK], [MOVE]) | {"model": "policy", "tool_choice": "sometimes"}
            if dialect == "messages" or name:
                body |= choice(dialect, name or "fly")
            answer = await place.http.post(f"/v1/{PATHS[dialect]}", json=body)
            assert (answer.status_code, "tool_choice" in answer.text) == (400, True)
            none = BODIES[dialect]([ASK], []) | {"model": "policy"} | choice(dialect, None)
            assert (await place.http.post(f"/v1/{PATHS[dialect]}", json=none)).status_code == 400

    asyncio.run(run())
