"""`lucene-exact` against a slow version that reads like the formula, and its index against itself."""

from __future__ import annotations

import math
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgym.envs.webshop.search.analysis import tokens
from rollgym.envs.webshop.search.lucene import LuceneIndex, decode_length, encode_length
from rollgym.envs.webshop.search.lucene_build import LuceneBuilder

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = st.sampled_from(["red", "blue", "shirt", "shoe", "zebra", "café", "usb", "10", "the"])
TEXTS = st.lists(st.lists(WORDS, max_size=60).map(" ".join), min_size=1, max_size=12)


def built(
    folder: Path, texts: list[str], *, run_tokens: int = 1000, names: list[str] | None = None
) -> LuceneIndex:
    index_folder = folder / f"index-{len(list(folder.iterdir()))}"
    index_folder.mkdir()
    builder = LuceneBuilder(index_folder, run_tokens=run_tokens)
    for text in texts:
        builder.add(tokens(text))
    builder.finish(names)
    return LuceneIndex(index_folder)


def slow_scores(texts: list[str], query: str) -> dict[int, float]:
    """BM25, one document at a time, in single precision where Lucene has it."""
    f = np.float32
    counts = [Counter(tokens(text)) for text in texts]
    with_terms = [count for count in counts if count]
    average = f(max(sum(count.total() for count in counts), 1) / max(len(with_terms), 1))
    having = Counter(term for count in counts for term in count)
    scores: dict[int, float] = {}
    for number, count in enumerate(counts):
        length = f(decode_length(encode_length(count.total())))
        total, matched = 0.0, False
        for term, times in Counter(tokens(query)).items():
            if not count[term]:
                continue
            idf = f(math.log(1 + (len(with_terms) - having[term] + 0.5) / (having[term] + 0.5)))
            weight = f(times) * idf
            inverse = f(1) / (f(0.9) * ((f(1) - f(0.4)) + f(0.4) * length / average))
            total += float(weight - weight / (f(1) + f(count[term]) * inverse))
            matched = True
        if matched:
            scores[number] = float(f(total))
    return scores


@given(TEXTS, st.lists(WORDS, max_size=6).map(" ".join))
@SLOW
def test_scores_and_order_equal_the_formula(tmp_path: Path, texts: list[str], query: str) -> None:
    expected = sorted(slow_scores(texts, query).items(), key=lambda hit: (-hit[1], hit[0]))
    assert built(tmp_path, texts).find(query, 5) == expected[:5]


@given(TEXTS, st.integers(1, 40), st.lists(WORDS, min_size=1, max_size=4).map(" ".join))
@SLOW
def test_an_index_of_several_runs_equals_one_of_one_run(
    tmp_path: Path, texts: list[str], run_tokens: int, query: str
) -> None:
    one, several = built(tmp_path, texts), built(tmp_path, texts, run_tokens=run_tokens)
    assert several.find(query) == one.find(query)
    folders = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)[-2:]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


@given(st.permutations(range(8)))
@SLOW
def test_scores_do_not_depend_on_the_order_of_documents(tmp_path: Path, order: list[int]) -> None:
    texts = ["red shirt", "red red shoe", "blue shirt usb", "usb", "red", "", "shirt " * 50, "red shirt blue"]
    names = [f"B{number}" for number in range(8)]
    straight = built(tmp_path, texts, names=names).find("red shirt usb")
    mixed = built(tmp_path, [texts[i] for i in order], names=[names[i] for i in order]).find("red shirt usb")
    assert [(order[number], score) for number, score in mixed] == straight


def test_a_score_worked_out_by_hand(tmp_path: Path) -> None:
    # idf = ln(1 + 1.5/1.5) = ln 2; both documents are of average length, so tf = 1 / (1 + 0.9).
    assert built(tmp_path, ["red shirt", "blue shirt"]).find("red") == [(0, pytest.approx(math.log(2) / 1.9))]


def test_a_repeated_word_counts_twice(tmp_path: Path) -> None:
    index = built(tmp_path, ["red shirt", "blue shoe"])
    assert index.find("red red")[0][1] == pytest.approx(2 * index.find("red")[0][1])


def test_equal_scores_come_by_name_else_by_number(tmp_path: Path) -> None:
    texts = ["red shirt"] * 6
    assert [n for n, _ in built(tmp_path, texts).find("red", 3)] == [0, 1, 2]
    named = built(tmp_path, texts, names=["F", "B", "E", "A", "D", "C"])
    assert [n for n, _ in named.find("red", 3)] == [3, 1, 5]
    assert [n for n, _ in named.find("red shirt", 10)] == [3, 1, 5, 4, 2, 0]


@pytest.mark.parametrize("words", ["", "the of", "!?", "unheard", "   "])
def test_a_query_without_known_words_finds_nothing(tmp_path: Path, words: str) -> None:
    assert built(tmp_path, ["red shirt", "the of"]).find(words) == []


@pytest.mark.parametrize("texts", [[], [""], ["the", "!"]])
def test_an_index_without_terms_finds_nothing(tmp_path: Path, texts: list[str]) -> None:
    assert built(tmp_path, texts).find("red the") == []


@pytest.mark.parametrize(
    ("length", "byte"),
    [
        (0, 0),
        (23, 23),
        (24, 24),
        (39, 39),
        (40, 40),
        (41, 40),
        (42, 41),
        (55, 47),
        (56, 48),
        (2**31 - 1, 255),
    ],
)
def test_lengths_are_kept_as_lucenes_byte(length: int, byte: int) -> None:
    assert encode_length(length) == byte


def test_a_byte_stands_for_the_least_of_its_lengths() -> None:
    for byte in range(256):
        assert encode_length(decode_length(byte)) == byte
    for length in range(5000):
        assert decode_length(encode_length(length)) <= length < decode_length(encode_length(length) + 1)


def test_few_and_many_touched_documents_are_added_up_alike(tmp_path: Path) -> None:
    # Two documents of 400 have the rare words: the way for few. The common word makes it the way for many.
    texts = ["common"] * 398 + ["rare zebra usb", "rare"]
    index = built(tmp_path, texts)
    few = index.find("rare zebra")
    assert few == sorted(slow_scores(texts, "rare zebra").items(), key=lambda hit: -hit[1])
    assert dict(index.find("rare zebra common", 2)) == dict(few)


@pytest.mark.parametrize("count", [1, 3, 7, 8, 50, 5000])
def test_the_best_of_many_are_those_of_the_formula(tmp_path: Path, count: int) -> None:
    """Enough documents for every way to add up and to leave out the hopeless."""
    words = ["red", "blue", "shirt", "shoe", "zebra", "usb", "cable", "mug"]
    texts = [" ".join(w for i, w in enumerate(words) if number * 7 % (i + 2) == 0) for number in range(2100)]
    index = built(tmp_path, texts, run_tokens=3000)
    for query in ("red shirt", "zebra mug", "red blue shoe cable cable", "mug"):
        expected = sorted(slow_scores(texts, query).items(), key=lambda hit: (-hit[1], hit[0]))
        assert index.find(query, count) == expected[:count]


def test_threads_share_an_index(tmp_path: Path) -> None:
    index = built(tmp_path, [f"red shirt {number % 7} {number % 11}" for number in range(300)])
    queries = [f"shirt {number % 7} {number % 5}" for number in range(40)]
    expected = [index.find(query) for query in queries]
    wrong: list[str] = []

    def ask() -> None:
        wrong.extend(q for q, e in zip(queries, expected, strict=True) if list(index._search(q, 50)) != e)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_found_may_be_changed_without_harm(tmp_path: Path) -> None:
    index = built(tmp_path, ["red"])
    index.find("red").clear()
    assert index.find("red") != []
