"""Runs one episode: open, reset, alternate observations and actions until it ends, close, score.

The result is always an `Episode` with a typed outcome. Failed and cancelled episodes are results, too; a
cancelled one stops at once.

`rollgym.rollout.inflight` runs many episodes with bounded concurrency.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Any

from msgspec import UNSET

from rollgym.core.agent import Agent, AgentAction, Briefing, Player, as_player
from rollgym.core.errors import (
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
from rollgym.core.failures import failure_of, outcome_of
from rollgym.core.roles import ROLE, ROLE_REWARDS, ROLE_SUCCESS, find_role
from rollgym.core.seeding import derive_seed
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, RoleSpec, Seconds, Turn
from rollgym.pool.base import EnvPool, EnvSession, LeaseLost, Reset, Step
from rollgym.rewards.composite import score_episode
from rollgym.rewards.scoring import Scorer


class EpisodeState(StrEnum):
    """The state of an episode, named after what it waits for."""

    QUEUED = "queued"
    OPENING = "opening"
    RESETTING = "resetting"
    GENERATING = "generating"
    STEPPING = "stepping"
    CLOSING = "closing"
    SCORING = "scoring"
    DONE = "done"


CLOSE_SECONDS = 30.0
"""Seconds that closing an environment or a player may take."""

OnState = Callable[[EpisodeState, int, str], None]
"""Called with each new state, the number of turns so far, and the worker that hosts the environment."""


def _ignore_state(state: EpisodeState, turns: int, worker: str) -> None:
    return


async def run_episode(
    spec: EpisodeSpec,
    pool: EnvPool,
    agent: Agent,
    *,
    scorer: Scorer | None = None,
    on_state: OnState = _ignore_state,
) -> Episode:
    """Run one episode and return it, however it ended.

    Raises:
        asyncio.CancelledError: The calling task was cancelled; the environment has been closed.
    """
    runner = EpisodeRunner(spec, pool, agent, scorer=scorer, on_state=on_state)
    episode = await runner.run()
    if runner.cancelled_by_caller:
        raise asyncio.CancelledError
    return episode


class EpisodeRunner:
    """Runs one episode from spec to outcome.

    `cancel` ends it from outside: `run` then returns an episode with the outcome ``cancelled`` and the turns
    so far.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        pool: EnvPool,
        agent: Agent,
        *,
        scorer: Scorer | None = None,
        attempts: int = 1,
        on_state: OnState = _ignore_state,
    ) -> None:
        self.spec = spec
        self.state = EpisodeState.QUEUED
        self.turns: list[Turn] = []
        self.cancelled_by_caller = False
        self._cancel_requested = False
        self._pool = pool
        self._agent = agent
        self._scorer = scorer
        self._attempts = attempts
        self.on_state = on_state
        self._failed_in = EpisodeState.QUEUED
        self._task: asyncio.Task[Outcome] | None = None
        self._started = time.time()
        self._clock = time.perf_counter()
        self._session: EnvSession | None = None
        self._players: dict[str, Player] = {}
        """By role; an episode of one agent has the role "" alone."""
        self._role = ""
        """The role that acts next."""
        self._turn_began = 0.0
        self._start: Reset | None = None
        self._observation = ""
        self._final: tuple[tuple[int, ...], bool] = ((), False)
        self._worker = ""
        self._info: dict[str, Any] = {}
        self._success: bool | None = None
        """As last reported by the environment, or by the scorer."""

    async def run(self) -> Episode:
        """Run the episode to its end.

        Waits for: the pool, the environment, the agent, the scorer (see `EpisodeState`). Unblocked by: their
        answers, the episode's time limit, or `cancel`.
        """
        self._task = asyncio.create_task(self._play())
        if self._cancel_requested:
            self._task.cancel()
        error: Failure | None = None
        try:
            outcome = await self._task
        except asyncio.CancelledError:
            # Awaiting a task passes a cancellation on to it, so it has ended by now in every case.
            self.cancelled_by_caller = not self._cancel_requested
            outcome = Outcome.CANCELLED
        except RollgymError as failure:
            by_agent = self._is_own(self._role) and caused_by_agent(failure, self._failed_in)
            outcome, error = outcome_of(failure), replace(failure_of(failure), by_agent=by_agent)
        except Exception as bug:
            # A bug: the episode ends all the same, with the error as its outcome.
            outcome, error = Outcome.ENV_ERROR, failure_of(bug)
        self._enter(EpisodeState.DONE)
        return self._end(outcome, error)

    def cancel(self) -> None:
        """End the episode now, and cancel the call that it waits for.

        An episode that is closing keeps its outcome, unless it is still to be scored.
        """
        self._cancel_requested = True
        if self._task is not None and self.state is not EpisodeState.CLOSING:
            self._task.cancel()

    def abandoned(self) -> Episode:
        """The episode as it is now, for one that does not end after `cancel`."""
        return self._end(Outcome.CANCELLED, None)

    async def _play(self) -> Outcome:
        """Play, close, score. A failure to close does not hide an earlier failure."""
        try:
            outcome = await self._in_time()
        except BaseException:
            self._failed_in = self.state
            with suppress(Exception):
                await self._close()
            raise
        await self._close()
        await self._score(outcome)
        return outcome

    async def _in_time(self) -> Outcome:
        try:
            async with asyncio.timeout(self.spec.limits.seconds):
                return await self._in_session()
        except TimeoutError:
            self._blame_opponents()
            return Outcome.TIME_LIMIT
        except ContextFull:
            return Outcome.TOKEN_LIMIT

    def _blame_opponents(self) -> None:
        """Raise if opponents used up most of the time limit: the agent must not fail for their slowness."""
        limit = self.spec.limits.seconds or 0.0
        opponents = [role.name for role in self._roles if not self._is_own(role.name)]
        waited = sum(turn.seconds.generate for turn in self.turns if turn.role in opponents)
        if self.state is EpisodeState.GENERATING and self._role in opponents:
            waited += time.perf_counter() - self._turn_began
        if 2 * waited > limit:
            names = " and ".join(f"{role} ({self.spec.players.get(role, '')})" for role in opponents)
            raise AgentError(
                f"The time limit of {limit:g} seconds passed, of which {waited:.3g} were spent waiting for "
                f"{names}."
            )

    async def _in_session(self) -> Outcome:
        self._enter(EpisodeState.OPENING)
        with _Border(EnvError, "the environment could not be opened"):
            self._session = session = await self._pool.open(self.spec)
        self._worker = session.worker
        self._enter(EpisodeState.RESETTING)
        with _Border(EnvError, "the environment could not be reset"):
            self._start = await session.reset()
        with _Border(EnvError, "the environment's roles are invalid"):
            _check_players(self.spec, self._start.roles)
            self._observe(self._start.observation, self._start.info)
        with boundary(AgentError, "the agent could not start"):
            for briefing in self._briefings(self._start):
                self._players[briefing.role] = as_player(self._agent.player(briefing))
        return await self._turns(session)

    def _briefings(self, start: Reset) -> list[Briefing]:
        """One briefing per role. The seed differs by role: an agent in two roles must not sample alike."""
        if not start.roles:
            return [Briefing(spec=self.spec, instructions=start.instructions, tools=start.tools)]
        seed = self.spec.sampling_seed
        return [
            Briefing(
                spec=replace(self.spec, sampling_seed=derive_seed("role", seed, role.name)),
                instructions=role.instructions,
                tools=role.tools,
                role=role.name,
                free_text=role.free_text,
            )
            for role in start.roles
        ]

    @property
    def _roles(self) -> tuple[RoleSpec, ...]:
        return self._start.roles if self._start else ()

    @property
    def _main_role(self) -> str:
        """The role whose reward and success are those of the episode."""
        return self.spec.role or next((role.name for role in self._roles), "")

    def _is_own(self, role: str) -> bool:
        """True where the agent of the episode's role plays this role, not an opponent."""
        players = self.spec.players
        return players.get(role) == players.get(self._main_role)

    async def _close(self) -> None:
        """Close the session and the player. A cancellation waits for that: a half-closed session leaks."""
        if self._session is None:
            return
        self._enter(EpisodeState.CLOSING)
        closing = asyncio.create_task(_close_session(self._session, list(self._players.values())))
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
        """Add the scorer's rewards, all of them or none. The environment is already released."""
        if self._scorer is None or not self.turns:
            return
        if self._cancel_requested:
            raise asyncio.CancelledError
        self._enter(EpisodeState.SCORING)
        with _Border(RewardError, "the episode could not be scored"):
            scored = await score_episode(self._scorer, self._end(outcome, None))
        self.turns, self._success = list(scored.turns), scored.success

    async def _turns(self, session: EnvSession) -> Outcome:
        tokens = 0
        while True:
            outcome = self._limit_reached(tokens)
            if outcome is not None:
                return self._cut_short(outcome)
            turn = await self._turn(session, self._players[self._role])
            tokens += len(turn.prompt_ids) + len(turn.action_ids)
            if turn.terminated:
                return Outcome.TERMINATED
            if turn.truncated:
                return self._cut_short(Outcome.TRUNCATED)

    def _cut_short(self, outcome: Outcome) -> Outcome:
        """Record the tokens that the next player would have read, if it can: a critic needs them.

        A role that has not acted yet is left out: it has no conversation that they could continue.
        """
        if any(turn.role == self._role for turn in self.turns):
            with boundary(AgentError, "the agent could not read the last observation"):
                self._final = self._players[self._role].final_prompt(self._observation)
        return outcome

    async def _turn(self, session: EnvSession, player: Player) -> Turn:
        self._enter(EpisodeState.GENERATING)
        self._turn_began = began = time.perf_counter()
        with _Border(AgentError, "the agent raised", raised=AgentRaised):
            action = _as_action(await player.act(self._observation, self._info))
        decided = time.perf_counter()
        self._enter(EpisodeState.STEPPING)
        with _Border(EnvError, "the environment could not be stepped"):
            step = await session.step(action.action)
        waited = time.perf_counter() - decided - step.seconds
        seconds = Seconds(queue=max(waited, 0.0), generate=decided - began, step=step.seconds)
        with _Border(AgentError, "the agent's action cannot be recorded"):
            turn = _make_turn(self._observation, action, step, seconds)
        if self._roles:
            with _Border(EnvError, "the environment's rewards are invalid"):
                rewards = _role_rewards(step.info, self._roles)
                turn = replace(turn, role=self._role, rewards=rewards, reward=rewards[self._main_role])
        self.turns.append(turn)
        with _Border(EnvError, "the environment's roles are invalid"):
            self._observe(step.observation, step.info)
        return turn

    def _observe(self, observation: str, info: dict[str, Any]) -> None:
        success = info.get("success")
        if self._roles:
            if find_role(self._roles, info.get(ROLE)) is None:
                raise ValueError(f"info['{ROLE}'] is {info.get(ROLE)!r}, which is not a role")
            self._role = str(info[ROLE])
            successes = info.get(ROLE_SUCCESS)
            if isinstance(successes, dict):
                success = successes.get(self._main_role, success)
        self._observation, self._info = observation, info
        self._success = None if success is None else bool(success)

    def _limit_reached(self, tokens: int) -> Outcome | None:
        limits = self.spec.limits
        if limits.turns is not None and len(self.turns) >= limits.turns:
            return Outcome.TURN_LIMIT
        if limits.tokens is not None and tokens >= limits.tokens:
            return Outcome.TOKEN_LIMIT
        return None

    def _enter(self, state: EpisodeState) -> None:
        self.state = state
        self.on_state(state, len(self.turns), self._worker)

    def _end(self, outcome: Outcome, error: Failure | None) -> Episode:
        """The finished episode. A failed one has no success."""
        return Episode(
            spec=self.spec,
            outcome=outcome,
            turns=tuple(self.turns),
            instructions=self._start.instructions if self._start else "",
            tools=self._start.tools if self._start else (),
            reset_info=self._start.info if self._start else {},
            final_observation=self._observation,
            final_ids=self._final[0],
            final_row=self._final[1],
            success=None if outcome.failed else self._success,
            error=error,
            attempts=self._attempts,
            started=self._started,
            seconds=time.perf_counter() - self._clock,
            roles=self._roles,
        )


def _check_players(spec: EpisodeSpec, roles: Sequence[RoleSpec]) -> None:
    """Refuse players of roles that the environment does not have."""
    for role in (*spec.players, *([spec.role] if spec.role else [])):
        if find_role(roles, role) is None:
            names = ", ".join(known.name for known in roles) or "none; others=null makes it ask all roles"
            raise EnvError(f"{spec.env_id} has no role {role!r} (roles: {names})")


def _role_rewards(info: dict[str, Any], roles: Sequence[RoleSpec]) -> dict[str, float]:
    given = info.get(ROLE_REWARDS)
    if not isinstance(given, dict) or any(find_role(roles, role) is None for role in given):
        raise ValueError(f"info['{ROLE_REWARDS}'] must hold rewards by role, not {given!r}")
    return {role.name: float(given.get(role.name, 0.0)) for role in roles}


def caused_by_agent(error: RollgymError, state: EpisodeState) -> bool:
    """Return whether the agent can have caused an error that ended its episode in this state.

    True for errors while its action is executed, unless another episode brought the worker down, and for
    exceptions of the agent's own code. Opening, resetting, closing and scoring an episode, and the engine or
    endpoint behind an agent, are infrastructure.
    """
    if state is EpisodeState.STEPPING:
        return not isinstance(error, WorkerLost) or (isinstance(error, LeaseLost) and error.guilty)
    return isinstance(error, AgentRaised)


class _Border:
    """A `boundary` that also reports a cancellation from within, such as an engine that shut down.

    Other exceptions become ``raised``, if given. A class, because a generator costs more in every turn.
    """

    __slots__ = ("_kind", "_raised", "_where")

    def __init__(
        self, kind: type[RollgymError], where: str, raised: type[RollgymError] | None = None
    ) -> None:
        self._kind, self._where, self._raised = kind, where, raised or kind

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, RollgymError):
            return
        if isinstance(error, Exception):
            raise self._raised(f"{self._where}: {one_line(error)}") from error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise self._kind(f"{self._where}: it was cancelled from within") from error


async def _close_session(session: EnvSession, players: Sequence[Player]) -> None:
    try:
        with _Border(EnvError, "the environment could not be closed"):
            async with asyncio.timeout(CLOSE_SECONDS):
                await session.close()
    finally:
        async with AsyncExitStack() as stack:  # all players leave, also after one fails to
            for player in players:
                stack.push_async_callback(_leave, player)


async def _leave(player: Player) -> None:
    with _Border(AgentError, "the agent could not leave"):
        async with asyncio.timeout(CLOSE_SECONDS):
            await player.leave()


def _as_action(answer: AgentAction | str) -> AgentAction:
    if isinstance(answer, str):
        return AgentAction(action=clean_text(answer))
    if isinstance(answer, AgentAction):
        return answer
    raise TypeError(f"an agent must return str or AgentAction, got {type(answer).__name__}")


def _make_turn(observation: str, action: AgentAction, step: Step, seconds: Seconds) -> Turn:
    return Turn(
        observation=observation,
        action=clean_text(action.action),
        response=None if action.response is None else clean_text(action.response),
        message=None if action.message is None else jsonable(action.message.to_openai(), "message"),
        reward=step.reward,
        terminated=step.terminated,
        truncated=step.truncated,
        info=step.info,
        prompt_ids=action.prompt_ids,
        action_ids=action.action_ids,
        logprobs=action.logprobs,
        new_row=action.new_row,
        policy_version=action.policy_version,
        version_spans=action.version_spans,
        finish_reason=action.finish_reason,
        seconds=seconds,
        usage=action.usage,
        routed_experts=action.routed_experts or UNSET,
    )
