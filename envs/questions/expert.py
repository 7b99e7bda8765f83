"""The expert of Questions: derives the answer from the content of a generated question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.core.errors import UsageError
from rollgym.envs.questions.facts import KINDS, LETTERS


class QuestionsExpert(SoloAgent):
    """Answers every generated question."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The letter of the right choice, or the answer."""
        if "kind" not in info:
            raise UsageError("The expert of Questions answers generated questions only, not those of a file.")
        answer = KINDS[info["kind"]].answer(info["values"])
        choices = list(info["choices"])
        return f"Answer: {LETTERS[choices.index(answer)] if choices else answer}"
