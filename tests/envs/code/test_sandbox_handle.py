"""The sandbox of an environment: plain settings, walls that are needed, and what happens when it dies."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import RunError, UsageError, WorkerLost
from rollgym.core.types import EpisodeSpec
from rollgym.envs.code import sandbox_handle as box_module
from rollgym.envs.code.env import CodeEnv
from rollgym.envs.code.expert import CodeExpert
from rollgym.envs.code.sandbox_handle import SandboxHandle, sandbox_settings
from rollgym.pool.base import Step
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.local import LocalPool
from rollgym.sandbox.types import Ended, Level, Limits, Ran, Sandbox

TASK: dict[str, Any] = {"task": 3, "split": "test"}


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def solved(info: dict[str, Any]) -> str:
    return CodeExpert(AgentSetup(env_id="x")).choose("", info)


class Dying:
    """Breaks down when something is run in it; ``lives`` says how many of its kind do so."""

    backend, level, weaknesses = "dying", Level.NONE, ("it dies",)
    lives = 0
    error: Exception = WorkerLost("it died")
    broken = False

    def exec(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Ran:
        return self.run(code)

    def run(self, code: str, *, limits: Limits | None = None) -> Ran:
        if type(self).lives:
            type(self).lives -= 1
            self.broken = True
            raise type(self).error
        return Ran(stdout="alive", stderr="", exit_code=0, ended=Ended.EXIT, seconds=0.0, state="committed")

    def write(self, name: str, content: bytes) -> None: ...

    def read(self, name: str) -> bytes:
        return b""

    def reset(self) -> None:
        if self.broken:
            raise WorkerLost("it is dead")

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "error",
    [WorkerLost("it died"), RunError("the walls could not be raised"), BlockingIOError(11, "no process")],
)
def test_a_sandbox_that_breaks_is_replaced_and_no_agent_gains(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Dying, "error", error)
    monkeypatch.setattr(box_module, "open_handle", lambda settings: Dying())
    env = CodeEnv(sandbox={"counts": True})
    _, info = env.reset(seed=0, options=TASK)
    assert info["sandbox"]["counts"]["replaced"] == 0
    Dying.lives = 1
    observation, *_, broken = env.step(block("print(1)"))
    assert "The sandbox broke down" in observation
    assert broken["sandbox"]["counts"]["replaced"] == 1
    assert env.step(block("print(1)"))[0].startswith("stdout:\nalive")
    Dying.lives = 2
    observation, reward, terminated, _, info = env.step(f"{solved(info)}\nsubmit")
    assert (observation, reward, info["success"]) == ("Hidden tests: 0 of 12 passed.", 0.0, False)
    assert Dying.lives == 0
    assert info["sandbox"]["counts"]["replaced"] == 3
    env.close()


def test_an_opening_that_fails_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0

    def seldom(settings: Any) -> Sandbox:
        nonlocal opened
        opened += 1
        if opened == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Dying()

    monkeypatch.setattr(box_module, "open_handle", seldom)
    monkeypatch.setattr(box_module, "_PAUSE", 0.0)
    box = SandboxHandle({})
    box.fresh()
    box.use(lambda sandbox: sandbox.run(""))
    assert box.once(lambda sandbox: sandbox.run("")) is not None
    assert opened >= 3
    box.close()


def test_a_slow_solution_fails_within_the_step_instead_of_losing_the_episode(sandbox: Sandbox) -> None:
    spec = EpisodeSpec(
        episode_id="e",
        env_id="rollgym/Code-v0",
        env_kwargs={"sandbox": {"limits": {"seconds": 600}, "minimum": "landlock"}},
        task=3,
        split="test",
    )

    async def play() -> Step:
        pool = LocalPool(1, limits=WorkerLimits(step_seconds=10))
        try:
            session = await pool.open(spec)
            function = (await session.reset()).info["function"]
            slow = f"import time\ndef {function}(*args):\n    time.sleep(1000)"
            return await session.step(f"{block(slow)}\nsubmit")
        finally:
            await pool.close()

    step = asyncio.run(play())
    assert (step.observation, step.reward) == ("Hidden tests: 0 of 12 passed.", 0.0)
    assert (step.terminated, step.info["success"]) == (True, False)


def test_without_walls_it_refuses_and_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Any) -> Sandbox:
        raise UsageError("No sandbox is available on this machine.")

    monkeypatch.setattr(box_module, "open_handle", refuse)
    env = CodeEnv()
    with pytest.raises(UsageError, match="No sandbox is available"):
        env.reset(seed=0)
    env.close()


def test_no_walls_at_all_must_be_asked_for_twice() -> None:
    env = CodeEnv(sandbox={"backend": "none"})
    with pytest.raises(UsageError, match="unsafe|is required"):
        env.reset(seed=0)


def test_settings_are_plain_values() -> None:
    settings = sandbox_settings(
        {
            "backend": "docker",
            "minimum": "landlock",
            "limits": {"seconds": 2, "memory_mb": 100},
            "preload": ["math"],
        }
    )
    assert (settings.backend, settings.minimum, settings.preload) == ("docker", Level.LANDLOCK, ("math",))
    assert (settings.limits.seconds, settings.limits.memory_mb, settings.limits.processes) == (2, 100, 16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "dokcer"}, "Did you mean docker"),
        ({"minimum": "namespace"}, "Did you mean namespaces"),
        ({"limit": {}}, "Did you mean limits"),
        ({"limits": {"second": 1}}, "Did you mean seconds"),
        ({"limits": {"seconds": "fast"}}, "must be a number"),
        ({"limits": {"seconds": 0}}, "above 0"),
        ({"limits": 3}, "mapping"),
        (3, "mapping"),
    ],
)
def test_wrong_settings_are_explained(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SandboxHandle(given)
