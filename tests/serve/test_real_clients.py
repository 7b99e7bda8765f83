"""Clients and agent frameworks of others, unchanged but for URL and key, in their own virtual environment.

Set ROLLGYM_TEST_CLIENTS to the environment that tests/serve/clients/make_venv.py makes (`make test-clients`).
"""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_episode import check_episode, environment, run_program, serving_mcp

import rollgym
from rollgym.chat import ChatTemplate, Conversation, load_tokenizer
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.types import Episode
from rollgym.serve.env_mcp import EnvMCPServer
from rollgym.serve.env_player import ServedEnv
from rollgym.trainer.data.sequences import token_episode

FOLDER = os.environ.get("ROLLGYM_TEST_CLIENTS", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="ROLLGYM_TEST_CLIENTS does not name an environment: run `make test-clients`"
)
CLIENTS = Path(__file__).parent / "clients"
PYTHON = str(Path(FOLDER).absolute() / "bin" / "python")
WEATHER = ToolCall(name="get_weather", arguments={"city": "Oslo"})
WEATHER_SCRIPT: list[Any] = [[WEATHER], "It rains in Oslo."]
ANSWER = ToolCall(name="final_answer", arguments={"answer": "It rains in Oslo."})
CODE: list[Any] = [
    'Thought: I look it up.\n<code>\nanswer = get_weather(city="Oslo")\nprint(answer)\n</code>',
    'Thought: Now I know.\n<code>\nfinal_answer("It rains in Oslo.")\n</code>',
]
SHELL: list[Any] = [
    [ToolCall(name="bash", arguments={"command": "echo hello"})],
    [ToolCall(name="bash", arguments={"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})],
]
CASES: dict[str, tuple[list[Any], str, list[bool]]] = {
    # Replies of the model, the last line of the client, and which turns start a new row.
    "openai_chat": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    "openai_responses": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    "anthropic": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    "agents chat": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    "agents responses": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    # These write the calls of their history as text after the replies.
    "smolagents tool": ([[WEATHER], [ANSWER]], "It rains in Oslo.", [False, True]),
    "smolagents code": (CODE, "It rains in Oslo.", [False, True]),
    "mini_swe_agent": (SHELL, "Submitted", [False, False]),
}


# mini-swe-agent does not stream.
RUNS = [
    (client, form) for client in CASES for form in ("whole", "stream")[: 1 + (client != "mini_swe_agent")]
]


@pytest.mark.parametrize(("client", "form"), RUNS)
def test_a_tool_using_episode_of_a_real_client_is_recorded_exactly(
    serving: Callable[..., Any], client: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies, answer, new_rows = CASES[client]

    async def run(url: str) -> None:
        printed = await run_client(client, form, url, tmp_path)
        assert printed.strip().splitlines()[-1].strip() == answer

    # The stop string of smolagents' code agent ends a reply before the end of the turn.
    check_episode(serving, monkeypatch, replies, new_rows, run, cut=client == "smolagents code")


async def run_client(client: str, form: str, url: str, folder: Path) -> str:
    """What a client prints that has only a URL and a key."""
    env = environment(url, folder) | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    script, *words = client.split()
    return await run_program([PYTHON, str(CLIENTS / f"use_{script}.py"), *words, form], env, folder)


def test_an_mcp_client_of_openai_agents_plays_an_environment(tmp_path: Path) -> None:
    served, episodes = ServedEnv(env_id="rollgym/FrozenLake-v0", split="test"), list[Episode]()

    async def run() -> Any:
        async with serving_mcp(EnvMCPServer(served, episodes.append)) as url:
            words = [PYTHON, str(CLIENTS / "use_agents_mcp.py"), f"{url}/mcp"]
            return json.loads(await run_program(words, environment("", tmp_path), tmp_path))

    tools, start, *seen = asyncio.run(run())
    assert tools == ["act", "start_episode"]
    (episode,) = episodes
    assert start.endswith(episode.turns[0].observation)
    observations = [*(turn.observation for turn in episode.turns[1:]), episode.final_observation]
    assert len(seen) == 4
    assert [text.partition("\n\nThe episode is over")[0] for text in seen[: episode.length]] == observations
    # The same actions in the environment itself lead to the same observations.
    env = rollgym.make("rollgym/FrozenLake-v0")
    observation, _ = env.reset(
        seed=episode.spec.env_seed, options={"task": episode.spec.task, "split": "test"}
    )
    replayed = [observation, *(env.step(turn.action)[0] for turn in episode.turns)]
    assert replayed == [episode.turns[0].observation, *observations]


WEATHER_TOOL = ToolSpec(
    name="get_weather",
    description="The weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def taught_model(template: ChatTemplate, folder: Path) -> tuple[Any, list[tuple[int, ...]]]:
    """The built-in policy, taught one conversation by heart, and the replies in it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    conversation = Conversation(template, "Be brief.", tools=[WEATHER_TOOL])
    replies, positions, targets = [], [], []
    said: list[Any] = ["How is Oslo?", [Message(role="tool", content="Rain in Oslo.", name="get_weather")]]
    texts = (template.call_text([WEATHER], [WEATHER_TOOL]), "It rains in Oslo.")
    for observation, text in zip(said, texts, strict=True):
        conversation.observe(observation)
        start, reply = len(conversation.prompt_ids), template.encode_reply(text)
        conversation.reply(reply)
        assert not conversation.new_row
        replies.append(reply)
        positions += range(start - 1, start - 1 + len(reply))
        targets += reply
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*conversation.prompt_ids]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        logits = model(input_ids=ids).logits[0, positions]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
        if loss.item() < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01
    return model, replies


@pytest.mark.parametrize("form", ["stream", "whole"])
def test_the_openai_client_streams_with_tools_from_a_real_engine(
    serving: Callable[..., Any], form: str, tmp_path: Path
) -> None:
    from rollgym.engines.embedded.engine import EmbeddedEngine
    from rollgym.trainer.builtin_policy.model import make_policy

    policy = make_policy(["rollgym/FrozenLake-v0"], tmp_path / "policy", size="tiny", context=1024)
    template = ChatTemplate(load_tokenizer(policy.path))
    model, replies = taught_model(template, policy.path)

    async def run() -> list[Episode]:
        engine = EmbeddedEngine(model, threads=1, device="cpu")
        async with serving(inner=engine, tokens=template, temperature=0.0) as place:
            finished = place.server.episodes()
            printed = await run_client("openai_chat", form, place.server.url, tmp_path)
            assert printed.strip() == "It rains in Oslo."
            await place.end("episode-7")
        await engine.close()
        return [episode async for episode in finished]

    (episode,) = asyncio.run(run())
    assert [turn.action_ids for turn in episode.turns] == replies
    (row,) = token_episode(episode).sequences
    assert row.ids[row.action_positions].tolist() == [i for reply in replies for i in reply]
    first, second = episode.turns
    assert first.message is not None
    (call,) = first.message["tool_calls"]
    assert (call["function"]["name"], second.observation) == ("get_weather", "Rain in Oslo.")
    assert all(logprob > -0.1 for turn in episode.turns for logprob in turn.logprobs)
