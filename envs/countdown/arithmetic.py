"""Sums of whole numbers with + - * / and brackets, evaluated exactly and without Python's eval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MAX_CHARS = 120
"""Longer text is refused, which bounds the size of numbers and the depth of brackets."""
_TOKEN = re.compile(r"[0-9]{1,6}|[-+*/()]")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}


class BadExpression(ValueError):
    """The text is not an expression with a value; the message is for the agent."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression, and the numbers in it in order."""
    tokens = _split(text)
    reader = _Reader(tokens)
    value = reader.expression(1)
    if reader.peek():
        raise BadExpression(f"There is something wrong at {reader.peek()!r}.")
    return value, [int(token) for token in tokens if token.isdigit()]


def apply(sign: str, left: Fraction, right: Fraction) -> Fraction:
    """One step of arithmetic."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if right == 0:
        raise BadExpression("It divides by zero.")
    return left / right


def random_expression(numbers: Sequence[int], rng: np.random.Generator) -> str:
    """A random expression with a value, of two or more of the numbers."""
    count = int(rng.integers(2, len(numbers) + 1))
    indices = rng.permutation(len(numbers))[:count]
    terms = [(Fraction(numbers[i]), str(numbers[i])) for i in indices]
    while len(terms) > 1:
        terms = [terms[i] for i in rng.permutation(len(terms))]
        (left, left_text), (right, right_text), *rest = terms
        sign = "+-*/"[int(rng.integers(4 if right else 3))]
        terms = [(apply(sign, left, right), f"({left_text} {sign} {right_text})"), *rest]
    return terms[0][1][1:-1]


def _split(text: str) -> list[str]:
    text = text.translate(_SIGNS)
    if len(text) > MAX_CHARS:
        raise BadExpression(f"It is longer than {MAX_CHARS} characters.")
    leftover = _TOKEN.sub("", text).split()
    if leftover:
        raise BadExpression("Use only the numbers, + - * / and brackets.")
    tokens = _TOKEN.findall(text)
    if not tokens:
        raise BadExpression("It is empty.")
    return tokens


class _Reader:
    """Reads tokens from left to right, stronger signs first."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self._next += 1
        return token

    def expression(self, min_strength: int) -> Fraction:
        """A value and all that is joined to it by signs of at least this strength."""
        value = self.single()
        while _STRENGTH.get(self.peek(), 0) >= min_strength:
            sign = self.take()
            value = apply(sign, value, self.expression(_STRENGTH[sign] + 1))
        return value

    def single(self) -> Fraction:
        """A number, or an expression in brackets."""
        token = self.take()
        if token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise BadExpression(f"A number is missing {f'before {token!r}' if token else 'at the end'}.")
        value = self.expression(1)
        if self.take() != ")":
            raise BadExpression("A bracket is not closed.")
        return value
