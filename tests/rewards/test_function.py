"""Reward functions in worker processes: what they may give, and that whatever they do is a typed failure."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from rollgym.core.errors import RewardError, UsageError
from rollgym.core.failures import failure_of, outcome_of
from rollgym.core.types import Outcome
from rollgym.pool import linux
from rollgym.pool.inline import InlinePool
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.local import LocalPool
from rollgym.rewards import Score, score_episode
from rollgym.rewards.function import FunctionScorer

T = TypeVar("T")


def use(
    target: str, what: Callable[[FunctionScorer], Awaitable[T]], timeout: float = 60.0, **options: Any
) -> T:
    """Use a scorer, close it, and see to it that no process of it is left."""

    async def main() -> T:
        scorer = FunctionScorer(target, timeout=timeout, **options)
        try:
            return await what(scorer)
        finally:
            await scorer.close()

    before = set(linux.children())
    result = asyncio.run(main())
    assert set(linux.children()) <= before
    return result


def test_a_function_gives_a_number_a_dict_or_a_score(kit: Any) -> None:
    episode = kit.episode(1.0, 2.0)

    def ask(target: str) -> Score:
        return use(target, lambda scorer: scorer.score(episode))

    assert ask("judges:length") == Score(2.0)
    assert ask("judges:in_full") == Score(0.5, False, {"turns": 2.0, "own": 3.0}, "so so")
    assert ask("judges:as_score") == Score(2.0, note="e")
    assert ask("judges:right") == Score(1.0)


def test_it_is_called_in_the_main_thread_of_another_process_where_it_may_set_alarms(kit: Any) -> None:
    score = use("judges:where", lambda scorer: scorer.score(kit.episode()))
    assert score.reward == 1.0
    assert score.parts["pid"] != os.getpid()


def test_an_episode_arrives_whole_however_long_and_odd_its_text(kit: Any) -> None:
    long = "é \u2028 {transcript} \x00 \\" * 20_000
    episode = kit.episode()
    turns = (replace(episode.turns[0], observation=long), *episode.turns[1:])
    score = use("judges:repeats", lambda scorer: scorer.score(replace(episode, turns=turns)))
    assert score.note == long


# The fault matrix, each with a real process

FAULTS = [
    ("raises", "judges:raises raised KeyError: 'no answer key'"),
    ("hangs", "judges:hangs took longer than 0.5 s; the worker was killed"),
    ("computes", "judges:computes took longer than 0.5 s; the worker was killed"),
    ("dies", "a worker process died with exit code 3 during judges:dies"),
    ("exits", "judges:exits raised SystemExit: enough"),
    ("not_a_number", "the reward must be finite, not nan"),
    ("infinite", "the reward must be finite, not inf"),
    ("text", "the reward must be a number, not a str"),
    ("nothing", "the reward must be a number, not null"),
    ("misspelt", "unknown keys 'sucess'"),
    ("without", "'reward' is missing"),
]


@pytest.mark.parametrize(("function", "said"), FAULTS)
def test_whatever_goes_wrong_in_a_worker_is_a_typed_failure_and_the_next_call_is_well(
    kit: Any, function: str, said: str
) -> None:
    async def main(scorer: FunctionScorer) -> None:
        with pytest.raises(RewardError) as caught:
            await score_episode(scorer, kit.episode())
        error = caught.value
        assert str(error).startswith(f"reward '{function}': ")
        assert said in str(error)
        assert outcome_of(error) is Outcome.ENV_ERROR
        assert failure_of(error).type == "RewardError"
        if function == "raises":
            assert "in raises" in failure_of(error).traceback, "the function's own traceback"
        if function in ("hangs", "computes"):
            assert f"in {function}" in failure_of(error).traceback, "where it hung"
        scorer.target = "judges:length"
        assert (await scorer.score(kit.episode())).reward == 2.0

    use(f"judges:{function}", main, timeout=0.5)


def test_a_function_that_takes_too_much_memory_is_killed(kit: Any) -> None:
    async def main(scorer: FunctionScorer) -> None:
        with pytest.raises(RewardError, match="over its limit of 400 MB, and was killed"):
            await scorer.score(kit.episode())

    use("judges:grows", main, memory_mb=400)


def test_a_hanging_function_does_not_affect_others(kit: Any) -> None:
    """Each call runs in a separate worker: hanging ones are killed without an effect on the others."""

    async def main(scorer: FunctionScorer) -> list[Any]:
        episodes = [kit.episode(name=str(n)) for n in range(6)]
        tasks = [replace(e, spec=replace(e.spec, task=n)) for n, e in enumerate(episodes)]
        return await asyncio.gather(*(scorer.score(e) for e in tasks), return_exceptions=True)

    answers = use("judges:hangs_on_odd", main, timeout=1.0, workers=4)
    assert [type(answer) for answer in answers] == [Score, RewardError] * 3


def test_waiting_for_a_worker_does_not_count_as_taking_long(kit: Any) -> None:
    """Three that hang, one worker: each is given its own time, and the last is scored all the same."""

    async def main(scorer: FunctionScorer) -> list[Any]:
        episodes = [kit.episode(name=str(n)) for n in range(4)]
        tasks = [replace(e, spec=replace(e.spec, task=int(n < 3))) for n, e in enumerate(episodes)]
        return await asyncio.gather(*(scorer.score(e) for e in tasks), return_exceptions=True)

    answers = use("judges:hangs_on_odd", main, timeout=0.4)
    assert [type(answer) for answer in answers] == [RewardError] * 3 + [Score]


def test_a_cancelled_call_ends_at_once_and_its_worker_by_the_deadline(kit: Any) -> None:
    async def main(scorer: FunctionScorer) -> None:
        task = asyncio.create_task(scorer.score(kit.episode()))
        while not (scorer._own.stats().workers and scorer._own.stats().workers[0].pid):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()
        scorer.target = "judges:length"
        assert (await scorer.score(kit.episode())).reward == 2.0

    use("judges:hangs", main, timeout=0.5)


def test_a_pool_that_is_given_is_used_and_left_open(kit: Any) -> None:
    async def main() -> None:
        pool = LocalPool(1, limits=WorkerLimits(step_seconds=60.0))
        try:
            for scorer in (
                FunctionScorer("judges:length", pool=pool),
                FunctionScorer("judges:right", pool=pool),
            ):
                assert (await scorer.score(kit.episode())).reward in (1.0, 2.0)
                await scorer.close()
            late = FunctionScorer("judges:hangs", pool=pool, timeout=0.3)
            with pytest.raises(RewardError, match=r"judges:hangs took longer than 0.3 s"):
                await late.score(kit.episode())
            assert pool.stats().episodes + pool.stats().leases == 3
        finally:
            await pool.close()

    asyncio.run(main())


def test_in_this_process_for_debugging(kit: Any) -> None:
    async def main() -> Score:
        return await FunctionScorer("judges:length", pool=InlinePool()).score(kit.episode())

    assert asyncio.run(main()) == Score(2.0)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("judges:absent", "no object in judges called 'absent'"),
        ("judges:A_NUMBER", r"judges:A_NUMBER is not callable \(type int\): name a function"),
    ],
)
def test_a_missing_function_is_reported(kit: Any, target: str, said: str) -> None:
    async def main(scorer: FunctionScorer) -> None:
        with pytest.raises(RewardError, match=said):
            await score_episode(scorer, kit.episode())

    use(target, main)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": "judges"}, "module:function, not 'judges'"),
        (
            {"target": None},
            "cannot be an object of type NoneType: pass a function .* or its name as module:function",
        ),
        ({"target": "no_such_module:f"}, "module 'no_such_module' was not found"),
        ({"target": "no_such.module:f"}, "module 'no_such.module' was not found"),
        ({"target": "__main__:f"}, "move it to a separate module"),
        ({"target": "judges:length", "timeout": 0}, "positive and finite"),
        ({"target": "judges:length", "workers": 0}, "workers must be at least 1, got 0"),
        (
            {"target": "judges:length", "workers": 1, "pool": InlinePool()},
            "pool excludes workers and memory_mb",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        FunctionScorer(**arguments)
