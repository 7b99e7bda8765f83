"""Terminal environment: a shell in a sandbox, files to work on, hidden checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, check_whole
from rollgym.core.errors import RunError, UsageError
from rollgym.core.messages import ToolCall
from rollgym.core.tasks import Task
from rollgym.core.tool_env import ToolEnv, tool
from rollgym.envs.arguments import check_choice
from rollgym.envs.code.sandbox_handle import SandboxHandle
from rollgym.envs.terminal.containers import ContainerHandle
from rollgym.envs.terminal.export import has_exported_tests
from rollgym.envs.terminal.generate import Generated
from rollgym.envs.terminal.harbor import TaskFolders
from rollgym.envs.terminal.judge import judge_task
from rollgym.envs.terminal.shell import (
    FOLDERS,
    LINKS,
    MAX_COMMAND_BYTES,
    ROOT,
    SESSION,
    command_hash,
    copy_files,
    format_ran,
    run_command,
    start_shell,
)
from rollgym.envs.terminal.types import FolderTask, TerminalTask, Tree
from rollgym.sandbox.types import Limits, Ran, Sandbox
from rollgym.sandbox.worker_confinement import landlock_abi

REWARDS = ("all", "fraction")
LIMITS: Mapping[str, Any] = {"seconds": 10.0, "memory_mb": 512, "processes": 48}
"""Default limits of a command."""
ATTEMPTS = 2
FORGEABLE = (
    "The tests of this task folder share a sandbox and a user with programs of the agent that they run or "
    "import: such a program can forge the reward. Tests that only read files cannot be forged."
)
"""Weakness of task folders whose tests may run a program of the agent without taking rights from it."""

_INSTRUCTIONS = """\
You work in a Linux shell. Do the task by calling tools: `bash` runs a command, `submit` ends the episode.
Each command starts in the folder and with the variables that the last one left; processes that it leaves \
running are ended. There is no network. A command may take {seconds:g} seconds. Of its output (stdout and \
stderr), {chars:,} characters are shown; the middle of a longer one is left out.
You have {turns} turns. When you submit, or after the last turn, hidden checks of the files in the working \
folder decide.
The reward is {reward}."""

_RANDOM = (
    "ls",
    "pwd",
    "ls -R | head -n 20",
    "wc -c * 2>/dev/null | tail -n 3",
    "echo {word}",
    "cat {word}.txt",
)
_RANDOM_WORDS = ("answer", "notes", "result", "data", "config", "main")


class TerminalEnv(ToolEnv):
    """Work in a shell; hidden checks of the files decide.

    Observation: the task; then the output of each command (stdout and stderr, the middle cut out), its exit
    code, and the turns left.

    Actions: calls of the tools ``bash(command)`` and ``submit()``.

    Reward: 0 until the end; then 1 if all hidden checks hold, else 0, or the share of the checks that hold.

    Success: all hidden checks hold.

    Ends: terminated by ``submit`` or by the last turn; the files are judged each time.

    Splits: tasks made by number, none in two splits; a folder has one split, ``test``.
    """

    reward_range = (0.0, 1.0)
    success_means = "all hidden checks hold"
    max_calls_per_turn = 4

    def __init__(
        self,
        *,
        families: Sequence[str] | None = None,
        level: int | None = None,
        folder: str | None = None,
        unsupported: str = "error",
        images: str = "none",
        reward: str = "all",
        max_turns: int = 15,
        output_chars: int = 4_000,
        sandbox: Mapping[str, Any] | None = None,
        reveal: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """Tasks are generated, or those of a folder of task folders; ``sandbox`` sets the limits.

        ``images`` allows tasks that need a container image: ``use`` one that the Docker engine has, or
        ``build`` it, which runs the instructions of the task's Dockerfile in the engine.
        """
        check_choice("reward", reward, REWARDS)
        check_whole("max_turns", max_turns)
        check_whole("output_chars", output_chars, 100)
        links: tuple[tuple[str, str], ...] = LINKS
        self._source: Generated | TaskFolders
        if folder is None:
            self._source = Generated(families, level)
        elif families is not None or level is not None:
            raise UsageError("families and level are for generated tasks; a folder has its own.")
        else:
            self._source = TaskFolders(folder, unsupported, images)
            links = tuple((root, SESSION) for root in self._source.roots)
        self.tasks = self._source.tasks
        self._sandboxes = self._handle = _handle(sandbox, links)
        self._containers = ContainerHandle(_with_limits(sandbox), build=images == "build")
        self._fraction, self._max_turns = reward == "fraction", max_turns
        self._chars, self._reveal = output_chars, reveal
        super().__init__(render_mode=render_mode)
        self.instructions = _INSTRUCTIONS.format(
            seconds=self._handle.settings.limits.seconds,
            chars=output_chars,
            turns=max_turns,
            reward=_reward_text(self._fraction, folder is not None),
        )

    def begin(self, task: Task) -> str:
        """Put the task's files into a fresh sandbox."""
        self._task: TerminalTask | FolderTask = self._source.load(task)
        self._turns, self._seconds, self._last_command = 0, 0.0, ""
        self._handle.fresh()
        self._handle = self._sandboxes
        if isinstance(self._task, FolderTask) and self._task.image is not None:
            self._handle, self._task = self._containers, self._containers.select(self._task)
        self._handle.fresh()
        self._start(self._task.tree)
        if isinstance(self._task, TerminalTask) and self._task.family == "git":
            self._need("git")
        where = f"The working folder is {self._root}." if isinstance(self._task, FolderTask) else ""
        return "\n".join(filter(None, [self._task.instruction.strip(), where, self._turns_left()]))

    def respond(self, action: str) -> StepResult:
        """Execute the calls of a turn; after the last turn, judge."""
        self._turns += 1
        result = super().respond(action)
        if result.terminated or self._turns < self._max_turns:
            return result
        end = self._judge(f"{result.observation}\n")
        return replace(end, valid=result.valid, info={**result.info, **end.info})

    def refuse(self, reason: str) -> StepResult:
        """Answer an invalid action with the turns left."""
        return StepResult(f"{reason}\n{self._turns_left()}", valid=False)

    @tool
    def bash(self, command: str) -> StepResult:
        """Run a command with bash. Folder and variables of the shell last from call to call.

        Args:
            command: The command, of one or more lines.
        """
        if "\0" in command or len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
            note = f"A command may have {MAX_COMMAND_BYTES:,} bytes and no NUL characters. Nothing was run."
            return self.refuse(note)
        limits = self._limits()
        self._last_command = command_hash(command)
        if limits is None:
            return self._judge("The time for this task is over. ")
        ran = self._handle.use(lambda sandbox: self._run(sandbox, command, limits))
        if ran is None:
            self._start(self._task.tree)
            note = "The sandbox broke down; a new one has the files of the beginning."
            return StepResult(f"{note}\n{self._turns_left()}")
        self._seconds += ran.seconds
        return StepResult(f"{format_ran(ran, limits)}\n{self._turns_left()}")

    @tool
    def submit(self) -> StepResult:
        """End the episode: the files in the working folder are judged."""
        return self._judge("")

    def facts(self) -> Mapping[str, Any]:
        """Kind and parameters of the task, turns left, a hash of the last command and the sandbox level."""
        facts: dict[str, Any] = {
            "turns_left": self._max_turns - self._turns,
            "last_command": self._last_command,
            "sandbox": self._handle.facts(),
        }
        task = self._task
        if isinstance(task, FolderTask):
            facts["name"] = task.name
            if self._reveal:
                facts["solution"] = [] if task.solution is None else [task.solution]
        else:
            facts |= {"family": task.family, "kind": task.kind, "level": task.level}
            facts["parameters"] = task.parameters
        if self._turns == 0:
            facts["weaknesses"] = self._handle.weaknesses()
            if isinstance(task, FolderTask):
                facts["forgeable"] = _forgeable(task)
                facts["weaknesses"] += [FORGEABLE] if facts["forgeable"] else []
        return facts

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A command that looks around, or ``submit``."""
        if rng.random() < 0.1:
            return ToolCall(name="submit").to_json()
        word = _RANDOM_WORDS[int(rng.integers(len(_RANDOM_WORDS)))]
        command = _RANDOM[int(rng.integers(len(_RANDOM)))].format(word=word)
        return ToolCall(name="bash", arguments={"command": command}).to_json()

    def close(self) -> None:
        """Close the sandbox."""
        self._sandboxes.close()
        self._containers.close()

    @property
    def _root(self) -> str:
        return self._task.root if isinstance(self._task, FolderTask) else ROOT

    @property
    def _session(self) -> str:
        """The real path of the working folder: a sandbox has a link to it, a container the folder."""
        return self._root if self._handle is self._containers else SESSION

    def _turns_left(self) -> str:
        turns_left = self._max_turns - self._turns
        return f"Turns left: {turns_left}." if turns_left else "No turns left."

    def _start(self, tree: Tree) -> None:
        """Start the shell in a sandbox; a broken one is replaced once."""
        reasons: list[RunError] = []
        for _ in range(ATTEMPTS):
            if self._handle.use(lambda sandbox: self._start_in(sandbox, tree, reasons)):
                return
        raise reasons[-1] if reasons else RunError("The sandbox of a terminal task broke twice.")

    def _start_in(self, sandbox: Sandbox, tree: Tree, reasons: list[RunError]) -> bool:
        env = self._task.env if isinstance(self._task, FolderTask) else None
        try:
            start_shell(sandbox, tree, root=self._root, env=env)
        except RunError as error:
            reasons.append(error)
            raise
        return True

    def _run(self, sandbox: Sandbox, command: str, limits: Limits) -> Ran:
        ran = run_command(sandbox, command, limits)
        if ran.state == "lost":
            # The files are still there; only the shell has to start again.
            self._start_in(sandbox, {}, [])
        return ran

    def _need(self, program: str) -> None:
        limits = self._handle.limits()
        ran = self._handle.use(lambda sandbox: run_command(sandbox, f"command -v {program}", limits))
        if ran is not None and ran.exit_code == 1:
            raise UsageError(
                f"The task needs {program}, which the sandbox does not have: install {program} on this "
                "machine, "
                "or choose other families (families=['files', 'text', ...])."
            )

    def _limits(self) -> Limits | None:
        """Return the limits of a command; ``None`` if the task's time is over."""
        limits = replace(self._handle.limits(), output_chars=self._chars)
        if not isinstance(self._task, FolderTask):
            return limits
        left = self._task.agent_seconds - self._seconds
        return replace(limits, seconds=min(limits.seconds, left)) if left > 0 else None

    def _judge(self, text: str) -> StepResult:
        tree = self._handle.use(self._copy)
        # No process of the agent runs while its files are judged.
        self._handle.fresh()
        verdict = judge_task(self._handle, self._task, tree)
        share = isinstance(self._task, FolderTask) or self._fraction
        return StepResult(
            f"{text}Hidden checks: {verdict.passed} of {verdict.of} hold.",
            verdict.reward if share else float(verdict.success),
            terminated=True,
            success=verdict.success,
            info={"hidden": {"passed": verdict.passed, "of": verdict.of}},
        )

    def _copy(self, sandbox: Sandbox) -> Tree | None:
        try:
            return copy_files(sandbox, Limits(), self._session)
        except ValueError:
            return None


def _forgeable(task: FolderTask) -> bool:
    """Return whether a program of the agent that the tests run could write the reward.

    What tests run cannot be known without running them, so all tests count except those that are known to
    take the program's rights away first.
    """
    return not (has_exported_tests(task.tests) and landlock_abi())


def _with_limits(values: Any) -> Any:
    """Add the default limits of a command to settings of a sandbox."""
    given = dict(values) if isinstance(values, Mapping) else values
    if given is None or isinstance(given, dict):
        given = dict(given or {})
        limits = given.get("limits") or {}
        if isinstance(limits, Mapping):
            given["limits"] = {**LIMITS, **limits}
    return given


def _handle(values: Mapping[str, Any] | None, links: tuple[tuple[str, str], ...]) -> SandboxHandle:
    """Make the sandbox of an environment, with the limits and links of a shell."""
    handle = SandboxHandle(_with_limits(values))
    if handle.settings.backend not in ("auto", "namespaces"):
        raise UsageError(
            f"Terminal tasks run in the sandbox backend namespaces, not in {handle.settings.backend}: "
            "leave backend "
            "out. `rollgym doctor` prints whether it works here."
        )
    handle.settings = replace(handle.settings, links=links, folders=FOLDERS)
    return handle


def _reward_text(fraction: bool, folder: bool) -> str:
    if folder:
        return "what the tests of the task give, from 0 to 1"
    return "the share of the checks that hold" if fraction else "1 if all of them hold, else 0"
