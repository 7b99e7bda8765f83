"""Questions from files: ``question``, ``answer`` and, with a choice, ``choices``, as JSONL or Parquet.

The answer of a question with choices is a letter (A is the first), the text of a choice, or an index that
counts from 0; ``choices`` is a list, or an object with ``text`` and ``label`` lists. Without choices,
``answer`` is the text, or a list of texts that are all right.
"""

from __future__ import annotations

from rollgym.envs.questions.facts import LETTERS, Question
from rollgym.envs.task_files import Files, FileTasks, Row, load_tasks, text_of


def load_questions(files: Files) -> FileTasks[Question]:
    """Load questions."""
    return load_tasks("Questions", files, parse_question, _content)


def parse_question(row: Row) -> Question:
    """The question of a row.

    Raises:
        ValueError: A column is missing, or the answer is not one of the choices.
    """
    text = text_of(row, "question")
    answer = next((row[name] for name in ("answer", "answerKey", "label") if row.get(name) is not None), None)
    if answer is None:
        raise ValueError("it has no answer; expected a column answer")
    choices = row.get("choices", row.get("options"))
    labels: list[str] = list(LETTERS)
    if isinstance(choices, dict):
        labels, choices = [str(label) for label in choices.get("label", LETTERS)], choices.get("text")
    if choices is None:
        right = [str(one).strip() for one in (answer if isinstance(answer, list) else [answer])]
        if not right or not all(right):
            raise ValueError(f"its answer is {answer!r:.60}; text was expected")
        return Question(text=text, answer=right[0], values={"accepted": tuple(right)} if right[1:] else {})
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"its choices are {choices!r:.60}; a list of 2 to {len(LETTERS)} texts was expected")
    texts = tuple(str(choice).strip() for choice in choices)
    if len({choice.casefold() for choice in texts}) < len(texts):
        raise ValueError("two of its choices are the same")
    return Question(text=text, answer=texts[_index(answer, texts, labels)], choices=texts)


def _index(answer: object, choices: tuple[str, ...], labels: list[str]) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    word = str(answer).strip()
    if word in labels[: len(choices)]:
        return labels.index(word)
    if word in choices:
        return choices.index(word)
    raise ValueError(f"its answer {answer!r:.60} is not one of its {len(choices)} choices")


def _content(question: Question) -> str:
    return " ".join(question.text.split())
