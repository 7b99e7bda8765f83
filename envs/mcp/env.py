"""An environment whose tools are those of an MCP server."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.core.env import StepResult
from rollgym.core.errors import EnvError, UsageError
from rollgym.core.messages import ToolCall, ToolSpec
from rollgym.core.tasks import Task, TaskSet
from rollgym.core.text import normalize_answer
from rollgym.core.tool_env import ToolEnv
from rollgym.core.tools import BadCall, text_tool
from rollgym.envs.mcp.session import Session
from rollgym.io.rows import Rows, open_rows
from rollgym.sandbox.command import SandboxedCommand
from rollgym.sandbox.types import Limits

__all__ = ["MCPEnv"]

_SUBMIT = text_tool("submit", "Submit the final answer. This ends the episode.", "answer", "The answer.")
_MAX_RESULT_CHARS = 16_000
_known_tools: dict[str, tuple[ToolSpec, ...]] = {}
"""By server: asking for them starts one."""


class MCPEnv(ToolEnv):
    """Answer a question with the tools of an MCP server; each episode has its own session.

    Observation: the question, then the results of the tools.

    Actions: calls of the server's tools, and ``submit``, which ends the episode.

    Reward: 1 for the right answer, else 0. A subclass can override `score`.

    Success: the reward is 1.

    Ends: terminated by ``submit``.

    Splits: those that the tasks name; ``train`` by default.

    Args:
        command: Command line of a server that speaks over stdin and stdout; runs in a sandbox.
        url: Address of a server that speaks streamable HTTP, instead of a command.
        tasks: A file (JSONL, Parquet or Arrow), or a list of objects: ``prompt``, ``answer`` (a string, or a
            list of accepted ones), optionally ``split`` and ``files`` (contents by path, put into the
            server's folder).
        mounts: Folders that the sandbox shows to the server, read-only.
        env: Environment variables of the server. Those of this process are not passed on.
        sandbox: ``namespaces``, or ``none`` to run the command with the rights of this process.
        tools: Names of the tools to offer. Default: all.
        timeout: Seconds that the server has for each request.
        memory_mb: Memory of the server, where cgroups can limit it.
        instructions: Replaces the instructions.
    """

    success_means = "the submitted answer is right"
    reward_range = (0.0, 1.0)
    instructions = "Answer the question. Use the tools, then submit the answer."
    tasks: TaskSet

    def __init__(
        self,
        *,
        command: str | Sequence[str] | None = None,
        url: str | None = None,
        tasks: str | Sequence[Mapping[str, Any]] = (),
        mounts: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        sandbox: str = "namespaces",
        tools: Sequence[str] | None = None,
        timeout: float = 30.0,
        memory_mb: int = 1024,
        instructions: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if (command is None) == (url is None):
            raise UsageError("MCPEnv needs either command or url: the MCP server whose tools are offered.")
        if sandbox not in ("namespaces", "none"):
            raise UsageError(f"sandbox must be namespaces or none, not {sandbox!r}.")
        if not 0 < timeout < math.inf:
            raise UsageError(f"timeout must be above 0 seconds, not {timeout!r}.")
        self._command = shlex.split(command) if isinstance(command, str) else list(command or ())
        self._url, self._sandbox, self._timeout = url, sandbox, float(timeout)
        self._mounts, self._env = tuple(mounts), dict(env or {})
        self._limits = Limits(memory_mb=memory_mb, disk_mb=64, processes=64, open_files=1024)
        self._by_split = _read_tasks(tasks)
        if url is not None or sandbox == "none":
            _check_without_files(self._by_split)
        if instructions is not None:
            self.instructions = instructions
        digest = hashlib.sha256(json.dumps(self._by_split, sort_keys=True).encode()).hexdigest()[:16]
        self.tasks = TaskSet(f"MCP-{digest}", {name: len(own) for name, own in self._by_split.items()})
        self._session: Session | None = None
        self._unused: Session | None = None
        """The session that listed the tools, if no episode has used it."""
        super().__init__(render_mode=render_mode)
        self.tools = (*self._offered(tools), _SUBMIT)

    def begin(self, task: Task) -> str:
        """Open a session with the server and ask the question."""
        self._task = self._by_split[task.split][task.index]
        self._end_session()
        files = self._task.get("files", {})
        unused, self._unused = self._unused, None
        if unused is not None and files:
            unused.close()
            unused = None
        self._session = unused or self._open(files)
        return str(self._task["prompt"])

    def check_call(self, call: ToolCall) -> None:
        """Accept calls of known tools; the server itself checks the arguments."""
        super().check_call(call)
        if call.name == _SUBMIT.name and not isinstance(call.arguments.get("answer"), str):
            raise BadCall("The tool submit needs the argument answer, a string.")

    def call_tool(self, call: ToolCall) -> str | StepResult:
        """Pass a call on to the server, or score the answer."""
        if call.name == _SUBMIT.name:
            self._end_session()
            reward = self.score(self._task, call.arguments["answer"])
            return StepResult("The answer was submitted.", reward, terminated=True, success=reward == 1.0)
        assert self._session is not None
        try:
            text, failed = self._session.call(call)
        except EnvError as error:  # refused, mostly for its arguments: the agent can correct it
            return StepResult(str(error), valid=False)
        if len(text) > _MAX_RESULT_CHARS:
            text = f"{text[:_MAX_RESULT_CHARS]}\n[{len(text) - _MAX_RESULT_CHARS} characters left out]"
        return StepResult(text, valid=not failed)

    def score(self, task: Mapping[str, Any], answer: str) -> float:
        """Return the reward of an answer: 1 if it equals one of the task's, whatever case and white space."""
        answers = task["answer"] if isinstance(task["answer"], list) else [task["answer"]]
        return float(normalize_answer(answer) in {normalize_answer(str(known)) for known in answers})

    def close(self) -> None:
        """End the session."""
        self._end_session()
        if self._unused is not None:
            self._unused.close()
            self._unused = None
        super().close()

    def _offered(self, names: Sequence[str] | None) -> tuple[ToolSpec, ...]:
        key = json.dumps([self._url, self._command, self._mounts, self._env, self._sandbox])
        if key not in _known_tools:
            self._unused = self._open({})
            try:
                _known_tools[key] = self._unused.tools()
            except BaseException:
                self._unused.close()
                raise
        known = {spec.name: spec for spec in _known_tools[key] if spec.name != _SUBMIT.name}
        if names is None:
            return tuple(known.values())
        if unknown := [name for name in names if name not in known]:
            self.close()
            raise UsageError(f"The MCP server has no tool {unknown[0]}: it has {', '.join(known)}.")
        return tuple(known[name] for name in names)

    def _open(self, files: Mapping[str, str]) -> Session:
        if self._url is not None:
            return Session(self._url, timeout=self._timeout)
        if self._sandbox == "none":
            words = ["env", *(f"{name}={value}" for name, value in self._env.items()), *self._command]
            return Session(words, timeout=self._timeout)
        confined = SandboxedCommand.make(
            self._command, mounts=self._mounts, files=files, environment=self._env, limits=self._limits
        )
        try:
            return Session(confined.argv, timeout=self._timeout, on_close=confined.close)
        except BaseException:
            confined.close()
            raise

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _read_tasks(tasks: str | Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the tasks by split."""
    rows = open_rows(tasks) if isinstance(tasks, str) else [dict(task) for task in tasks]

    def where(number: int) -> str:
        return rows.place(number) if isinstance(rows, Rows) else f"task {number}"

    by_split: dict[str, list[dict[str, Any]]] = {}
    for number, task in enumerate(rows):
        if not isinstance(task.get("prompt"), str) or not isinstance(task.get("answer"), (str, list)):
            raise UsageError(
                f"{where(number)} needs a prompt (a string) and an answer (a string or a list of them)."
            )
        files = task.get("files", {})
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise UsageError(f"{where(number)}: files must be an object of texts by path.")
        by_split.setdefault(str(task.get("split", "train")), []).append(task)
    if not by_split:
        raise UsageError("MCPEnv needs tasks: a JSONL file, or a list of objects with prompt and answer.")
    return by_split


def _check_without_files(by_split: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise a `UsageError` for a task with files, where nothing can put them before the server."""
    for split, tasks in by_split.items():
        for number, task in enumerate(tasks):
            if task.get("files"):
                raise UsageError(
                    f"Task {number} of {split} has files, which need a command in a sandbox: leave them out, "
                    "or set command with sandbox=namespaces."
                )
