"""Black-box programs as agents: the program sends requests, the model replies, the exchange is an episode.

To the scheduler the program is the environment: its requests are the observations, and its rewards the
rewards. The model has replied by the time the scheduler sees the request, so `act` only returns the recorded
reply. One `SubprocessAgent` is therefore both the pool and the agent.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from rollgym.core.agent import Agent, AgentAction, Briefing, Player
from rollgym.core.errors import AgentError, ContextFull, EnvError, RunError, UsageError, WorkerLost
from rollgym.core.messages import Message
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome
from rollgym.pool.base import EnvPool, EnvSession, Reset, Step
from rollgym.rewards import Scorer
from rollgym.rollout.episode_runner import run_episode
from rollgym.serve.offered_env import OfferedEnv
from rollgym.serve.program import REWARD_FILES, Program, as_program
from rollgym.serve.program_process import MAX_OUTPUT, Process, make_launcher
from rollgym.serve.requests import ApiError, RewardBody, read
from rollgym.serve.server import RecordingServer
from rollgym.serve.session import Session
from rollgym.utils.signals import signal_name

MAX_REWARD_FILE = 65_536
"""Bytes of a file with a reward."""
EXPECTED = {
    "output": 'the last line of its output must be a reward, such as {"reward": 1.0, "success": true}',
    "http": "it must post a reward to $ROLLGYM_SESSION/reward or /rl/reward",
    "file": f"it must leave {' or '.join(REWARD_FILES)} in its working folder",
}
"""What a program without a reward missed, by the source of the reward."""

_Event = Literal["turn", "limit", "ended", "exit"]


class SubprocessAgent(Agent):
    """Runs a program for each episode, in a sandbox unless the program says otherwise.

    The program gets the endpoint in ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL``, the key of its session in
    ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``, and its task as one JSON object on standard input.
    `Program.reward` says where its reward comes from.

    Args:
        server: The endpoint, already started.
        program: The program; a command or ``module:function`` for one with default settings.
        timeout: Seconds for an episode whose spec sets no time limit.
        envs: The pool whose environments a program with reward=environment plays.
    """

    def __init__(
        self,
        server: RecordingServer,
        program: Program | str | Sequence[str],
        timeout: float = 600.0,
        *,
        envs: EnvPool | None = None,
    ) -> None:
        self.server = server
        self.program = as_program(program)
        if not 0 < timeout < float("inf"):
            raise UsageError(f"The time limit must be positive and finite, not {timeout}.")
        if self.program.reward == "environment" and envs is None:
            raise UsageError("reward=environment requires envs, the pool of environments.")
        self.timeout = timeout
        self.envs = envs
        self.launcher = make_launcher(self.program, server.url)
        self._playing: dict[str, SubprocessEpisode] = {}

    async def prepare(self) -> None:
        """Start the sandbox before the first episode, so that a program that cannot run is an error now."""
        await self.launcher.prepare()

    async def play(
        self, spec: EpisodeSpec, metadata: Mapping[str, Any] | None = None, *, scorer: Scorer | None = None
    ) -> Episode:
        """Run one episode; the server records it. ``metadata`` is added to the program's task."""
        if spec.limits.seconds is None:
            spec = replace(spec, limits=replace(spec.limits, seconds=self.timeout))
        if metadata:
            self._check_free(spec)
            self._playing[spec.episode_id] = SubprocessEpisode(self, spec, metadata)
        try:
            episode = await run_episode(spec, self, self, scorer=scorer)
        finally:
            self._playing.pop(spec.episode_id, None)
        self.server.keep(episode)
        return episode

    async def open(self, spec: EpisodeSpec) -> SubprocessEpisode:
        """Return the environment session of an episode: the method of a pool."""
        waiting = self._playing.get(spec.episode_id)
        if waiting is not None and not waiting.started:
            return waiting
        self._check_free(spec)
        self._playing[spec.episode_id] = run = SubprocessEpisode(self, spec, {})
        return run

    def player(self, briefing: Briefing) -> SubprocessEpisode:
        """Return the player of an episode, which reports the recorded replies."""
        return self._playing[briefing.spec.episode_id]

    async def close(self) -> None:
        """Stop all programs."""
        await asyncio.gather(*(run.close() for run in list(self._playing.values())))
        await self.launcher.close()

    def forget(self, run: SubprocessEpisode) -> None:
        """Drop an episode whose program has ended."""
        if self._playing.get(run.spec.episode_id) is run:
            del self._playing[run.spec.episode_id]

    def environment(self, session: Session) -> dict[str, str]:
        """Return the variables of a program that name its endpoint."""
        url, key = self.server.session_url(session), self.server.session_key(session)
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": self.server.options.model,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": self.server.options.model,
            "ROLLGYM_SESSION": url,
        }

    def _check_free(self, spec: EpisodeSpec) -> None:
        if spec.episode_id in self._playing:
            raise UsageError(f"Episode {spec.episode_id} is already running.")


class SubprocessEpisode(Player, EnvSession):
    """One program in one episode."""

    def __init__(self, agent: SubprocessAgent, spec: EpisodeSpec, metadata: Mapping[str, Any]) -> None:
        self.spec = spec
        self.started = False
        self._agent = agent
        self._metadata = dict(metadata)
        self._session: Session | None = None
        self._process: Process | None = None
        self._env: EnvSession | None = None
        self._env_error: RunError | None = None
        self._early_reward = 0.0
        """Rewards of the environment before the first reply of the model."""
        self._next = 0
        """Index of the turn that `act` reports next."""
        self._failed: RunError | None = None
        """Why the program failed; raised after its last turn was reported."""
        self._clock = time.monotonic()

    @property
    def session(self) -> Session:
        """The session of the program."""
        assert self._session is not None
        return self._session

    async def reset(self) -> Reset:
        """Start the program and wait for the model's first reply to it."""
        self.started = True
        agent, source = self._agent, self._agent.program.reward
        try:
            self._session = agent.server.begin(self.spec, self._metadata, recorded_elsewhere=True)
        except ApiError as error:
            raise EnvError(f"No session could be opened for the program: {error}") from None
        self.session.rewards_from = None if source == "http" else source
        if source == "environment":
            await self._open_env()
        environment = agent.environment(self.session)
        task = json.dumps(self._task(environment)).encode() + b"\n"
        self._process = await agent.launcher.start(task, environment)
        event = await self._next_event()
        if event != "turn":
            silent = _failure("ProgramSilent", "The program ended without a request to the model.")
            raise await self._failure() or self._env_error or silent
        return Reset(
            observation=self.session.turns[0].observation,
            info=self.session.metadata,
            instructions=self.session.instructions,
            tools=self.session.tools,
        )

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Return the recorded reply of the model."""
        if self._failed is not None:
            raise self._failed
        turn = self.session.turns[self._next]
        values = {field.name: getattr(turn, field.name) for field in fields(AgentAction)}
        values["message"] = Message.from_openai(turn.message) if turn.message is not None else None
        return AgentAction(**values)

    async def step(self, action: str) -> Step:
        """Wait for the program's next request, or its end."""
        began = time.perf_counter()
        self._next += 1
        event = await self._next_event()
        session = self.session
        if session.outcome is Outcome.CANCELLED:
            raise WorkerLost("The recording server was closed while the program ran.")
        if event in ("exit", "ended"):
            failed = await self._failure() if event == "exit" else None
            self._failed = failed or self._env_error or self._take_reward()
            if self._failed is not None and self._next >= (self.spec.limits.turns or math.inf):
                raise self._failed  # at the turn limit `act` is not called again
        over = event in ("exit", "ended") and self._failed is None
        truncated = over and session.outcome is Outcome.TRUNCATED
        if self._early_reward and session.turns:
            session.reward(self._early_reward, None, late=True)
            self._early_reward = 0.0
        return Step(
            observation=session.turns[self._next].observation if event == "turn" else "",
            reward=session.turns[self._next - 1].reward,
            terminated=over and not truncated,
            truncated=truncated,
            info=session.turns[self._next - 1].info | _success(session),
            seconds=time.perf_counter() - began,
        )

    async def close(self) -> None:
        """Stop the program, and return its environment."""
        self._agent.forget(self)
        process, self._process = self._process, None
        env, self._env = self._env, None
        try:
            if process is not None:
                await process.stop()
        finally:
            if env is not None:
                await env.close()
            if self._session is not None:
                self._agent.server.release(self._session)

    async def _open_env(self) -> None:
        """Start the environment that the program plays."""
        assert self._agent.envs is not None
        self._env = await self._agent.envs.open(self.spec)
        start = await self._env.reset()
        self.session.env = OfferedEnv(self._env, start, self._on_env_step, self._on_env_error)

    def _on_env_step(self, step: Step) -> None:
        """Record a reward of the environment; its end is the end of the episode."""
        session = self.session
        if session.ended:
            return
        success = step.info.get("success")
        if session.turns:
            session.reward(self._early_reward + step.reward, None)
            self._early_reward = 0.0
        else:
            self._early_reward += step.reward
        session.success = bool(success) if success is not None else session.success
        if step.terminated or step.truncated:
            outcome = Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED
            self._agent.server.sessions.finish(session, outcome)

    def _on_env_error(self, error: RunError) -> None:
        self._env_error = error
        if not self.session.ended:
            self._agent.server.sessions.finish(self.session, Outcome.ENV_ERROR)

    async def _next_event(self) -> _Event:
        """Wait for the next turn, a limit, the end of the session or the exit of the program."""
        session, process = self.session, self._process
        assert process is not None
        while True:
            session.changed.clear()
            if len(session.turns) > self._next:
                return "turn"
            if session.limit is not None:
                return "limit"
            if session.ended and self._ends_with_session():
                return "ended"
            if process.exit.done():
                await process.finished()
                return "exit"
            changed: asyncio.Future[Any] = asyncio.ensure_future(session.changed.wait())
            left = self._agent.timeout - (time.monotonic() - self._clock)
            limit = None if self.spec.limits.seconds is not None else max(left, 0.0)
            try:
                done, _ = await asyncio.wait(
                    [changed, process.exit], timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                changed.cancel()
            if not done:
                seconds = f"{self._agent.timeout:g} s"
                raise _failure("ProgramTimeout", f"The program took longer than {seconds}.")

    def _ends_with_session(self) -> bool:
        """Return whether an episode is over with its session; else the program has yet to leave a reward."""
        source = self._agent.program.reward
        return source not in ("output", "file") or self.session.outcome is Outcome.CANCELLED

    async def _failure(self) -> RunError | None:
        """Return why the program failed, if it did; an error of the model comes before the exit code."""
        process, session = self._process, self.session
        assert process is not None
        if not process.exit.done():
            return None
        code = await process.finished()
        if process.too_much_output:
            size = f"{MAX_OUTPUT >> 20} MB"
            return _failure("OutputLimit", f"The program wrote more than {size} of output.", process)
        if code == 0:
            return None
        if code < 0 and process.out_of_memory():
            size = f"{self._agent.program.memory_mb:,} MB"
            return _failure("MemoryLimit", f"The program needed more than {size} of memory.", process)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        detail = f": {process.last_error_line}" if process.last_error_line else ""
        failure: RunError = (WorkerLost if code < 0 else EnvError)(f"The program {how}{detail}")
        if session.last_error is not None:
            failure = AgentError(f"The program {how} after the model failed: {session.last_error}")
        elif session.context_full and session.turns:
            failure = ContextFull("The program failed after its conversation no longer fit the context.")
        failure.failure = Failure(type="ProgramFailed", message=str(failure), traceback=process.stderr_tail)
        return failure

    def _take_reward(self) -> RunError | None:
        """Take the reward from its source; returns the error where it is missing or invalid."""
        process, session, source = self._process, self.session, self._agent.program.reward
        assert process is not None
        if source == "environment":
            session.success = bool(session.success)  # a program that gave up has failed
        if source not in EXPECTED or (source == "http" and session.rewarded):
            return None
        try:
            text = _reported(process, source)
            if not text:
                message = f"The program ended without a reward: {EXPECTED[source]}."
                return _failure("NoReward", message, process)
            body = _read_reward(text)
            session.reward(body.reward, body.success, late=True)
        except (ApiError, OSError, ValueError) as error:
            return _failure("BadReward", f"The program left no valid reward: {error}", process)
        return None

    def _task(self, environment: Mapping[str, str]) -> dict[str, Any]:
        spec = self.spec
        offered = {} if self.session.env is None else self.session.env.describe()
        if offered:
            offered["mcp_url"] = f"{environment['ROLLGYM_SESSION']}/mcp"
        return {
            **self._metadata,
            **offered,
            "episode_id": spec.episode_id,
            "env_id": spec.env_id,
            "env_kwargs": spec.env_kwargs,
            "task": spec.task,
            "split": spec.split,
            "env_seed": spec.env_seed,
            "model": environment["OPENAI_MODEL"],
            "base_url": environment["OPENAI_BASE_URL"],
            "session_url": environment["ROLLGYM_SESSION"],
        }


def _failure(kind: str, message: str, process: Process | None = None) -> EnvError:
    """Return an error of the program, of this type."""
    error = EnvError(message)
    tail = "" if process is None else process.stderr_tail
    error.failure = Failure(type=kind, message=message, traceback=tail)
    return error


def _success(session: Session) -> dict[str, Any]:
    return {} if session.success is None else {"success": session.success}


def _reported(process: Process, source: str) -> str:
    """Return the text of the reward that the program left; empty without one."""
    if source == "output":
        return process.last_line if process.last_line.startswith("{") else ""
    for name in REWARD_FILES if source == "file" else ():
        data = process.read_file(name, MAX_REWARD_FILE)
        if data is not None:
            return data.decode("utf-8", "replace").strip()
    return ""


def _read_reward(text: str) -> RewardBody:
    """Read a number, or an object with ``reward`` and ``success``."""
    if text.startswith("{"):
        return read(text.encode(), RewardBody)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a reward must be finite, not {value}")
    return RewardBody(reward=value)
