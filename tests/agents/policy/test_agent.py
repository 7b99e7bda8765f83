"""The token agent: what it sends, what it reports, and how it ends."""

import asyncio
from typing import Any

import pytest
from spelt import END, EOS, Spelt, chatml, spell

from rollgym.agents.parsing import PARSERS
from rollgym.agents.policy.agent import PolicyAgent, PolicyOptions
from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, make_agent
from rollgym.core.errors import AgentError, ContextFull, MissingExtra, UnknownName, UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.engines.base import WeightSource
from rollgym.testing import ScriptedEngine

SETUP = AgentSetup(env_id="rollgym/FrozenLake-v0")
PROMPT = "<start>s:Walk.\n\nReply with your action only, and nothing else.<end>\n"


def brief(**spec: Any) -> Briefing:
    values = {"episode_id": "e1", "env_id": "test/Env-v0", "sampling_seed": 5, **spec}
    return Briefing(spec=EpisodeSpec(**values), instructions="Walk.")


def agent(
    reply: Any = (*b"Up", END), tokenizer: Any = None, engine: Any = None, **options: Any
) -> PolicyAgent:
    return PolicyAgent(engine or ScriptedEngine(reply), tokenizer or Spelt(), PolicyOptions(**options))


def act(policy: PolicyAgent, *observations: str, **spec: Any) -> list[AgentAction]:
    async def episode() -> list[AgentAction]:
        player = policy.player(brief(**spec))
        return [await player.act(observation, {}) for observation in observations]

    return asyncio.run(episode())


def test_a_turn_reports_what_was_added_and_what_was_sampled():
    first, second = act(agent(), "hi", "ok")
    assert first.prompt_ids == spell(f"{PROMPT}<start>u:hi<end>\n<start>a:")
    assert second.prompt_ids == spell("\n<start>u:ok<end>\n<start>a:")
    for move in (first, second):
        assert move.action == move.response == "Up"
        assert move.action_ids == (*b"Up", END)
        assert move.logprobs == (-0.5, -0.5, -0.5)
        assert move.finish_reason == "stop"
        assert (move.policy_version, move.version_spans, move.new_row) == (0, ((0, 3),), False)
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(first.prompt_ids) + 3 + len(second.prompt_ids)
    assert second.usage.completion_tokens == 3


def test_requests_extend_one_another_under_unique_ids():
    engine = ScriptedEngine([*b"Up", END])
    policy = agent(engine=engine, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=9)
    act(policy, "hi", "ok")
    act(policy, "hi")
    first, second, other = engine.requests
    assert second.prompt_ids[: len(first.prompt_ids) + 3] == (*first.prompt_ids, *b"Up", END)
    assert len({request.request_id for request in engine.requests}) == 3
    assert first.session == second.session != other.session
    assert first.session.startswith("e1")
    assert first.sampling.stop_ids == (END, EOS)
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.max_tokens) == (0.1, 9)


def test_seeds_depend_on_the_sampling_seed_and_the_turn_alone():
    def seeds(**spec: Any) -> list[int]:
        engine = ScriptedEngine([END])
        act(agent(engine=engine), "hi", "ok", **spec)
        return [request.sampling.seed for request in engine.requests]

    assert seeds() == seeds(episode_id="another", env_seed=3)
    assert len({*seeds(), *seeds(sampling_seed=6)}) == 4


def test_rows_can_be_put_together_from_the_moves():
    def drops(messages: Any, add_generation_prompt: bool, **kwargs: Any) -> str:
        hidden = [{**m, "content": m["content"].replace("!", "")} for m in messages]
        return chatml(hidden, add_generation_prompt)

    replies = iter([b"a", b"b!", b"c", b"d!", b"e"])
    engine = ScriptedEngine(lambda request: [*next(replies), END])
    policy = agent(engine=engine, tokenizer=Spelt(drops))

    moves = act(policy, *["go"] * 5)
    assert [move.new_row for move in moves] == [False, False, True, False, True]
    row: tuple[int, ...] = ()
    for move, request in zip(moves, engine.requests, strict=True):
        row = move.prompt_ids if move.new_row else row + move.prompt_ids
        assert request.prompt_ids == row
        row += move.action_ids
    assert policy.totals()["new_rows"] == 2


def test_versions_that_change_in_the_middle_are_reported():
    async def episode() -> AgentAction:
        engine = ScriptedEngine([*b"Up" * 10, END], version=3)
        task = asyncio.create_task(agent(engine=engine).player(brief()).act("hi", {}))
        while not engine.active:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # once for each token
        await asyncio.sleep(0)
        await engine.update_weights(4, WeightSource(tensors={}))
        return await task

    move = asyncio.run(episode())
    assert move.policy_version == 3
    assert [version for version, _ in move.version_spans] == [3, 4]


def test_an_action_is_taken_out_of_the_reply():
    policy = agent(spell("so<answer>Left</answer>") + (END,), parser="answer")
    (move,) = act(policy, "hi")
    assert (move.action, move.response) == ("Left", "so<answer>Left</answer>")
    assert policy.totals()["format_misses"] == 0
    misses = agent(spell("Left") + (END,), parser="answer")
    assert act(misses, "hi")[0].action == "Left"
    assert misses.totals()["format_misses"] == 1


def test_a_reply_that_is_cut_off_is_played_as_it_is():
    (move,) = act(agent(spell("abcdef"), max_tokens=3), "hi")
    assert (move.action, move.finish_reason) == ("abc", "length")


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({}, PROMPT + "<start>u:hi<end>\n<start>a:"),
        (
            {"system": False},
            "<start>u:Walk.\n\nReply with your action only, and nothing else.\n\nhi<end>\n<start>a:",
        ),
        ({"instructions": False}, "<start>u:hi<end>\n<start>a:"),
        ({"instructions": False, "system": False}, "<start>u:hi<end>\n<start>a:"),
    ],
)
def test_where_the_instructions_stand(options, start):
    first, second = act(agent(**options), "hi", "ok")
    assert first.prompt_ids == spell(start)
    assert second.prompt_ids == spell("\n<start>u:ok<end>\n<start>a:")


def test_a_full_context_is_a_separate_outcome():
    prompt = len(spell("<start>u:hi<end>\n<start>a:"))
    policy = agent(engine=ScriptedEngine([*b"Up", END], context_length=prompt), instructions=False)
    with pytest.raises(ContextFull, match=rf"^The conversation has {prompt} tokens before turn 1,"):
        act(policy, "hi")
    assert policy.totals()["context_full"] == 1


def test_a_reply_is_as_long_as_there_is_room():
    prompt = len(spell("<start>u:hi<end>\n<start>a:"))
    engine = ScriptedEngine([*b"Up", END], context_length=prompt + 2)
    policy = agent(engine=engine, instructions=False, max_tokens=50)
    (move,) = act(policy, "hi")
    assert engine.requests[0].sampling.max_tokens == 2
    assert (move.action, move.finish_reason) == ("Up", "length")
    with pytest.raises(ContextFull, match="before turn 2"):
        act(policy, "hi", "ok")


def test_cancelling_a_turn_stops_the_engine():
    engine = ScriptedEngine([*b"Up" * 10, END], delay=10)

    async def episode() -> None:
        player = agent(engine=engine).player(brief())
        task = asyncio.create_task(player.act("hi", {}))
        while not engine.active:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await player.leave()

    asyncio.run(episode())
    assert engine.cancelled == [engine.requests[0].request_id]
    assert not engine.active
    assert engine.forgotten == [engine.requests[0].session]


def test_an_aborted_reply_is_not_an_action():
    engine = ScriptedEngine([*b"Up" * 10, END], delay=0.001)

    async def episode() -> None:
        task = asyncio.create_task(agent(engine=engine).player(brief()).act("hi", {}))
        while not engine.active:
            await asyncio.sleep(0)
        await engine.abort(list(engine.active))
        await task

    with pytest.raises(AgentError, match="reply of turn 1 was aborted"):
        asyncio.run(episode())


def test_a_template_that_fails_later_is_the_agents_failure():
    def picky(messages: Any, add_generation_prompt: bool, **kwargs: Any) -> str:
        if any(m["content"] == "Up" for m in messages):
            raise ValueError("not Up")
        return chatml(messages, add_generation_prompt)

    with pytest.raises(AgentError, match=r"cannot continue: The chat template refuses .*not Up"):
        act(agent(tokenizer=Spelt(picky)), "hi", "ok")


def test_players_share_no_conversation():
    policy = agent()

    async def both() -> list[AgentAction]:
        first, second = policy.player(brief()), policy.player(brief(episode_id="e2"))
        moves = await asyncio.gather(first.act("a", {}), second.act("b", {}))
        return [*moves, await first.act("c", {})]

    first, second, third = asyncio.run(both())
    assert first.prompt_ids == spell(f"{PROMPT}<start>u:a<end>\n<start>a:")
    assert second.prompt_ids == spell(f"{PROMPT}<start>u:b<end>\n<start>a:")
    assert third.prompt_ids == spell("\n<start>u:c<end>\n<start>a:")


def test_an_engine_that_was_given_stays_open_and_one_that_was_made_is_closed():
    engine = ScriptedEngine([END])
    asyncio.run(agent(engine=engine).close())
    assert not engine.closed
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(ScriptedEngine([END]))
        return engines[-1]

    policy = agent(engine=make)
    asyncio.run(policy.close())
    assert engines == []
    act(policy, "hi")
    act(policy, "hi")
    asyncio.run(policy.close())
    assert [engine.closed for engine in engines] == [True]


def test_the_agent_says_what_it_is_and_what_it_took():
    policy = agent(max_tokens=8)
    moves = act(policy, "hi", "ok")
    assert isinstance(policy, Agent)
    assert policy.describe()["max_tokens"] == 8
    assert policy.describe()["template_text"] == "{instructions}\n\n{format}"
    totals = policy.totals()
    assert (totals["requests"], totals["completion_tokens"]) == (2, 6)
    assert totals["prompt_tokens"] == 2 * len(moves[0].prompt_ids) + 3 + len(moves[1].prompt_ids)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "No model given: pass model=DIR"),
        ({"model": "nowhere"}, "There is no folder nowhere"),
        ({"model": 3}, "No model given"),
        (
            {"model": ".", "temprature": 1},
            "called 'temprature'. Did you mean temperature",
        ),
        ({"model": ".", "top_p": 0}, r"Agent 'lm': sampling needs 0 < top_p <= 1"),
        ({"model": ".", "max_tokens": 0}, r"Agent 'lm': sampling needs max_tokens >= 1"),
        ({"model": ".", "max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"model": ".", "temperature": "hot"}, "Agent 'lm': must be real number, not str"),
        ({"model": ".", "parser": "tea leaves"}, "There is no parser called 'tea leaves'"),
        ({"model": ".", "parser": 3}, "parser must be text, not 3"),
        ({"model": ".", "dtype": "int4"}, "dtype must be auto, float32, bfloat16 or float16, not 'int4'"),
        ({"model": ".", "max_batch": 0}, "max_batch must be a whole number of at least 1, not 0"),
        ({"model": ".", "system": "yes"}, "system must be true or false, not 'yes'"),
        ({"model": ".", "chat_kwargs": 1}, "chat_kwargs must be a JSON object, not 1"),
        ({"model": "."}, "The folder . does not hold a tokenizer: tokenizer.json is missing"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=sentence):
        make_agent("lm", SETUP, **options)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UsageError, match="does not hold a model: config.json is missing"):
        make_agent("lm", SETUP, model=str(tmp_path))


def test_without_torch_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("rollgym.agents.policy.agent.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"^Agent 'lm' needs .*pip install .*\[train\]"):
        make_agent("lm", SETUP, model=str(tmp_path))


def test_every_parser_can_be_named():
    for name in PARSERS:
        assert PolicyOptions(parser=name).parser == name
    with pytest.raises(UnknownName):
        PolicyOptions(parser="none such")
