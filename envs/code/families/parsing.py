"""Problems about text that has a form."""

from __future__ import annotations

from rollgym.envs.code.families.base import WORDS, Family, Rng, letters, number


def _pairs(rng: Rng, joint: str, between: str) -> str:
    entries = []
    for _ in range(number(rng, 3, 7)):
        name = WORDS[number(rng, 0, 7)]
        value = str(number(rng, -9, 99)) if rng.random() < 0.8 else letters(rng, "xyz", 1, 3)
        entries.append(f"{name}{joint}{value}" if rng.random() < 0.9 else name)
    return between.join(entries)


def _sum(rng: Rng, depth: int = 0) -> str:
    if depth and (depth > 2 or rng.random() < 0.3):
        return str(number(rng, 0, 20))
    left, right = _sum(rng, depth + 1), _sum(rng, depth + 1)
    return f"({left} {'+-*'[number(rng, 0, 2)]} {right})"


def _clock(rng: Rng) -> str:
    return f"{number(rng, 0, 23):02}:{number(rng, 0, 59):02}"


PARSING = (
    Family(
        name="read pairs",
        level=2,
        signature="read_pairs(text: str) -> dict[str, int]",
        statement=(
            "The text is a list of entries such as `bell${joint}7` (a name, `$joint`, a value) with "
            "`$between` between them. Return a dict from name to value for those entries whose value is a"
            " whole number (it may have a minus sign). Leave out all other entries. If a name comes more "
            "than once, $twice."
        ),
        solution="""def read_pairs(text):
    found = {}
    for entry in text.split($between):
        name, sign, value = entry.partition($joint)
        digits = value[1:] if value.startswith("-") else value
        if not sign or not digits.isdigit():
            continue
        n = int(value)
        if name not in found or $twice == "its last value counts":
            found[name] = n
        elif $twice == "its values are added":
            found[name] += n
        elif $twice == "its greatest value counts":
            found[name] = max(found[name], n)
    return found
""",
        parameters={
            "joint": ("=", ":", "->"),
            "between": (";", ",", "|", " "),
            "twice": (
                "its first value counts",
                "its last value counts",
                "its values are added",
                "its greatest value counts",
            ),
        },
        inputs=lambda rng, p: (_pairs(rng, p["joint"], p["between"]),),
        edges=(("",), ("amber",)),
    ),
    Family(
        name="brackets",
        level=2,
        signature="check_brackets(text: str) -> int",
        statement=(
            "The text has round and square brackets; other characters do not matter. A closing bracket "
            "must close the last bracket still open, which must be of its kind. If all brackets match, "
            "return $good. Else return $more plus the index of the first closing bracket that does not "
            "match or, if there is none, of the first bracket that is never closed."
        ),
        solution="""def check_brackets(text):
    pairs = {")": "(", "]": "["}
    waiting = []
    for i, c in enumerate(text):
        if c in pairs.values():
            waiting.append(i)
        elif c in pairs:
            if waiting and text[waiting[-1]] == pairs[c]:
                waiting.pop()
            else:
                return i + $more
    if waiting:
        return waiting[0] + $more
    return $good
""",
        parameters={"good": (-1, -2, -10), "more": (0, 1, 10, 100)},
        inputs=lambda rng, p: (
            letters(rng, "()[]ab", 2, 10) if rng.random() < 0.6 else "([a])" * number(rng, 1, 4) + "[b",
        ),
        edges=(("",), ("([])",), (")",), ("([)]",)),
    ),
    Family(
        name="work out sums",
        level=3,
        signature="work_out(text: str) -> int",
        statement=(
            "Work out an expression such as `(2 + (3 * 4))`: whole numbers, and brackets around each "
            "operation with single spaces around its sign. `+` and `-` are as usual, but `a * b` means "
            "$star. Return the value modulo $modulus (as Python's % gives it)."
        ),
        solution="""def work_out(text):
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()
    def value():
        t = tokens.pop(0)
        if t != "(":
            return int(t)
        a, sign, b = value(), tokens.pop(0), value()
        tokens.pop(0)
        if sign == "+":
            return a + b
        if sign == "-":
            return a - b
        return {
            "a times b": a * b,
            "a times b plus 1": a * b + 1,
            "the greater of the two": max(a, b),
            "the lesser of the two": min(a, b),
            "twice a plus b": 2 * a + b,
        }[$star]
    return value() % $modulus
""",
        parameters={
            "star": (
                "a times b",
                "a times b plus 1",
                "the greater of the two",
                "the lesser of the two",
                "twice a plus b",
            ),
            "modulus": (11, 50, 97, 100, 1000),
        },
        inputs=lambda rng, p: (_sum(rng),),
        edges=(("7",), ("(3 - 5)",), ("((2 * 3) * 4)",)),
    ),
    Family(
        name="times of day",
        level=1,
        signature="later(clock: str) -> str",
        statement=(
            "A time of day is written `HH:MM`, from 00:00 to 23:59. Return the time that is $hours hours "
            "and $minutes minutes $way, written in the same form."
        ),
        solution="""def later(clock):
    h, m = map(int, clock.split(":"))
    change = $hours * 60 + $minutes
    total = (h * 60 + m + (change if $way == "later" else -change)) % 1440
    return f"{total // 60:02}:{total % 60:02}"
""",
        parameters={
            "hours": tuple(range(0, 24, 2)),
            "minutes": (5, 12, 25, 38, 47, 59),
            "way": ("later", "earlier"),
        },
        inputs=lambda rng, p: (_clock(rng),),
        edges=(("00:00",), ("23:59",)),
    ),
    Family(
        name="read a table",
        level=2,
        signature="column(table: str) -> list[int]",
        statement=(
            "Each line of the table has whole numbers with `$between` between them, as many as it likes. "
            "For each line, in order, give its $which number; lines that are too short give $none. Lines "
            "that begin with `$mark` do not count, nor do empty ones."
        ),
        solution="""def column(table):
    found = []
    for line in table.split("\\n"):
        if not line or line.startswith($mark):
            continue
        row = [int(x) for x in line.split($between)]
        at = {"second": 1, "third": 2, "last but one": -2, "last but two": -3}[$which]
        try:
            found.append(row[at])
        except IndexError:
            found.append($none)
    return found
""",
        parameters={
            "between": (",", ";", "|"),
            "which": ("second", "third", "last but one", "last but two"),
            "none": (0, -1, 99),
            "mark": ("#", "%", "!"),
        },
        inputs=lambda rng, p: (
            "\n".join(
                (p["mark"] if rng.random() < 0.2 else "")
                + p["between"].join(str(number(rng, 0, 99)) for _ in range(number(rng, 1, 5)))
                for _ in range(number(rng, 2, 6))
            ),
        ),
        edges=(("",), ("5",), ("1\n\n2",)),
    ),
)
