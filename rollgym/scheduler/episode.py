"""One episode's life: open, reset, then observation and action by turns until something ends it.

Whatever happens, the result is an `Episode` with a typed outcome; only cancelling the task itself raises.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rollgym.agent import Agent, Briefing, Move, Player
from rollgym.errors import AgentError, RollgymError, boundary
from rollgym.failures import failure_of, outcome_of
from rollgym.pool import EnvPool, EnvSession, Reset, Step
from rollgym.records import clean_text
from rollgym.types import Episode, EpisodeSpec, Failure, Outcome, Seconds, Turn


async def play_episode(spec: EpisodeSpec, pool: EnvPool, agent: Agent, *, attempts: int = 1) -> Episode:
    """Play one episode and return it, however it ended."""
    life = _Life(spec, attempts)
    error: Failure | None = None
    session: EnvSession | None = None
    try:
        async with asyncio.timeout(spec.limits.seconds):
            session = await pool.open(spec)
            start = life.begin(await session.reset())
            with boundary(AgentError, "the agent could not start"):
                player = agent.player(Briefing(spec=spec, instructions=start.instructions))
            outcome = await life.play(session, player)
    except TimeoutError:
        outcome = Outcome.TIME_LIMIT
    except RollgymError as failure:
        outcome, error = outcome_of(failure), failure_of(failure)
    finally:
        if session is not None:
            await session.close()
    return life.end(outcome, error)


class _Life:
    """What is known of an episode while it is played."""

    def __init__(self, spec: EpisodeSpec, attempts: int) -> None:
        self.spec = spec
        self.attempts = attempts
        self.started = time.time()
        self.clock = time.perf_counter()
        self.start: Reset | None = None
        self.observation = ""
        self.info: dict[str, Any] = {}
        self.turns: list[Turn] = []

    def begin(self, start: Reset) -> Reset:
        self.start = start
        self.observation, self.info = start.observation, start.info
        return start

    async def play(self, session: EnvSession, player: Player) -> Outcome:
        """Turns until the environment or a limit ends the episode."""
        tokens = 0
        while True:
            outcome = self._limit_reached(tokens)
            if outcome is not None:
                return outcome
            turn = await self._turn(session, player)
            tokens += len(turn.prompt_ids) + len(turn.action_ids)
            if turn.ends:
                return Outcome.TERMINATED if turn.terminated else Outcome.TRUNCATED

    async def _turn(self, session: EnvSession, player: Player) -> Turn:
        began = time.perf_counter()
        with boundary(AgentError, "the agent raised"):
            move = _as_move(await player.act(self.observation, self.info))
        decided = time.perf_counter()
        step = await session.step(move.action)
        waited = time.perf_counter() - decided - step.seconds
        seconds = Seconds(queue=max(waited, 0.0), generate=decided - began, step=step.seconds)
        turn = _make_turn(self.observation, move, step, seconds)
        self.turns.append(turn)
        self.observation, self.info = step.observation, step.info
        return turn

    def _limit_reached(self, tokens: int) -> Outcome | None:
        limits = self.spec.limits
        if limits.turns is not None and len(self.turns) >= limits.turns:
            return Outcome.TURN_LIMIT
        if limits.tokens is not None and tokens >= limits.tokens:
            return Outcome.TOKEN_LIMIT
        return None

    def end(self, outcome: Outcome, error: Failure | None) -> Episode:
        """The finished episode. A failed one has no success; others have what the environment said last."""
        said = self.info.get("success")
        return Episode(
            spec=self.spec,
            outcome=outcome,
            turns=tuple(self.turns),
            instructions=self.start.instructions if self.start else "",
            reset_info=self.start.info if self.start else {},
            final_observation=self.observation,
            success=None if outcome.failed or said is None else bool(said),
            error=error,
            attempts=self.attempts,
            started=self.started,
            seconds=time.perf_counter() - self.clock,
        )


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
