"""Loads problems from files of rows: HumanEval, MBPP and a plain format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.files import gunzip, read_bounded
from rollgym.envs.arguments import check_choice
from rollgym.envs.code.families.base import example
from rollgym.envs.code.harness import encode
from rollgym.envs.code.problems import Listed
from rollgym.envs.code.types import Asserts, Case, Cases, Problem, Tests
from rollgym.io.rows import open_rows

MOST_BYTES = 1_000_000_000
"""Size limit of a JSON list of problems, decompressed."""
Record = Mapping[str, Any]
_MBPP_SPLITS = (("prompt", 1, 10), ("test", 11, 510), ("dev", 511, 600), ("train", 601, 974))
_ORDER = ("train", "dev", "test", "prompt")


def load_problems(path: str, form: str = "auto") -> Listed:
    """Load the problems of a file, with the splits of its form."""
    check_choice("form of problems", form, ("auto", *FORMS))
    splits: dict[str, list[Problem]] = {split: [] for split in _ORDER}
    keys: set[str] = set()
    for where, record in read_records(path):
        record_form = _form_of(record, where) if form == "auto" else form
        try:
            split, problem = FORMS[record_form](record)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{where} is not a problem in the form {record_form}: {reason}.") from error
        if problem.key in keys:
            raise UsageError(f"{where}: there are two problems called {problem.key!r}.")
        keys.add(problem.key)
        splits.setdefault(split, []).append(problem)
    if not keys:
        raise UsageError(f"{path} holds no problems.")
    return Listed(Path(path).name, splits)


def read_records(path: str) -> Iterator[tuple[Place, Record]]:
    """Yield (position, record) of a file of rows (JSON lines, Parquet, Arrow), or of one JSON list."""
    listed = _listed(path)
    if listed is None:
        rows = open_rows(path)
        yield from ((Place(rows.place, number), row) for number, row in enumerate(rows))
        return
    for number, record in enumerate(listed):
        where = Place(lambda index: f"{path}, record {index + 1}", number)
        if not isinstance(record, dict):
            raise UsageError(f"{where} is a {type(record).__name__}; an object was expected.")
        yield where, record


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a record, for messages: it is only looked up to be shown."""

    of: Callable[[int], str]
    number: int

    def __str__(self) -> str:
        return self.of(self.number)


def _listed(path: str) -> list[Any] | None:
    """The content of a file ``.json`` or ``.json.gz`` that is one list; ``None`` for other files."""
    if not path.endswith((".json", ".json.gz")):
        return None
    try:
        data = read_bounded(Path(path), MOST_BYTES)
        text = (gunzip(data, MOST_BYTES) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if not text.lstrip().startswith("["):
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}.") from error
    return list(values)


def _form_of(record: Record, where: Place) -> str:
    if "entry_point" in record and "test" in record:
        return "humaneval"
    if "test_list" in record:
        return "mbpp"
    if "function" in record:
        return "jsonl"
    raise UsageError(
        f"{where} has an unknown form: expected entry_point and test (HumanEval), test_list (MBPP) or "
        "function (plain)."
    )


def human_eval(record: Record) -> tuple[str, Problem]:
    """``prompt``, ``entry_point``, ``canonical_solution`` and ``test``, which defines check(candidate)."""
    prompt, name = _text(record, "prompt"), _text(record, "entry_point")
    solution = prompt + _text(record, "canonical_solution")
    test = f"{_text(record, 'test')}\n\ncheck(candidate)\n"
    definition = re.search(rf"^def {re.escape(name)}\b.*$", prompt, re.MULTILINE)
    if not definition:
        raise ValueError(f"its prompt does not begin the function {name}")
    return "test", Problem(
        key=str(record["task_id"]),
        statement=f"Complete this function.\n\n{prompt.strip()}",
        name=name,
        signature=definition[0].removeprefix("def ").rstrip(": "),
        public=Asserts(tests=()),
        hidden=Asserts(tests=(test,), setup=solution),
        solution=solution,
        prelude=prompt[: definition.start()],
    )


def mbpp(record: Record) -> tuple[str, Problem]:
    """``text`` or ``prompt``, ``code`` and ``test_list``; the first test is shown."""
    number = int(record["task_id"])
    code = _text(record, "code").replace("\r\n", "\n")
    tests = _texts(record, "test_list")
    lines = [*record.get("test_imports", ()), *re.findall(r"^(?:import|from) .+$", code, re.MULTILINE)]
    imports, setup = "\n".join(lines), str(record.get("test_setup_code", ""))
    name = _tested(tests[0], code)
    split = next((split for split, low, high in _MBPP_SPLITS if low <= number <= high), "train")
    definition = re.search(rf"^def\s+({re.escape(name)}\s*\(.*\))\s*:", code, re.MULTILINE)
    return split, Problem(
        key=f"MBPP/{number}",
        statement=str(record["prompt"] if "prompt" in record else record["text"]).strip(),
        name=name,
        signature=definition[1] if definition else f"{name}(...)",
        # Public tests run while the agent's session is alive, so the reference must not be there.
        public=Asserts(tests=tests[:1], setup=f"{imports}\n{setup}\n"),
        hidden=Asserts(tests=tests, setup=f"{imports}\n{code}\n{setup}\n"),
        solution=code,
        shown=tests[:1],
    )


def _tested(test: str, code: str) -> str:
    """Return the function under test: the first name the test calls that the code defines."""
    defined = re.findall(r"^def\s+(\w+)", code, re.MULTILINE)
    for name in re.findall(r"(\w+)\s*\(", test):
        if name in defined:
            return str(name)
    raise ValueError(f"no function of its code is called in {test!r}")


def plain_problem(record: Record) -> tuple[str, Problem]:
    """``function``, ``statement`` and ``tests`` (``[[arguments], expected]`` each) or ``asserts``."""
    name = _text(record, "function")
    if not name.isidentifier():
        raise ValueError(f"its function {name!r} is not a valid Python name")
    setup = str(record.get("setup", ""))
    hidden = _tests(record, "tests", "asserts", f"{setup}\n{record.get('solution') or ''}\n")
    # Public tests run while the agent's session is alive, so the reference must not be there.
    public = _tests(record, "examples", "public_asserts", setup)
    if not len(hidden):
        raise ValueError("it has neither tests nor asserts")
    lines = [example(name, c) for c in public.cases] if isinstance(public, Cases) else list(public.tests)
    return str(record.get("split", "train")), Problem(
        key=str(record.get("id") or f"{name}: {_text(record, 'statement')}"),
        statement=_text(record, "statement"),
        name=name,
        signature=str(record.get("signature", f"{name}(...)")),
        public=public,
        hidden=hidden,
        solution=record.get("solution"),
        prelude=str(record.get("prelude", "")),
        shown=tuple(lines),
    )


def _tests(record: Record, cases_field: str, asserts_field: str, setup: str) -> Tests:
    if record.get(asserts_field):
        return Asserts(tests=_texts(record, asserts_field), setup=setup)
    cases = []
    for pair in record.get(cases_field, ()):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list)):
            raise ValueError(f"one of its {cases_field} is {pair!r}; [[arguments], expected] was expected")
        cases.append(Case(arguments=[encode(argument) for argument in pair[0]], expected=encode(pair[1])))
    return Cases(cases=tuple(cases))


def _text(record: Record, name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TypeError(f"its {name} is {value!r}; text was expected")
    return value


def _texts(record: Record, name: str) -> tuple[str, ...]:
    value = record[name]
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"its {name} is {value!r}; a list of texts was expected")
    return tuple(value)


FORMS: Mapping[str, Callable[[Record], tuple[str, Problem]]] = {
    "humaneval": human_eval,
    "mbpp": mbpp,
    "jsonl": plain_problem,
}
