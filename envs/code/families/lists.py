"""Problems about lists of numbers."""

from __future__ import annotations

from rollgym.envs.code.families.base import Family, number, numbers

LISTS = (
    Family(
        name="sum of some",
        level=1,
        signature="sum_some(values: list[int]) -> int",
        statement=(
            "Return the sum of those values that leave the remainder $rest when divided by $divisor (as "
            "Python's % gives it) and are $side $bound."
        ),
        solution="""def sum_some(values):
    above = $side == "greater than"
    kept = [v for v in values if v % $divisor == $rest]
    return sum(v for v in kept if (v > $bound if above else v < $bound))
""",
        parameters={
            "divisor": (2, 3, 4),
            "rest": (0, 1),
            "side": ("greater than", "less than"),
            "bound": tuple(range(-5, 26, 3)),
        },
        inputs=lambda rng, p: (numbers(rng, -20, 40, 6, 14),),
        edges=(([],), ([1, 0, -1],)),
    ),
    Family(
        name="turn a list",
        level=1,
        signature="turn(values: list[int]) -> list[int]",
        statement=(
            "Turn the list $places places to the $way (what falls out at one end comes in at the other), "
            "then add $more to each value at an even index."
        ),
        solution="""def turn(values):
    if not values:
        return []
    k = $places % len(values)
    if $way == "right":
        k = (len(values) - k) % len(values)
    turned = values[k:] + values[:k]
    return [v + $more if i % 2 == 0 else v for i, v in enumerate(turned)]
""",
        parameters={"places": tuple(range(1, 9)), "way": ("left", "right"), "more": (1, 2, 5, 10, -3)},
        inputs=lambda rng, p: (numbers(rng),),
        edges=(([],), ([4],), ([1, 2],)),
    ),
    Family(
        name="windows",
        level=2,
        signature="windows(values: list[int]) -> list[int]",
        statement=(
            "For each $size neighbouring values in the list, in order, give their $what. Results below "
            "$floor are replaced by $floor. A list that is too short gives an empty list."
        ),
        solution="""def windows(values):
    tell = {
        "sum": sum,
        "maximum": max,
        "minimum": min,
        "difference of the greatest and the least": lambda w: max(w) - min(w),
    }[$what]
    return [max($floor, tell(values[i:i + $size])) for i in range(len(values) - $size + 1)]
""",
        parameters={
            "size": (2, 3, 4, 5),
            "what": ("sum", "maximum", "minimum", "difference of the greatest and the least"),
            "floor": (-10, -3, 0, 4, 7),
        },
        inputs=lambda rng, p: (numbers(rng, -20, 40, 4, 11),),
        edges=(([],), ([5],)),
    ),
    Family(
        name="best gap",
        level=2,
        signature="best_gap(values: list[int]) -> int",
        statement=(
            "Choose two positions i < j that are at least $apart apart (j - i >= $apart). Return the "
            "$best possible value of $what. If the list has no such positions, return $none."
        ),
        solution="""def best_gap(values):
    tell = {
        "values[j] - values[i]": lambda a, b: b - a,
        "values[i] + values[j]": lambda a, b: a + b,
        "the absolute difference of the two values": lambda a, b: abs(a - b),
    }[$what]
    found = [
        tell(values[i], values[j]) for i in range(len(values)) for j in range(i + $apart, len(values))
    ]
    if not found:
        return $none
    return max(found) if $best == "greatest" else min(found)
""",
        parameters={
            "apart": (1, 2, 3, 4),
            "best": ("greatest", "least"),
            "what": (
                "values[j] - values[i]",
                "values[i] + values[j]",
                "the absolute difference of the two values",
            ),
            "none": (0, -1, -100),
        },
        inputs=lambda rng, p: (numbers(rng, -30, 60, 4, 10),),
        edges=(([],), ([3],), ([3, 8],)),
    ),
    Family(
        name="merge spans",
        level=3,
        signature="merge(spans: list[list[int]]) -> list[list[int]]",
        statement=(
            "Each span is [start, end] with start <= end. Join spans that overlap or whose gap is at most"
            " $gap (the gap is the next start minus the end before it). Leave out joined spans shorter "
            "than $least (end minus start). Return the rest $order."
        ),
        solution="""def merge(spans):
    joined = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= $gap:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    joined = [s for s in joined if s[1] - s[0] >= $least]
    if $order == "from the longest to the shortest, equal ones by start":
        joined.sort(key=lambda s: (s[0] - s[1], s[0]))
    return joined
""",
        parameters={
            "gap": (0, 1, 2, 3, 5),
            "least": (0, 2, 4, 6),
            "order": ("by start", "from the longest to the shortest, equal ones by start"),
        },
        inputs=lambda rng, p: (
            [[s := number(rng, 0, 60), s + number(rng, 0, 9)] for _ in range(number(rng, 3, 9))],
        ),
        edges=(([],), ([[1, 9]],), ([[5, 6], [1, 2]],)),
    ),
    Family(
        name="longest rising part",
        level=3,
        signature="longest(values: list[int]) -> int",
        statement=(
            "Leave out values (keeping the order of the rest) so that each value that is left is at least"
            " $least and at most $most greater than the one before it. Return how many values can be left"
            " at most."
        ),
        solution="""def longest(values):
    best = []
    for i, v in enumerate(values):
        best.append(1 + max([best[j] for j in range(i) if $least <= v - values[j] <= $most], default=0))
    return max(best, default=0)
""",
        parameters={"least": (0, 1, 2, 3), "most": (5, 8, 12, 20, 40)},
        inputs=lambda rng, p: (numbers(rng, 0, 40, 6, 14),),
        edges=(([],), ([7],), ([9, 8, 7],)),
    ),
)
