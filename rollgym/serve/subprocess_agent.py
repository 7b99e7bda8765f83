"""Black-box programs as agents: the program sends requests, the model replies, the exchange is an episode.

To the scheduler the program is the environment: its requests are the observations, and its rewards the
rewards. The model has replied by the time the scheduler sees the request, so `act` only returns the recorded
reply. One `SubprocessAgent` is therefore both the pool and the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from rollgym.core.agent import Agent, AgentAction, Briefing, Player
from rollgym.core.errors import AgentError, ContextFull, EnvError, RunError, UsageError, WorkerLost, one_line
from rollgym.core.messages import Message
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome
from rollgym.pool.base import EnvSession, Reset, Step
from rollgym.rewards import Scorer
from rollgym.rollout.episode_runner import run_episode
from rollgym.serve.requests import ApiError, RewardBody, read
from rollgym.serve.server import RecordingServer
from rollgym.serve.session import Session
from rollgym.utils.signals import signal_name

TAIL = 16_384
"""Bytes kept of the end of stdout and of stderr."""
GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""

POLL_SECONDS = 0.02
"""Interval at which the exit of a program is polled."""


class Process:
    """A program in its own process group; stopping it stops its children too."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self._inner = inner
        self.exit = asyncio.create_task(_exit_code(inner))
        self._tails = {"out": b"", "err": b""}
        streams = {"out": inner.stdout, "err": inner.stderr}
        self._readers = [
            asyncio.create_task(self._read(name, pipe)) for name, pipe in streams.items() if pipe
        ]

    @classmethod
    async def start(
        cls, command: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: Path | None
    ) -> Process:
        """Start the program and write ``stdin`` to its standard input."""
        pipe = asyncio.subprocess.PIPE
        try:
            inner = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), cwd=cwd, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise EnvError(f"The program {command[0]} cannot be started: {one_line(error)}") from error
        process = cls(inner)
        assert inner.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program does not read it
            inner.stdin.write(stdin)
            inner.stdin.close()
        return process

    async def finished(self) -> int:
        """Wait for the exit and the rest of the output; return the exit code."""
        code = await asyncio.shield(self.exit)
        await asyncio.wait(self._readers, timeout=GRACE_SECONDS)
        return code

    @property
    def last_line(self) -> str:
        """The last line of its standard output."""
        return _last_line(self._tails["out"])

    @property
    def last_error_line(self) -> str:
        """The last line of its standard error, shortened."""
        return _last_line(self._tails["err"])[:300]

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error."""
        return self._tails["err"].decode("utf-8", "replace")

    async def stop(self) -> None:
        """Stop the program and its children: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._inner.pid, number)
            if self.exit.done() and number is signal.SIGTERM:
                continue  # only children can be left, which need not be awaited
            await asyncio.wait([self.exit], timeout=GRACE_SECONDS)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        transport = getattr(self._inner, "_transport", None)
        if transport is not None:  # a child that escaped may hold the other end open
            transport.close()

    async def _read(self, name: str, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(65_536):
            self._tails[name] = (self._tails[name] + chunk)[-TAIL:]


async def _exit_code(inner: asyncio.subprocess.Process) -> int:
    # Not wait(): that also waits for children of the program that hold its output open.
    while inner.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return inner.returncode


def _last_line(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


_Event = Literal["turn", "limit", "ended", "exit"]


class SubprocessAgent(Agent):
    """Runs a program for each episode.

    The program gets the endpoint in ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL``, the key of its session in
    ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``, and its task as one JSON object on standard input. It
    reports the reward with ``POST $ROLLGYM_SESSION/reward`` or in its last line of output, such as
    ``{"reward": 1.0, "success": true}``.

    Args:
        server: The endpoint, already started.
        command: The program and its arguments.
        timeout: Seconds for an episode whose spec sets no time limit.
        cwd: Working directory of the program.
        env: Additional environment variables.
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
            raise UsageError(f"Program {' '.join(self.command[:1])!r} not found.")
        if not 0 < timeout < float("inf"):
            raise UsageError(f"The time limit must be positive and finite, not {timeout}.")
        self.timeout = timeout
        self.cwd = cwd
        self._env = dict(env or {})
        self._playing: dict[str, SubprocessEpisode] = {}

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

    def forget(self, run: SubprocessEpisode) -> None:
        """Drop an episode whose program has ended."""
        if self._playing.get(run.spec.episode_id) is run:
            del self._playing[run.spec.episode_id]

    def environment(self, session: Session) -> dict[str, str]:
        """Return the environment variables of a program."""
        url, key = self.server.session_url(session), self.server.session_key(session)
        variables = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": self.server.options.model,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": self.server.options.model,
            "ROLLGYM_SESSION": url,
        }
        return {**os.environ, **self._env, **variables}

    def _check_free(self, spec: EpisodeSpec) -> None:
        if spec.episode_id in self._playing:
            raise UsageError(f"Episode {spec.episode_id} is already running.")


def _success(session: Session) -> dict[str, Any]:
    return {} if session.success is None else {"success": session.success}


class SubprocessEpisode(Player, EnvSession):
    """One program in one episode."""

    def __init__(self, agent: SubprocessAgent, spec: EpisodeSpec, metadata: Mapping[str, Any]) -> None:
        self.spec = spec
        self.started = False
        self._agent = agent
        self._metadata = dict(metadata)
        self._session: Session | None = None
        self._process: Process | None = None
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
        try:
            self._session = self._agent.server.begin(self.spec, self._metadata, recorded_elsewhere=True)
        except ApiError as error:
            raise EnvError(f"No session could be opened for the program: {error}") from None
        environment = self._agent.environment(self.session)
        task = json.dumps(self._task(environment)).encode() + b"\n"
        self._process = await Process.start(self._agent.command, task, environment, self._agent.cwd)
        event = await self._next_event()
        if event != "turn":
            raise await self._failure() or EnvError("The program ended without a request to the model.")
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
        if event == "exit":
            self._failed = await self._failure()
            if self._failed is None:
                self._read_reward()
            elif self.spec.limits.turns is not None and self._next >= self.spec.limits.turns:
                raise self._failed  # at the turn limit `act` is not called again
        session = self.session
        if session.outcome is Outcome.CANCELLED:
            raise WorkerLost("The recording server was closed while the program ran.")
        truncated = event == "ended" and session.outcome is Outcome.TRUNCATED
        return Step(
            observation=session.turns[self._next].observation if event == "turn" else "",
            reward=session.turns[self._next - 1].reward,
            terminated=event in ("ended", "exit") and not truncated and self._failed is None,
            truncated=truncated,
            info=session.turns[self._next - 1].info | _success(session),
            seconds=time.perf_counter() - began,
        )

    async def close(self) -> None:
        """Stop the program."""
        self._agent.forget(self)
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        if self._session is not None:
            self._agent.server.release(self._session)

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
            if session.ended:
                return "ended"
            if process.exit.done():
                await process.finished()
                return "exit"
            changed = asyncio.create_task(session.changed.wait())
            left = self._agent.timeout - (time.monotonic() - self._clock)
            limit = None if self.spec.limits.seconds is not None else max(left, 0.0)
            try:
                done, _ = await asyncio.wait(
                    {changed, process.exit}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                changed.cancel()
            if not done:
                raise EnvError(f"The program took longer than {self._agent.timeout:g} s.")

    async def _failure(self) -> RunError | None:
        """Return why the program failed, if it did; an error of the model comes before the exit code."""
        process, session = self._process, self.session
        assert process is not None
        if not process.exit.done():
            return None
        code = await process.finished()
        if code == 0:
            return None
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        detail = f": {process.last_error_line}" if process.last_error_line else ""
        kind = WorkerLost if code < 0 else EnvError
        failure: RunError = kind(f"The program {how}{detail}")
        if session.last_error is not None:
            failure = AgentError(f"The program {how} after the model failed: {session.last_error}")
        elif session.context_full and session.turns:
            failure = ContextFull("The program failed after its conversation no longer fit the context.")
        failure.failure = Failure(type="ProgramFailed", message=str(failure), traceback=process.stderr_tail)
        return failure

    def _read_reward(self) -> None:
        """Read the reward from the last line of output, unless the program has reported one."""
        process, session = self._process, self.session
        assert process is not None
        line = process.last_line
        if session.rewarded or not line.startswith("{"):
            return
        try:
            body = read(line.encode(), RewardBody)
            session.reward(body.reward, body.success)
        except ApiError as error:
            raise EnvError(f"The program's last line is not a valid reward: {error}") from None

    def _task(self, environment: Mapping[str, str]) -> dict[str, Any]:
        spec = self.spec
        return {
            **self._metadata,
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
