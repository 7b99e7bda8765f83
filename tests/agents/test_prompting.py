from pathlib import Path

import pytest

from rollgym.agents.prompting import (
    ASKS,
    TEMPLATES,
    Exchange,
    fill_template,
    history_limit,
    load_template,
)
from rollgym.core.errors import UsageError

TURNS = [Exchange("o1", "r1"), Exchange("o2", "r2")]


def test_the_prompt_holds_the_instructions_and_the_format() -> None:
    prompt = fill_template(TEMPLATES["plain"], "Rules.\n", "answer")
    assert prompt == f"Rules.\n\n{ASKS['answer']}"
    assert "<answer>x</answer>" in prompt


def test_marks_inside_the_instructions_stay_as_they_are() -> None:
    assert fill_template("{instructions}|{format}", "a {format} {x}", "regex:a") == "a {format} {x}|"


def test_a_template_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text('Play {"json": 1}: {instructions}\n')
    assert fill_template(load_template(str(path)), "R", "raw") == 'Play {"json": 1}: R'


def test_a_template_that_is_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("no mark")
    with pytest.raises(UsageError, match=r"no \{instructions\} mark"):
        load_template(str(path))
    with pytest.raises(UsageError, match="Did you mean plain"):
        load_template("plane")
    with pytest.raises(UsageError, match="cannot be read"):
        load_template(str(tmp_path))
    path.write_bytes(b"\xff{instructions}")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_template(str(path))


def test_history_policies() -> None:
    assert [history_limit(policy) for policy in ("full", "none", "last:3", "last:0")] == [None, 0, 3, 0]
    for wrong in ("last", "last:", "last:-1", "last:x", "all", ""):
        with pytest.raises(UsageError, match="last:N"):
            history_limit(wrong)
