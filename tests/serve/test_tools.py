"""Tools through the endpoint: each dialect and template family, token-exact, whole and as a stream."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialect_wire import DIALECTS, ask
from scripted_replies import Scripted
from talkers import TOOL_FAMILIES

from rollgym.chat import Conversation
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.serialization import decode_episode, encode_episode
from rollgym.core.tools import read_calls
from rollgym.core.types import Episode
from rollgym.io.run_dir import RunFolder, read_run
from rollgym.trainer.data.sequences import token_episode

Serving = Callable[..., Any]
MOVE = ToolSpec(
    name="move",
    description="Move the player.",
    parameters={"type": "object", "properties": {"direction": {"type": "string"}}, "required": ["direction"]},
)
LOOK = ToolSpec(name="look", description="Look around.")
UP, DOWN = (ToolCall(name="move", arguments={"direction": word}) for word in ("up", 'down "x"'))
SEE = ToolCall(name="look")
ONE_CALL = ("llama3 tools", "gpt-oss tools")
"""Families that call one tool a turn."""
SYSTEM, ASK = (
    Message(role="system", content="Reach the door."),
    Message(role="user", content="You see a door."),
)


def play(serving: Serving, scripted: Scripted, talk: Callable[[Any], Any], **options: Any) -> list[Episode]:
    async def run() -> list[Episode]:
        async with serving(inner=scripted.engine, tokens=scripted.template, **options) as place:
            finished = place.server.episodes()
            await talk(place)
        return [episode async for episode in finished]

    return asyncio.run(run())


def result(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", [*sorted(TOOL_FAMILIES), "gemma", "smollm2"])
def test_a_tool_using_episode_is_recorded_exactly(
    serving: Serving, name: str, dialect: str, stream: bool
) -> None:
    final = "<|channel|>final<|message|>It opens." if name == "gpt-oss tools" else "It opens."
    scripted = Scripted(name, [[UP], [DOWN], final])
    replies: list[Message] = []

    async def talk(place: Any) -> None:
        said = [SYSTEM, ASK]
        for text in ("It is dark.", "A door.", ""):
            reply = await ask(place.http, dialect, "one", said, [MOVE, LOOK], stream=stream)
            replies.append(reply)
            said += [reply, *(result(call, text) for call in reply.tool_calls)]
        await place.end("one", reward=1.0)

    (episode,) = play(serving, scripted, talk)
    assert [[(call.name, call.arguments) for call in reply.tool_calls] for reply in replies] == [
        [("move", UP.arguments)],
        [("move", DOWN.arguments)],
        [],
    ]
    assert replies[-1].text == "It opens."
    assert len({call.id for reply in replies for call in reply.tool_calls}) == 2
    # Replayed through the template, the conversation gives the ids that the engine was sent and sampled.
    replay = Conversation(scripted.template, SYSTEM.text, tools=[MOVE, LOOK])
    replay.observe(ASK.text)
    for number, ids in enumerate(scripted.sampled):
        assert scripted.engine.requests[number].prompt_ids == replay.prompt_ids
        assert episode.turns[number].action_ids == ids
        assert episode.turns[number].new_row == replay.new_row
        replay.reply(ids)
        calls = replay.last_message.tool_calls
        if calls:
            text = ("It is dark.", "A door.")[number]
            replay.observe([replace(result(calls[0], text), name="move")])
    if not any(turn.new_row for turn in episode.turns):
        (row,) = token_episode(episode).sequences
        assert row.ids.tolist() == [*scripted.engine.requests[-1].prompt_ids, *scripted.sampled[-1]]
        assert len(row.action_positions) == sum(map(len, scripted.sampled))
    assert read_calls(episode.turns[0].action) == (UP,)
    assert episode.turns[1].observation == "It is dark."
    assert episode.tools == (MOVE, LOOK)
    assert [Message.from_openai(turn.message or {}) for turn in episode.turns] == replies
    (told,) = episode.turns[0].info["messages"]
    assert (told["role"], told["content"], told["name"]) == ("tool", "It is dark.", "move")
    assert decode_episode(encode_episode(episode)) == episode


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", sorted(set(TOOL_FAMILIES) - set(ONE_CALL)))
def test_parallel_calls_are_answered_in_any_order(
    serving: Serving, name: str, dialect: str, stream: bool
) -> None:
    scripted = Scripted(name, [[UP, SEE], "Done."])

    async def talk(place: Any) -> None:
        reply = await ask(place.http, dialect, "one", [ASK], [MOVE, LOOK], stream=stream)
        first, second = reply.tool_calls
        assert (first.name, second.name) == ("move", "look")
        results = [result(second, "A hall."), result(first, "You moved.")]
        await ask(place.http, dialect, "one", [ASK, reply, *results], [MOVE, LOOK], stream=stream)
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [(call.name, call.arguments) for call in read_calls(episode.turns[0].action)] == [
        ("move", UP.arguments),
        ("look", {}),
    ]
    assert episode.turns[1].observation == "A hall.\n\nYou moved."
    assert not episode.turns[1].new_row
    replay = Conversation(scripted.template, tools=[MOVE, LOOK])
    replay.observe(ASK.text)
    replay.reply(scripted.sampled[0])
    move, look = replay.last_message.tool_calls
    replay.observe([result(look, "A hall."), result(move, "You moved.")])
    assert scripted.engine.requests[1].prompt_ids == replay.prompt_ids


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_one_call_is_shown_where_the_client_asks_for_one(serving: Serving, dialect: str) -> None:
    scripted = Scripted("qwen2.5 tools", [[UP, SEE], [UP, SEE]])
    choice: dict[str, Any] = {"parallel_tool_calls": False}
    none: dict[str, Any] = {"tool_choice": "none"}
    if dialect == "messages":
        choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        none = {"tool_choice": {"type": "none"}}

    async def talk(place: Any) -> None:
        reply = await ask(place.http, dialect, "one", [ASK], [MOVE, LOOK], **choice)
        (call,) = reply.tool_calls
        said = [ASK, reply, result(call, "ok")]
        text = await ask(place.http, dialect, "one", said, [MOVE, LOOK], **none)
        assert not text.tool_calls
        assert '"move"' in text.text
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled
    assert not episode.turns[1].new_row


@pytest.mark.parametrize("text", ['<tool_call>{"name": "move"', "<tool_call>\nnonsense\n</tool_call>"])
def test_a_malformed_call_is_text_and_costs_a_turn(serving: Serving, text: str) -> None:
    scripted = Scripted("qwen2.5 tools", [text, "Sorry."])

    async def talk(place: Any) -> None:
        reply = await ask(place.http, "chat", "one", [ASK], [MOVE])
        assert (reply.text, reply.tool_calls) == (text, ())
        again = Message(role="user", content="That was no call.")
        await ask(place.http, "chat", "one", [ASK, reply, again], [MOVE])
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled
    assert not episode.turns[1].new_row


@pytest.mark.parametrize("dialect", DIALECTS)
def test_reasoning_is_a_part_of_its_own_and_may_be_dropped_by_the_client(
    serving: Serving, dialect: str
) -> None:
    scripted = Scripted("qwen3 tools", ["<think>\nUp it is.\n</think>\n\nGo up.", "Yes."])

    async def talk(place: Any) -> None:
        for stream in (False, True):
            scripted._texts[:] = ["<think>\nUp it is.\n</think>\n\nGo up.", "Yes."]
            reply = await ask(place.http, dialect, f"s{stream}", [ASK], [MOVE], stream=stream)
            assert (reply.reasoning.strip(), reply.text.strip()) == ("Up it is.", "Go up.")
            dropped = Message(role="assistant", content=reply.text)
            said = [ASK, dropped, Message(role="user", content="Sure?")]
            await ask(place.http, dialect, f"s{stream}", said, [MOVE], stream=stream)
            session = place.server.sessions.open[f"s{stream}"]
            # The template drops old reasoning: a new row, in which the reply has no reasoning.
            assert [turn.new_row for turn in session.turns] == [False, True]

    play(serving, scripted, talk)


def test_sub_agents_and_compacted_histories_are_rows_of_their_own(serving: Serving) -> None:
    """Main agent, sub-agent with other tools, main agent again, then a summary in place of the history."""
    scripted = Scripted("qwen2.5 tools", [[UP], [SEE], "A hall.", [DOWN], [UP]])

    async def talk(place: Any) -> None:
        main, sub = [SYSTEM, ASK], [Message(role="system", content="Look."), ASK]
        first = await ask(place.http, "chat", "one", main, [MOVE])
        seen = await ask(place.http, "chat", "one", sub, [LOOK])
        sub += [seen, result(seen.tool_calls[0], "A hall")]
        await ask(place.http, "chat", "one", sub, [LOOK])
        main += [first, result(first.tool_calls[0], "A hall.")]
        await ask(place.http, "chat", "one", main, [MOVE])
        summary = Message(role="user", content="So far: you went up and down.")
        await ask(place.http, "chat", "one", [SYSTEM, summary], [MOVE])
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.new_row for turn in episode.turns] == [False, True, False, True, True]
    requests = [request.prompt_ids for request in scripted.engine.requests]
    rows = [row.ids.tolist() for row in token_episode(episode).sequences]
    assert rows == [[*requests[i], *scripted.sampled[i]] for i in (0, 2, 3, 4)]
    # The main agent goes on with the ids that were sampled for it.
    assert requests[3][: len(requests[0]) + len(scripted.sampled[0])] == (*requests[0], *scripted.sampled[0])


def test_what_a_session_keeps_to_continue_from_is_bounded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollgym.serve import session as module

    monkeypatch.setattr(module, "MAX_KEPT_TOKENS", 3000)
    scripted = Scripted("qwen2.5 tools", ["Yes."] * 40)

    async def talk(place: Any) -> None:
        for number in range(30):
            said = [Message(role="user", content=f"{number} {'x' * 300}")]
            await ask(place.http, "responses", "one", said)
        session = place.server.sessions.open["one"]
        assert 1 < len(session.conversations) < 30
        assert sum(kept.num_tokens for kept in session.conversations.values()) <= 3000
        assert 1 < len(session.histories) < 30
        assert sum(history.num_tokens for history in session.histories.values()) <= 3000
        monkeypatch.setattr(module, "MAX_CONVERSATIONS", 3)
        await ask(place.http, "responses", "one", [ASK])
        assert (len(session.conversations), len(session.histories)) == (3, 3)
        refused = await place.http.post("/session/one/v1/responses", json={"model": "policy", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "turn_limit")

    play(serving, scripted, talk, max_turns=31)


def test_other_tools_begin_a_row(serving: Serving) -> None:
    scripted = Scripted("qwen2.5 tools", [[UP], "Yes."])

    async def talk(place: Any) -> None:
        reply = await ask(place.http, "chat", "one", [ASK], [MOVE])
        await ask(place.http, "chat", "one", [ASK, reply, result(reply.tool_calls[0], "ok")], [MOVE, LOOK])
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.new_row for turn in episode.turns] == [False, True]


def test_dialects_can_be_mixed_in_a_session(serving: Serving) -> None:
    scripted = Scripted("qwen2.5 tools", [[UP], [DOWN], "Done."])

    async def talk(place: Any) -> None:
        said = [SYSTEM, ASK]
        for dialect in DIALECTS:
            reply = await ask(place.http, dialect, "one", said, [MOVE])
            said += [reply, *(result(call, "ok") for call in reply.tool_calls)]
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.new_row for turn in episode.turns] == [False, False, False]


def test_several_replies_are_siblings_in_rows_of_their_own(serving: Serving) -> None:
    scripted = Scripted("qwen2.5 tools", [[UP], [DOWN], [SEE], "Done."])

    async def talk(place: Any) -> None:
        body = {"model": "policy", "messages": [ASK.to_openai()], "n": 3, "logprobs": True}
        body["tools"] = [MOVE.to_openai(), LOOK.to_openai()]
        answer = (await place.http.post("/session/one/v1/chat/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == sum(map(len, scripted.sampled))
        chosen = Message.from_openai(answer["choices"][1]["message"])
        said = [ASK, chosen, result(chosen.tool_calls[0], "ok")]
        await ask(place.http, "chat", "one", said, [MOVE, LOOK])
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    assert [turn.new_row for turn in episode.turns] == [False, True, True, True]
    requests = scripted.engine.requests
    assert len({request.prompt_ids for request in requests[:3]}) == 1
    assert len({request.sampling.seed for request in requests[:3]}) == 3
    row = (*requests[1].prompt_ids, *scripted.sampled[1])
    assert requests[3].prompt_ids[: len(row)] == row


def test_a_response_continues_an_earlier_one_by_its_id(serving: Serving) -> None:
    scripted = Scripted("qwen2.5 tools", [[UP], "Done.", "Again."])

    async def talk(place: Any) -> None:
        post = place.http.post
        tools = [{"type": "function", "name": "move", "parameters": MOVE.parameters}]
        body = {"model": "policy", "instructions": "Walk.", "tools": tools}
        first = (await post("/v1/responses", json=body | {"input": "Go."})).json()
        (call,) = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        more = {"previous_response_id": first["id"], "input": [output]}
        second = await post("/v1/responses", json=body | more)
        assert second.json()["output"][0]["content"][0]["text"] == "Done."
        assert len(place.server.sessions.open) == 1
        third = await post("/v1/responses", json=body | {"input": "x", "previous_response_id": "resp_9_nope"})
        assert (third.status_code, third.json()["error"]["param"]) == (404, "previous_response_id")
        named = "/session/other/v1/responses"
        other = await post(named, json=body | more)
        assert other.status_code == 404

    (episode,) = play(serving, scripted, talk)
    assert [turn.new_row for turn in episode.turns] == [False, False]


def test_tokens_are_counted_as_they_are_sent(serving: Serving) -> None:
    scripted = Scripted("qwen2.5 tools", ["Hello."])

    async def talk(place: Any) -> None:
        from dialect_wire import messages_body

        body = messages_body([SYSTEM, ASK], [MOVE]) | {"model": "policy"}
        counted = await place.http.post("/v1/messages/count_tokens", json=body)
        assert list(place.server.sessions.open) == []
        await ask(place.http, "messages", "one", [SYSTEM, ASK], [MOVE])
        assert counted.json() == {"input_tokens": len(scripted.engine.requests[0].prompt_ids)}
        del body["max_tokens"]
        assert (await place.http.post("/v1/messages/count_tokens", json=body)).status_code == 200
        assert (await place.http.post("/v1/messages", json=body)).status_code == 400

    play(serving, scripted, talk)


def test_a_stop_string_after_a_call_ends_the_reply(serving: Serving) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call> Observation: I made it up'
    scripted = Scripted("qwen2.5 tools", [text])

    async def talk(place: Any) -> None:
        reply = await ask(place.http, "chat", "one", [ASK], [LOOK], stop=["Observation:"])
        assert [call.name for call in reply.tool_calls] == ["look"]
        assert reply.text.strip() == ""
        await place.end("one")

    (episode,) = play(serving, scripted, talk)
    (turn,) = episode.turns
    assert turn.action_ids == scripted.sampled[0][: len(turn.action_ids)]
    assert len(turn.action_ids) < len(scripted.sampled[0])


@pytest.mark.parametrize("repeat", ["", "</code>"])
def test_a_client_may_append_the_stop_string_that_ended_a_reply(serving: Serving, repeat: str) -> None:
    scripted = Scripted("qwen2.5 tools", ["<code>x</code>", "Yes."])

    async def talk(place: Any) -> None:
        for number in range(2):
            scripted._texts[:] = ["<code>x</code>", "Yes."]
            body = {"model": "policy", "stop": ["</code>"], "messages": [ASK.to_openai()]}
            path = "/session/one/v1" if number else "/v1"
            text = (await place.http.post(f"{path}/chat/completions", json=body)).json()["choices"][0]
            assert text["message"]["content"] == "<code>x"
            body["messages"] += [{"role": "assistant", "content": f"<code>x{repeat}"}, ASK.to_openai()]
            assert (await place.http.post(f"{path}/chat/completions", json=body)).status_code == 200

    for episode in play(serving, scripted, talk):
        assert [turn.new_row for turn in episode.turns] == [False, False]


ODD_CALLS = [
    r'{"name": "move", "arguments": {"direction": "\ud800"}}',
    r'{"name": "\ud800", "arguments": {}}',
    '{"name": "move", "arguments": {"direction": NaN}}',
    '{"name": "move", "arguments": {"n": 1e999, "m": ' + "9" * 400 + "}}",
    '{"name": "move", "arguments": ' + '{"a": ' * 200 + "1" + "}" * 201,
    '{"name": "move", "arguments": []}',
    '{"name": "move", "arguments": {}, "arguments": {"direction": "up"}}',
    '{"name": "fly", "arguments": {"direction": "up"}}',
    "[]",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("text", ODD_CALLS)
def test_whatever_the_model_writes_as_a_call_is_sent_and_recorded(
    serving: Serving, tmp_path: Path, text: str, dialect: str, stream: bool
) -> None:
    scripted = Scripted("qwen2.5 tools", [f"<tool_call>\n{text}\n</tool_call>", "Done."])
    folder = RunFolder.create(tmp_path / "run", {"schema": 1, "kind": "serve"})

    async def talk(place: Any) -> None:
        reply = await ask(place.http, dialect, "one", [ASK], [MOVE], stream=stream)
        after = [result(call, "ok") for call in reply.tool_calls] or [ASK]
        await ask(place.http, dialect, "one", [ASK, reply, *after], [MOVE], stream=stream)
        await place.end("one")

    (episode,) = play(serving, scripted, talk, folder=folder)
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled
    assert read_run(tmp_path / "run")[1] == [episode]
