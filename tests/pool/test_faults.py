"""Environments that misbehave in real processes: each is named, nobody else suffers, nothing is left over."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import EnvError, WorkerLost
from rollgym.pool.base import LeaseLost
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.local import LocalPool

GOOD = ["task 5 luck 133801", "turn 1", "turn 2", "turn 3"]
SHORT = WorkerLimits(reset_seconds=1.5, step_seconds=1.5)


def the_loss(kit: Any, env: str, limits: WorkerLimits | None = None, **kwargs: object) -> LeaseLost:
    """Play an environment that takes its worker with it; a good one must play after it."""

    async def use(pool: LocalPool) -> LeaseLost:
        with pytest.raises(LeaseLost) as caught:
            await kit.play(pool, kit.spec(env, **kwargs), *["yes"] * 20)
        assert await kit.play(pool, kit.spec()) == GOOD
        assert pool.stats().ended == {caught.value.reason: 1}
        return caught.value

    loss: LeaseLost = kit.run(use, limits=limits)
    assert loss.guilty
    assert loss.culprits == (f"{env}-5",)
    return loss


@pytest.mark.parametrize(
    ("env", "call"), [("HangsInReset", "reset"), ("Hangs", "step"), ("HangsInClose", "close")]
)
def test_a_hang_is_killed_at_its_deadline_and_shows_where_it_hung(
    kit: Any, env: str, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if call == "close":

        async def use(pool: LocalPool) -> bool:
            with pytest.raises(EnvError, match="one too many"):
                await kit.play(pool, kit.spec(env))
            return bool(await kit.until_async(lambda: pool.stats().ended == {"deadline": 1}))

        assert kit.run(use, limits=SHORT)
    else:
        loss = the_loss(kit, env, SHORT)
        assert str(loss) == f"{call}() took longer than 1.5 s; the worker was killed"
        assert loss.failure is not None
        assert "time.sleep(3600)" in loss.failure.traceback
    err = capfd.readouterr().err
    assert f"{call}() of episode {env}-5 has been running for" in err
    assert "time.sleep(3600)" in err


def test_an_environment_whose_helper_died_is_a_loss_and_the_worker_goes_on(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        with pytest.raises(WorkerLost, match="the browser is gone"):
            await kit.play(pool, kit.spec("LosesItsHelper"))
        assert await kit.play(pool, kit.spec()) == GOOD
        assert pool.stats().ended == {}

    kit.run(use)


def test_a_call_that_holds_the_interpreter_is_found_by_its_silence(kit: Any) -> None:
    loss = the_loss(kit, "HoldsTheInterpreter", WorkerLimits(silent_seconds=2.5))
    assert str(loss) == "the worker sent no heartbeat for 2.5 s and was killed during step()"
    assert loss.reason == "silent"


def test_exit_codes_and_signals_are_named(kit: Any) -> None:
    async def use(pool: LocalPool) -> LeaseLost:
        with pytest.raises(LeaseLost) as caught:
            await kit.play(pool, kit.spec("DiesOnSomeTasks", task=3))
        return caught.value

    loss = kit.run(use)
    assert str(loss) == "a worker process died with exit code 7 during step()"
    assert loss.guilty


def test_a_segmentation_fault_is_named_and_shows_where(kit: Any) -> None:
    loss = the_loss(kit, "Segfaults")
    assert str(loss) == "a worker process died by signal 11 (SIGSEGV) during step()"
    assert loss.failure is not None
    assert "faulty.py" in loss.failure.traceback


def test_a_leak_is_killed_at_the_hard_limit(kit: Any) -> None:
    loss = the_loss(kit, "Leaks", WorkerLimits(hard_memory_mb=400))
    assert loss.reason == "memory"
    assert "MB, over its limit of 400 MB, and was killed; it grew in this episode's calls" in str(loss)


def test_closing_all_descriptors_costs_the_worker_and_closing_low_ones_nothing(kit: Any) -> None:
    async def use(pool: LocalPool) -> str:
        assert len(await kit.play(pool, kit.spec("ClosesDescriptors", task=0))) == 4
        with pytest.raises(LeaseLost) as caught:
            await kit.play(pool, kit.spec("ClosesDescriptors", task=1))
        assert await kit.play(pool, kit.spec()) == GOOD
        return str(caught.value)

    assert kit.run(use).startswith("a worker process died with exit code 70")


def test_victims_learn_which_episode_failed(kit: Any) -> None:
    async def use(pool: LocalPool) -> tuple[Any, ...]:
        idle = await pool.open(kit.spec(name="idle"))
        await idle.reset()
        busy = await pool.open(kit.spec("Sleeps", name="busy"))
        await busy.reset()
        hung = await pool.open(kit.spec("Hangs", name="hung"))
        await hung.reset()

        async def be_busy() -> None:
            while True:
                await busy.step("yes")

        results = await asyncio.gather(hung.step("yes"), be_busy(), return_exceptions=True)
        with pytest.raises(LeaseLost) as caught:
            await idle.step("yes")
        with pytest.raises(LeaseLost):
            await idle.reset()
        for session in (idle, busy, hung):
            await session.close()
        return (*results, caught.value)

    hung, busy, idle = kit.run(use, limits=WorkerLimits(step_seconds=1.5))
    assert hung.guilty
    assert str(hung) == "step() took longer than 1.5 s; the worker was killed"
    for victim in (idle,) if isinstance(busy, EnvError) else (busy, idle):
        assert not victim.guilty
        assert victim.culprits == ("hung",)
        assert "because step() took longer than 1.5 s during a call of episode hung" in str(victim)


def test_idle_leases_are_victims_of_a_death_and_running_ones_suspects(kit: Any) -> None:
    async def use(pool: LocalPool) -> tuple[LeaseLost, LeaseLost]:
        idle = await pool.open(kit.spec(name="idle"))
        await idle.reset()
        with pytest.raises(LeaseLost) as guilty:
            await kit.play(pool, kit.spec("Segfaults", name="bad"))
        with pytest.raises(LeaseLost) as victim:
            await idle.step("yes")
        return guilty.value, victim.value

    guilty, victim = kit.run(use)
    assert guilty.guilty
    assert not victim.guilty
    assert victim.culprits == guilty.culprits == ("bad",)
    assert str(victim) == "a worker process died by signal 11 (SIGSEGV) during a call of episode bad"


def test_no_lease_is_suspected_without_a_running_call(kit: Any) -> None:
    async def use(pool: LocalPool) -> LeaseLost:
        session = await pool.open(kit.spec())
        await session.reset()
        os.kill(pool.stats().workers[0].pid or 0, signal.SIGKILL)
        assert await kit.until_async(lambda: pool.stats().ended == {"died": 1})
        with pytest.raises(LeaseLost) as caught:
            await session.step("yes")
        return caught.value

    loss = kit.run(use)
    assert not loss.guilty
    assert loss.culprits == ()
    assert str(loss) == "a worker process died by signal 9 (SIGKILL)"


NONSENSE = [
    "returned from step() a NoneType; it must be a tuple of 5",
    "returned from step() a tuple of 4; it must be a tuple of 5",
    "returned a list as observation; it must be text",
    "returned 'much' as reward; it must be a number",
    "returned a list as info; it must be a dict",
    "returned a bytes as observation; it must be text",
    "returned a Whatever as end flag; it must be true or false",
]


def test_malformed_returns_are_errors_and_keep_the_worker(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        for task, complaint in enumerate(NONSENSE):
            with pytest.raises(EnvError) as caught:
                await kit.play(pool, kit.spec("ReturnsNonsense", task=task))
            assert complaint in str(caught.value)
        assert pool.stats().ended == {}

    kit.run(use)


def test_exceptions_exits_and_long_texts_keep_the_worker(kit: Any) -> None:
    async def use(pool: LocalPool) -> list[str]:
        said = []
        for env in ("RaisesInReset", "RaisesInStep", "Exits", "SaysTooMuch", "NotANumber", "BadThread"):
            with pytest.raises(EnvError) as caught:
                await kit.play(pool, kit.spec(env))
            said.append(str(caught.value))
        assert await kit.play(pool, kit.spec()) == GOOD
        assert pool.stats().ended == {}
        return said

    closed, many, exits, much, nan, thread = kit.run(use)
    assert "raised in reset(): RuntimeError: the shop is closed" in closed
    assert "raised in step(): ZeroDivisionError" in many
    assert "raised SystemExit: enough" in exits
    assert "bytes in one call; the limit is" in much
    assert "reward nan; it must be finite" in nan
    assert "pool_thread is 'mine'; it must be 'own', 'any' or 'main'" in thread


def test_threads_signals_and_closed_output_do_no_harm(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        for env in ("StartsThreads", "HasSignals", "HasDatabase", "ClosesOutput", "Counting"):
            assert len(await kit.play(pool, kit.spec(env))) == 4
        assert pool.stats().ended == {}

    kit.run(use)


def test_a_child_that_comes_back_from_a_step_does_not_answer_twice(kit: Any) -> None:
    async def use(pool: LocalPool) -> None:
        for _ in range(3):
            assert await kit.play(pool, kit.spec("ForksAndReturns")) == GOOD
        assert pool.stats().ended == {}

    kit.run(use)


def test_a_flood_on_stdout_is_cut_and_said_so(kit: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async def use(pool: LocalPool) -> float:
        for _ in range(2):
            assert await kit.play(pool, kit.spec("Floods")) == GOOD
        forkserver = pool._forkserver
        assert forkserver is not None
        return float(kit.memory_mb(forkserver.pid))

    memory = kit.run(use)
    out, err = capfd.readouterr()
    assert out == ""
    assert "prints too much; part of the output is dropped" in err
    assert "bytes that worker 1" in err
    assert len(err) < 5_000_000  # of 48 MB
    assert memory < 150


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_children_of_environments_go_with_their_worker(kit: Any, tmp_path: Path, how: str) -> None:
    async def use(pool: LocalPool) -> None:
        assert len(await kit.play(pool, kit.spec("LeavesChildren", folder=str(tmp_path)))) == 4
        assert await kit.until_async(lambda: len(list(tmp_path.iterdir())) == 9)
        pids = [int(path.name) for path in tmp_path.iterdir()]
        assert all(kit.alive(pid) for pid in pids)
        if how == "killed":
            os.kill(pool.stats().workers[0].pid or 0, signal.SIGKILL)
            assert await kit.until_async(lambda: not any(kit.alive(pid) for pid in pids))

    kit.run(use)
    assert not any(kit.alive(int(path.name)) for path in tmp_path.iterdir())


def test_a_run_among_all_of_them_completes(kit: Any, tmp_path: Path) -> None:
    """Good episodes beside every fault at once: victims are tried again, and suspects again alone."""
    bad = ["Hangs", "HangsInReset", "Segfaults", "Leaks", "RaisesInStep", "Exits", "Floods", "NotANumber"]
    specs = [kit.spec(env, name=f"bad-{env}") for env in bad]
    specs += [kit.spec(name=f"good-{number}") for number in range(24)]
    results: dict[str, list[object]] = {spec.episode_id: [] for spec in specs}
    suspects: list[Any] = []

    async def env_thread(pool: LocalPool, queue: list[Any]) -> None:
        while queue:
            spec = queue.pop(0)
            actions = ["yes"] * (30 if spec.env_id == "faulty:Leaks" else 3)
            try:
                results[spec.episode_id].append(await kit.play(pool, spec, *actions))
            except LeaseLost as loss:
                if loss.culprits == (spec.episode_id,):
                    results[spec.episode_id].append(loss)
                else:
                    # Two suspects would be put beside one another again and again.
                    (suspects if spec.episode_id in loss.culprits else queue).append(spec)
            except EnvError as error:
                results[spec.episode_id].append(error)

    async def use(pool: LocalPool) -> None:
        queue = list(specs)
        await asyncio.gather(*(env_thread(pool, queue) for _ in range(6)))
        while suspects:
            await env_thread(pool, [suspects.pop()])

    limits = WorkerLimits(reset_seconds=3.0, step_seconds=3.0, hard_memory_mb=500)
    kit.run(use, workers=2, limits=limits)
    assert all(len(found) == 1 for found in results.values())
    for spec in specs:
        (found,) = results[spec.episode_id]
        failed = spec.episode_id.startswith("bad") and "Floods" not in spec.episode_id
        assert isinstance(found, Exception) == failed, (spec.episode_id, found)
