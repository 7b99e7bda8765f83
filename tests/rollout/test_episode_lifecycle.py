"""One episode with faults: it always ends with an outcome and closes everything."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from virtual import VirtualPlayer, VirtualSession, World, run

from rollgym.core.errors import AgentError, ContextFull, EngineLost, EnvError, WorkerLost
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome
from rollgym.pool.base import LeaseLost
from rollgym.rollout.episode_runner import CLOSE_SECONDS, EpisodeRunner, EpisodeState, run_episode

Act = Callable[..., Awaitable[Any]]


class Steady(World):
    """Everything takes a second."""

    async def delay(self, *what: object, most: float = float("inf")) -> None:
        await asyncio.sleep(1.0)


async def never(*args: object) -> Any:
    await asyncio.sleep(1e9)


def raises(error: BaseException) -> Act:
    async def act(*args: object) -> Any:
        raise error

    return act


SPEC = EpisodeSpec(episode_id="e", env_id="env", limits=Limits(seconds=1000.0))


def play(
    patch: tuple[type, str, Any] | None = None, *, cancel_at: float | None = None, limit: float = 1000.0
) -> tuple[Episode, World, float]:
    """Play one episode; ``patch`` replaces a method, ``cancel_at`` cancels it then."""
    spec = EpisodeSpec(episode_id="e", env_id="env", limits=Limits(seconds=limit))

    async def main() -> tuple[Episode, World, float]:
        loop = asyncio.get_running_loop()
        world = Steady(early=0.0)
        runner = EpisodeRunner(spec, world, world)
        if cancel_at is not None:
            loop.call_later(cancel_at, runner.cancel)
        episode = await runner.run()
        assert runner.state is EpisodeState.DONE
        return episode, world, loop.time()

    with pytest.MonkeyPatch.context() as patches:
        if patch is not None:
            patches.setattr(*patch)
        return run(main)


def all_closed(world: World) -> bool:
    ledger = world.ledger
    return not world.inside and (ledger["opened"], ledger["players"]) == (ledger["closed"], ledger["left"])


@pytest.mark.parametrize(
    ("where", "error", "outcome", "said"),
    [
        ((World, "open"), OSError("no socket"), "env_error", "could not be opened: OSError: no socket"),
        ((World, "open"), TimeoutError(), "env_error", "could not be opened: TimeoutError"),
        ((World, "open"), asyncio.CancelledError(), "env_error", "opened: it was cancelled from within"),
        ((VirtualSession, "reset"), KeyError("x"), "env_error", "could not be reset: KeyError: 'x'"),
        ((VirtualSession, "step"), KeyError("x"), "env_error", "could not be stepped: KeyError: 'x'"),
        ((VirtualSession, "close"), KeyError("x"), "env_error", "could not be closed: KeyError: 'x'"),
        ((VirtualPlayer, "act"), KeyError("x"), "engine_error", "the agent raised: KeyError: 'x'"),
        ((VirtualPlayer, "act"), TimeoutError(), "engine_error", "the agent raised: TimeoutError"),
        ((VirtualPlayer, "act"), asyncio.CancelledError(), "engine_error", "it was cancelled from within"),
        ((VirtualPlayer, "act"), AgentError("gone"), "engine_error", "gone"),
        ((VirtualPlayer, "act"), ContextFull("full"), "token_limit", None),
        ((VirtualPlayer, "leave"), KeyError("x"), "engine_error", "the agent could not leave: KeyError: 'x'"),
    ],
)
def test_whatever_is_raised_is_an_outcome(
    where: tuple[type, str], error: BaseException, outcome: str, said: str | None
) -> None:
    episode, world, _ = play((*where, raises(error)))
    assert episode.outcome.value == outcome
    assert (episode.error is None) == (said is None)
    if said is not None and episode.error is not None:
        assert said in episode.error.message
    if where[1] not in ("open", "close", "leave"):
        assert all_closed(world)


@pytest.mark.parametrize(
    ("where", "error", "by_agent"),
    [
        ((World, "open"), OSError("no socket"), False),
        ((VirtualSession, "reset"), KeyError("x"), False),
        ((VirtualSession, "reset"), LeaseLost("dead", guilty=True), False),
        ((VirtualSession, "step"), KeyError("x"), True),
        ((VirtualSession, "step"), EnvError("odd"), True),
        ((VirtualSession, "step"), LeaseLost("dead", guilty=True), True),
        ((VirtualSession, "step"), LeaseLost("dead with another"), False),
        ((VirtualSession, "step"), WorkerLost("the browser died"), False),
        ((VirtualSession, "close"), KeyError("x"), False),
        ((VirtualPlayer, "act"), KeyError("x"), True),
        ((VirtualPlayer, "act"), TimeoutError(), True),
        ((VirtualPlayer, "act"), AgentError("the endpoint said 500"), False),
        ((VirtualPlayer, "act"), EngineLost("gone"), False),
        ((VirtualPlayer, "act"), asyncio.CancelledError(), False),
        ((VirtualPlayer, "leave"), KeyError("x"), False),
    ],
)
def test_what_an_agent_can_cause_counts_as_its_failure(
    where: tuple[type, str], error: BaseException, by_agent: bool
) -> None:
    episode, _, _ = play((*where, raises(error)))
    assert episode.error is not None
    assert episode.error.by_agent is by_agent
    assert episode.excluded is not by_agent


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_pool_that_answers_nonsense_is_an_environment_s_error(where: str) -> None:
    async def nothing(*args: object) -> None:
        return None

    episode, world, _ = play((VirtualSession, where, nothing))
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert episode.error.type == "AttributeError"
    assert all_closed(world)


def test_an_agent_that_cannot_start_is_an_engine_error() -> None:
    def refuse(*args: object) -> Any:
        raise KeyError("x")

    episode, world, _ = play((World, "player", refuse))
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert world.ledger["opened"] == world.ledger["closed"] == 1


def test_a_move_that_cannot_be_recorded_is_an_engine_error() -> None:
    from rollgym.core.agent import AgentAction

    async def act(*args: object) -> AgentAction:
        return AgentAction(action="go", action_ids=(1, 2), logprobs=(0.5,))

    episode, world, _ = play((VirtualPlayer, "act", act))
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error is not None
    assert "2 action_ids but 1 logprobs" in episode.error.message
    assert all_closed(world)


@pytest.mark.parametrize("at", [0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
def test_a_cancelled_episode_stops_at_once_and_is_an_episode(at: float) -> None:
    """At 1 it is opened, at 2 reset, then it acts and steps by turns."""
    episode, world, now = play(cancel_at=at)
    assert episode.outcome is Outcome.CANCELLED
    assert episode.length == max(0, int(at - 2) // 2)
    assert now == at + (1.0 if at >= 1 else 0.0), "an open environment is closed, which takes a second"
    assert all_closed(world)


def test_cancelling_a_closing_episode_does_not_interrupt_it() -> None:
    """Cancelled while it closes, it keeps its outcome, and closing continues."""
    whole, _, until = play()
    episode, world, now = play(cancel_at=until - 0.5)
    assert now == until
    assert episode.outcome is whole.outcome is Outcome.TERMINATED
    assert not world.ledger["half closed"]
    assert all_closed(world)


def test_closing_does_not_count_against_the_time_limit() -> None:
    _, _, until = play()
    episode, world, _ = play(limit=until - 0.5)
    assert episode.outcome is Outcome.TERMINATED
    assert not world.ledger["half closed"]


def test_a_time_limit_and_a_cancellation_at_the_same_moment() -> None:
    episode, world, _ = play(limit=3.5, cancel_at=3.5)
    assert episode.outcome in (Outcome.CANCELLED, Outcome.TIME_LIMIT)
    assert all_closed(world)


def test_a_time_limit_ends_what_hangs() -> None:
    episode, world, now = play((VirtualPlayer, "act", never), limit=100.0)
    assert episode.outcome is Outcome.TIME_LIMIT
    assert now == 101.0
    assert all_closed(world)


@pytest.mark.parametrize(
    ("where", "outcome"),
    [((VirtualSession, "close"), Outcome.ENV_ERROR), ((VirtualPlayer, "leave"), Outcome.ENGINE_ERROR)],
)
def test_closing_has_a_timeout(where: tuple[type, str], outcome: Outcome) -> None:
    _, _, usual = play()
    episode, _, now = play((*where, never))
    assert episode.outcome is outcome
    assert now <= usual + CLOSE_SECONDS


def test_a_failure_while_closing_does_not_hide_the_first_one() -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(VirtualSession, "close", raises(KeyError("second")))
        episode, _, _ = play((VirtualPlayer, "act", raises(KeyError("first"))))
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error is not None
    assert "first" in episode.error.message


def test_a_player_leaves_even_where_the_environment_cannot_be_closed() -> None:
    _, world, _ = play((VirtualSession, "close", raises(KeyError("x"))))
    assert world.ledger["left"] == world.ledger["players"] == 1


@pytest.mark.parametrize("at", [0.5, 3.5, "while it closes"])
def test_cancelling_the_caller_raises_after_everything_was_closed(at: Any) -> None:
    _, _, until = play()
    seconds = until - 0.5 if isinstance(at, str) else at

    async def main() -> World:
        world = Steady(early=0.0)
        task = asyncio.create_task(run_episode(SPEC, world, world))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return world

    world = run(main)
    assert all_closed(world)
    assert not world.ledger["half closed"]


def test_a_stray_cancellation_does_not_cancel_the_caller() -> None:
    async def main() -> Episode:
        world = Steady(early=0.0)
        return await run_episode(SPEC, world, world)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(VirtualPlayer, "act", raises(asyncio.CancelledError()))
        assert run(main).outcome is Outcome.ENGINE_ERROR


def test_states_are_reported_in_order_with_turns_and_worker() -> None:
    reported: list[tuple[str, int, str]] = []

    async def main() -> None:
        world = Steady(turns=1)
        runner = EpisodeRunner(
            SPEC, world, world, on_state=lambda *what: reported.append((what[0].value, *what[1:]))
        )
        await runner.run()

    run(main)
    worker = reported[1][2]
    assert worker.startswith("w")
    assert reported == [
        ("opening", 0, ""),
        ("resetting", 0, worker),
        ("generating", 0, worker),
        ("stepping", 0, worker),
        ("closing", 1, worker),
        ("done", 1, worker),
    ]
