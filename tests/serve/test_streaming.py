"""Streams: text arrives while the reply is being sampled, and never anything that the reply does not keep."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dialect_wire import BODIES, DIALECTS, PATHS, STREAMS, ask, events
from scripted_replies import Scripted

from rollgym.core.errors import AgentError
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.engines.base import GenerateRequest, Generation, OnToken
from rollgym.testing import ScriptedEngine

Serving = Callable[..., Any]
NAME = "qwen2.5 tools"
MOVE = ToolSpec(name="move", description="Move.")
ASK = Message(role="user", content="You see a door.")
UP = ToolCall(name="move", arguments={"direction": "up"})
TEXT = "I open the door, and then I go up and up and up."


class Gated(ScriptedEngine):
    """An engine that waits after some tokens until it is resumed."""

    after = 0

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        count = 0

        def counted(token_id: int) -> None:
            nonlocal count
            count += 1
            on_token(token_id)
            if count == self.after:
                self._running.clear()

        return await super().stream(request, counted)

    async def paused(self) -> None:
        """Wait until it waits."""
        while self._running.is_set():
            await asyncio.sleep(0)


class GatedReplies(Scripted):
    """Scripted replies of an engine that waits after some tokens."""

    engine: Gated

    def __init__(self, text: str, after: int = 0, kind: type[Gated] = Gated) -> None:
        super().__init__(NAME, [text])
        self.engine = kind(self._reply, context_length=100_000)
        self.engine.after = after


def size(scripted: Scripted, text: str) -> int:
    """The number of tokens of a text."""
    return len(scripted.template.codec.encode([text], "\n"))


@asynccontextmanager
async def streaming(
    place: Any, dialect: str, tools: Sequence[ToolSpec] = (), **more: Any
) -> AsyncIterator[Any]:
    """A streamed request, as an iterator over its events as text."""
    body = BODIES[dialect]([ASK], tools) | {"model": "policy", "stream": True} | more
    async with place.http.stream("POST", f"/session/one/v1/{PATHS[dialect]}", json=body) as answer:
        assert answer.status_code == 200

        async def parts() -> AsyncIterator[str]:
            buffer = ""
            async for chunk in answer.aiter_text():
                *whole, buffer = (buffer + chunk).split("\n\n")
                for part in whole:
                    yield f"{part}\n\n"
            assert not buffer

        yield parts()


def shown(dialect: str, text: str) -> str:
    """The text of the reply in events."""
    found = []
    for value in events(text):
        match dialect:
            case "chat":
                found += [choice["delta"].get("content") or "" for choice in value["choices"]]
            case "responses":
                found.append(value["delta"] if value["type"] == "response.output_text.delta" else "")
            case _:
                found.append(value.get("delta", {}).get("text", ""))
    return "".join(found)


async def until_shown(dialect: str, parts: AsyncIterator[str], text: str) -> str:
    """Read events until they show a text."""
    read = ""
    while shown(dialect, read) != text:
        read += await anext(parts)
    return read


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_arrives_while_the_reply_is_being_sampled(serving: Serving, dialect: str) -> None:
    scripted = GatedReplies(TEXT)
    scripted.engine.after = size(scripted, "I open the door,")

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            async with streaming(place, dialect) as parts:
                read = await until_shown(dialect, parts, "I open the door,")
                session = place.server.sessions.open["one"]
                assert (scripted.engine.active, session.turns) == ({"0_one/0"}, [])
                await scripted.engine.paused()
                await scripted.engine.resume()
                read += "".join([part async for part in parts])
            assert STREAMS[dialect](events(read)).text == TEXT
            assert [turn.action_ids for turn in session.turns] == scripted.sampled

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_before_a_call_is_not_held_back_and_the_call_waits_until_it_is_one(
    serving: Serving, dialect: str
) -> None:
    call = Scripted(NAME, []).template.tools.format.write([UP])
    scripted = GatedReplies(f"I go up.\n{call}")
    scripted.engine.after = size(scripted, f"I go up.\n{call}")  # all but the end of the turn

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            async with streaming(place, dialect, [MOVE]) as parts:
                early = await until_shown(dialect, parts, "I go up.")
                assert "move" not in early.replace('"tools"', "")[early.find("I go") :]
                await scripted.engine.paused()
                await scripted.engine.resume()
                read = early + "".join([part async for part in parts])
            message = STREAMS[dialect](events(read))
            assert (message.text, [call.arguments for call in message.tool_calls]) == (
                "I go up.",
                [UP.arguments],
            )

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_turns_out_malformed_is_never_streamed_as_one(serving: Serving, dialect: str) -> None:
    good = '<tool_call>\n{"name": "move", "arguments": {}}\n</tool_call>'
    text = f"Well.\n{good}\n<tool_call>\nno\n</tool_call>"
    scripted = Scripted(NAME, [text])

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            reply = await ask(place.http, dialect, "one", [ASK], [MOVE], stream=True)
            assert (reply.text, reply.tool_calls) == (text, ())

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_characters_are_whole(serving: Serving, dialect: str) -> None:
    text = "Grüße 漢字 🙂🙂 und 🙂"
    scripted = Scripted(NAME, [text])
    ids = scripted.template.codec.encode([text], "\n")
    assert any("\ufffd" in scripted.template.codec.decode([i]) for i in ids)  # characters of several tokens

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            async with streaming(place, dialect) as parts:
                read = [part async for part in parts]
            assert not any("\\ufffd" in part or '\\ud83d"' in part for part in read)
            assert shown(dialect, "".join(read)) == text

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize("stop", ["</code>", "x</", "\n\n", "x"])
def test_stop_strings_are_never_streamed(serving: Serving, dialect: str, stop: str) -> None:
    text = "Run <code>y = 1\n\nx</code> and more that nobody sees" * 3
    scripted = Scripted(NAME, [text, text])
    field = "stop" if dialect == "chat" else "stop_sequences"

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            plain = await ask(place.http, dialect, "two", [ASK], **{field: [stop]})
            async with streaming(place, dialect, **{field: [stop]}) as parts:
                read = [part async for part in parts]
            assert shown(dialect, "".join(read)) == plain.text == text[: text.index(stop)]
            sessions = place.server.sessions.open
            assert sessions["one"].turns[0].action_ids == sessions["two"].turns[0].action_ids

    asyncio.run(run())


def test_a_stop_string_in_reasoning_is_shown_neither_whole_nor_as_a_stream(serving: Serving) -> None:
    text = "<think>\nI see. STOP it.\n</think>\n\nGo."
    scripted = Scripted("qwen3 tools", [text, text])

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            for stream in (False, True):
                reply = await ask(place.http, "chat", str(stream), [ASK], stream=stream, stop=["STOP"])
                assert (reply.reasoning, reply.text) == ("I see. ", "")

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_reasoning_is_streamed_before_the_text(serving: Serving, dialect: str) -> None:
    text = "<think>\nThe door is shut.\n</think>\n\nI open it."
    scripted = Scripted("qwen3 tools", [text, text])

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            reply = await ask(place.http, dialect, "one", [ASK], [MOVE], stream=True)
            plain = await ask(place.http, dialect, "two", [ASK], [MOVE])
            assert (reply.reasoning, reply.text) == (plain.reasoning, plain.text)
            assert reply.text == "I open it."

    asyncio.run(run())


def test_an_empty_thought_is_not_a_part_of_the_text(serving: Serving) -> None:
    text = "<think>\n\n</think>\n\nI open it."
    scripted = Scripted("qwen3 tools", [text, text])

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            for stream in (False, True):
                reply = await ask(place.http, "chat", str(stream), [ASK], [MOVE], stream=stream)
                assert (reply.reasoning, reply.text) == ("", "I open it.")

    asyncio.run(run())


def test_several_replies_are_streamed_side_by_side(serving: Serving) -> None:
    scripted = Scripted(NAME, ["First reply.", [UP]])

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            async with streaming(place, "chat", [MOVE], n=2, stream_options={"include_usage": True}) as parts:
                values = events("".join([part async for part in parts]))
            for index, (text, calls) in enumerate((("First reply.", 0), ("", 1))):
                mine = [
                    value | {"choices": [choice for choice in value["choices"] if choice["index"] == index]}
                    for value in values
                ]
                message = STREAMS["chat"](mine)
                assert (message.text, len(message.tool_calls)) == (text, calls)
            assert values[-1]["usage"]["completion_tokens"] == sum(map(len, scripted.sampled))
            session = place.server.sessions.open["one"]
            assert [turn.action_ids for turn in session.turns] == scripted.sampled

    asyncio.run(run())


class Failing(Gated):
    """An engine that fails after some tokens."""

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        async def fail() -> Generation:
            await self.paused()
            raise AgentError("The engine is away.")

        both = {asyncio.ensure_future(super().stream(request, on_token)), asyncio.ensure_future(fail())}
        done, left = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        return done.pop().result()


@pytest.mark.parametrize("after", [0, 8])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_that_fails(serving: Serving, dialect: str, after: int) -> None:
    """Before the first text the response has an error status; later the stream ends with an error."""
    scripted = GatedReplies(TEXT, after, Failing)

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            if not after:

                async def away() -> None:
                    raise AgentError("The engine is away.")

                place.spy.before = away
                body = BODIES[dialect]([ASK], []) | {"model": "policy", "stream": True}
                answer = await place.http.post(f"/session/one/v1/{PATHS[dialect]}", json=body)
                assert (answer.status_code, "The engine is away." in answer.text) == (503, True)
            else:
                async with streaming(place, dialect) as parts:
                    last = [part async for part in parts][-1]
                value = json.loads(last.partition("data: ")[2])
                error = value if dialect == "responses" else value["error"]
                assert error["message"] == "The engine is away."
                assert last.startswith("event: error") == (dialect != "chat")
            assert place.server.sessions.open["one"].turns == []
            assert place.server.sessions.open["one"].running == set()

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_leaves_in_the_middle_aborts_the_reply(serving: Serving, dialect: str) -> None:
    scripted = GatedReplies(TEXT, 10)

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template, max_requests=1) as place:
            async with streaming(place, dialect) as parts:
                while not shown(dialect, await anext(parts)):
                    pass
            while not scripted.engine.cancelled:
                await asyncio.sleep(0.01)
            session = place.server.sessions.open["one"]
            while session.running:
                await asyncio.sleep(0.01)
            assert session.turns == []
            await scripted.engine.resume()
            scripted._texts.append("Again.")
            scripted.engine.after = 0
            assert (await ask(place.http, dialect, "one", [ASK])).text == "Again."

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_session_that_ends_in_the_middle_ends_the_stream_with_an_error(
    serving: Serving, dialect: str
) -> None:
    scripted = GatedReplies(TEXT, 10)

    async def run() -> None:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            async with streaming(place, dialect) as parts:
                while not shown(dialect, await anext(parts)):
                    pass
                assert (await place.end("one"))["turns"] == 0
                rest = [part async for part in parts]
            assert "has ended" in rest[-1]

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_real_engine_streams_the_ids_of_a_plain_request(serving: Serving, dialect: str) -> None:
    """Also with a stop string, for which the reply is sampled in pieces."""
    limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
    stops = {"chat": {"stop": ["qz"]}, "messages": {"stop_sequences": ["qz"]}}.get(dialect, {})

    async def run() -> None:
        async with serving(seed=3) as place:
            for number, more in enumerate(({}, stops)):
                opened = {"sampling_seed": 7}
                bodies = []
                for name in ("plain", "stream"):
                    session = f"{name}{number}"
                    await place.http.post("/session", json={"id": session, **opened})
                    body = BODIES[dialect]([ASK], []) | {"model": "policy", limit: 70} | more
                    body["stream"] = name == "stream"
                    answer = await place.http.post(f"/session/{session}/v1/{PATHS[dialect]}", json=body)
                    bodies.append(answer)
                turns = [
                    place.server.sessions.open[f"{name}{number}"].turns[0] for name in ("plain", "stream")
                ]
                assert turns[0].action_ids == turns[1].action_ids
                assert turns[0].logprobs == turns[1].logprobs
                assert shown(dialect, bodies[1].text) == turns[0].action

    asyncio.run(run())
