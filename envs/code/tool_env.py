"""A question with one number as its answer, and Python to work it out with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, check_whole
from rollgym.core.seeding import stable_digest
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.code.actions import parse_action, parse_answer
from rollgym.envs.code.formatting import format_run
from rollgym.envs.code.problems import SPLITS
from rollgym.envs.code.questions import Question, is_right, load_questions, random_question, read_number
from rollgym.envs.code.sandbox_handle import SandboxHandle

_INSTRUCTIONS = """\
Answer a question whose answer is a number. Each turn, either write one block of Python code:
```python
print(12 * 34)
```
The block is run, and you see what it printed; what it defines is still there in the next turn.
Or give your answer, which ends the episode: `answer: 408`
You have {turns} turns in all. There is no network, and a block may take {seconds:g} seconds.
The reward is 1 for the right number, else 0."""


class PythonToolEnv(TextEnv):
    """Answer a question; blocks of code run in a sandbox.

    Observation: the question; then the output of the block and the turns left.

    Actions: one fenced block of Python, run in a session whose names and files last, or ``answer: X``. A
    block and an answer together are an answer. Anything else changes nothing and gives ``valid=False``.

    Reward: 1 for the right number, else 0.

    Success: the answer is the right number, but for rounding in the tenth digit.

    Ends: terminated by an answer, right or wrong; truncated after ``max_turns``.

    Splits: questions made by number, none in two splits; a file has the splits that it names.
    """

    reward_range = (0.0, 1.0)
    success_means = "the answer is the right number"
    tasks: TaskSet

    def __init__(
        self,
        questions: str = "generated",
        *,
        max_turns: int = 6,
        output_chars: int = 2_000,
        sandbox: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Questions are ``generated`` or in a JSONL file of GSM8K's form."""
        check_whole("max_turns", max_turns)
        check_whole("output_chars", output_chars, 100)
        self._listed = None if questions == "generated" else load_questions(questions)
        self.tasks = _tasks(self._listed)
        self._box = SandboxHandle(sandbox)
        self._max_turns, self._chars = max_turns, output_chars
        self.instructions = _INSTRUCTIONS.format(turns=max_turns, seconds=self._box.settings.limits.seconds)
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Ask the task's question."""
        if self._listed is None:
            self._question = self.tasks.draw(task, random_question, lambda question: question.text)
        else:
            self._question = self._listed[task.split][task.index]
        self._turns = 0
        self._box.fresh()
        return f"{self._question.text}\n{self._turns_left()}"

    def respond(self, action: str) -> StepResult:
        """Run a block, or compare an answer."""
        self._turns += 1
        parsed = parse_action(action)
        answer = parse_answer(parsed)
        if answer is not None:
            return self._compare(answer)
        if len(parsed.blocks) != 1:
            note = "That is neither a block between ``` fences nor `answer: X`."
            if parsed.blocks:
                note = f"There are {len(parsed.blocks)} blocks: write one a turn."
            return self._continue(note, valid=False)
        limits = self._box.limits()
        ran = self._box.use(lambda sandbox: sandbox.run(parsed.blocks[0], limits=limits))
        if ran is None:
            return self._continue("The sandbox broke down; the session begins again with nothing.")
        return self._continue(format_run(ran, limits, self._chars))

    def facts(self) -> Mapping[str, Any]:
        """Turns left, sandbox level and the question."""
        question = self._question
        facts: dict[str, Any] = {"turns_left": self._max_turns - self._turns, "sandbox": self._box.facts()}
        if question.kind:
            facts |= {"kind": question.kind, "parameters": question.parameters}
        if self._turns == 0:
            facts["weaknesses"] = self._box.weaknesses()
        return facts

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A small sum, or a number as the answer."""
        value = int(rng.integers(1, 10_000))
        return f"answer: {value}" if rng.random() < 0.4 else f"```python\nprint({value} + 1)\n```"

    def close(self) -> None:
        """Close the sandbox."""
        self._box.close()

    def _turns_left(self) -> str:
        return f"Turns left: {self._max_turns - self._turns}."

    def _continue(self, text: str, valid: bool = True) -> StepResult:
        over = self._turns >= self._max_turns
        return StepResult(f"{text}\n{self._turns_left()}", truncated=over, valid=valid)

    def _compare(self, answer: str) -> StepResult:
        value = read_number(answer)
        if value is None:
            note = f"{answer[:80]!r} is not one number. Write for example `answer: 408`."
            return self._continue(note, valid=False)
        success = is_right(value, self._question.answer)
        return StepResult("Right." if success else "Wrong.", float(success), terminated=True, success=success)


def _tasks(listed: Mapping[str, list[Question]] | None) -> TaskSet:
    if listed is None:
        return TaskSet("PythonTool", SPLITS)
    content = stable_digest(*(question for questions in listed.values() for question in questions)).hex()[:12]
    return TaskSet(f"PythonTool-{content}", {split: len(questions) for split, questions in listed.items()})
