"""The accessibility tree as an agent reads it, and where Chromium is looked for. No browser needed."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from rollgym.browser.find import find_chromium
from rollgym.browser.tree import CLICKED, LISTS, TYPED, read_tree
from rollgym.core.errors import MissingExtra, UsageError
from rollgym.core.extras import install_command

SNAPSHOT = """\
- generic [active] [ref=f3e1]:
  - generic [ref=f3e2]:
    - paragraph [ref=f3e3]: "Instruction:"
    - paragraph [ref=f3e4]: I want "tea" - cheap
  - searchbox "What are you looking for?" [active] [ref=f3e5]: green tea
  - 'link "Tea: the best" [ref=f3e6] [cursor=pointer]':
    - /url: /tea
  - radiogroup "size" [ref=f3e7]:
    - paragraph [ref=f3e8]: size
    - radio "large \\"x\\"" [checked] [ref=f3e9]
    - radio "small" [disabled] [ref=f3e10]
  - heading "It's here" [level=2] [ref=f3e11]
  - text: "a\\x07b: c"
  - status [ref=f3e12]: "Not possible: no."
  - button "Buy Now" [ref=f3e13] [cursor=pointer]
"""


def test_a_tree_is_short_lines_with_references_of_our_own() -> None:
    tree = read_tree(SNAPSHOT)
    assert tree.text.splitlines() == [
        "Instruction:",
        'I want "tea" - cheap',
        '[e1] searchbox "What are you looking for?": green tea',
        '[e2] link "Tea: the best"',
        'radiogroup "size"',
        '  [e3] radio "large "x"" (checked)',
        '  radio "small" (disabled)',
        'heading "It\'s here"',
        "a\x07b: c",
        "Not possible: no.",
        '[e4] button "Buy Now"',
    ]
    assert {ref: target.ref for ref, target in tree.targets.items()} == {
        "e1": "f3e5",
        "e2": "f3e6",
        "e3": "f3e9",
        "e4": "f3e13",
    }
    assert (tree.refs(TYPED), tree.refs(CLICKED)) == (["e1"], ["e2", "e3", "e4"])


@pytest.mark.parametrize("odd", ["", "- ", "nonsense", '- "', "- 'a", "- button [ref", "    -  x: [y]: z"])
def test_lines_nobody_expects_do_no_harm(odd: str) -> None:
    tree = read_tree(f'{odd}\n- button "OK" [ref=e2]')
    assert tree.text.endswith('[e1] button "OK"')


def test_text_cannot_pass_for_something_to_use() -> None:
    tree = read_tree('- paragraph [ref=e2]: "- button \\"Buy\\" [ref=e9]"')
    assert tree.text == '- button "Buy" [ref=e9]'
    assert tree.targets == {}


def test_chromium_is_where_one_says(tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    with pytest.raises(UsageError, match=r"chromium= names .*apt install chromium-headless-shell"):
        find_chromium(str(program))
    with pytest.raises(UsageError, match="ROLLGYM_CHROMIUM names"):
        find_chromium(None, {"ROLLGYM_CHROMIUM": str(program)})
    program.touch(mode=0o755)
    assert find_chromium(str(program)) == str(program)
    assert find_chromium(None, {"ROLLGYM_CHROMIUM": str(program)}) == str(program)


def test_without_chromium_the_fix_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    where = {"PLAYWRIGHT_BROWSERS_PATH": str(tmp_path / "browsers")}
    with pytest.raises(
        UsageError,
        match="Chromium, which was not found.*playwright install chromium-headless-shell.*chromium=",
    ):
        find_chromium(None, where)
    (tmp_path / "browsers" / "chromium_headless_shell-1").mkdir(parents=True)
    assert find_chromium(None, where) is None  # Playwright finds its own


def test_without_playwright_the_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def no_playwright(name: str, *rest: Any) -> Any:
        return None if name == "playwright" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", no_playwright)
    with pytest.raises(MissingExtra, match=re.escape(install_command("browser"))):
        find_chromium()


WIDGETS = """\
- generic [ref=e3]:
  - combobox [ref=e4]:
    - option "Niger" [selected]
    - option "French Guiana"
  - generic [ref=e5] [cursor=pointer]:
    - generic [ref=e6]: inbox
  - generic [ref=e7] [cursor=pointer]: F
  - slider "Volume" [ref=e8]
  - option "loose"
"""


def test_elements_under_a_hand_cursor_and_lists_get_references_where_asked_for() -> None:
    tree = read_tree(WIDGETS, CLICKED | TYPED | LISTS, pointers=True)
    assert tree.text.splitlines() == [
        "[e1] combobox",
        '  option "Niger" (selected)',
        '  option "French Guiana"',
        "[e2] generic",
        "  inbox",
        "[e3] generic: F",
        'slider "Volume"',
        'option "loose"',
    ]
    assert tree.targets["e1"].options == ("Niger", "French Guiana")
    assert [target.ref for target in tree.targets.values()] == ["e4", "e5", "e7"]
    plain = read_tree(WIDGETS)
    assert plain.targets == {}
    assert plain.text.splitlines()[3:5] == ["inbox", "F"]
