"""Level files: what is read, and what is refused in which words."""

import os
from pathlib import Path

import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.sokoban.levels import content_hash, load_levels, parse_levels

BOXOBAN = """; 0
#####
#@$.#
#####

; 1
######
# .$@#
######
"""

COLLECTION = """A collection, for the tests

   ####
####  #
#@-$_.#
#######
Title: crooked
Comment: below, the player and a box start on targets

########
#+*  $ #
########
"""


def test_a_boxoban_file_has_its_levels_in_order() -> None:
    first, second = parse_levels(BOXOBAN)
    assert first.text == "#####\n#@$.#\n#####"
    assert second.text == "######\n# .$@#\n######"


def test_an_xsb_collection_may_have_titles_crooked_rows_and_other_floor() -> None:
    first, second = parse_levels(COLLECTION)
    assert first.text == "#######\n####  #\n#@ $ .#\n#######"
    assert second.text == "########\n#+*  $ #\n########"


def test_windows_line_ends_make_no_difference() -> None:
    assert parse_levels(BOXOBAN.replace("\n", "\r\n")) == parse_levels(BOXOBAN)


def test_an_indented_level_loses_its_indent() -> None:
    assert parse_levels("   #####\n   #@$.#\n   #####")[0].text == "#####\n#@$.#\n#####"


def test_a_closed_pocket_inside_stays_as_it_is() -> None:
    text = "#######\n#@$.# #\n#######"
    assert parse_levels(text)[0].text == text


@pytest.mark.parametrize(
    ("board", "complaint"),
    [
        ("#####\n# $.#\n#####", "it has no player"),
        ("######\n#@@$.#\n######", "it has 2 players, not one"),
        ("######\n#@$$.#\n######", "it has 2 boxes but 1 targets"),
        ("####\n#@ #\n####", "it has no boxes"),
        ("####\n#@*#\n####", "every box already stands on a target"),
        ("#####\n#@$. \n#####", "not enclosed"),
        ("#####\n#@$.#\n## ##", "not enclosed"),
        ("#####  \n#@$.#.$\n#####  ", "outside the walls (row 1, column 5"),
    ],
)
def test_a_wrong_level_is_named_with_its_file_number_and_fault(board: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_levels(f"; 0\n#####\n#@$.#\n#####\n\n; 1\n{board}\n", "mine.txt")
    message = str(caught.value)
    assert message.startswith("mine.txt, level 1 (counted from 0; line 7): ")
    assert complaint in message


def test_a_strange_symbol_in_a_row_is_named_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"mine.txt, line 2: 'x' is not a symbol"):
        parse_levels("#####\n#@x.#\n#####", "mine.txt")


@pytest.mark.parametrize("text", ["", "\n\n", "only words\n"])
def test_a_file_without_levels_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="mine.txt holds no level"):
        parse_levels(text, "mine.txt")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt cannot be read: No such file"):
        load_levels(tmp_path / "none.txt")


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_levels(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00#")
    with pytest.raises(UsageError, match="not text in UTF-8"):
        load_levels(tmp_path / "binary")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "levels.txt"
    path.write_text(BOXOBAN)
    assert len(load_levels(path)) == 2
    path.write_text("#####\n#@$.#\n#####\n")
    assert len(load_levels(path)) == 1


def test_the_content_hash_ignores_comments_but_not_boards() -> None:
    plain = parse_levels(BOXOBAN)
    assert content_hash(parse_levels("Mine\n\n" + BOXOBAN)) == content_hash(plain)
    assert content_hash(plain[:1]) != content_hash(plain)


@pytest.mark.parametrize("name", ["boxoban_unfiltered_valid_000.txt", "boxoban_medium_valid_000.txt"])
def test_boxoban_files_load_whole(name: str) -> None:
    folder = os.environ.get("ROLLGYM_TEST_DATA")
    if not folder:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no Boxoban files to read")
    path = Path(folder, "sokoban", name)
    levels = load_levels(path)
    assert len(levels) == 1000
    assert levels[3].text in path.read_text()
    assert {level.text.count("$") for level in levels} == {4}
