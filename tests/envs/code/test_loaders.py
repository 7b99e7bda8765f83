"""Problems from files: HumanEval's form, MBPP's and one's own; real data where it is."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.code.env import CodeEnv
from rollgym.envs.code.judge import judge
from rollgym.envs.code.loaders import load_problems
from rollgym.envs.code.problems import Listed
from rollgym.envs.code.questions import load_questions
from rollgym.envs.code.types import Asserts, Cases, Problem
from rollgym.sandbox.types import Limits, Sandbox

HUMAN_EVAL = {
    "task_id": "Mine/0",
    "prompt": "import math\n\ndef helper(x):\n    return x\n\n"
    "def area(r):\n    '''The area of a circle.'''\n",
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n    assert 3.14 < candidate(1) < 3.15\n    assert not candidate(0)\n",
}
MBPP = {
    "task_id": 601,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
}
OWN = {
    "function": "double",
    "statement": "Double a number.",
    "signature": "double(n: int) -> int",
    "examples": [[[2], 4]],
    "tests": [[[3], 6], [[0], 0]],
    "solution": "def double(n):\n    return 2 * n\n",
    "split": "test",
}


def write(folder: Path, *records: Any, name: str = "problems.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


def problems(listed: Listed) -> list[Problem]:
    tasks = listed.tasks
    return [listed.problem(tasks.task(split, i)) for split, size in tasks.splits.items() for i in range(size)]


# Some public tests compute for seconds; what a busy machine makes of that must not matter.
PATIENT = Limits(seconds=600, cpu_seconds=60)


def passes(sandbox: Sandbox, problem: Problem, solution: str) -> bool:
    program = f"{problem.prelude}\n{solution}"
    return all(r.passed for r in judge(sandbox, program, problem.name, problem.hidden, PATIENT))


@pytest.mark.parametrize("record", [HUMAN_EVAL, MBPP, OWN], ids=["humaneval", "mbpp", "own"])
def test_the_reference_passes_and_a_wrong_one_does_not(
    sandbox: Sandbox, tmp_path: Path, record: dict[str, Any]
) -> None:
    (problem,) = problems(load_problems(write(tmp_path, record)))
    assert problem.solution is not None
    assert passes(sandbox, problem, problem.solution)
    assert not passes(sandbox, problem, f"def {problem.name}(*a):\n    return 7\n")


def test_a_prompt_gives_the_statement_the_signature_and_its_helpers(tmp_path: Path) -> None:
    (problem,) = problems(load_problems(write(tmp_path, HUMAN_EVAL)))
    assert problem.signature == "area(r)"
    assert problem.prelude == "import math\n\ndef helper(x):\n    return x\n\n"
    assert "The area of a circle." in problem.statement


def test_mbpp_has_its_own_splits_and_shows_one_test(tmp_path: Path) -> None:
    records = [MBPP | {"task_id": number} for number in (5, 11, 510, 511, 974)]
    listed = load_problems(write(tmp_path, *records))
    assert listed.tasks.splits == {"train": 1, "dev": 1, "test": 2, "prompt": 1}
    problem = problems(listed)[0]
    assert problem.shown == ("assert add(1, 2) == 3",)
    assert (problem.name, problem.signature) == ("add", "add(a, b)")


TRAP = """
import os, re, signal
found = set()
def look(*_):
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) in (1, os.getpid()):
            continue
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in maps:
                    start, end = (int(n, 16) for n in line.split()[0].split("-"))
                    if "rw" in line:
                        memory.seek(start)
                        found.update(re.findall(rb"SEC" + rb"RET-[0-9]+", memory.read(end - start)))
        except (OSError, ValueError, OverflowError):
            continue
    signal.setitimer(signal.ITIMER_REAL, 0.005)  # again, but not while it looks
signal.signal(signal.SIGALRM, look)
signal.setitimer(signal.ITIMER_REAL, 0.005)
"""


@pytest.mark.parametrize(
    "record", [MBPP, OWN | {"public_asserts": ["assert double(1) == 2"]}], ids=["mbpp", "own"]
)
def test_a_session_cannot_watch_the_public_tests_for_the_reference(
    sandbox: Sandbox, tmp_path: Path, record: dict[str, Any]
) -> None:
    """Its process is alive while public tests run, and a timer lets it look around."""
    spoilt = {
        key: f"{value}\n# SECRET-777" if key in ("code", "solution") else value
        for key, value in record.items()
    }
    env = CodeEnv(write(tmp_path, spoilt), sandbox={"limits": {"seconds": 60}})
    _, info = env.reset(seed=0)
    block = f"```python\n{TRAP}\ndef {info['function']}(*a):\n    return 1\n```"
    try:
        assert "Public tests" in env.step(block)[0]
        assert env.step("```python\nprint(found)\n```")[0].startswith("stdout:\nset()\n")
    finally:
        env.close()


def test_gzip_and_one_json_list_are_read_too(tmp_path: Path) -> None:
    plain = load_problems(write(tmp_path, OWN))
    zipped = tmp_path / "problems.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps(OWN).encode()))
    listed = tmp_path / "problems.json"
    listed.write_text(json.dumps([OWN]))
    assert problems(load_problems(str(zipped))) == problems(load_problems(str(listed))) == problems(plain)


def test_the_public_sets_are_read_from_parquet_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra [parquet] is not installed: no pyarrow")
    from pyarrow import parquet

    for record in (HUMAN_EVAL, MBPP):
        path = tmp_path / f"{record['task_id']}.parquet".replace("/", "-")
        parquet.write_table(pyarrow.Table.from_pylist([record]), path)
        assert problems(load_problems(str(path))) == problems(load_problems(write(tmp_path, record)))


def test_a_wrong_record_of_a_json_list_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "problems.json"
    path.write_text(json.dumps([OWN, 3]))
    with pytest.raises(UsageError, match="record 2 is a int; an object was expected"):
        load_problems(str(path))
    path.write_text("[1")
    with pytest.raises(UsageError, match="problems.json is not JSON"):
        load_problems(str(path))


def test_the_name_of_a_set_follows_its_content(tmp_path: Path) -> None:
    name = load_problems(write(tmp_path, OWN)).tasks.name
    two = load_problems(write(tmp_path, OWN | {"tests": [[[3], 6], [[1], 2]]})).tasks.name
    assert name != two


def test_asserts_of_ones_own_without_a_reference(sandbox: Sandbox, tmp_path: Path) -> None:
    record = {
        "function": "f",
        "statement": "Add one.",
        "asserts": ["assert f(1) == 2", "assert f(f(1)) == 3"],
    }
    (problem,) = problems(load_problems(write(tmp_path, record)))
    assert isinstance(problem.hidden, Asserts)
    assert isinstance(problem.public, Cases)
    assert passes(sandbox, problem, "def f(x):\n    return x + 1\n")
    assert not passes(sandbox, problem, "def f(x):\n    return 2\n")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (OWN | {"tests": [[3, 6]]}, r"jsonl:2 .*\[\[arguments\], expected\] was expected"),
        (OWN | {"tests": []}, "neither tests nor asserts"),
        (OWN | {"function": "not a name"}, "is not a valid Python name"),
        ({"function": "f", "tests": [[[1], 1]]}, "it has no 'statement'"),
        (OWN | {"statement": 3}, "its statement is 3; text was expected"),
        (OWN, "two problems called"),
        ({"some": "thing"}, "has an unknown form"),
        ([1], "expected a JSON object with named columns, not a list"),
        (MBPP | {"test_list": "assert"}, "a list of texts was expected"),
        (MBPP | {"test_list": ["assert other(1)"]}, "no function of its code"),
        (HUMAN_EVAL | {"entry_point": "other"}, "does not begin the function other"),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, record: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_problems(write(tmp_path, OWN, record))


def test_files_that_are_none_are_explained(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"a": 1\n')
    with pytest.raises(UsageError, match="broken.jsonl:1: not valid JSON"):
        load_problems(str(broken))
    broken.write_text("\n")
    with pytest.raises(UsageError, match="broken.jsonl is empty: expected at least one row"):
        load_problems(str(broken))
    with pytest.raises(UsageError, match="Did you mean mbpp"):
        load_problems(str(broken), "mbp")


def test_the_environment_plays_problems_from_a_file(sandbox: Sandbox, tmp_path: Path) -> None:
    env = CodeEnv(write(tmp_path, HUMAN_EVAL), reveal=True, sandbox={"limits": {"seconds": 60}})
    observation, info = env.reset(seed=0, options={"task": 0, "split": "test"})
    assert "The area of a circle." in observation
    # What the task gives is there in the session, too.
    assert env.step("```python\nprint(helper(math.floor(2.5)))\n```")[0].startswith("stdout:\n2\n")
    _, reward, terminated, _, info = env.step(f"```python\n{info['solution']}\n```\nsubmit")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.close()


def test_questions_of_a_file_have_their_number_after_four_signs(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"question": "How many?", "answer": "3 and 4 make 7.\n#### 1,007"},
        {"question": "q", "answer": 2},
    )
    assert [question.answer for question in load_questions(path)["train"]] == [1007, 2]
    with pytest.raises(UsageError, match="jsonl:1: its answer has no single number"):
        load_questions(write(tmp_path, {"question": "q", "answer": "#### none"}))
    with pytest.raises(UsageError, match="has no question"):
        load_questions(write(tmp_path, {"answer": "#### 1"}))


def real(name: str) -> list[Problem]:
    folder = os.environ.get("ROLLGYM_TEST_DATA")
    path = Path(folder or "", "code", name)
    if not folder or not path.exists():
        pytest.skip("ROLLGYM_TEST_DATA is not set or has no code/: no public problems to judge")
    return problems(load_problems(str(path)))


CANNOT = {
    "mbpp.jsonl": {"MBPP/367", "MBPP/533", "MBPP/601", "MBPP/927"},
}
"""Their tests pass objects of the solution's own classes, or types, which are not data."""


@pytest.mark.parametrize("name", ["HumanEval.jsonl.gz", "sanitized-mbpp.json"])
def test_some_public_references_pass_and_wrong_ones_do_not(sandbox: Sandbox, name: str) -> None:
    problems = real(name)
    for problem in [
        *problems[::25],
        *(candidate for candidate in problems if candidate.key in ("HumanEval/32", "HumanEval/38")),
    ]:
        assert problem.solution is not None
        assert passes(sandbox, problem, problem.solution), problem.key
        assert not passes(sandbox, problem, f"def {problem.name}(*a):\n    return 'wrong'\n"), problem.key


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "count"), [("HumanEval.jsonl.gz", 164), ("sanitized-mbpp.json", 427), ("mbpp.jsonl", 974)]
)
def test_all_public_references_pass_and_wrong_ones_do_not(sandbox: Sandbox, name: str, count: int) -> None:
    problems = real(name)
    assert len(problems) == count
    failed = {problem.key for problem in problems if not passes(sandbox, problem, problem.solution or "")}
    assert failed == CANNOT.get(name, set())
    wrong = {
        problem.key
        for problem in problems
        if passes(sandbox, problem, f"def {problem.name}(*a):\n    return 'wrong'\n")
    }
    assert not wrong
