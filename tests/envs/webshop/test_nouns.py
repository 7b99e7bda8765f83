"""Nouns of titles: by rules, by a file, by spaCy where it is installed."""

import gzip
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollgym.envs.webshop.catalog import nouns
from rollgym.envs.webshop.catalog.nouns import LIGHT, Tagger, light_nouns, words_of


@pytest.mark.parametrize(
    ("title", "found"),
    [
        ("Blue Cup for Tea and Coffee", ("blue", "cup", "tea", "coffee")),
        ("Women's Running Shoes, 2 Pack", ("women", "running", "shoes", "pack")),
        ("a comfortable chair, made of wood", ("chair", "wood")),
        ("Comfortable Chair", ("comfortable", "chair")),
        ("Non-Slip Mat (Grey) 60 x 40 cm", ("non", "slip", "mat", "grey", "cm")),
        ("Cable,Adapter/Charger 4K 64GB 100%", ("cable", "adapter", "charger")),
        ("Cup Cup cup", ("cup", "cup", "cup")),
        ("for the with 12 & - !!", ()),
        ("", ()),
    ],
)
def test_light_rules(title: str, found: tuple[str, ...]) -> None:
    assert light_nouns(title) == found


def test_words_lose_punctuation_but_keep_their_case() -> None:
    assert words_of("(Blue) “Cup”, Men’s... 3.5 oz") == ["Blue", "Cup", "Men", "3.5", "oz"]


def test_a_file_goes_before_the_tagger() -> None:
    tagger = Tagger({"B1": ("given",)}, lambda title: (title.upper(),), "shouting")
    assert tagger("B1", "cup") == ("given",)
    assert tagger("B2", "cup") == ("CUP",)
    assert tagger.name == "file, else shouting"
    assert Tagger(None, lambda title: (), "none").name == "none"


def test_without_spacy_the_light_rules_are_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    tagger = Tagger()
    assert tagger.name == LIGHT
    assert tagger("B1", "Blue Cup") == ("blue", "cup")


class Model:
    """Takes capitals for names, as spaCy's model would not."""

    meta = {"version": "9.9"}

    def __call__(self, title: str) -> list[Any]:
        tags = [("PROPN" if word[0].isupper() else "ADP", word) for word in title.split()]
        return [types.SimpleNamespace(pos_=tag, text=word) for tag, word in tags]


def test_spacy_is_taken_where_it_and_its_model_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spacy = types.ModuleType("spacy")
    spacy.load = lambda name, exclude: Model()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    tagger = Tagger()
    assert tagger.name == "en_core_web_sm 9.9"
    assert tagger("B1", "Blue Cup for Tea") == ("blue", "cup", "tea")


def test_spacy_without_its_model_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, exclude: list[str]) -> None:
        raise OSError(f"no model {name}")

    spacy = types.ModuleType("spacy")
    spacy.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    assert Tagger().name == LIGHT


def r_type(info: dict[str, Any], bought: list[str], wanted: list[str]) -> float:
    """The type part of the reward, from what the golden file says and two lists of nouns."""
    score = len(set(bought) & set(wanted)) / len(wanted) if wanted else 0.2
    if score == 0:
        return 0.0
    if score < 0.1:
        return 0.1
    return 1.0 if info["query_match"] or info["category_match"] or score > 0.2 else 0.5


def test_the_light_rules_agree_with_spacy_where_it_matters() -> None:
    data = os.environ.get("ROLLGYM_TEST_DATA")
    if data is None:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no golden nouns to compare with")
    folder = Path(data) / "webshop"
    items = json.loads((folder / "items_shuffle_1000.json").read_text())
    golden = json.loads((folder / "golden" / "title_nouns.json").read_text())
    ours = {item["asin"]: list(nouns.light_nouns(item["name"])) for item in items}
    pairs = [(Counter(golden[asin]), Counter(ours[asin])) for asin in golden]
    common = sum((theirs & mine).total() for theirs, mine in pairs)
    assert common / sum(mine.total() for _, mine in pairs) > 0.93
    assert common / sum(theirs.total() for theirs, _ in pairs) > 0.96
    with gzip.open(folder / "golden" / "goals.jsonl.gz") as file:
        wanted = [json.loads(line)["asin"] for line in file]
    changed = 0
    with gzip.open(folder / "golden" / "rewards.jsonl.gz") as file:
        for line in map(json.loads, file):
            bought, goal = line["asin"], wanted[line["goal_idx"]]
            assert r_type(line["info"], golden[bought], golden[goal]) == line["info"]["r_type"]
            changed += r_type(line["info"], ours[bought], ours[goal]) != line["info"]["r_type"]
    assert changed <= 40
