"""Problems about data structures."""

from __future__ import annotations

from typing import Any

from rollgym.envs.code.families.base import WORDS, Family, Rng, letters, number, numbers, words


def _tree(rng: Rng, depth: int = 0) -> Any:
    """A random tree [value, left, right], or None."""
    if depth and (depth > 3 or rng.random() < 0.3):
        return None
    return [number(rng, -9, 30), _tree(rng, depth + 1), _tree(rng, depth + 1)]


def _edges(rng: Rng, letters_: str = "ABCDEFG") -> list[list[str]]:
    size = number(rng, 3, 9)
    return [[letters_[i] for i in rng.choice(len(letters_), size=2, replace=False)] for _ in range(size)]


STRUCTURES = (
    Family(
        name="count words",
        level=2,
        signature="count_words(words: list[str]) -> list[list]",
        statement=(
            "Count how often each word comes in the list. Return [word, count] for the words that come at"
            " least $least times and have at least $length letters, sorted by $order, at most $most of "
            "them."
        ),
        solution="""def count_words(words):
    from collections import Counter
    found = [[w, c] for w, c in Counter(words).items() if c >= $least and len(w) >= $length]
    if $order == "count (the greatest first) and then by word":
        found.sort(key=lambda p: (-p[1], p[0]))
    elif $order == "word":
        found.sort()
    else:
        found.sort(key=lambda p: (p[1], p[0]))
    return found[:$most]
""",
        parameters={
            "least": (1, 2, 3),
            "length": (4, 5, 6),
            "order": (
                "count (the greatest first) and then by word",
                "word",
                "count (the least first) and then by word",
            ),
            "most": (2, 3, 5, 9),
        },
        inputs=lambda rng, p: (
            [w for w in words(rng, 3, 7) for _ in range(number(rng, 1, 4))] + [WORDS[number(rng, 0, 4)]],
        ),
        edges=(([],), (["tulip", "tulip"],)),
    ),
    Family(
        name="group by",
        level=2,
        signature="group(values: list[int]) -> dict[int, list[int]]",
        statement=(
            "Put the values into groups by their remainder when divided by $divisor (as Python's % gives "
            "it). Return a dict from remainder to its values $order, without groups of fewer than $least "
            "values."
        ),
        solution="""def group(values):
    found = {}
    for v in values:
        found.setdefault(v % $divisor, []).append(v)
    found = {k: v for k, v in found.items() if len(v) >= $least}
    if $order == "in rising order":
        found = {k: sorted(v) for k, v in found.items()}
    elif $order == "in rising order, each value once":
        found = {k: sorted(set(v)) for k, v in found.items()}
    return found
""",
        parameters={
            "divisor": (2, 3, 4, 5, 6, 7, 8, 9),
            "least": (1, 2, 3),
            "order": ("in their order in the list", "in rising order", "in rising order, each value once"),
        },
        inputs=lambda rng, p: (numbers(rng, -20, 40, 6, 14),),
        edges=(([],), ([5, 5, 5],)),
    ),
    Family(
        name="binary tree",
        level=3,
        signature="tell(tree: list | None) -> int",
        statement=(
            "A tree is None or [value, left, right], where left and right are trees. Return $what over "
            "all nodes whose depth is $depth (the root has depth 0), or $none if there are none."
        ),
        solution="""def tell(tree):
    found, now, depth = [], [tree], 0
    while now:
        now = [t for t in now if t is not None]
        odd = depth % 2 == 1
        if {"at least 1": depth >= 1, "at most 2": depth <= 2, "even": not odd, "odd": odd}[$depth]:
            found += [t[0] for t in now]
        now = [c for t in now for c in t[1:]]
        depth += 1
    if not found:
        return $none
    return {
        "the sum of the values": sum(found),
        "the greatest value": max(found),
        "the least value": min(found),
        "the number of negative values": sum(v < 0 for v in found),
    }[$what]
""",
        parameters={
            "what": (
                "the sum of the values",
                "the greatest value",
                "the least value",
                "the number of negative values",
            ),
            "depth": ("at least 1", "at most 2", "even", "odd"),
            "none": (-100, -1, 1000),
        },
        inputs=lambda rng, p: (_tree(rng),),
        edges=((None,), ([5, None, None],)),
    ),
    Family(
        name="roads",
        level=3,
        signature="distance(roads: list[list[str]], start: str, goal: str) -> int",
        statement=(
            "Each road [a, b] joins two towns and $way. Return the least number of roads from start to "
            "goal, times $times (0 if they are the same town), or $none if there is no way or it takes "
            "more than $most roads."
        ),
        solution="""def distance(roads, start, goal):
    near = {}
    for a, b in roads:
        near.setdefault(a, []).append(b)
        if $way == "can be used both ways":
            near.setdefault(b, []).append(a)
    seen, now, count = {start}, [start], 0
    while now and count <= $most:
        if goal in now:
            return count * $times
        now = [b for b in dict.fromkeys(b for a in now for b in near.get(a, [])) if b not in seen]
        seen.update(now)
        count += 1
    return $none
""",
        parameters={
            "way": ("can be used both ways", "leads from a to b only"),
            "times": (1, 5, 10),
            "none": (-1, 99, -7),
            "most": (2, 3, 4),
        },
        inputs=lambda rng, p: (_edges(rng), "ABC"[number(rng, 0, 2)], "DEFG"[number(rng, 0, 3)]),
        edges=(([], "A", "A"), ([["A", "B"]], "B", "A"), ([["A", "B"], ["B", "C"], ["C", "D"]], "A", "D")),
    ),
    Family(
        name="stack of commands",
        level=2,
        signature="stack(commands: list[str]) -> list[int]",
        statement=(
            "Begin with an empty stack and follow the commands: `push N` puts N on top unless $size "
            "numbers are there already (then it does nothing), `pop` removes the top, `dup` pushes the "
            "top once more (if there is room), `$name` replaces the top two numbers by $what. A command "
            "that lacks numbers does nothing. Return the stack from bottom to top."
        ),
        solution="""def stack(commands):
    s = []
    for c in commands:
        if c.startswith("push"):
            if len(s) < $size:
                s.append(int(c.split()[1]))
        elif c == "pop":
            if s:
                s.pop()
        elif c == "dup":
            if s and len(s) < $size:
                s.append(s[-1])
        elif len(s) >= 2:
            top, below = s.pop(), s.pop()
            s.append({
                "their sum": top + below,
                "their product": top * below,
                "the upper minus the lower": top - below,
                "the greater of them": max(top, below),
            }[$what])
    return s
""",
        parameters={
            "size": (3, 4, 5, 6),
            "name": ("join", "merge", "melt"),
            "what": ("their sum", "their product", "the upper minus the lower", "the greater of them"),
        },
        inputs=lambda rng, p: (
            [
                f"push {number(rng, 0, 9)}" if c == "p" else {"o": "pop", "d": "dup", "j": p["name"]}[c]
                for c in letters(rng, "ppppodjj", 4, 12)
            ],
        ),
        edges=(([],), (["pop"],), (["push 1", "dup", "dup", "dup", "dup", "dup", "dup"],)),
    ),
)
