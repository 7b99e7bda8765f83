"""Problems about things that change step by step."""

from __future__ import annotations

from rollgym.envs.code.families.base import Family, letters, number, numbers

SIMULATION = (
    Family(
        name="walk on a grid",
        level=2,
        signature="walk(moves: str) -> list[int]",
        statement=(
            "Someone stands at x = 0, y = 0 on a field with x from 0 to $width and y from 0 to $height. "
            "The letters N, S, E and W are steps of $stride: N adds to y, E adds to x, S and W take away."
            " $edge. Return [x, y] at the end."
        ),
        solution="""def walk(moves):
    x = y = 0
    for m in moves:
        dx, dy = {"N": (0, 1), "S": (0, -1), "E": (1, 0), "W": (-1, 0)}[m]
        nx, ny = x + dx * $stride, y + dy * $stride
        if $edge == "A step that would leave the field is not made":
            if 0 <= nx <= $width and 0 <= ny <= $height:
                x, y = nx, ny
        elif $edge == "Who would leave the field stops at its edge":
            x, y = min(max(nx, 0), $width), min(max(ny, 0), $height)
        else:
            x, y = nx % ($width + 1), ny % ($height + 1)
    return [x, y]
""",
        parameters={
            "width": (3, 4, 6, 9),
            "height": (2, 5, 7),
            "stride": (1, 2, 3),
            "edge": (
                "A step that would leave the field is not made",
                "Who would leave the field stops at its edge",
                "Who leaves the field on one side comes in again on the other side",
            ),
        },
        inputs=lambda rng, p: (letters(rng, "NNEESW", 3, 16),),
        edges=(("",), ("S",), ("NNNNNNNNEEEEEEEE",)),
    ),
    Family(
        name="savings",
        level=1,
        signature="savings(start: int, years: int) -> int",
        statement=(
            "An account holds `start` coins. At the end of each year $percent percent of what it holds is"
            " added, rounded down to whole coins, and then $fee coins are taken away (never more than "
            "there are). Return what it holds after `years` years."
        ),
        solution="""def savings(start, years):
    held = start
    for _ in range(years):
        held += held * $percent // 100
        held -= min(held, $fee)
    return held
""",
        parameters={"percent": tuple(range(2, 16)), "fee": (0, 1, 3, 5, 8, 12, 20)},
        inputs=lambda rng, p: (number(rng, 0, 2000), number(rng, 1, 12)),
        edges=((0, 5), (100, 0)),
    ),
    Family(
        name="waiting line",
        level=2,
        signature="served(times: list[int]) -> list[int]",
        statement=(
            "People wait in a line; `times[i]` is how many minutes person i needs at the desk. A person "
            "is served for at most $slice minutes, then goes to the end of the line if more is needed. "
            "Each change at the desk takes $change minutes more. Return the minute at which each person "
            "is done, in the order of the list. The first person starts at minute $start, without a "
            "change."
        ),
        solution="""def served(times):
    from collections import deque
    left, done, now = list(times), [0] * len(times), $start
    line, first = deque(range(len(times))), True
    while line:
        i = line.popleft()
        if not first:
            now += $change
        first = False
        spent = min($slice, left[i])
        now += spent
        left[i] -= spent
        if left[i]:
            line.append(i)
        else:
            done[i] = now
    return done
""",
        parameters={"slice": (1, 2, 3, 4, 5), "change": (0, 1, 2), "start": (0, 5, 10, 60)},
        inputs=lambda rng, p: (numbers(rng, 1, 9, 2, 6),),
        edges=(([],), ([7],)),
    ),
    Family(
        name="cells",
        level=3,
        signature="grow(cells: str) -> str",
        statement=(
            "A row of cells is written with `#` (full) and `.` (empty). In each step all cells change at "
            "once: a full cell stays full if it has $stay full neighbours, an empty cell becomes full if "
            "it has exactly $born. The neighbours are the nearest $near on each side; the row $ends. "
            "Return the row after $steps steps."
        ),
        solution="""def grow(cells):
    row = [c == "#" for c in cells]
    n = len(row)
    stay = {"1 or 2": (1, 2), "at most 1": (0, 1), "exactly 2": (2,)}[$stay]
    for _ in range($steps):
        new = []
        for i in range(n):
            full = 0
            for d in range(1, $near + 1):
                for j in (i - d, i + d):
                    if $ends == "is closed to a ring":
                        full += row[j % n]
                    elif 0 <= j < n:
                        full += row[j]
            new.append(full in stay if row[i] else full == $born)
        row = new
    return "".join("#" if c else "." for c in row)
""",
        parameters={
            "stay": ("1 or 2", "at most 1", "exactly 2"),
            "born": (1, 2),
            "near": (1, 2),
            "ends": ("is closed to a ring", "has empty ground beyond its ends"),
            "steps": (1, 2, 3, 4, 5),
        },
        inputs=lambda rng, p: (letters(rng, "#.", 5, 14),),
        edges=(("#....",), (".....",), ("#####",)),
    ),
    Family(
        name="small machine",
        level=3,
        signature="run(program: list[str]) -> int",
        statement=(
            "A machine has two numbers a = $a and b = 0 and runs a list of commands from the first to the"
            " last: `inc` adds $inc to a, `dec` takes $dec from a, `swap` exchanges a and b, `add` adds b"
            " to a, and `skip` passes over the next command if a is $test. Return a at the end."
        ),
        solution="""def run(program):
    a, b, i = $a, 0, 0
    while i < len(program):
        c = program[i]
        if c == "inc":
            a += $inc
        elif c == "dec":
            a -= $dec
        elif c == "swap":
            a, b = b, a
        elif c == "add":
            a += b
        elif {"even": a % 2 == 0, "negative": a < 0, "greater than b": a > b, "equal to b": a == b}[$test]:
            i += 1
        i += 1
    return a
""",
        parameters={
            "a": (0, 1, 5, 10),
            "inc": (1, 2, 3, 7),
            "dec": (1, 2, 4),
            "test": ("even", "negative", "greater than b", "equal to b"),
        },
        inputs=lambda rng, p: (
            [
                ("inc", "dec", "swap", "add", "skip", "inc", "skip")[k]
                for k in rng.integers(7, size=number(rng, 4, 12))
            ],
        ),
        edges=(([],), (["skip"],), (["skip", "inc", "swap", "add"],)),
    ),
)
