"""The token agent in environments with tools, for templates with and without tools."""

import asyncio
import json

import pytest
from talkers import family
from tool_envs import Safe

from rollgym.agents.policy.agent import PolicyAgent, PolicyOptions
from rollgym.chat.tokenizer import MIDDLE
from rollgym.core.agent import Briefing
from rollgym.core.errors import UsageError
from rollgym.core.messages import Message, ToolCall
from rollgym.core.serialization import decode_episode, encode_episode
from rollgym.core.types import EpisodeSpec, Limits, Outcome
from rollgym.pool.inline import InlinePool
from rollgym.rollout.episode_runner import EpisodeRunner
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.imitation.retokenize import retokenize

EVERY = pytest.mark.parametrize(
    "name",
    [
        "qwen2.5 tools",
        "qwen3 tools",
        "smollm3 tools",
        "llama3 tools",
        "mistral tools",
        "gpt-oss tools",
        "llama3",
    ],
)
TURN = ToolCall(name="turn", arguments={"direction": "right", "steps": 2})
PULL = ToolCall(name="pull")


class Script(ScriptedEngine):
    """Emits texts in order; a list of calls is written as the template writes it."""

    def __init__(self, name, replies, **kwargs):
        self.agent: PolicyAgent | None = None
        self.name = name
        self.replies = iter(replies)
        super().__init__(self.next_reply, **kwargs)

    def next_reply(self, request):
        template = self.agent.chat
        reply = next(self.replies)
        text = reply if isinstance(reply, str) else template.call_text(reply, Safe().tools)
        ids = template.codec.encode([text], MIDDLE)
        end = template.tools.end_id if not isinstance(reply, str) else None
        return [*ids, template.facts.stop_ids[0] if end is None else end]


def run(name, replies, limits=None, **options):
    engine = Script(name, replies, context_length=options.pop("context", 100_000))
    agent = PolicyAgent(engine, family(name), PolicyOptions(max_tokens=400, **options))
    engine.agent = agent

    async def play():
        pool = InlinePool(["tool_envs"])
        try:
            spec = EpisodeSpec(
                episode_id="e", env_id="tool_envs:Safe", task=1, limits=limits or Limits(turns=9)
            )
            return await EpisodeRunner(spec, pool, agent).run()
        finally:
            await pool.close()

    return asyncio.run(play()), agent, engine


@EVERY
def test_an_episode_with_tools(name):
    episode, agent, engine = run(name, [[TURN], "I wait.", [TURN], [PULL]])
    assert episode.error is None, episode.error
    assert episode.outcome is Outcome.TERMINATED
    assert [turn.info["valid"] for turn in episode.turns] == [True, False, True, True]
    assert episode.turns[0].action == TURN.to_json()
    assert episode.turns[0].message["tool_calls"][0]["function"]["name"] == "turn"
    assert episode.turns[1].message == {"role": "assistant", "content": "I wait."}
    assert episode.tools == Safe().tools
    assert agent.totals()["format_misses"] == 1
    assert agent.totals()["forms"]["tool_call"] == 3
    decode = agent.chat.codec.decode
    assert "Turn the dial." in decode(engine.requests[0].prompt_ids)
    assert "The dial shows 2." in decode(engine.requests[1].prompt_ids)
    assert "No valid tool call. The tools are: turn, pull, note." in decode(engine.requests[2].prompt_ids)
    # Trained on exactly what was sampled, and every result has mask 0.
    trained = token_episode(episode)
    sampled = [int(i) for sequence in trained.sequences for i in sequence.ids[sequence.action_positions]]
    assert sampled == [i for turn in episode.turns for i in turn.action_ids]
    assert "The dial" not in decode(sampled)


@EVERY
def test_an_episode_with_tools_survives_its_line(name):
    episode, _, _ = run(name, [[TURN], [PULL]])
    assert decode_episode(encode_episode(episode)) == episode


@pytest.mark.parametrize("name", ["qwen2.5 tools", "llama3 tools", "mistral tools"])
def test_a_malformed_call_is_explained_in_the_models_own_form(name):
    broken = {"qwen2.5 tools": "<tool_call>{", "llama3 tools": '{"name": ', "mistral tools": "[TOOL_CALLS]["}[
        name
    ]
    episode, agent, engine = run(name, [broken, [PULL]])
    assert [turn.info["valid"] for turn in episode.turns] == [False, True]
    prompt = agent.chat.codec.decode(engine.requests[1].prompt_ids)
    assert "The tool call is malformed" in prompt
    assert "Answer with JSON" not in prompt.split("malformed")[1]


def test_several_calls_of_a_turn_are_one_action():
    episode, agent, engine = run("qwen2.5 tools", [[TURN, TURN], [PULL]])
    assert json.loads(episode.turns[0].action) == [json.loads(TURN.to_json())] * 2
    assert "The dial shows 4." in agent.chat.codec.decode(engine.requests[1].prompt_ids)


@pytest.mark.parametrize("history", ["none", "actions"])
def test_without_history_results_are_text(history):
    episode, agent, engine = run("mistral tools", [[TURN], [TURN], [PULL]], history=history)
    assert episode.error is None
    prompt = agent.chat.codec.decode(engine.requests[2].prompt_ids)
    assert "The dial shows 4." in prompt
    assert "[TOOL_RESULTS]" not in prompt


def test_dropped_turns_leave_no_result_without_its_call():
    first, agent, engine = run("mistral tools", [[TURN]] * 6 + [[PULL]])
    needed = max(len(request.prompt_ids) for request in engine.requests)
    episode, agent, engine = run(
        "mistral tools", [[TURN]] * 6 + [[PULL]], overflow="drop_oldest", context=needed + 300
    )
    assert episode.error is None
    assert agent.totals()["dropped_turns"] > 0
    assert any(turn.new_row for turn in episode.turns)


def test_long_results_are_cut():
    replies = [[ToolCall(name="note", arguments={"text": "word " * 60})], [PULL]]
    _, _, engine = run("qwen2.5 tools", replies)
    context = len(engine.requests[1].prompt_ids) + 400 - 50  # max_tokens are kept free
    episode, agent, _ = run("qwen2.5 tools", replies, overflow="truncate_observation", context=context)
    assert episode.error is None
    assert agent.totals()["cut_observations"] == 1
    assert "characters left out" in agent.chat.codec.decode(episode.turns[1].prompt_ids)


def test_the_state_after_the_last_turn_is_valued_with_its_result():
    episode, agent, _ = run("qwen2.5 tools", [[TURN], [TURN]], limits=Limits(turns=2))
    assert episode.outcome is Outcome.TURN_LIMIT
    text = agent.chat.codec.decode(episode.final_ids)
    assert "<tool_response>\nThe dial shows 4.\n</tool_response>" in text


@EVERY
def test_demonstrations_are_learned_as_calls(name):
    """An expert's action becomes the call that the model would have to sample."""
    episode, agent, _ = run(name, [[TURN], [PULL]])
    plain = episode.__class__(
        spec=episode.spec,
        outcome=episode.outcome,
        turns=tuple(
            turn.__class__(
                observation=turn.observation, action=turn.action, info=turn.info, terminated=turn.terminated
            )
            for turn in episode.turns
        ),
        instructions=episode.instructions,
        tools=episode.tools,
        reset_info=episode.reset_info,
    )
    learned = retokenize(plain, agent)
    assert [turn.action_ids for turn in learned.turns] == [turn.action_ids for turn in episode.turns]
    assert [turn.prompt_ids for turn in learned.turns] == [turn.prompt_ids for turn in episode.turns]


@pytest.mark.parametrize("name", ["qwen2.5 tools", "llama3"])
def test_a_policy_of_one_game_needs_no_schemas(name):
    episode, agent, engine = run(name, [[TURN], [PULL]], instructions=False)
    assert episode.error is None
    assert episode.turns[0].info["valid"]
    first, second = (agent.chat.codec.decode(request.prompt_ids) for request in engine.requests)
    assert "Turn the dial." not in first
    assert "The dial shows 2." in second


def test_a_format_can_be_set():
    _, agent, engine = run("qwen2.5 tools", ['```json\n{"name": "pull"}\n```'], tool_format="json")
    assert "Each line is a tool" in agent.chat.codec.decode(engine.requests[0].prompt_ids)
    with pytest.raises(UsageError, match="tool_format must be auto or one of"):
        PolicyOptions(tool_format="xml")


def test_examples_of_the_format_are_refused():
    agent = PolicyAgent(ScriptedEngine([1]), family("qwen2.5 tools"), PolicyOptions(format_examples=2))
    briefing = Briefing(
        spec=EpisodeSpec(episode_id="e", env_id="tool_envs:Safe"), instructions="Play.", tools=Safe().tools
    )
    with pytest.raises(UsageError, match="format_examples"):
        agent.player(briefing)


def test_channels_are_read_in_plain_text_environments():
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Up"
    engine = Script("gpt-oss tools", [reply])
    agent = PolicyAgent(engine, family("gpt-oss tools"), PolicyOptions(max_tokens=99))
    engine.agent = agent
    player = agent.player(Briefing(spec=EpisodeSpec(episode_id="e", env_id="x"), instructions="Play."))
    assert asyncio.run(player.act("Go.", {})).action == "Up"


def test_messages_of_another_kind_are_ignored():
    agent = PolicyAgent(ScriptedEngine([1]), family("qwen2.5 tools"), PolicyOptions())
    builder = agent.prompt_builder("Play.", tools=Safe().tools)
    for info in ({"messages": "hello"}, {"messages": [3]}, {"messages": [{"role": "nobody"}]}):
        builder.observe("Go.", info)
        builder.conversation.undo_observe()
    assert Message(role="user", content="Go.").text == "Go."
