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
from scripted_replies import Scripted
from talkers import family

from rollgym.core.messages import ToolCall
from rollgym.core.types import Episode, Outcome
from rollgym.serve import session as session_module
from rollgym.serve.requests import ChatRequest
from rollgym.trainer.data.sequences import token_episode

FOLDER = os.environ.get("ROLLGYM_TEST_CLIENTS", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="ROLLGYM_TEST_CLIENTS does not name an environment: run `make test-clients`"
)
CLIENTS = Path(__file__).parent / "clients"
NAME = "qwen2.5 tools"
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
    "agents_chat": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    "agents_responses": (WEATHER_SCRIPT, "It rains in Oslo.", [False, False]),
    # These write the calls of their history as text after the replies.
    "smolagents_tool": ([[WEATHER], [ANSWER]], "It rains in Oslo.", [False, True]),
    "smolagents_code": (CODE, "It rains in Oslo.", [False, True]),
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
    scripted = Scripted(NAME, replies)
    requests: list[ChatRequest] = []
    original = session_module.continued

    def noted(template: Any, past: Any, request: ChatRequest) -> Any:
        requests.append(request)
        return original(template, past, request)

    monkeypatch.setattr(session_module, "continued", noted)

    async def run() -> list[Episode]:
        async with serving(inner=scripted.engine, tokens=scripted.template) as place:
            finished = place.server.episodes()
            printed = await run_client(client, form, place.server.url, tmp_path)
            assert printed.strip().splitlines()[-1].strip() == answer
            ending = {"reward": 1.0, "success": True, "done": True}
            key = {"authorization": "Bearer session/episode-7"}
            told = await place.http.post("/rl/reward", json=ending, headers=key)
            assert told.status_code == 200, told.text
        return [episode async for episode in finished]

    (episode,) = asyncio.run(run())
    assert (episode.spec.episode_id, episode.outcome, episode.success) == (
        "episode-7",
        Outcome.TERMINATED,
        True,
    )
    assert [turn.new_row for turn in episode.turns] == new_rows
    recorded = [turn.action_ids for turn in episode.turns]
    if client == "smolagents_code":  # its stop string ends a reply before the end of the turn
        assert all(len(ids) < len(said) for ids, said in zip(recorded, scripted.sampled, strict=True))
        scripted.sampled = [said[: len(ids)] for ids, said in zip(recorded, scripted.sampled, strict=True)]
    assert recorded == scripted.sampled
    # What the engine was sent is what the template writes for the messages and tools of the request ...
    prompts = [list(request.prompt_ids) for request in scripted.starts]
    tokenizer = family(NAME)
    for request, ids in zip(requests, prompts, strict=True):
        assert tokenizer.decode(ids) == rendered(tokenizer, request)
    # ... and a row consists of such a prompt and the ids that were sampled after it, nothing tokenized again.
    last = [i for i in range(len(new_rows)) if i + 1 == len(new_rows) or new_rows[i + 1]]
    rows = [row.ids.tolist() for row in token_episode(episode).sequences]
    assert rows == [[*prompts[i], *scripted.sampled[i]] for i in last]


async def run_client(client: str, form: str, url: str, folder: Path) -> str:
    """What a client prints that has only a URL and a key."""
    env = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(folder),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "session/episode-7",
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "session/episode-7",
        "ANTHROPIC_MODEL": "policy",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    process = await asyncio.create_subprocess_exec(
        str(Path(FOLDER).absolute() / "bin" / "python"),
        str(CLIENTS / f"use_{client}.py"),
        form,
        env=env,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(240):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


def rendered(tokenizer: Any, request: ChatRequest) -> str:
    """A request as the tokenizer's own chat template writes it."""
    messages = [{"role": "system", "content": request.system}] if request.system else []
    for message in request.messages:
        body = message.to_openai()
        for call in body.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        messages.append(body)
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=[tool.to_openai() for tool in request.tools] or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text
