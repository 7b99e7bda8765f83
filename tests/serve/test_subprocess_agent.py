"""Black-box programs as players: real processes, typed ends, and a scheduler that takes them for granted."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_replies import Scripted

from rollgym.core.errors import AgentError, UsageError
from rollgym.core.messages import ToolCall
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.io.run_dir import RunFolder, read_run
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.sandbox.interpreter import find_python
from rollgym.serve import Program, SubprocessAgent
from rollgym.trainer.builtin_policy.model import make_policy
from rollgym.trainer.data.sequences import token_episode

Serving = Callable[..., Any]
PYTHON = find_python().path
"""A Python that a sandbox can run."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "blackbox_agent.py"
CLIENT = """
import json, os, sys, time, urllib.error, urllib.request
told = json.load(sys.stdin)
def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)
def ask(*said):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 4}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]
def say(path, **body):
    return post(os.environ["ROLLGYM_SESSION"] + path, body)
"""


def spec(name: str = "e1", **limits: Any) -> EpisodeSpec:
    return EpisodeSpec(episode_id=name, env_id="test/Program-v0", task=4, limits=Limits(**limits))


@pytest.fixture
def run_program(serving: Serving, tmp_path: Path) -> Callable[..., Episode]:
    """The episode that a program of these lines plays."""

    def run(lines: str, limits: dict[str, Any] | None = None, **options: Any) -> Episode:
        script = tmp_path / "program.py"
        script.write_text(CLIENT + lines)
        timeout, before = options.pop("timeout", 60.0), options.pop("before", None)
        given = {name: options.pop(name) for name in ("reward", "sandbox") if name in options}
        program = Program(command=f"{PYTHON} -S -E {script}", **given)

        async def play() -> Episode:
            async with serving(**options) as place:
                place.spy.before = before
                player = SubprocessAgent(place.server, program, timeout)
                try:
                    episode = await player.play(spec(**limits or {}), {"goal": "G"})
                finally:
                    await player.close()
                assert place.server.sessions.open == {}
                return episode

        return asyncio.run(play())

    return run


def test_a_program_plays_and_its_last_line_is_the_reward(run_program: Callable[..., Episode]) -> None:
    episode = run_program(
        "first = ask('@ F'); ask('@ F', first, 'F @'); print('done')\n"
        "print(json.dumps({'reward': 0.75, 'success': True}))"
    )
    assert (episode.outcome, episode.total_reward, episode.success) == (Outcome.TERMINATED, 0.75, True)
    assert [turn.observation for turn in episode.turns] == ["@ F", "F @"]
    assert [turn.new_row for turn in episode.turns] == [False, False]
    assert episode.reset_info == {"goal": "G"}
    (row,) = token_episode(episode).sequences
    assert len(row.action_positions) == sum(len(turn.action_ids) for turn in episode.turns)
    assert episode.turns[0].seconds.step > 0


def test_a_program_gets_its_task_and_can_reward_each_turn(run_program: Callable[..., Episode]) -> None:
    episode = run_program(
        "assert told['task'] == 4 and told['goal'] == 'G' and told['episode_id'] == 'e1', told\n"
        "first = ask('@ F'); say('/reward', reward=0.5)\n"
        "ask('@ F', first, 'F @'); say('/reward', reward=2, success=False)\n"
        "ask('something else'); say('/end', truncated=True)\n"
        "time.sleep(60)",
        reward="http",
    )
    assert [turn.reward for turn in episode.turns] == [0.5, 2.0, 0.0]
    assert [turn.new_row for turn in episode.turns] == [False, False, True]
    assert (episode.outcome, episode.success) == (Outcome.TRUNCATED, False)


@pytest.mark.parametrize(
    ("lines", "outcome", "kind", "said"),
    [
        ("ask('@ F'); sys.exit('no way')", "env_error", "ProgramFailed", "ended with exit code 1: no way"),
        ("sys.exit(3)", "env_error", "ProgramFailed", "ended with exit code 3"),
        ("pass", "env_error", "ProgramSilent", "without a request to the model"),
        ("ask('@ F'); os.kill(os.getpid(), 9)", "worker_lost", "ProgramFailed", "killed by SIGKILL"),
        ("ask('@ F'); print('{\"reward\": \"much\"}')", "env_error", "BadReward", "no valid reward"),
        ("ask('@ F'); print('1.0')", "env_error", "NoReward", "the last line of its output must be"),
        ("ask('@ F'); ask('F ' * 400)", "token_limit", None, None),
    ],
)
@pytest.mark.parametrize("sandbox", ["namespaces", "none"])
def test_every_way_to_fail_has_its_outcome(
    run_program: Callable[..., Episode],
    sandbox: str,
    lines: str,
    outcome: str,
    kind: str | None,
    said: str | None,
) -> None:
    episode = run_program(lines, sandbox=sandbox)
    assert episode.outcome.value == outcome
    assert (episode.error.type if episode.error else None) == kind
    assert episode.length == lines.count("ask('@ F')")
    assert said is None or (episode.error is not None and said in episode.error.message)


TOOL_PROGRAM = """
tool = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
def chat(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [tool]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
messages = [{"role": "user", "content": "Go."}]
messages.append(chat(messages))
(call,) = messages[-1]["tool_calls"]
messages.append({"role": "tool", "tool_call_id": call["id"], "content": "You moved."})
assert chat(messages)["content"] == "Done."
url = os.environ["ANTHROPIC_BASE_URL"].partition("/session/")[0] + "/rl/reward"
post(url, {"reward": 1.0, "success": True})
"""


def test_a_program_that_calls_tools_is_recorded_by_its_parts(run_program: Callable[..., Episode]) -> None:
    """It reports the reward to the server's address: its key names the session."""
    scripted = Scripted("qwen2.5 tools", [[ToolCall(name="move")], "Done."])
    episode = run_program(
        TOOL_PROGRAM, inner=scripted.engine, tokens=scripted.template, api_key="secret", reward="http"
    )
    assert (episode.outcome, episode.total_reward, episode.success) == (Outcome.TERMINATED, 1.0, True)
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled
    assert [tool.name for tool in episode.tools] == ["move"]
    assert episode.turns[0].action == '{"name": "move", "arguments": {}}'
    assert (episode.turns[0].message or {})["tool_calls"][0]["function"]["name"] == "move"
    assert episode.turns[0].info["messages"][0]["content"] == "You moved."
    assert not episode.turns[1].new_row


def test_the_errors_of_a_program_are_kept(run_program: Callable[..., Episode]) -> None:
    episode = run_program("ask('@ F'); print('x' * 100_000); raise KeyError('here')")
    assert episode.error is not None
    assert episode.error.type == "ProgramFailed"
    assert "line" in episode.error.traceback
    assert episode.error.message.endswith("KeyError: 'here'")


def test_limits_end_the_program(run_program: Callable[..., Episode]) -> None:
    loop = "said = ['@ F']\nwhile True: said += [ask(*said), 'F @']"
    assert run_program(loop, {"turns": 2}).outcome is Outcome.TURN_LIMIT
    episode = run_program(loop, {"tokens": 30})
    assert episode.outcome is Outcome.TOKEN_LIMIT
    assert episode.length < 10


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_with_its_children(
    run_program: Callable[..., Episode], tmp_path: Path
) -> None:
    note = tmp_path / "child"
    episode = run_program(
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid)); ask('@ F'); time.sleep(300)",
        timeout=6.0,
        sandbox="none",
    )
    assert episode.outcome is Outcome.TIME_LIMIT
    assert gone(int(note.read_text()))


@pytest.mark.slow
def test_children_that_outlive_a_program_are_ended(
    run_program: Callable[..., Episode], tmp_path: Path
) -> None:
    note = tmp_path / "child"
    episode = run_program(
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid)); ask('@ F')\n"
        "print(json.dumps({'reward': 1}), flush=True)",
        sandbox="none",
    )
    assert (episode.outcome, episode.total_reward) == (Outcome.TERMINATED, 1.0)
    assert gone(int(note.read_text()))


def gone(pid: int) -> bool:
    """Return whether a process ends eventually; an unreaped one counts as ended."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_an_engine_that_fails_is_an_engine_error(run_program: Callable[..., Episode]) -> None:
    calls: list[int] = []

    async def fail_later() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise AgentError("The engine is away.")

    episode = run_program("ask('@ F', ask('@ F'), 'F @')", before=fail_later)
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error is not None
    assert "The engine is away." in episode.error.message


def test_a_program_that_does_not_exist_is_refused_at_once(serving: Serving) -> None:
    async def run() -> None:
        async with serving() as place:
            for sandbox in ("namespaces", "none"):
                with pytest.raises(UsageError, match="Program .* not found"):
                    SubprocessAgent(place.server, Program(command="no-such-program --fast", sandbox=sandbox))
            with pytest.raises(UsageError, match="command is empty"):
                SubprocessAgent(place.server, [])
            with pytest.raises(UsageError, match="time limit"):
                SubprocessAgent(place.server, "true", 0)

    asyncio.run(run())


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    """A model with room for whole games; its tokenizer is that of the other one."""
    folder = tmp_path_factory.mktemp("lake") / "lake"
    made = make_policy(["rollgym/FrozenLake-v0"], folder, size="tiny", context=2048)
    engine = EmbeddedEngine(made.path, threads=1, device="cpu")
    yield engine
    asyncio.run(engine.close())


@pytest.mark.slow
def test_episodes_of_programs_are_written_and_the_example_plays(
    serving: Serving, lake: EmbeddedEngine, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", {"schema": 1})
    task = EpisodeSpec(episode_id="lake", env_id="rollgym/FrozenLake-v0", task=3)

    async def run() -> Episode:
        async with serving(folder=folder, inner=lake, api_key="secret", temperature=1.0) as place:
            program = Program(command=f"{sys.executable} {EXAMPLE}", sandbox="none")
            return await SubprocessAgent(place.server, program, timeout=120).play(task)

    episode = asyncio.run(run())
    assert episode.outcome is Outcome.TERMINATED, episode.error
    assert episode.success is not None
    assert 1 <= episode.length <= 12
    assert "G" in episode.turns[0].observation
    _, (read,) = read_run(tmp_path / "run")
    assert read == episode


def test_the_example_ends_its_own_session_when_started_by_hand(
    serving: Serving, lake: EmbeddedEngine
) -> None:
    async def run() -> Episode:
        async with serving(inner=lake) as place:
            finished = place.server.episodes()
            surroundings = {
                "OPENAI_BASE_URL": f"{place.server.url}/session/mine/v1",
                "OPENAI_MODEL": "policy",
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(EXAMPLE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **surroundings},
            )
            out, _ = await process.communicate(b'{"task": 7}')
            episode: Episode = await asyncio.wait_for(anext(finished), 60)
            assert json.loads(out) == {"reward": episode.total_reward, "success": episode.success}
            return episode

    assert asyncio.run(run()).outcome is Outcome.TERMINATED


def test_a_scheduler_plays_groups_with_programs(serving: Serving, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        CLIENT + "first = ask('@ F'); ask('@ F', first, 'F @'); print(json.dumps({'reward': len(first)}))"
    )

    async def run() -> Any:
        async with serving() as place:
            player = SubprocessAgent(place.server, [PYTHON, "-S", "-E", str(script)])
            source = EnvSource(env_id="test/Program-v0", tasks=None, limits=Limits(turns=8, seconds=60))
            config = SchedulerConfig(max_in_flight=2, groups=GroupPolicy(size=2))
            async with Scheduler(TaskSampler([source], seed=5), player, player, config) as scheduler:
                groups = await scheduler.take(2)
            await player.close()
            return groups

    groups = asyncio.run(run())
    assert len(groups) == 2
    for episode in (episode for group in groups for episode in group.episodes):
        assert episode.outcome is Outcome.TERMINATED, episode.error
        assert episode.total_reward == len(episode.turns[0].action)
        assert len(token_episode(episode).sequences) == 1
