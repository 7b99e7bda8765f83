"""Questions with one number as their answer: generated, or read from a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.envs.code.families.base import WORDS, Rng, compiled, fill, number, numbers
from rollgym.envs.code.loaders import read_records

_NUMBER = re.compile(r"[-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its answer."""

    text: str
    answer: float
    kind: str = ""
    parameters: Mapping[str, Any] | None = None
    """Parameters of the text, for an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of question: ``$name`` in its texts is replaced by a parameter."""

    name: str
    text: str
    program: str
    """Prints the answer."""
    choose: Callable[[Rng], dict[str, Any]]

    def program_for(self, parameters: Mapping[str, Any]) -> str:
        """The program for these parameters."""
        return fill(self.program, {name: repr(value) for name, value in parameters.items()})

    def question(self, parameters: Mapping[str, Any]) -> Question:
        """Return the question, with the answer computed by its program."""
        body = self.program_for(parameters).replace("\n", "\n    ").rstrip()
        work_out = compiled(f"def work_out(print):\n    {body}\n", "work_out")
        printed: list[float] = []
        work_out(printed.append)
        texts = {name: _format_parameter(value) for name, value in parameters.items()}
        return Question(
            text=fill(self.text, texts), answer=printed[-1], kind=self.name, parameters=dict(parameters)
        )


def _format_parameter(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_format_parameter(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _stock(rng: Rng) -> dict[str, list[int]]:
    names = [WORDS[int(k)] for k in rng.choice(len(WORDS), size=number(rng, 4, 8), replace=False)]
    return {name: [number(rng, 1, 60), number(rng, 2, 99)] for name in names}


def _multiples(rng: Rng) -> dict[str, int]:
    divisor = number(rng, 7, 400)
    return {name: divisor * number(rng, 11, 999) for name in "abc"}


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="long sum",
            text="What is $a * $b - $c * $d + $e?",
            program="print($a * $b - $c * $d + $e)\n",
            choose=lambda rng: {name: number(rng, 100, 99_999) for name in "abcde"},
        ),
        Kind(
            name="last digits",
            text="What are the last six digits of $base to the power of $power, read as a number?",
            program="print(pow($base, $power, 10**6))\n",
            choose=lambda rng: {"base": number(rng, 3, 999), "power": number(rng, 20, 9_999)},
        ),
        Kind(
            name="sum of multiples",
            text="What is the sum of all whole numbers from 1 to $n that $a or $b divides?",
            program="print(sum(k for k in range(1, $n + 1) if k % $a == 0 or k % $b == 0))\n",
            choose=lambda rng: {
                "n": number(rng, 500, 9_999),
                "a": number(rng, 3, 9),
                "b": number(rng, 10, 19),
            },
        ),
        Kind(
            name="prime",
            text="Which is the $n-th prime number, if 2 is the first?",
            program=(
                "found, k = [], 2\nwhile len(found) < $n:\n    if all(k % p for p in found):\n"
                "        found.append(k)\n    k += 1\nprint(found[-1])\n"
            ),
            choose=lambda rng: {"n": number(rng, 30, 600)},
        ),
        Kind(
            name="digit sum",
            text="What is the sum of the decimal digits of $base to the power of $power?",
            program="print(sum(map(int, str($base**$power))))\n",
            choose=lambda rng: {"base": number(rng, 2, 99), "power": number(rng, 20, 300)},
        ),
        Kind(
            name="average",
            text="What is the average of these numbers, rounded to two decimals?\n$values",
            program="xs = $values\nprint(round(sum(xs) / len(xs), 2))\n",
            choose=lambda rng: {"values": numbers(rng, 1, 999, 9, 20)},
        ),
        Kind(
            name="spread",
            text="By how much do the $k-th greatest and the $k-th least of these numbers differ?\n$values",
            program="xs = sorted($values)\nprint(xs[-$k] - xs[$k - 1])\n",
            choose=lambda rng: {"k": number(rng, 2, 4), "values": numbers(rng, -500, 999, 10, 20)},
        ),
        Kind(
            name="stock",
            text=(
                "A store has these goods, each with its number of pieces and the price of a piece:\n$stock\n"
                "What are all the pieces of goods with a price above $price worth together?"
            ),
            program="stock = $stock\nprint(sum(n * p for n, p in stock.values() if p > $price))\n",
            choose=lambda rng: {"stock": _stock(rng), "price": number(rng, 5, 60)},
        ),
        Kind(
            name="compound interest",
            text=(
                "An account holds $start coins. Each year $percent percent are added, and then $fee coins "
                "are taken away; parts of a coin are kept. How many coins are there after $years years, "
                "rounded to two decimals?"
            ),
            program=(
                "held = $start\nfor _ in range($years):\n    held = held * (1 + $percent / 100) - $fee\n"
                "print(round(held, 2))\n"
            ),
            choose=lambda rng: {
                "start": number(rng, 500, 9_999),
                "percent": number(rng, 1, 12),
                "fee": number(rng, 0, 40),
                "years": number(rng, 3, 25),
            },
        ),
        Kind(
            name="common divisor",
            text="What is the greatest number that divides $a, $b and $c?",
            program="from math import gcd\nprint(gcd($a, gcd($b, $c)))\n",
            choose=_multiples,
        ),
    )
}


def random_question(rng: Rng) -> Question:
    """A question of a random kind."""
    kinds = list(KINDS.values())
    kind = kinds[int(rng.integers(len(kinds)))]
    return kind.question(kind.choose(rng))


def read_number(text: str) -> float | None:
    """Return the only number in a text, ignoring currency signs, commas and units; otherwise ``None``."""
    matches = [match[0] for match in _NUMBER.finditer(text)]
    if len(matches) != 1:
        return None
    try:
        return float(re.sub(r"[,_]", "", matches[0]))
    except ValueError:
        return None


def is_right(value: float, expected: float) -> bool:
    """Whether a number equals the answer up to rounding in the tenth digit."""
    return abs(value - expected) <= 1e-9 * max(1.0, abs(expected))


def load_questions(path: str) -> dict[str, list[Question]]:
    """Questions of a JSONL file: ``question``, and ``answer``, whose number follows ``####`` or is alone."""
    splits: dict[str, list[Question]] = {}
    for where, record in read_records(path):
        question, answer = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not question.strip():
            raise UsageError(f"{where} has no question.")
        value = read_number(str(answer).rpartition("####")[2]) if answer is not None else None
        if value is None:
            raise UsageError(f"{where}: its answer has no single number after ####: {str(answer)[-80:]!r}.")
        splits.setdefault(str(record.get("split", "train")), []).append(
            Question(text=question.strip(), answer=value)
        )
    if not splits:
        raise UsageError(f"{path} holds no questions.")
    return splits
