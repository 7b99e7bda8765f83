"""Seeds derived from names: the same in every process and on every machine.

Python's ``hash()`` is salted per process and a global generator is shared by all code in a process, so
neither may influence an episode. All randomness starts from `derive_seed`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

MAX_SEED = 2**31 - 1


def stable_digest(*parts: object) -> bytes:
    """SHA-256 over the parts' text, separated so that ("ab", "c") and ("a", "bc") differ."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derive_seed(*parts: object) -> int:
    """A seed (0 ≤ seed < 2³¹ - 1) that depends only on the given parts."""
    return int.from_bytes(stable_digest(*parts)[:8], "big") % MAX_SEED


def derive_rng(*parts: object) -> np.random.Generator:
    """A generator seeded from the given parts."""
    return np.random.default_rng(int.from_bytes(stable_digest(*parts)[:16], "big"))
