"""The shell of an episode, its end, and the expert."""

from collections.abc import Callable

import pytest
from terminal_actions import bash, call, submit

import rollgym
from rollgym.checks import check
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.seeding import derive_rng
from rollgym.envs.terminal.env import TerminalEnv
from rollgym.envs.terminal.families.base import LEVELS
from rollgym.envs.terminal.generate import KINDS
from rollgym.envs.terminal.types import Check, TerminalTask, file

MakeEnv = Callable[..., TerminalEnv]
TASK = TerminalTask(
    family="files",
    kind="",
    level=1,
    instruction="Write 7 to a.txt, and run.sh so that it doubles its input.",
    parameters={},
    tree={"data/x.txt": file("one\ntwo\n")},
    checks=(
        Check(kind="text", path="a.txt", expected="7"),
        Check(kind="run", command="bash run.sh in", files={"in": "4\n"}, expected="8"),
    ),
)
SOLUTION = "echo 7 > a.txt; echo 'echo $((2 * $(cat $1)))' > run.sh"


def begin(env: TerminalEnv, task: TerminalTask = TASK) -> str:
    """Start an episode of a given task."""
    env._source.load = lambda _: task  # type: ignore[method-assign]
    return env.reset(seed=0)[0]


def test_folder_variables_functions_and_files_last(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    assert bash(env, "cd data; X=5; export Y='a  b'; f() { echo f$1; }; alias say=echo") == "[exit code 0]"
    assert bash(env, 'pwd; echo $X "$Y"; f 3; say hi; env | grep ^Y') == (
        "/app/data\n5 a  b\nf3\nhi\nY=a  b\n[exit code 0]"
    )
    assert bash(env, "cd ..; cat data/x.txt; cd -") == "one\ntwo\n/app/data\n[exit code 0]"
    assert bash(env, "exit 3") == "[exit code 3]"
    assert bash(env, "nosuch; echo $X >&2") == "bash: line 1: nosuch: command not found\n5\n[exit code 0]"
    assert "syntax error" in bash(env, "if then")


def test_a_slow_command_is_stopped_and_the_shell_is_as_before(make_env: MakeEnv) -> None:
    env = make_env(sandbox={"limits": {"seconds": 1}})
    begin(env)
    bash(env, "cd data; X=5")
    shown = bash(env, "cd /tmp; X=6; echo started; sleep 60")
    assert shown == (
        "started\n[stopped after 1 seconds; folder and variables of the shell are as before the command]"
    )
    assert bash(env, "pwd; echo $X") == "/app/data\n5\n[exit code 0]"


def test_what_a_command_leaves_running_is_ended(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    leave = "(sleep 300; echo late > late.txt) & setsid sleep 301 & disown -a; echo ok"
    assert bash(env, leave) == "ok\n[exit code 0]"
    assert "sleep" not in bash(env, "cat /proc/[0-9]*/comm")


def test_output_is_cut_in_the_middle(make_env: MakeEnv) -> None:
    env = make_env(output_chars=200)
    begin(env)
    shown = bash(env, "seq 1 5000")
    assert shown.startswith("1\n2\n3\n")
    assert shown.endswith("4999\n5000\n[exit code 0]")
    assert "bytes left out" in shown
    assert len(shown) < 300


def test_there_is_no_network_and_no_rollgym(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    assert "[exit code 0]" not in bash(env, "echo > /dev/tcp/127.0.0.1/22")
    assert bash(env, "python3 -c 'import rollgym' 2>&1 | tail -n 1").startswith("ModuleNotFoundError")
    assert bash(env, "ls / | tr '\\n' ' '; ls /tests /logs 2>&1 | wc -l").split("\n")[0].count("root") == 0


def test_all_checks_give_the_reward(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    bash(env, SOLUTION)
    assert submit(env) == 1.0
    begin(env)
    bash(env, "echo 7 > a.txt")
    assert submit(env) == 0.0


def test_a_share_of_the_checks_gives_a_share_of_the_reward(make_env: MakeEnv) -> None:
    env = make_env(reward="fraction")
    begin(env)
    bash(env, "echo 7 > a.txt")
    observation, reward, _, _, info = env.step(call("submit"))
    assert (observation, reward, info["success"]) == ("Hidden checks: 1 of 2 hold.", 0.5, False)
    assert info["hidden"] == {"passed": 1, "of": 2}


def test_the_last_turn_is_judged(make_env: MakeEnv) -> None:
    env = make_env(max_turns=2)
    assert "Turns left: 2." in begin(env)
    assert not env.step(call("bash", command=SOLUTION))[2]
    observation, reward, terminated, truncated, info = env.step("nonsense")
    assert (reward, terminated, truncated, info["valid"]) == (1.0, True, False, False)
    assert observation.endswith("Hidden checks: 2 of 2 hold.")


def test_several_calls_in_a_turn(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    calls = f"[{call('bash', command=SOLUTION)}, {call('submit')}, {call('bash', command='rm a.txt')}]"
    _, reward, terminated, _, info = env.step(calls)
    assert (reward, terminated) == (1.0, True)
    assert [message["role"] for message in info["messages"]] == ["tool", "tool"]


def test_an_invalid_action_costs_a_turn(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    for action in ("ls", call("bash"), call("bash", command=3), call("python", command="1")):
        observation, reward, terminated, _, info = env.step(action)
        assert (info["valid"], reward, terminated) == (False, 0.0, False)
    assert observation.endswith("Turns left: 11.")


@pytest.mark.parametrize("command", ["x" * 100_001, "echo \0"])
def test_a_command_that_cannot_be_passed_is_invalid(make_env: MakeEnv, command: str) -> None:
    env = make_env()
    begin(env)
    result = env.bash(command)
    assert not result.valid
    assert "Nothing was run" in result.observation


def test_a_sandbox_that_dies_begins_again_with_the_files(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    bash(env, SOLUTION)
    assert env._handle._sandbox is not None
    env._handle._sandbox.close()
    assert "broke down" in bash(env, "ls")
    assert bash(env, "ls") == "data\n[exit code 0]"
    assert submit(env) == 0.0


def test_options_are_checked() -> None:
    for wrong, word in [
        ({"reward": "most"}, "reward"),
        ({"max_turns": 0}, "max_turns"),
        ({"sandbox": {"backend": "docker"}}, "namespaces"),
        ({"sandbox": {"links": []}}, "links"),
        ({"folder": "/nonexistent"}, "folder"),
        ({"folder": ".", "level": 1}, "level"),
    ]:
        with pytest.raises((UsageError, UnknownName), match=word):
            TerminalEnv(**wrong)  # type: ignore[arg-type]


def _solve(env: TerminalEnv, task: TerminalTask) -> float:
    begin(env, task)
    for command in KINDS[task.kind].solve(task.parameters):
        bash(env, command)
    return submit(env)


@pytest.mark.parametrize("name", KINDS)
def test_the_expert_solves_a_task_of_each_kind(make_env: MakeEnv, name: str) -> None:
    env = make_env()
    level = LEVELS[list(KINDS).index(name) % 3]
    task = KINDS[name].task(derive_rng("expert", name), level)
    assert _solve(env, task) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_the_expert_solves_many_tasks_of_each_kind_and_level(make_env: MakeEnv, name: str) -> None:
    env = make_env()
    for level in LEVELS:
        for number in range(8):
            task = KINDS[name].task(derive_rng("experts", name, number), level)
            begin(env, task)
            assert submit(env) == 0.0
            assert _solve(env, task) == 1.0, (name, level, number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_keeps_the_contract(need_sandbox: None) -> None:
    report = check("rollgym/Terminal-v0")
    assert {result.rule: result.detail for result in report.results if result.status != "passed"} == {}


def test_files_that_need_more_room_are_copied_too(make_env: MakeEnv) -> None:
    env = make_env()
    begin(env)
    bash(env, f"head -c 300000 /dev/urandom > noise; {SOLUTION}")
    assert submit(env) == 1.0


def test_the_registered_expert_plays_by_info_alone(need_sandbox: None) -> None:
    results = rollgym.evaluate("rollgym/Terminal-v0", agent="expert", episodes=4, seed=3)
    assert (results.summary or {})["success_rate"] == 1.0
