"""Questions: a choice of answers or a short answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.answers import read_answer, trim
from rollgym.envs.arguments import check_choice, check_kinds, check_range
from rollgym.envs.questions.facts import KINDS, LETTERS, LEVELS, VOCABULARY, Question, random_question
from rollgym.envs.questions.files import load_questions
from rollgym.envs.task_files import FileTasks

FORMS = ("mixed", "choice", "short")
_LONGEST = 200
"""Characters of the longest answer that is read."""
_OPTION = re.compile(r"\(?([A-J])(?:[).:]\)?)?(?: (.*))?", re.DOTALL)

_INSTRUCTIONS = """\
Answer the question. You may think first.
End with a line of the form
Answer: X
where X is the letter of the right choice, or the answer alone where there are no choices. \
X alone on the last line works, too.
Give the answer once: a reply with several answers has none.
You have {attempts} attempt{s}. The reward is 1 for the right answer, else 0."""


class QuestionsEnv(TextEnv):
    r"""Answer a question, by a letter or by a few words.

    Observation: the question and, if it has choices, one line for each; after a wrong attempt, first that it
    was wrong.

    Actions: any text with one answer: ``\boxed{X}``, a line ``Answer: X``, or X alone on the last line. X is
    a letter, a letter and its choice, or a choice; without choices, the answer in words. A text without an
    answer, or with several, gives ``valid=False``; it uses up an attempt.

    Reward: 1 for the right answer, else 0.

    Success: the same.

    Ends: terminated by the right answer or when the attempts are used up.

    Splits: questions made by number, whose content is in no two splits; a file has its own splits.
    """

    reward_range = (0.0, 1.0)
    success_means = "the answer is the right one"
    pool_thread = "any"  # its calls are quick
    tasks: TaskSet

    def __init__(
        self,
        questions: str | Mapping[str, str] = "generated",
        *,
        level: int | None = None,
        kinds: Sequence[str] | None = None,
        form: str = "mixed",
        attempts: int = 1,
        render_mode: str | None = None,
    ) -> None:
        """Questions are ``generated``, of one ``level`` (1 to 3) or all, or from a file or files by split.

        ``kinds`` restricts generated questions to these, such as ``["largest", "smallest"]``.
        """
        check_range("attempts", attempts, 1, 1_000)
        check_choice("form", form, FORMS)
        if level is not None and level not in LEVELS:
            raise UsageError(f"level must be from 1 to 3, or null for all levels, not {level!r}.")
        self._level, self._attempts = level, attempts
        self._choice = {"choice": True, "short": False}.get(form)
        self._file: FileTasks[Question] | None = None
        known = [kind.name for kind in KINDS.values() if level in (None, kind.level)]
        self._kinds = check_kinds(kinds, known, level)
        named = "" if kinds is None else f"-{'-'.join(sorted(self._kinds))}"
        self.tasks = TaskSet(f"Questions-{level or 'all'}-{form}{named}")
        if questions != "generated":
            if level is not None or form != "mixed" or kinds is not None:
                raise UsageError("level, kinds and form apply to generated questions only: remove them.")
            self._file = load_questions(questions)
            self.tasks = self._file.tasks
        self.instructions = _INSTRUCTIONS.format(attempts=attempts, s="s"[: attempts != 1])
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Ask the task's question."""
        self._question = self._pose(task)
        self._left = self._attempts
        return self._question.shown

    def respond(self, action: str) -> StepResult:
        """Read and judge the answer."""
        self._left -= 1
        over = self._left == 0
        question = self._question
        answer = read_answer(action, self._is_answer)
        given = self._read(answer.text) if answer.given else None
        info = {"answer": answer.text[:_LONGEST], "answer_found": answer.found}
        if given is None:
            why = "There are several answers." if answer.found == "several" else "There is no answer."
            return StepResult(self._again(why), terminated=over, valid=False, info=info)
        if given in {_folded(text) for text in question.values.get("accepted", (question.answer,))}:
            return StepResult("Correct.", 1.0, terminated=True, success=True, info=info)
        return StepResult(self._again("Wrong."), terminated=over, info=info)

    def facts(self) -> Mapping[str, Any]:
        """The choices, the attempts left, and of a generated question level, kind and content."""
        question = self._question
        facts: dict[str, Any] = {"choices": list(question.choices), "attempts_left": self._left}
        if question.choices:
            facts["actions"] = [f"Answer: {letter}" for letter in LETTERS[: len(question.choices)]]
        if question.kind:
            facts |= {"level": question.level, "kind": question.kind, "values": dict(question.values)}
        return facts

    @property
    def words(self) -> tuple[str, ...]:
        """Words of generated questions."""
        return () if self._file is not None else VOCABULARY

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random letter, or a random number where there are no choices."""
        count = len(info["choices"])
        return f"Answer: {LETTERS[int(rng.integers(count))] if count else int(rng.integers(1, 1_000))}"

    def _pose(self, task: Task) -> Question:
        if self._file is not None:
            return self._file.content(task)
        return self.tasks.draw(
            task,
            lambda rng: random_question(rng, self._level, choice=self._choice, only=self._kinds),
            lambda question: question.key,
        )

    def _is_answer(self, line: str) -> bool:
        """Whether a line is a bare answer; without choices, only a line that is short may be one."""
        if self._question.choices:
            return self._read(line) is not None
        return 0 < len(line.split()) <= max(3, len(self._question.answer.split()))

    def _read(self, text: str) -> str | None:
        """The answer in comparable form, or ``None`` where it names no choice or no word."""
        choices = self._question.choices
        if not choices:
            folded = _folded(text)
            return folded if folded and len(folded) <= _LONGEST else None
        folded_choices = [_folded(choice) for choice in choices]
        match = _OPTION.fullmatch(trim(text))
        if match is not None and LETTERS.index(match[1]) < len(choices):
            named = folded_choices[LETTERS.index(match[1])]
            if match[2] is None or _folded(match[2]) == named:
                return named
        return _folded(text) if _folded(text) in folded_choices else None

    def _again(self, note: str) -> str:
        return f"{note}\n{self._question.shown}" if self._left else note


def _folded(text: str) -> str:
    """A text without case, articles, punctuation at its edges and repeated white space."""
    words = trim(text).casefold().split()
    if words[:1] and words[0] in ("the", "a", "an") and len(words) > 1:
        words = words[1:]
    return " ".join(words).strip(" .,;:!?()[]")
