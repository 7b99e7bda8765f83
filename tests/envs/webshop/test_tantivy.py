"""The tantivy engine: its ranking formula, ties, and several segments."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rollgym.envs.webshop.search.analysis import tokens
from rollgym.envs.webshop.search.tantivy_index import TantivyBuilder, TantivyIndex

pytest.importorskip("tantivy")


def built(folder: Path, texts: list[str]) -> TantivyIndex:
    builder = TantivyBuilder(folder)
    for text in texts:
        builder.add(tokens(text))
    builder.finish()
    return TantivyIndex(folder)


def test_its_constants_are_1_2_and_0_75(tmp_path: Path) -> None:
    index = built(tmp_path, ["red shirt", "blue shirt usb cable", "shoe shoe shoe"])
    idf = math.log(1 + (3 - 1 + 0.5) / 1.5)
    norm = 1.2 * (1 - 0.75 + 0.75 * 2 / 3)
    # tantivy multiplies by k1 + 1, which Lucene leaves out.
    assert index.find("red") == [(0, pytest.approx(idf * 2.2 / (1 + norm), rel=1e-5))]


def test_terms_are_those_of_the_analysis(tmp_path: Path) -> None:
    index = built(tmp_path, ["Women's running T-Shirts ★", "o'neill 1,000.5 café", "the of"])
    for words, number in [
        ("woman RUNS", 0),
        ("★", 0),
        ("shirt", 0),
        ("O'NEILL", 1),
        ("1,000.5", 1),
        ("CAFÉ", 1),
    ]:
        assert [hit[0] for hit in index.find(words)] == [number], words
    assert index.find("the of") == []
    assert index.find("neill") == []


@pytest.mark.parametrize("count", [1, 7, 50, 199, 10**9])
def test_equal_scores_come_by_number(tmp_path: Path, count: int) -> None:
    index = built(tmp_path, ["red shirt", "red red shirt"] * 100)
    numbers = [number for number, _ in index.find("red", count)]
    assert numbers == [*range(1, 200, 2), *range(0, 200, 2)][:count]


def test_equal_scores_come_by_number_across_segments(tmp_path: Path) -> None:
    builder = TantivyBuilder(tmp_path)
    for number in range(90):
        builder.add(["red", "shirt"] if number % 3 else ["red", "red"])
        if number % 40 == 20:
            builder._writer.commit()
    builder.finish()
    index = TantivyIndex(tmp_path)
    assert index._searcher.num_segments > 1
    expected = [*range(0, 90, 3), *(number for number in range(90) if number % 3)]
    for count in (1, 10, 31, 50, 90):
        assert [number for number, _ in index.find("red", count)] == expected[:count]


@pytest.mark.parametrize("times", [1, 2, 50])
def test_a_repeated_word_counts_as_often(tmp_path: Path, times: int) -> None:
    index = built(tmp_path, ["red shirt", "blue shirt"])
    assert index.find("red " * times)[0][1] == pytest.approx(times * index.find("red")[0][1], rel=1e-5)


def test_a_document_of_no_terms_keeps_its_number(tmp_path: Path) -> None:
    assert [hit[0] for hit in built(tmp_path, ["", "red", "the", "red"]).find("red")] == [1, 3]


def test_an_empty_index_finds_nothing(tmp_path: Path) -> None:
    assert built(tmp_path, []).find("red") == []


def test_no_results_are_asked_for(tmp_path: Path) -> None:
    assert built(tmp_path, ["red"]).find("red", 0) == []
