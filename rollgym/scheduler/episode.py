"""One episode's life: open, reset, then observation and action by turns until something ends it, and a score.

Whatever happens, the result is an `Episode` with a typed outcome. A cancelled one stops at once, wherever it
is, and is an episode too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Any

from rollgym.agent import Agent, Briefing, Move, Player
from rollgym.errors import (
    AgentError,
    AgentRaised,
    ContextFull,
    EnvError,
    RewardError,
    RollgymError,
    WorkerLost,
    boundary,
    one_line,
)
from rollgym.failures import failure_of, outcome_of
from rollgym.pool import EnvPool, EnvSession, Reset, Step
from rollgym.records import clean_text
from rollgym.rewards.scoring import Scorer
from rollgym.rewards.weighted import score_episode
from rollgym.types import Episode, EpisodeSpec, Failure, Outcome, Seconds, Turn


class EpisodeState(StrEnum):
    """Where an episode is; the name says what it waits for."""

    QUEUED = "queued"
    OPENING = "opening"
    RESETTING = "resetting"
    GENERATING = "generating"
    STEPPING = "stepping"
    CLOSING = "closing"
    SCORING = "scoring"
    DONE = "done"


CLOSE_SECONDS = 30.0
"""How long an environment or a player may take to be given back."""

Watcher = Callable[[EpisodeState, int, str], None]
"""Told each new state, how many turns have been played, and which worker hosts the environment."""


def _nobody(state: EpisodeState, turns: int, worker: str) -> None:
    return


async def play_episode(
    spec: EpisodeSpec,
    pool: EnvPool,
    agent: Agent,
    *,
    scorer: Scorer | None = None,
    attempts: int = 1,
    watcher: Watcher = _nobody,
) -> Episode:
    """Play one episode and return it, however it ended. Cancelling the calling task raises, as ever."""
    life = EpisodeLife(spec, pool, agent, scorer=scorer, attempts=attempts, watcher=watcher)
    episode = await life.live()
    if life.cancelled_by_caller:
        raise asyncio.CancelledError
    return episode


class EpisodeLife:
    """One episode from spec to outcome.

    `cancel` ends it from outside: `live` then returns an episode with the outcome ``cancelled`` and the turns
    that were played.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        pool: EnvPool,
        agent: Agent,
        *,
        scorer: Scorer | None = None,
        attempts: int = 1,
        watcher: Watcher = _nobody,
    ) -> None:
        self.spec = spec
        self.state = EpisodeState.QUEUED
        self.turns: list[Turn] = []
        self.cancelled_by_caller = False
        self._cancel_asked = False
        self._pool = pool
        self._agent = agent
        self._scorer = scorer
        self._attempts = attempts
        self.watcher = watcher
        self._failed_in = EpisodeState.QUEUED
        self._task: asyncio.Task[Outcome] | None = None
        self._started = time.time()
        self._clock = time.perf_counter()
        self._session: EnvSession | None = None
        self._player: Player | None = None
        self._start: Reset | None = None
        self._observation = ""
        self._final: tuple[tuple[int, ...], bool] = ((), False)
        self._worker = ""
        self._info: dict[str, Any] = {}
        self._success: bool | None = None
        """As the environment said last, or a scorer after it."""

    async def live(self) -> Episode:
        """Play until something ends the episode."""
        self._task = asyncio.create_task(self._play())
        if self._cancel_asked:
            self._task.cancel()
        error: Failure | None = None
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            # Awaiting a task hands a cancellation on to it, so it is over by now, whoever asked for it.
            self.cancelled_by_caller = not self._cancel_asked
            outcome = Outcome.CANCELLED
        except RollgymError as failure:
            by_agent = caused_by_agent(failure, self._failed_in)
            outcome, error = outcome_of(failure), replace(failure_of(failure), by_agent=by_agent)
        except Exception as bug:
            # Nobody foresaw it; still the episode ends, and says why.
            outcome, error = Outcome.ENV_ERROR, failure_of(bug)
        self._enter(EpisodeState.DONE)
        return self._end(outcome, error)

    def cancel(self) -> None:
        """End the episode now; what it waits for is told to stop.

        One that only has to be given back keeps its outcome, unless it is still to be scored.
        """
        self._cancel_asked = True
        if self._task is not None and self.state is not EpisodeState.CLOSING:
            self._task.cancel()

    def abandoned(self) -> Episode:
        """The episode as it is now, for one that does not end when it is told to."""
        return self._end(Outcome.CANCELLED, None)

    async def _play(self) -> Outcome:
        """Play, give everything back, score. Failing to give back does not hide an earlier failure."""
        try:
            outcome = await self._in_time()
        except BaseException:
            self._failed_in = self.state
            with suppress(Exception):
                await self._give_back()
            raise
        await self._give_back()
        await self._score(outcome)
        return outcome

    async def _in_time(self) -> Outcome:
        try:
            async with asyncio.timeout(self.spec.limits.seconds):
                return await self._in_session()
        except TimeoutError:
            return Outcome.TIME_LIMIT
        except ContextFull:
            return Outcome.TOKEN_LIMIT

    async def _in_session(self) -> Outcome:
        self._enter(EpisodeState.OPENING)
        with _border(EnvError, "the environment could not be opened"):
            self._session = session = await self._pool.open(self.spec)
        self._worker = getattr(session, "worker", "")
        self._enter(EpisodeState.RESETTING)
        with _border(EnvError, "the environment could not be reset"):
            self._start = await session.reset()
        self._hear(self._start.observation, self._start.info)
        with boundary(AgentError, "the agent could not start"):
            briefing = Briefing(spec=self.spec, instructions=self._start.instructions)
            self._player = player = self._agent.player(briefing)
        return await self._turns(session, player)

    async def _give_back(self) -> None:
        """Close the session and let the player leave. A cancellation waits for that: half closed leaks."""
        if self._session is None:
            return
        self._enter(EpisodeState.CLOSING)
        closing = asyncio.create_task(_close(self._session, self._player))
        cancelled = False
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError:
                cancelled = True
        failure = closing.exception()
        if cancelled:
            raise asyncio.CancelledError
        if failure is not None:
            raise failure

    async def _score(self, outcome: Outcome) -> None:
        """Add a scorer's reward, all of it or nothing. The environment is free for others by now."""
        if self._scorer is None or not self.turns:
            return
        if self._cancel_asked:
            raise asyncio.CancelledError
        self._enter(EpisodeState.SCORING)
        with _border(RewardError, "the episode could not be scored"):
            scored = await score_episode(self._scorer, self._end(outcome, None))
        self.turns, self._success = list(scored.turns), scored.success

    async def _turns(self, session: EnvSession, player: Player) -> Outcome:
        tokens = 0
        while True:
            outcome = self._limit_reached(tokens)
            if outcome is not None:
                return self._cut_short(outcome, player)
            turn = await self._turn(session, player)
            tokens += len(turn.prompt_ids) + len(turn.action_ids)
            if turn.terminated:
                return Outcome.TERMINATED
            if turn.truncated:
                return self._cut_short(Outcome.TRUNCATED, player)

    def _cut_short(self, outcome: Outcome, player: Player) -> Outcome:
        """Note what the player would have read next, where it can say so: a critic values it."""
        view = getattr(player, "view", None)
        if view is not None and self.turns:
            with boundary(AgentError, "the agent could not read the last observation"):
                self._final = view(self._observation)
        return outcome

    async def _turn(self, session: EnvSession, player: Player) -> Turn:
        self._enter(EpisodeState.GENERATING)
        began = time.perf_counter()
        with _border(AgentError, "the agent raised", raised=AgentRaised):
            move = _as_move(await player.act(self._observation, self._info))
        decided = time.perf_counter()
        self._enter(EpisodeState.STEPPING)
        with _border(EnvError, "the environment could not be stepped"):
            step = await session.step(move.action)
        waited = time.perf_counter() - decided - step.seconds
        seconds = Seconds(queue=max(waited, 0.0), generate=decided - began, step=step.seconds)
        with boundary(AgentError, "the agent's move cannot be recorded"):
            turn = _make_turn(self._observation, move, step, seconds)
        self.turns.append(turn)
        self._hear(step.observation, step.info)
        return turn

    def _hear(self, observation: str, info: dict[str, Any]) -> None:
        said = info.get("success")
        self._observation, self._info = observation, info
        self._success = None if said is None else bool(said)

    def _limit_reached(self, tokens: int) -> Outcome | None:
        limits = self.spec.limits
        if limits.turns is not None and len(self.turns) >= limits.turns:
            return Outcome.TURN_LIMIT
        if limits.tokens is not None and tokens >= limits.tokens:
            return Outcome.TOKEN_LIMIT
        return None

    def _enter(self, state: EpisodeState) -> None:
        self.state = state
        self.watcher(state, len(self.turns), self._worker)

    def _end(self, outcome: Outcome, error: Failure | None) -> Episode:
        """The finished episode. A failed one has no success."""
        return Episode(
            spec=self.spec,
            outcome=outcome,
            turns=tuple(self.turns),
            instructions=self._start.instructions if self._start else "",
            reset_info=self._start.info if self._start else {},
            final_observation=self._observation,
            final_ids=self._final[0],
            final_row=self._final[1],
            success=None if outcome.failed else self._success,
            error=error,
            attempts=self._attempts,
            started=self._started,
            seconds=time.perf_counter() - self._clock,
        )


def caused_by_agent(error: RollgymError, state: EpisodeState) -> bool:
    """Whether an agent can have caused an error that ended its episode in this state.

    All that goes wrong while its action is played, unless others brought the worker down; and what its own
    code raises. Opening, resetting, closing and scoring an episode, and the engine or endpoint that an agent
    asks, are infrastructure.
    """
    if state is EpisodeState.STEPPING:
        return not isinstance(error, WorkerLost) or bool(getattr(error, "guilty", False))
    return isinstance(error, AgentRaised)


@contextmanager
def _border(kind: type[RollgymError], where: str, raised: type[RollgymError] | None = None) -> Iterator[None]:
    """A `boundary` that also names a cancellation from within: an engine that went away, say.

    What is raised inside becomes ``raised`` where that is given. One generator: it runs twice a turn.
    """
    try:
        yield
    except RollgymError:
        raise
    except Exception as error:
        raise (raised or kind)(f"{where}: {one_line(error)}") from error
    except asyncio.CancelledError as stray:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise kind(f"{where}: it was cancelled from within") from stray


async def _close(session: EnvSession, player: Player | None) -> None:
    try:
        with _border(EnvError, "the environment could not be given back"):
            async with asyncio.timeout(CLOSE_SECONDS):
                await session.close()
    finally:
        leave = getattr(player, "leave", None)
        if leave is not None:
            with _border(AgentError, "the agent could not leave"):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await leave()


def _as_move(answer: Move | str) -> Move:
    if isinstance(answer, str):
        return Move(action=clean_text(answer))
    if isinstance(answer, Move):
        return answer
    raise TypeError(f"an agent must answer with text or a Move, not a {type(answer).__name__}")


def _make_turn(observation: str, move: Move, step: Step, seconds: Seconds) -> Turn:
    return Turn(
        observation=observation,
        action=clean_text(move.action),
        response=None if move.response is None else clean_text(move.response),
        reward=step.reward,
        terminated=step.terminated,
        truncated=step.truncated,
        info=step.info,
        prompt_ids=move.prompt_ids,
        action_ids=move.action_ids,
        logprobs=move.logprobs,
        new_row=move.new_row,
        policy_version=move.policy_version,
        version_spans=move.version_spans,
        finish_reason=move.finish_reason,
        seconds=seconds,
        usage=move.usage,
    )
