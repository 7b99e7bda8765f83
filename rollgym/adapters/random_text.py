"""Random answers to a question, for environments that do not list their actions."""

from __future__ import annotations

import numpy as np


def random_word(text: str, rng: np.random.Generator) -> str:
    """A word of the text, or a number from 0 to 9."""
    words = [word.strip(".,:;?!()[]'\"") for word in text.split()]
    choices = [*map(str, range(10)), *(word for word in words if word)]
    return str(choices[int(rng.integers(len(choices)))])
