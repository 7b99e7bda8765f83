"""The judge believes nothing: each way to cheat is a solution that must not pass a single test."""

from collections.abc import Mapping

import pytest

from rollgym.envs.code.harness import encode
from rollgym.envs.code.judge import NO_TIME, NOTE_CHARS, SolutionJudge, answers_of, judge
from rollgym.envs.code.types import Asserts, Case, Cases
from rollgym.sandbox.types import Limits, Ran, Sandbox

QUICK = Limits(seconds=30, cpu_seconds=3, memory_mb=256)
INPUTS = ([3, 1, 2], [9, 8], [5, 5, 1, 4])
CASES = Cases(cases=tuple(Case(arguments=[encode(xs)], expected=encode(sorted(xs))) for xs in INPUTS))
REFERENCE = "def f(xs):\n    return sorted(xs)\n"
ASSERTS = Asserts(tests=tuple(f"assert f({xs}) == {sorted(xs)}" for xs in INPUTS), setup=REFERENCE)

CHEATS: Mapping[str, str] = {
    "leaves early with code 0": "import sys\nsys.exit(0)",
    "leaves at once with code 0": "import os\nos._exit(0)",
    "exits in the function": "def f(xs):\n    raise SystemExit(0)",
    "leaves in the function": "import os\ndef f(xs):\n    os._exit(0)",
    "raises what nobody catches": "class E(BaseException): ...\ndef f(xs):\n    raise E()",
    "raises a keyboard interrupt": "def f(xs):\n    raise KeyboardInterrupt",
    "raises what breaks when told": (
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit(0)\ndef f(xs):\n    raise E()"
    ),
    "prints forged results": (
        "for i in range(3):\n    print([i, 'value', [1], []], flush=True)\n    print('passed')\n"
        'def f(xs):\n    print(\'[0, "passed", ""]\')\n    return xs'
    ),
    "writes forged results to every descriptor": (
        "import os\nfor d in range(64):\n"
        '    try: os.write(d, b\'[0, "passed", ""]\\n\')\n    except OSError: pass\n'
        "def f(xs):\n    return xs"
    ),
    "finds the way out and speaks for the judge": (
        "import sys\nframe = sys._getframe()\n"
        "while 'write_line' not in frame.f_locals:\n    frame = frame.f_back\n"
        "say = frame.f_locals['write_line']\n"
        "for i in range(-1, 3):\n"
        "    say([i, 'passed', '']); say([i, 'value', True, []]); say([i, 'calls', []])\n"
        "def f(xs):\n    return None"
    ),
    "overwrites print and assert's error": (
        "import builtins\nbuiltins.print = lambda *a, **k: None\nbuiltins.AssertionError = ValueError\n"
        "def f(xs):\n    return xs"
    ),
    "overwrites builtins that compare": (
        "import builtins\nbuiltins.all = builtins.isinstance = builtins.len = lambda *a: True\n"
        "def f(xs):\n    return None"
    ),
    "patches the judge's functions": (
        "import __main__\nfor name in ('encode', 'values_equal', '_run_call', '_run_test', 'decide'):\n"
        "    setattr(__main__, name, lambda *a: [0, 'passed', ''])\n"
        "def f(xs):\n    return xs"
    ),
    "patches json": (
        'import json\njson.dumps = lambda *a, **k: \'[0, "passed", ""]\'\ndef f(xs):\n    return None'
    ),
    "returns what equals everything": (
        "class Any(list):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
        "    __hash__ = None\n"
        "def f(xs):\n    return Any()"
    ),
    "returns an object that equals everything": (
        "class Any:\n    __eq__ = lambda s, o: True\n    __bool__ = lambda s: True\ndef f(xs):\n"
        "    return Any()"
    ),
    "returns a text that equals everything": (
        "class Any(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
        "def f(xs):\n    return Any('x')"
    ),
    "replaces itself while it runs": (
        "import sys\ndef f(xs):\n    sys._getframe(1).f_globals.update(sorted=list)\n"
        "    return NotImplemented"
    ),
    "leaves a thread behind": (
        "import threading, time, os\n"
        'def later():\n    time.sleep(0.2)\n    os.write(1, b\'[0, "passed", ""]\\n\')\n'
        "threading.Thread(target=later).start()\ndef f(xs):\n    return xs"
    ),
    "leaves a child behind": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(30)\n    os._exit(0)\ndef f(xs):\n"
        "    return xs[:0]"
    ),
    "forges at exit": (
        'import atexit, os\natexit.register(lambda: os.write(1, b\'[0, "passed", ""]\'))\n'
        "def f(xs):\n    return 0"
    ),
    "traces the judge": (
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
        "def f(xs):\n    return xs"
    ),
    "defines nothing": "x = 1",
    "is no Python": "def f(xs:\n    return",
    "is no function": "f = 3",
    "takes no arguments": "def f():\n    return []",
    "changes its argument and returns nothing": "def f(xs):\n    xs.sort()",
}


@pytest.mark.parametrize("tests", [CASES, ASSERTS], ids=["cases", "asserts"])
def test_an_honest_solution_passes(sandbox: Sandbox, tests: Cases | Asserts) -> None:
    assert all(result.passed for result in judge(sandbox, REFERENCE, "f", tests, QUICK))


@pytest.mark.parametrize("tests", [CASES, ASSERTS], ids=["cases", "asserts"])
def test_a_wrong_solution_fails_where_it_is_wrong(sandbox: Sandbox, tests: Cases | Asserts) -> None:
    results = judge(sandbox, "def f(xs):\n    return xs[::-1]\n", "f", tests, QUICK)
    assert [result.passed for result in results] == [False, True, False]


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("tests", [CASES, ASSERTS], ids=["cases", "asserts"])
def test_no_cheat_passes_a_test(sandbox: Sandbox, tests: Cases | Asserts, cheat: str) -> None:
    results = judge(sandbox, CHEATS[cheat] + "\n", "f", tests, QUICK)
    assert len(results) == 3
    assert not any(result.passed for result in results)
    # And the next one is judged as ever.
    assert all(result.passed for result in judge(sandbox, REFERENCE, "f", tests, QUICK))


SPEAK = """
import os, sys
frame = sys._getframe()
while "write_line" not in frame.f_locals:
    frame = frame.f_back
say = frame.f_locals["write_line"]
inner = dict(zip(say.__code__.co_freevars, (cell.cell_contents for cell in say.__closure__)))
def speak(value):
    for number in range(3):
        line = inner["nonce"] + ' [' + str(number) + ', "value", ' + value + ', []]' + chr(10)
        os.write(inner["output_fd"], line.encode())
speak({value})
os._exit(0)
"""
"""A solution that finds the judge's channel and writes a value there, as text that need not be JSON."""

SPOKEN: Mapping[str, str] = {
    "lists in lists": "'[' * 900 + ']' * 900",
    "far too many lists in lists": "'[' * 30_000 + ']' * 30_000",
    "dicts in dicts": "'{\"dict\": [[1, ' * 300 + '1' + ']]}' * 300",
    "a complex number with a part too large": ("'{\"complex\": [{\"int\": \"0x' + 'f' * 5000 + '\"}, 0]}'"),
    "a complex number with a part missing": "'{\"complex\": [1]}'",
    "an unknown tag": "'{\"foo\": 1}'",
    "two tags": '\'{"list": [], "tuple": []}\'',
    "no tag": "'{}'",
    "not a number": "'NaN'",
    "a number of too many digits": "'1' * 5000",
    "a number that is no number": "'{\"int\": [1]}'",
    "a float that is no float": '\'{"float": {"tuple": []}}\'',
    "bytes that are none": '\'{"bytes": "zz"}\'',
    "pairs that are none": "'{\"dict\": [1, 2]}'",
    "pairs of one": "'{\"dict\": [[1]]}'",
    "a tuple that is a text": '\'{"tuple": "abc"}\'',
    "an object of nothing": "'{\"object\": []}'",
    "a lone surrogate": "'\"' + chr(92) + 'ud800\"'",
    "half a line": "'[1, 2'",
}

ODD: Mapping[str, str] = {
    "a complex number that lies about its parts": (
        "class C(complex):\n    real = 10**400\ndef f(xs):\n    return C(1)"
    ),
    "a long whole number": "def f(xs):\n    return 7 ** 100_000",
    "many long whole numbers": "def f(xs):\n    return [1 << 10**6] * 16",
    "a number that breaks when compared": (
        "class N(int):\n    __lt__ = __gt__ = __eq__ = lambda s, o: 1 / 0\n    __hash__ = None\n"
        "def f(xs):\n    return N(1)"
    ),
    "a class that lies about itself": (
        "class L:\n    __class__ = property(lambda s: dict)\n    __reduce__ = lambda s: 1 / 0\n"
        "def f(xs):\n    return L()"
    ),
    "a class with a name that is no text": (
        "class M(type):\n    __name__ = property(lambda s: {1: s})\nclass L(metaclass=M): ...\n"
        "def f(xs):\n    return L()"
    ),
    "tuples in tuples": "def f(xs):\n    v = ()\n    for _ in range(190): v = (v,)\n    return v",
    "dicts in dicts": "def f(xs):\n    v = {}\n    for _ in range(190): v = {1: v}\n    return v",
    "a list that holds itself": "def f(xs):\n    xs.append(xs)\n    return xs",
    "an endless generator": "def f(xs):\n    while True: yield 1",
    "what has no truth": ("class T:\n    def __bool__(self): raise SystemExit\ndef f(xs):\n    return T()"),
    "a repr that breaks": "class R(str):\n    __repr__ = lambda s: 1\ndef f(xs):\n    return R('x')",
    "odd texts": "def f(xs):\n    return '\\ud800\\x00\\x1b[31m' * 3",
    "odd floats": "def f(xs):\n    return [float('nan'), float('-inf'), -0.0, 1e308]",
    "a text longer than any answer may be": "def f(xs):\n    return 'x' * 10**7",
    "an error longer than any answer may be": "def f(xs):\n    raise ValueError('x' * 10**7)",
    "no descriptors": "import os\nos.closerange(0, 256)\ndef f(xs):\n    return xs",
    "no memory": "def f(xs):\n    return [0] * 10**10",
    "a signal to its own process group": "import os\ndef f(xs):\n    os.kill(0, 9)",
    "a recursion without end": "def f(xs):\n    return f(xs)",
}


@pytest.mark.parametrize("tests", [CASES, ASSERTS], ids=["cases", "asserts"])
@pytest.mark.parametrize("what", [*SPOKEN, *ODD])
def test_no_answer_breaks_the_judge(sandbox: Sandbox, tests: Cases | Asserts, what: str) -> None:
    """Raising here would take the episode, and with it a failure, out of the agent's score."""
    solution = SPEAK.replace("{value}", SPOKEN[what]) if what in SPOKEN else ODD[what]
    results = judge(sandbox, solution + "\n", "f", tests, QUICK)
    assert [result.passed for result in results] == [False] * 3
    assert all(len(result.note) <= NOTE_CHARS for result in results)


def test_every_value_that_a_solution_may_return_is_read(sandbox: Sandbox) -> None:
    deep: list[object] = []
    for _ in range(80):
        deep = [deep]
    values = [None, True, -1, 1 << 99, 0.5, float("inf"), 2j, "\ud800", b"\0", [1], (2,), {3}, {4: [5]}, deep]
    cases = Cases(cases=tuple(Case(arguments=[encode(value)], expected=encode(value)) for value in values))
    assert all(result.passed for result in judge(sandbox, "def f(x):\n    return x\n", "f", cases, QUICK))


class Counted:
    """A sandbox that notes the time each execution was given."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.given = sandbox, list[float]()

    def exec(self, code: str, *, stdin: str, limits: Limits) -> Ran:
        self.given.append(limits.seconds)
        return self.sandbox.exec(code, stdin=stdin, limits=limits)


@pytest.mark.parametrize("tests", [CASES, ASSERTS], ids=["cases", "asserts"])
def test_judging_ends_in_time_whatever_the_solution_takes(sandbox: Sandbox, tests: Cases | Asserts) -> None:
    counted = Counted(sandbox)
    slow = "import time\ndef f(xs):\n    time.sleep(60)\n"
    results = judge(counted, slow, "f", tests, Limits(seconds=50), seconds=1.5)  # type: ignore[arg-type]
    assert [result.passed for result in results] == [False] * 3
    assert max(counted.given) <= 1.5
    assert NO_TIME in results[-1].note


SCAN = """
import gc, os, re, sys
def f(x):
    mark = b"SEC" + b"RET-"
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(n, 16) for n in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line:
                continue
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, ValueError, OverflowError):
                continue
            found = re.search(mark + rb"\\\\d{9}", data)
            if found:
                return found[0].decode()
    for folder, _, names in os.walk("."):
        for name in names:
            text = open(os.path.join(folder, name), errors="replace").read()
            if mark.decode() in text:
                return text
    return sys.stdin.read()
""".replace("\\\\", "\\")
SECRET = "SECRET-" + "271828182"


def test_the_scanner_finds_what_is_in_its_memory(sandbox: Sandbox) -> None:
    """Else the next test would show nothing."""
    (answer,) = answers_of(SolutionJudge(sandbox, QUICK), SCAN, "f", [[f"SECRET-{314159265}"]])
    assert answer[:2] == ["value", f"SECRET-{314159265}"]


@pytest.mark.parametrize(
    "tests",
    [
        Cases(cases=(Case(arguments=[1], expected=SECRET),)),
        Asserts(tests=(f"assert f(1) == {SECRET!r}",)),
        Asserts(
            tests=("assert f(1) == answer",), setup=f"answer = {SECRET!r}\ndef f(x):\n    return answer\n"
        ),
    ],
    ids=["cases", "asserts", "reference"],
)
def test_a_solution_cannot_read_the_tests_from_memory_or_disk(
    sandbox: Sandbox, tests: Cases | Asserts
) -> None:
    (result,) = judge(sandbox, SCAN, "f", tests, QUICK)
    assert not result.passed


def test_what_a_liar_says_for_the_judge_is_only_an_answer(sandbox: Sandbox) -> None:
    """It does find the way out: but all it can say there is what it could return as well."""
    liar = CHEATS["finds the way out and speaks for the judge"]
    answers = answers_of(SolutionJudge(sandbox, QUICK), liar, "f", [[1], [2]])
    assert answers == [["value", True, []]] * 2


def test_a_solution_that_hangs_on_one_input_fails_that_one_only(sandbox: Sandbox) -> None:
    hangs = "def f(xs):\n    while len(xs) == 2: pass\n    return sorted(xs)\n"
    results = judge(sandbox, hangs, "f", CASES, Limits(seconds=60, cpu_seconds=1))
    assert [result.passed for result in results] == [True, False, True]
    assert results[1].note == "it took too long"


def test_a_solution_that_dies_on_every_input_is_given_up(sandbox: Sandbox) -> None:
    many = Cases(cases=CASES.cases * 3)
    results = judge(sandbox, "import os\ndef f(xs):\n    os._exit(0)\n", "f", many, QUICK)
    assert len(results) == 9
    assert not any(result.passed for result in results)
    assert results[0].note == "it ended the program instead of returning"
    assert results[-1].note == "it was not asked: it had died too often"


def test_every_call_gets_inputs_of_its_own(sandbox: Sandbox) -> None:
    eats = "def f(xs):\n    found = sorted(xs)\n    xs.clear()\n    return found\n"
    twice = Cases(cases=CASES.cases * 2)
    assert all(result.passed for result in judge(sandbox, eats, "f", twice, QUICK))


def test_long_answers_are_read_whole(sandbox: Sandbox) -> None:
    long = Cases(cases=(Case(arguments=[200_000], expected="ab" * 100_000),))
    solution = "def f(n):\n    return ('ab' * n)[:n]\n"
    assert judge(sandbox, solution, "f", long, QUICK)[0].passed


def test_a_test_may_ask_for_what_depends_on_earlier_answers(sandbox: Sandbox) -> None:
    chain = Asserts(tests=("x = 1\nfor _ in range(3):\n    x = f(x)\nassert x == 8",))
    assert judge(sandbox, "def f(x):\n    return 2 * x\n", "f", chain, QUICK)[0].passed
    assert not judge(sandbox, "def f(x):\n    return 3 * x\n", "f", chain, QUICK)[0].passed


def test_a_test_sees_errors_of_the_kind_that_was_raised_and_changed_arguments(sandbox: Sandbox) -> None:
    tests = Asserts(
        tests=(
            "try:\n    f([])\nexcept ValueError:\n    pass\nelse:\n    assert False",
            "xs = [3, 1]\nassert f(xs) is None\nassert xs == [1, 3]",
        )
    )
    solution = "def f(xs):\n    if not xs:\n        raise ValueError('empty')\n    xs.sort()\n"
    assert [r.passed for r in judge(sandbox, solution, "f", tests, QUICK)] == [True, True]
    assert [r.passed for r in judge(sandbox, "def f(xs):\n    pass\n", "f", tests, QUICK)] == [False, False]


def test_the_reference_never_answers_for_the_solution(sandbox: Sandbox) -> None:
    """The same call in two tests: the second must not take the author's answer for the solution's."""
    tests = Asserts(tests=("assert f(2) == 4", "assert f(2) == 4"), setup="def f(x):\n    return 2 * x\n")
    assert [r.passed for r in judge(sandbox, "def f(x):\n    return 5\n", "f", tests, QUICK)] == [
        False,
        False,
    ]


def test_tests_that_draw_at_random_ask_the_same_in_each_round(sandbox: Sandbox) -> None:
    test = "import random\nfor _ in range(5):\n    n = random.randint(1, 10**9)\n    assert f(n) == n + 1"
    tests = Asserts(tests=(test,), setup="def f(n):\n    return n + 1\n")
    assert judge(sandbox, "def f(n):\n    return n + 1\n", "f", tests, QUICK)[0].passed
    assert not judge(sandbox, "def f(n):\n    return n\n", "f", tests, QUICK)[0].passed
