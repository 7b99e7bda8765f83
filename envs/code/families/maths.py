"""Problems about numbers."""

from __future__ import annotations

from rollgym.envs.code.families.base import Family, number

MATHS = (
    Family(
        name="digits",
        level=1,
        signature="digits(n: int) -> int",
        statement=(
            "Write the whole number n >= 0 in base $base. Return the $what of its digits, plus $more."
        ),
        solution="""def digits(n):
    found = []
    while True:
        n, d = divmod(n, $base)
        found.append(d)
        if n == 0:
            break
    value = {"sum": sum, "greatest": max, "number": len}[$what](found)
    return value + $more
""",
        parameters={
            "base": tuple(range(2, 13)),
            "what": ("sum", "greatest", "number"),
            "more": (0, 1, 3, 10),
        },
        inputs=lambda rng, p: (number(rng, 1, 10 ** number(rng, 2, 6)),),
        edges=((0,), (1,), (4095,)),
    ),
    Family(
        name="numbers below",
        level=1,
        signature="count_below(n: int) -> int",
        statement=(
            "How many whole numbers from 1 to n (both included) can be divided by $one $join by $two? "
            "Return that number times $times."
        ),
        solution="""def count_below(n):
    def wanted(k):
        a, b = k % $one == 0, k % $two == 0
        return (a and b) if $join == "and" else (a or b) if $join == "or" else (a and not b)
    return $times * sum(wanted(k) for k in range(1, n + 1))
""",
        parameters={
            "one": (2, 3, 4, 6),
            "two": (5, 7, 9, 10),
            "join": ("and", "or", "but not"),
            "times": (1, 2, 3),
        },
        inputs=lambda rng, p: (number(rng, 1, 900),),
        edges=((0,), (1,), (90,)),
    ),
    Family(
        name="primes in a range",
        level=2,
        signature="primes(low: int, high: int) -> list[int]",
        statement=(
            "Return the prime numbers p with low <= p <= high whose $what leaves the remainder $rest when"
            " divided by $divisor, $order."
        ),
        solution="""def primes(low, high):
    found = []
    for p in range(max(low, 2), high + 1):
        if all(p % d for d in range(2, int(p ** 0.5) + 1)):
            value = p if $what == "value" else sum(map(int, str(p)))
            if value % $divisor == $rest:
                found.append(p)
    return found[::-1] if $order == "the greatest first" else found
""",
        parameters={
            "what": ("value", "sum of decimal digits"),
            "divisor": (3, 5, 7),
            "rest": (1, 2),
            "order": ("the least first", "the greatest first"),
        },
        inputs=lambda rng, p: ((a := number(rng, 0, 200)), a + number(rng, 20, 120)),
        edges=((0, 2), (20, 10), (2, 3)),
    ),
    Family(
        name="own sequence",
        level=2,
        signature="term(n: int) -> int",
        statement=(
            "A sequence begins with $a (term 0) and $b (term 1). Every later term is $p times the term "
            "before it plus $q times the one before that, modulo $modulus. Return term n."
        ),
        solution="""def term(n):
    a, b = $a, $b
    for _ in range(n):
        a, b = b, ($p * b + $q * a) % $modulus
    return a
""",
        parameters={
            "a": (0, 1, 2, 3),
            "b": (1, 2, 5),
            "p": (1, 2, 3),
            "q": (1, 2, 4),
            "modulus": (97, 1009, 10007, 99991),
        },
        inputs=lambda rng, p: (number(rng, 2, 300),),
        edges=((0,), (1,), (1000,)),
    ),
    Family(
        name="ways to pay",
        level=3,
        signature="ways(amount: int) -> int",
        statement=(
            "There are coins of $a, $b and $c, any number of each. In how many ways can an amount be paid"
            " if at most $most coins are used in all? The order of the coins does not matter."
        ),
        solution="""def ways(amount):
    count = 0
    for x in range($most + 1):
        for y in range($most + 1 - x):
            rest = amount - x * $a - y * $b
            if rest >= 0 and rest % $c == 0 and x + y + rest // $c <= $most:
                count += 1
    return count
""",
        parameters={"a": (1, 2), "b": (3, 4, 5), "c": (7, 8, 9, 11), "most": (8, 10, 12, 15)},
        inputs=lambda rng, p: (number(rng, 1, 70),),
        edges=((0,), (1,), (500,)),
    ),
    Family(
        name="steps to one",
        level=3,
        signature="steps(n: int) -> int",
        statement=(
            "From a number k >= 1 one may go to k + $up, or to k divided by $one or by $two where that "
            "leaves no remainder, never above $limit. Return the least number of steps from n to 1, or -1"
            " if there is no way."
        ),
        solution="""def steps(n):
    seen, now, count = {n}, [n], 0
    while now:
        if 1 in seen:
            return count
        later = []
        for k in now:
            ways = [k + $up] + [k // d for d in ($one, $two) if k % d == 0]
            for w in ways:
                if w <= $limit and w not in seen:
                    seen.add(w)
                    later.append(w)
        now, count = later, count + 1
    return -1
""",
        parameters={"up": (1, 2, 3), "one": (2, 3), "two": (5, 7), "limit": (300, 500, 800)},
        inputs=lambda rng, p: (number(rng, 2, 250),),
        edges=((1,), (2,), (299,)),
    ),
)
