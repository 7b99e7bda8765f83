"""A fixed list of episodes: bounded concurrency, order, retries, early ends."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from scenes import Timed, evaluation, now
from virtual import run

from rollgym.core.errors import RunError, WorkerLost
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.rollout.events import EventLog
from rollgym.rollout.inflight import EpisodeBatch, run_episodes
from rollgym.rollout.retry import NO_RETRIES, RetryPolicy

WORKER_LOST = RetryPolicy(max_retries=2, outcomes={Outcome.WORKER_LOST})


class Lossy(Timed):
    """These episodes lose their worker as often as given."""

    def __init__(self, **losses: int) -> None:
        super().__init__()
        self.losses = losses

    async def suffer(self, spec: EpisodeSpec, where: str, turn: int = 0) -> str | None:
        if where == "step" and self.losses.get(spec.episode_id, 0) > 0:
            self.losses[spec.episode_id] -= 1
            raise WorkerLost("the worker died")
        return None


def batch(world: Timed, specs: Sequence[EpisodeSpec], **options: Any) -> tuple[list[Episode], EventLog]:
    ended: list[Episode] = []

    async def main() -> EventLog:
        log = EventLog(keep=True, clock=asyncio.get_running_loop().time)
        await EpisodeBatch(world, world, log=log, on_episode=ended.append, **options).run(specs)
        return log

    return ended, run(main)


def starts(log: EventLog) -> list[tuple[float, str]]:
    return [(event["t"], event["episode"]) for event in log.events if event["kind"] == "episode_started"]


@pytest.mark.parametrize(("limit", "seconds"), [(1, 20.0), (2, 10.0), (3, 10.0), (4, 5.0), (9, 5.0)])
def test_no_more_episodes_run_at_once_than_allowed(limit: int, seconds: float) -> None:
    world = Timed()

    async def main() -> float:
        await run_episodes(evaluation(*"abcd"), world, world, max_in_flight=limit)
        return now()

    assert run(main) == seconds
    assert world.most_inside == min(limit, 4)


def test_episodes_are_reported_as_they_end_and_returned_in_order() -> None:
    world, reported = Timed(seconds={"a": 9.0}), []

    async def main() -> list[Episode]:
        return await run_episodes(
            evaluation(*"abc"),
            world,
            world,
            max_in_flight=2,
            on_episode=lambda episode: reported.append(episode.spec.episode_id),
        )

    assert [episode.spec.episode_id for episode in run(main)] == ["a", "b", "c"]
    assert reported == ["b", "c", "a"]


def test_retries_run_last_and_one_at_a_time() -> None:
    ended, log = batch(Lossy(a=1, c=2), evaluation(*"abcd"), max_in_flight=4, retry=WORKER_LOST)
    assert starts(log) == [*((0.0, name) for name in "abcd"), (5.0, "a"), (10.0, "c"), (15.0, "c")]
    assert [(e.spec.episode_id, e.outcome.value, e.attempts) for e in ended] == [
        ("b", "terminated", 1),
        ("d", "terminated", 1),
        ("a", "terminated", 2),
        ("c", "terminated", 3),
    ]


@pytest.mark.parametrize(("retry", "attempts"), [(WORKER_LOST, 3), (NO_RETRIES, 1)])
def test_an_episode_that_is_lost_too_often_is_reported_as_it_is(retry: RetryPolicy, attempts: int) -> None:
    [episode], _ = batch(Lossy(a=9), evaluation("a"), max_in_flight=4, retry=retry)
    assert (episode.outcome, episode.attempts) == (Outcome.WORKER_LOST, attempts)


def test_a_batch_that_gives_up_starts_no_more_episodes() -> None:
    losses = dict.fromkeys("abc", 1)
    ended, log = batch(
        Lossy(**losses),
        evaluation(*"abcdefg"),
        max_in_flight=1,
        retry=WORKER_LOST,
        give_up=lambda lost: lost >= 3,
    )
    assert [name for _, name in starts(log)] == [*"abc", *"abc"]
    assert [episode.attempts for episode in ended] == [2, 2, 2]


def test_stop_cancels_what_runs_and_reports_none_of_it() -> None:
    world, ended = Timed(seconds={"b": 9.0}), []

    async def main() -> float:
        running = EpisodeBatch(world, world, max_in_flight=2, on_episode=ended.append)
        asyncio.get_running_loop().call_later(7.0, running.stop)
        await running.run(evaluation(*"abcd"))
        return now()

    assert run(main) < 20.0
    assert [episode.spec.episode_id for episode in ended] == ["a"]
    assert not world.inside


def test_an_error_of_the_caller_ends_the_batch_and_is_raised() -> None:
    world, seen = Timed(), []

    def refuse(episode: Episode) -> None:
        seen.append(episode.spec.episode_id)
        raise RunError("enough")

    async def main() -> None:
        with pytest.raises(RunError, match="enough"):
            await run_episodes(evaluation(*"abcd"), world, world, max_in_flight=1, on_episode=refuse)
        assert now() == 5.0

    run(main)
    assert seen == ["a"]
    assert not world.inside


@pytest.mark.parametrize("kind", ["episode_started", "episode_state", "episode_finished"])
def test_a_log_that_cannot_be_written_ends_the_batch(kind: str) -> None:
    class Full(EventLog):
        def add(self, what: str, **fields: Any) -> None:
            if what == kind:
                raise OSError("no space left on device")
            super().add(what, **fields)

    async def main() -> None:
        world = Timed()
        with pytest.raises(OSError, match="no space left"):
            await EpisodeBatch(world, world, max_in_flight=2, log=Full()).run(evaluation(*"abcd"))
        assert not world.inside

    run(main)


def test_a_cancelled_call_closes_every_environment() -> None:
    async def main() -> None:
        world = Timed()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await run_episodes(evaluation(*"abcd"), world, world, max_in_flight=3)
        assert not world.inside
        assert world.ledger["opened"] == world.ledger["closed"] == 3

    run(main)
