"""Black-box programs as players: the program asks, the model answers, and what comes of it is an episode.

To a scheduler the program is the environment: what it asks is what is observed, and its rewards are the
rewards. The reply has been given by the time the scheduler hears of the question, so the agent only reports
how it came about. One `ProgramPlayer` is both, the pool and the agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rollgym.agent import Briefing, Move
from rollgym.errors import AgentError, ContextFull, EnvError, RunError, UsageError, WorkerLost
from rollgym.pool import Reset, Step
from rollgym.rewards import Scorer
from rollgym.scheduler.episode import play_episode
from rollgym.serve.process import Process
from rollgym.serve.requests import Refused, RewardBody, read
from rollgym.serve.server import RecordingServer
from rollgym.serve.session import Session
from rollgym.types import Episode, EpisodeSpec, Failure, Outcome

_Heard = Literal["turn", "limit", "ended", "exit"]


class ProgramPlayer:
    """Runs a program for each episode.

    The program finds the endpoint in ``OPENAI_BASE_URL`` (and a key in ``OPENAI_API_KEY``), and its task as
    one JSON object on standard input. It says what the episode was worth by ``POST $ROLLGYM_SESSION/reward``
    or in its last line of output, such as ``{"reward": 1.0, "success": true}``.

    Args:
        server: The endpoint, started.
        command: The program and its arguments.
        timeout: Seconds for an episode whose spec sets no such limit.
        cwd: Where the program runs.
        env: Variables for it besides ours.
    """

    def __init__(
        self,
        server: RecordingServer,
        command: Sequence[str] | str,
        timeout: float = 600.0,
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.server = server
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        if not self.command or shutil.which(self.command[0], path=(env or {}).get("PATH")) is None:
            raise UsageError(f"There is no program {' '.join(self.command[:1])!r} to play with.")
        if not 0 < timeout < float("inf"):
            raise UsageError(f"The time limit must be positive and finite, not {timeout}.")
        self.timeout = timeout
        self.cwd = cwd
        self._env = dict(env or {})
        self._playing: dict[str, ProgramRun] = {}

    async def play(
        self, spec: EpisodeSpec, about: Mapping[str, Any] | None = None, *, scorer: Scorer | None = None
    ) -> Episode:
        """One episode, however it ends; the server keeps it. The program is told ``about`` as well."""
        if spec.limits.seconds is None:
            spec = replace(spec, limits=replace(spec.limits, seconds=self.timeout))
        if about:
            self._check_free(spec)
            self._playing[spec.episode_id] = ProgramRun(self, spec, about)
        try:
            episode = await play_episode(spec, self, self, scorer=scorer)
        finally:
            self._playing.pop(spec.episode_id, None)
        self.server.keep(episode)
        return episode

    async def open(self, spec: EpisodeSpec) -> ProgramRun:
        """A program for an episode, as a scheduler's pool gives it."""
        waiting = self._playing.get(spec.episode_id)
        if waiting is not None and not waiting.started:
            return waiting
        self._check_free(spec)
        self._playing[spec.episode_id] = run = ProgramRun(self, spec, {})
        return run

    def player(self, briefing: Briefing) -> ProgramRun:
        """Who tells what the model said to the program of this episode."""
        return self._playing[briefing.spec.episode_id]

    async def close(self) -> None:
        """End all programs."""
        await asyncio.gather(*(run.close() for run in list(self._playing.values())))

    def forget(self, run: ProgramRun) -> None:
        """A program has ended."""
        if self._playing.get(run.spec.episode_id) is run:
            del self._playing[run.spec.episode_id]

    def surroundings(self, session: Session) -> dict[str, str]:
        """The variables that a program finds."""
        url = self.server.session_url(session)
        ours = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self.server.options.api_key or "none",
            "OPENAI_MODEL": self.server.options.model,
            "ROLLGYM_SESSION": url,
        }
        return {**os.environ, **self._env, **ours}

    def _check_free(self, spec: EpisodeSpec) -> None:
        if spec.episode_id in self._playing:
            raise UsageError(f"The episode {spec.episode_id} is being played already.")


class ProgramRun:
    """One program in one episode."""

    def __init__(self, player: ProgramPlayer, spec: EpisodeSpec, about: Mapping[str, Any]) -> None:
        self.spec = spec
        self.started = False
        self._player = player
        self._about = dict(about)
        self._session: Session | None = None
        self._process: Process | None = None
        self._next = 0
        """The turn that is told next."""
        self._failed: RunError | None = None
        """Why the program failed, told once its last turn has been."""
        self._clock = time.monotonic()

    @property
    def session(self) -> Session:
        """Its conversation."""
        assert self._session is not None
        return self._session

    async def reset(self) -> Reset:
        """Start the program and wait until the model has answered it for the first time."""
        self.started = True
        try:
            self._session = self._player.server.begin(self.spec, self._about)
        except Refused as refused:
            raise EnvError(f"The program has no session to talk in: {refused}") from None
        self.session.owned = True
        surroundings = self._player.surroundings(self.session)
        told = json.dumps(self._told(surroundings)).encode() + b"\n"
        self._process = await Process.start(self._player.command, told, surroundings, self._player.cwd)
        heard = await self._hear()
        if heard != "turn":
            raise await self._failure() or EnvError("The program ended without asking the model anything.")
        return Reset(
            observation=self.session.turns[0].observation,
            info=self.session.metadata,
            instructions=self.session.instructions,
        )

    async def act(self, observation: str, info: Mapping[str, Any]) -> Move:
        """What the model answered."""
        if self._failed is not None:
            raise self._failed
        turn = self.session.turns[self._next]
        return Move(
            action=turn.action,
            response=turn.response,
            prompt_ids=turn.prompt_ids,
            action_ids=turn.action_ids,
            logprobs=turn.logprobs,
            new_row=turn.new_row,
            policy_version=turn.policy_version,
            version_spans=turn.version_spans,
            finish_reason=turn.finish_reason,
            usage=turn.usage,
        )

    async def step(self, action: str) -> Step:
        """What the program did with it: its next question, or its end."""
        began = time.perf_counter()
        self._next += 1
        heard = await self._hear()
        if heard == "exit":
            self._failed = await self._failure()
            if self._failed is None:
                self._read_reward()
            elif self.spec.limits.turns is not None and self._next >= self.spec.limits.turns:
                raise self._failed  # nobody would ask again
        session = self.session
        if session.ended_as is Outcome.CANCELLED:
            raise WorkerLost("The recording server was closed while the program ran.")
        truncated = heard == "ended" and session.ended_as is Outcome.TRUNCATED
        return Step(
            observation=session.turns[self._next].observation if heard == "turn" else "",
            reward=session.turns[self._next - 1].reward,
            terminated=heard in ("ended", "exit") and not truncated and self._failed is None,
            truncated=truncated,
            info={} if session.success is None else {"success": session.success},
            seconds=time.perf_counter() - began,
        )

    async def close(self) -> None:
        """End the program, whatever it does."""
        self._player.forget(self)
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        if self._session is not None:
            self._player.server.release(self._session)

    async def _hear(self) -> _Heard:
        """What happens next."""
        session, process = self.session, self._process
        assert process is not None
        while True:
            session.news.clear()
            if len(session.turns) > self._next:
                return "turn"
            if session.limit is not None:
                return "limit"
            if session.over:
                return "ended"
            if process.exit.done():
                await process.finished()
                return "exit"
            news = asyncio.create_task(session.news.wait())
            left = self._player.timeout - (time.monotonic() - self._clock)
            limit = None if self.spec.limits.seconds is not None else max(left, 0.0)
            try:
                done, _ = await asyncio.wait(
                    {news, process.exit}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                news.cancel()
            if not done:
                raise EnvError(f"The program took longer than {self._player.timeout:g} s.")

    async def _failure(self) -> RunError | None:
        """Why the program failed, if it did; what it met with the model comes before how it took it."""
        process, session = self._process, self.session
        assert process is not None
        if not process.exit.done():
            return None
        code = await process.finished()
        if code == 0:
            return None
        how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        said = f": {process.complaint}" if process.complaint else ""
        kind = WorkerLost if code < 0 else EnvError
        failure: RunError = kind(f"The program {how}{said}")
        if session.trouble is not None:
            failure = AgentError(f"The program {how} after the model failed: {session.trouble}")
        elif session.context_full and session.turns:
            failure = ContextFull("The program gave up when its conversation no longer fitted the context.")
        failure.failure = Failure(type="ProgramFailed", message=str(failure), traceback=process.errors)
        return failure

    def _read_reward(self) -> None:
        """The reward in the last line of output, where the program has told none before."""
        process, session = self._process, self.session
        assert process is not None
        line = process.last_line
        if session.rewarded or not line.startswith("{"):
            return
        try:
            said = read(line.encode(), RewardBody)
            session.reward(said.reward, said.success)
        except Refused as refused:
            raise EnvError(f"The program's last line is no reward: {refused}") from None

    def _told(self, surroundings: Mapping[str, str]) -> dict[str, Any]:
        spec = self.spec
        return {
            **self._about,
            "episode_id": spec.episode_id,
            "env_id": spec.env_id,
            "env_kwargs": spec.env_kwargs,
            "task": spec.task,
            "split": spec.split,
            "env_seed": spec.env_seed,
            "model": surroundings["OPENAI_MODEL"],
            "base_url": surroundings["OPENAI_BASE_URL"],
            "session_url": surroundings["ROLLGYM_SESSION"],
        }


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
