"""The reward of a program comes from one source; programs that misbehave have typed outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_replies import Scripted

import rollgym
from rollgym.core.errors import EnvError, UsageError
from rollgym.core.messages import ToolCall
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome
from rollgym.pool.base import Step
from rollgym.pool.inline import InlinePool
from rollgym.rewards import CompositeScorer
from rollgym.rewards.function import FunctionScorer
from rollgym.sandbox.cgroup import Cgroup
from rollgym.sandbox.interpreter import find_python
from rollgym.sandbox.namespaces import find_bwrap
from rollgym.sandbox.program_layout import PROGRAM_LIMITS
from rollgym.serve import Program, SubprocessAgent
from rollgym.serve import program_process as process_module
from rollgym.serve.offered_env import OfferedEnv, answer_mcp
from rollgym.serve.program import check_program

pytestmark = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed")
PYTHON = find_python().path
LAKE = "rollgym/FrozenLake-v0"
CLIENT = """
import json, os, sys, time, urllib.error, urllib.request
task = json.load(sys.stdin)
def call(url, body=None):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}
def ask(text="@ F"):
    body = {"model": task["model"], "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return call(task["base_url"] + "/chat/completions", body)["choices"][0]["message"]["content"]
"""
Play = Callable[..., Episode]


@pytest.fixture
def play(serving: Callable[..., Any], tmp_path: Path) -> Play:
    """The episode that a program of these lines plays."""

    def run(lines: str, *, seconds: float = 60.0, turns: int | None = None, **options: Any) -> Episode:
        script = tmp_path / "program.py"
        script.write_text(CLIENT + lines)
        names = set(Program.__dataclass_fields__)
        settings = {name: options.pop(name) for name in list(options) if name in names}
        scorer = options.pop("scorer", None)
        envs = options.pop("envs", None) or InlinePool()
        kwargs = options.pop("env_kwargs", {})
        program = Program(command=f"{PYTHON} -S -E {script}", **settings)
        spec = EpisodeSpec(
            episode_id="e1",
            env_id=LAKE,
            env_kwargs=kwargs,
            task=3,
            limits=Limits(seconds=seconds, turns=turns),
        )

        async def main() -> Episode:
            options.setdefault("api_key", "secret")
            async with serving(**options) as place:
                player = SubprocessAgent(place.server, program, envs=envs)
                try:
                    return await player.play(spec, scorer=scorer)
                finally:
                    await player.close()
                    await envs.close()
                    if scorer is not None:
                        await scorer.close()

        return asyncio.run(main())

    return run


@pytest.mark.parametrize("sandbox", ["namespaces", "none"])
@pytest.mark.parametrize(
    ("lines", "reward", "success"),
    [
        ("open('reward.json', 'w').write(json.dumps({'reward': 0.5, 'success': True}))", 0.5, True),
        ("open('reward.json', 'w').write('0.75')", 0.75, None),
        ("open('reward.txt', 'w').write(' -1.5\\n')", -1.5, None),
        ("call(task['session_url'] + '/end', {}); open('reward.txt', 'w').write('2')", 2.0, None),
    ],
)
def test_a_file_is_the_reward(
    play: Play, sandbox: str, lines: str, reward: float, success: bool | None
) -> None:
    episode = play(f"ask(); {lines}", reward="file", sandbox=sandbox)
    assert (episode.outcome, episode.error) == (Outcome.TERMINATED, None)
    assert (episode.total_reward, episode.success) == (reward, success)


@pytest.mark.parametrize(
    ("source", "lines", "kind"),
    [
        ("file", "pass", "NoReward"),
        ("file", "open('reward.txt', 'w').write('a lot')", "BadReward"),
        ("file", "open('reward.txt', 'w').write('nan')", "BadReward"),
        ("file", "open('reward.json', 'w').write('{\"reward\": 1e999}')", "BadReward"),
        ("file", "open('reward.json', 'w').write('x' * 100_000)", "BadReward"),
        ("file", "os.symlink('/etc/hostname', 'reward.txt')", "BadReward"),
        ("http", "pass", "NoReward"),
        ("http", "call(task['session_url'] + '/end', {}); time.sleep(60)", "NoReward"),
        ("output", "print('done')", "NoReward"),
        ("output", "print('{\"reward\": null}')", "BadReward"),
    ],
)
def test_a_missing_or_invalid_reward_is_a_typed_outcome(
    play: Play, source: str, lines: str, kind: str
) -> None:
    episode = play(f"ask(); {lines}", reward=source)
    assert (episode.outcome, episode.success, episode.length) == (Outcome.ENV_ERROR, None, 1)
    assert episode.error is not None
    assert episode.error.type == kind, episode.error


def test_a_program_cannot_reward_itself_where_the_reward_comes_from_elsewhere(play: Play) -> None:
    """Nor can it read the reward, or act for another session."""
    episode = play(
        "ask(); base = task['session_url'].partition('/session/')[0]\n"
        "assert call(task['session_url'] + '/reward', {'reward': 9})['status'] == 409\n"
        "assert call(base + '/rl/reward', {'reward': 9})['status'] == 409\n"
        "assert call(task['session_url'] + '/end', {'reward': 9})['status'] == 409\n"
        "assert call(base + '/session/other/reward', {'reward': 9})['status'] == 403\n"
        "assert call(base + '/session', {})['status'] == 403\n"
        "assert set(call(task['session_url'])) == {'id', 'open', 'turns'}\n"
        "open('reward.txt', 'w').write('0.5')\n",
        reward="file",
    )
    assert episode.error is None
    assert episode.total_reward == 0.5


def test_http_is_the_reward(play: Play) -> None:
    episode = play(
        "ask(); base = task['session_url'].partition('/session/')[0]\n"
        "assert call(base + '/rl/reward', {'reward': 0.5, 'success': True})['reward'] == 0.5\n",
        reward="http",
    )
    assert (episode.outcome, episode.total_reward, episode.success) == (Outcome.TERMINATED, 0.5, True)


def test_a_function_of_the_episode_is_the_reward(play: Play) -> None:
    scorer = CompositeScorer({"length": (FunctionScorer(lambda episode: episode.length), 1.0)})
    episode = play("ask(); ask('F')", reward="my_module:reward", scorer=scorer)
    assert (episode.outcome, episode.total_reward) == (Outcome.TERMINATED, 2.0)


WALK = """
for direction in ("right", "down") * 12:
    ask()
    result = call(task["session_url"] + "/env/step", {"name": "move", "arguments": {"direction": direction}})
    assert set(result) == {"observation", "over"}, result
    if result["over"]:
        break
"""


def test_the_environment_is_the_reward_and_the_program_does_not_see_it(play: Play) -> None:
    episode = play(
        "assert task['observation'].count('\\n') == 3 and 'goal' in task['instructions']\n"
        "assert [tool['function']['name'] for tool in task['tools']] == ['move']\n"
        "assert call(task['session_url'] + '/env')['over'] is False\n" + WALK,
        reward="environment",
        env_kwargs={"tools": True},
    )
    assert episode.error is None
    env = rollgym.make(LAKE, tools=True)
    env.reset(seed=0, options={"task": 3, "split": "train"})
    rewards = []
    for direction in ("right", "down") * 12:
        call = ToolCall(name="move", arguments={"direction": direction}).to_json()
        _, reward, terminated, truncated, info = env.step(call)
        rewards.append(reward)
        if terminated or truncated:
            break
    expected = Outcome.TERMINATED if terminated else Outcome.TRUNCATED
    assert [turn.reward for turn in episode.turns] == rewards
    assert (episode.outcome, episode.success) == (expected, info["success"])


def test_a_program_that_gives_up_has_failed(play: Play) -> None:
    episode = play("ask()", reward="environment")
    assert (episode.outcome, episode.total_reward, episode.success) == (Outcome.TERMINATED, 0.0, False)


def test_a_text_environment_has_one_tool(play: Play) -> None:
    episode = play(
        "ask()\n"
        "assert [tool['function']['name'] for tool in task['tools']] == ['act']\n"
        "url = task['session_url'] + '/env/step'\n"
        "assert 'P' in call(url, {'action': 'Right'})['observation']\n"
        "assert call(url, {'name': 'act', 'arguments': {'action': 'Left'}})['over'] is False\n"
        "assert call(url, {})['status'] == call(url, {'name': 'fly'})['status'] == 400\n",
        reward="environment",
    )
    assert episode.error is None
    assert episode.outcome is Outcome.TERMINATED


class BrokenPool(InlinePool):
    """Environments that fail at their first step."""

    async def open(self, spec: EpisodeSpec) -> Any:
        lease = await super().open(spec)

        async def step(action: str) -> Step:
            raise EnvError("The lake has dried up.")

        lease.step = step  # type: ignore[method-assign]
        return lease


def test_an_environment_that_fails_is_an_env_error(play: Play) -> None:
    episode = play(
        "ask(); result = call(task['session_url'] + '/env/step', {'action': 'Right'})\n"
        "assert result['status'] == 503, result\ntime.sleep(60)",
        reward="environment",
        envs=BrokenPool(),
    )
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert "dried up" in episode.error.message


HOSTILE: dict[str, tuple[str, Outcome, str | None]] = {
    "hangs": ("ask(); time.sleep(300)", Outcome.TIME_LIMIT, None),
    "never asks": ("time.sleep(300)", Outcome.TIME_LIMIT, None),
    "endless output": ("ask()\nwhile True: print('x' * 100_000)", Outcome.ENV_ERROR, "OutputLimit"),
    "endless errors": (
        "ask()\nwhile True: sys.stderr.write('x' * 100_000)", Outcome.ENV_ERROR, "OutputLimit"
    ),
    "output before a request": ("while True: print('x' * 100_000)", Outcome.ENV_ERROR, "OutputLimit"),
    "fork bomb": ("ask()\nwhile True: os.fork()", Outcome.ENV_ERROR, "ProgramFailed"),
    "kills everything": (
        "ask(); os.kill(-1, 9); time.sleep(1); sys.exit(7)", Outcome.ENV_ERROR, "ProgramFailed"
    ),
    "ends its session": ("ask(); call(task['session_url'] + '/end', {})", Outcome.ENV_ERROR, "NoReward"),
    "ends it and asks": (
        "ask(); call(task['session_url'] + '/end', {}); ask()", Outcome.ENV_ERROR, "ProgramFailed"
    ),
    "ends it at once": ("call(task['session_url'] + '/end', {})", Outcome.ENV_ERROR, "ProgramSilent"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_that_misbehaves_has_a_typed_outcome(
    play: Play, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "MAX_OUTPUT", 2 << 20)
    lines, outcome, kind = HOSTILE[name]
    episode = play(lines, seconds=3.0 if outcome is Outcome.TIME_LIMIT else 60.0, processes=20)
    assert episode.outcome is outcome, episode.error
    assert (episode.error.type if episode.error else None) == kind
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "program.py" not in listed


def test_a_program_that_needs_too_much_memory_has_a_typed_outcome(play: Play) -> None:
    group = Cgroup.make(PROGRAM_LIMITS)
    if group is None:
        pytest.skip("no cgroup can be made here")
    group.close()
    episode = play("ask(); data = []\nwhile True: data.append(b'x' * 10_000_000)", memory_mb=64)
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert episode.error.type == "MemoryLimit", episode.error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "either command or function"),
        ({"command": "a", "function": "b:c"}, "either command or function"),
        ({"command": " "}, "command is empty"),
        ({"command": "a 'b"}, "cannot be split"),
        ({"function": "module"}, "module:name or file.py:name"),
        ({"command": "a", "python": "python3"}, "python requires function"),
        ({"command": "a", "reward": "luck"}, "reward must be one of output, http, file, environment"),
        ({"command": "a", "sandbox": "none", "mounts": ["/opt"]}, "mounts requires sandbox=namespaces"),
        ({"command": "a", "auxiliary": "("}, "not a regular expression"),
        ({"command": "a", "memory_mb": 0}, "memory_mb must be above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Program(**settings)


def test_a_missing_sandbox_is_reported_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgym.serve.program.find_bwrap", lambda: None)
    with pytest.raises(UsageError, match=r"apt install bubblewrap.*sandbox=none"):
        check_program(Program(command="true"))
    check_program(Program(command="true", sandbox="none"))


def test_an_unsandboxed_program_gets_no_secrets_either(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    episode = play(
        "ask(); assert 'hush' not in os.environ.values(), os.environ\n"
        "print(json.dumps({'reward': float(os.environ['MINE'])}))",
        sandbox="none",
        env={"MINE": "3"},
    )
    assert (episode.error, episode.total_reward) == (None, 3.0)


def test_an_mcp_client_plays_the_offered_environment(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official client, against the endpoint itself."""
    mcp = pytest.importorskip("mcp")
    from mcp.client.streamable_http import streamable_http_client

    async def main() -> None:
        async with serving(api_key="secret") as place:
            pool = InlinePool()
            spec = EpisodeSpec(episode_id="m", env_id=LAKE, env_kwargs={"tools": True}, task=3)
            session = place.server.begin(spec, recorded_elsewhere=True)
            session.rewards_from = "environment"
            steps: list[Step] = []
            async with pool_env(pool, spec, steps) as session.env:
                url, key = place.server.session_url(session), place.server.session_key(session)
                for mode in ("auto", "legacy"):
                    http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"})
                    transport = streamable_http_client(f"{url}/mcp", http_client=http)
                    async with http, mcp.Client(transport, mode=mode) as client:
                        (tool,) = (await client.list_tools()).tools
                        assert (tool.name, tool.input_schema["required"]) == ("move", ["direction"])
                        result = await client.call_tool("move", {"direction": "right"})
                        assert (result.is_error, "P" in result.content[0].text) == (False, True)
                        result = await client.call_tool("fly", {})
                        assert result.is_error
                assert len(steps) == 2
                refused = await place.http.post(f"/session/{session.name}/mcp", json={"jsonrpc": "2.0"})
                assert refused.status_code == 401

    asyncio.run(asyncio.wait_for(main(), 60))


def pool_env(pool: InlinePool, spec: EpisodeSpec, steps: list[Step]) -> Any:
    @contextlib.asynccontextmanager
    async def opened() -> Any:
        lease = await pool.open(spec)
        try:
            yield OfferedEnv(lease, await lease.reset(), steps.append, lambda error: None)
        finally:
            await lease.close()
            await pool.close()

    return opened()


def test_messages_that_are_not_json_rpc_are_refused() -> None:
    env = OfferedEnv.__new__(OfferedEnv)

    async def main() -> None:
        for message in ({}, {"method": 3}, {"id": 1, "method": "no/such"}):
            answer = await answer_mcp(env, message)
            assert answer is not None
            assert "error" in answer
        assert await answer_mcp(env, {"method": "notifications/initialized"}) is None

    asyncio.run(main())


def test_a_program_with_tools_plays_by_mcp_alone(play: Play) -> None:
    """The model's calls are passed on to the environment, as an agent framework does."""
    scripted = Scripted("qwen2.5 tools", [[ToolCall(name="move", arguments={"direction": "down"})]] * 30)
    episode = play(
        "messages = [{'role': 'user', 'content': task['observation']}]\n"
        "for number in range(30):\n"
        "    body = {'model': task['model'], 'messages': messages, 'tools': task['tools']}\n"
        "    answer = call(task['base_url'] + '/chat/completions', body)\n"
        "    if 'choices' not in answer: break\n"
        "    messages.append(answer['choices'][0]['message'])\n"
        "    (made,) = messages[-1]['tool_calls']\n"
        "    params = {'name': made['function']['name'],\n"
        "              'arguments': json.loads(made['function']['arguments'])}\n"
        "    body = {'jsonrpc': '2.0', 'id': number, 'method': 'tools/call', 'params': params}\n"
        "    text = call(task['mcp_url'], body)['result']['content'][0]['text']\n"
        "    messages.append({'role': 'tool', 'tool_call_id': made['id'], 'content': text})\n",
        reward="environment",
        env_kwargs={"tools": True},
        inner=scripted.engine,
        tokens=scripted.template,
    )
    assert episode.error is None
    assert episode.outcome in (Outcome.TERMINATED, Outcome.TRUNCATED)
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled[: episode.length]
    assert not any(turn.new_row for turn in episode.turns)


CLIENTS = os.environ.get("ROLLGYM_TEST_CLIENTS", "")


@pytest.mark.skipif(not CLIENTS, reason="ROLLGYM_TEST_CLIENTS does not name an environment")
def test_the_example_with_openai_agents_plays_in_a_sandbox(serving: Callable[..., Any]) -> None:
    """An agent of a framework, with the tools of the environment by MCP, and the recorded tokens exact."""
    python = str(Path(CLIENTS).absolute() / "bin" / "python")
    example = Path(__file__).parents[2] / "examples" / "blackbox_tools.py"
    program = Program(function=f"{example}:play", python=python, reward="environment")
    try:
        check_program(program)
    except UsageError as error:
        pytest.skip(str(error))
    calls = [ToolCall(name="move", arguments={"direction": way}) for way in ("right", "down") * 12]
    scripted = Scripted("qwen2.5 tools", [[call] for call in calls])
    spec = EpisodeSpec(
        episode_id="w", env_id=LAKE, env_kwargs={"tools": True}, task=3, limits=Limits(seconds=120)
    )

    async def main() -> Episode:
        options = {"inner": scripted.engine, "tokens": scripted.template, "api_key": "secret"}
        async with serving(**options) as place:
            player = SubprocessAgent(place.server, program, envs=InlinePool())
            try:
                return await player.play(spec)
            finally:
                await player.close()

    episode = asyncio.run(main())
    assert episode.error is None
    assert episode.outcome in (Outcome.TERMINATED, Outcome.TRUNCATED)
    assert [tool.name for tool in episode.tools] == ["move"]
    assert [turn.action for turn in episode.turns] == [call.to_json() for call in calls][: episode.length]
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled[: episode.length]
    assert not any(turn.new_row for turn in episode.turns)
