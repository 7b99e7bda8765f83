"""Code environment: write a program, run it, improve it; hidden tests decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, check_whole
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task
from rollgym.core.tool_env import ToolEnv, tool
from rollgym.core.tools import write_calls
from rollgym.envs.arguments import check_choice
from rollgym.envs.code.actions import ParsedAction, action_calls, defines, parse_action, submits
from rollgym.envs.code.formatting import format_run, format_test_results
from rollgym.envs.code.judge import Result, judge
from rollgym.envs.code.loaders import load_problems
from rollgym.envs.code.problems import Generated, Problems
from rollgym.envs.code.sandbox_handle import SandboxHandle
from rollgym.envs.code.types import Tests

REWARDS = ("fraction", "all")

_INSTRUCTIONS = """\
Write a Python function that does what is asked. Each turn, write one block of code:
```python
print(1 + 1)
```
The block is run and you see what it printed. What it defines is still there in the next turn.
A block that defines the wanted function is your solution, until another one does; it must work by itself. \
You are told how it does on the public tests.
When you are content, answer `submit`: the solution is run on hidden tests, and the episode ends. A block \
with `submit` on a line below it is submitted as it is.{pass_}
You have {turns} turns; after the last one the solution you have is judged. There is no network. A block may \
take {seconds:g} seconds.
The reward is {reward}."""


_TOOLS = """\
Write a Python function that does what is asked. Run code with the tool `run_python`: you see what it \
printed. What it defines is still there in the next call.
Code that defines the wanted function is your solution, until other code does; it must work by itself. \
You are told how it does on the public tests.
When you are content, call `submit`: the solution is run on hidden tests, and the episode ends.{pass_}
You have {turns} calls; after the last one the solution you have is judged. There is no network. A call may \
take {seconds:g} seconds.
The reward is {reward}."""


class CodeEnv(ToolEnv):
    """Write a function; blocks of code are run in a sandbox, hidden tests decide.

    Observation: the task; then the output of the block (stdout, stderr, each cut), how it ended where it did
    not end well, how the solution does on the public tests, and the turns left.

    Actions: one fenced block of Python, run in a session whose names and files last; ``submit``; or both: the
    block is then the solution. The solution is the last block that defines the wanted function. Anything else
    changes nothing and gives ``valid=False``. With ``tools=True`` the tools ``run_python`` and ``submit``;
    each call counts as a turn.

    Reward: 0 until the end, then the share of hidden tests that pass, or 1 for all of them and else 0.

    Success: all hidden tests pass.

    Ends: terminated by ``submit``, by the last turn, or with ``end_on_pass`` when all public tests pass; the
    solution is judged each time.

    Splits: problems made by number, none in two splits; a file has the splits of its form.
    """

    reward_range = (0.0, 1.0)
    success_means = "all hidden tests pass"

    def __init__(
        self,
        problems: str = "generated",
        *,
        form: str = "auto",
        difficulty: int | None = None,
        family: str | None = None,
        reward: str = "fraction",
        max_turns: int = 8,
        end_on_pass: bool = False,
        output_chars: int = 2_000,
        sandbox: Mapping[str, Any] | None = None,
        reveal: bool = False,
        tools: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """Problems are ``generated`` or from a file; ``sandbox`` sets isolation and limits."""
        check_choice("reward", reward, REWARDS)
        check_whole("max_turns", max_turns)
        check_whole("output_chars", output_chars, 100)
        self._problems = _problems(problems, form, difficulty, family)
        self.tasks = self._problems.tasks
        self._box = SandboxHandle(sandbox)
        self._all_or_nothing, self._max_turns, self._end_on_pass = reward == "all", max_turns, end_on_pass
        self._chars, self._reveal = output_chars, reveal
        self.instructions = (_TOOLS if tools else _INSTRUCTIONS).format(
            turns=max_turns,
            seconds=self._box.settings.limits.seconds,
            reward="1 if all hidden tests pass, else 0"
            if self._all_or_nothing
            else "the share of hidden tests that pass",
            pass_=" The episode ends too when all public tests pass." if end_on_pass else "",
        )
        super().__init__(render_mode=render_mode)
        if not tools:
            self.tools = ()

    def begin(self, task: Task) -> str:
        """Start the task's problem in a fresh session."""
        self._problem = self._problems.problem(task)
        self._solution: str | None = None
        self._turns = 0
        self._box.fresh()
        self._prepare()
        return self._question()

    @tool
    def run_python(self, code: str) -> StepResult:
        """Run Python code and see what it printed.

        Args:
            code: The code. What it defines stays for later calls.
        """
        self._turns += 1
        return self._run(code.strip("\r\n") + "\n")

    @tool
    def submit(self) -> StepResult:
        """Submit the solution: hidden tests decide, and the episode ends."""
        self._turns += 1
        return self._submit(ParsedAction((), ""))

    def refuse(self, reason: str) -> StepResult:
        """Count an invalid action as a turn."""
        self._turns += 1
        return self._continue(reason, valid=False)

    def respond(self, action: str) -> StepResult:
        """Run a block, or judge."""
        if self.tools:
            return super().respond(action)
        self._turns += 1
        parsed = parse_action(action)
        if len(parsed.blocks) > 1:
            note = f"There are {len(parsed.blocks)} blocks: write one block a turn. Nothing was run."
            return self._continue(note, valid=False)
        if submits(parsed):
            return self._submit(parsed)
        if not parsed.blocks:
            note = "That is neither a block of code between ``` fences nor `submit`."
            return self._continue(note, valid=False)
        return self._run(parsed.blocks[0])

    def facts(self) -> Mapping[str, Any]:
        """Statement, turns left and sandbox level."""
        problem = self._problem
        facts = {
            "function": problem.name,
            "signature": problem.signature,
            "examples": list(problem.shown),
            "has_solution": self._solution is not None,
            "turns_left": self._max_turns - self._turns,
            "sandbox": self._box.facts(),
        }
        if problem.family:
            facts |= {"family": problem.family, "parameters": problem.parameters, "level": problem.level}
        if self._turns == 0:
            facts["weaknesses"] = self._box.weaknesses()
        if self._reveal:
            facts["solution"] = problem.solution
        return facts

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A function that returns a constant, or ``submit`` once there is one."""
        action = self._random_text(info, rng)
        return write_calls(action_calls(action)) if self.tools else action

    def _random_text(self, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        if info["has_solution"] and rng.random() < 0.3:
            return "submit"
        value = ("None", "0", "1", "[]", "''", "args[0]", "-1")[int(rng.integers(7))]
        return f"```python\ndef {info['function']}(*args):\n    return {value}\n```"

    def close(self) -> None:
        """Close the sandbox."""
        self._box.close()

    def _question(self) -> str:
        problem = self._problem
        lines = [f"Write the function {problem.signature}.", problem.statement]
        if problem.shown:
            lines += ["Public tests:", *problem.shown]
        return "\n".join([*lines, self._turns_left()])

    def _turns_left(self) -> str:
        turns_left = self._max_turns - self._turns
        return f"Turns left: {turns_left}." if turns_left else "No turns left."

    def _prepare(self) -> None:
        if self._problem.prelude:
            self._box.use(lambda sandbox: sandbox.run(self._problem.prelude))

    def _submit(self, parsed: ParsedAction) -> StepResult:
        if parsed.blocks:
            self._solution = parsed.blocks[0]
        if self._solution is None:
            note = f"There is nothing to submit: no block has defined {self._problem.name} yet."
            return self._continue(note, valid=False)
        return self._judge_hidden("")

    def _run(self, block: str) -> StepResult:
        limits = self._box.limits()
        ran = self._box.use(lambda sandbox: sandbox.run(block, limits=limits))
        lines = ["The sandbox broke down; the session begins again with nothing."]
        if ran is None:
            self._prepare()
        else:
            lines = [format_run(ran, limits, self._chars)]
        passed = False
        if defines(block, self._problem.name):
            self._solution = block
            if len(self._problem.public):
                results = self._results(self._problem.public)
                lines.append(format_test_results(self._problem.shown, results))
                passed = all(result.passed for result in results)
        text = "\n".join(lines)
        return self._judge_hidden(f"{text}\n") if passed and self._end_on_pass else self._continue(text)

    def _continue(self, text: str, valid: bool = True) -> StepResult:
        if self._turns < self._max_turns:
            return StepResult(f"{text}\n{self._turns_left()}", valid=valid)
        if self._solution is None:
            return StepResult(f"{text}\nNo turns left, and no solution.", terminated=True, valid=valid)
        return self._judge_hidden(f"{text}\nNo turns left. ", valid)

    def _judge_hidden(self, text: str, valid: bool = True) -> StepResult:
        # State left by the agent's code must not exist when the tests run.
        self._box.fresh()
        results = self._results(self._problem.hidden, unused=True)
        passed = sum(result.passed for result in results)
        success = passed == len(results)
        return StepResult(
            f"{text}Hidden tests: {passed} of {len(results)} passed.",
            float(success) if self._all_or_nothing else passed / len(results),
            terminated=True,
            success=success,
            valid=valid,
            info={"hidden": {"passed": passed, "of": len(results)}},
        )

    def _results(self, tests: Tests, *, unused: bool = False) -> Sequence[Result]:
        problem, box = self._problem, self._box
        program = f"{problem.prelude}\n{self._solution}" if problem.prelude else str(self._solution)
        for _ in range(2):
            results = box.once(
                lambda sandbox: judge(
                    sandbox, program, problem.name, tests, box.settings.limits, box.seconds()
                ),
                unused=unused,
            )
            if results is not None:
                return results
        return [Result(False, "it broke the sandbox")] * len(tests)


def _problems(problems: str, form: str, difficulty: int | None, family: str | None) -> Problems:
    if problems == "generated":
        if form != "auto":
            raise UsageError("form is for problems from a file; generated ones have none.")
        return Generated(difficulty, family)
    if difficulty is not None or family is not None:
        raise UsageError("difficulty and family are for generated problems; a file has its own.")
    return load_problems(problems, form)
