"""Text to terms, and the stemmer, against words worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.webshop.search.analysis import STOP_WORDS, tokens
from rollgym.envs.webshop.search.porter import stem

STEMS = """
caresses caress  ponies poni  ties ti  caress caress  cats cat  feed feed  agreed agre  plastered plaster
bled bled  motoring motor  sing sing  conflated conflat  troubled troubl  sized size  hopping hop  tanned tan
falling fall  hissing hiss  fizzed fizz  failing fail  filing file  happy happi  sky sky  relational relat
conditional condit  rational ration  valenci valenc  digitizer digit  conformabli conform  radicalli radic
differentli differ  vileli vile  analogousli analog  vietnamization vietnam  predication predic
operator oper  feudalism feudal  decisiveness decis  hopefulness hope  callousness callous
formaliti formal  sensitiviti sensit  sensibiliti sensibl  triplicate triplic  formative form
formalize formal  electriciti electr  electrical electr  hopeful hope  goodness good  revival reviv
allowance allow  inference infer  airliner airlin  gyroscopic gyroscop  adjustable adjust
defensible defens  irritant irrit  replacement replac  adjustment adjust  dependent depend  adoption adopt
homologou homolog  communism commun  activate activ  angulariti angular  homologous homolog
effective effect  bowdlerize bowdler  probate probat  rate rate  cease ceas  controll control  roll roll
archaeology archaeolog  possibly possibl  is is  as as  ion ion  sses ss  s s  beautiful beauti  oily oili
"""


def test_words_have_the_stems_porter_gives_them() -> None:
    words = STEMS.split()
    assert [f"{word} {stem(word)}" for word in words[::2]] == [
        f"{w} {e}" for w, e in zip(words[::2], words[1::2], strict=True)
    ]


@given(st.text(alphabet="aeiouybcdglnstz1é", max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_stem_is_never_longer_than_its_word_nor_empty(word: str) -> None:
    assert len(stem(word)) <= len(word)
    assert not word or stem(word)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("the of AND Or", []),
        ("!!! ___ -- ''", []),
        ("T-Shirt, blue/red", ["t", "shirt", "blue", "red"]),
        ("women's WOMEN’S o'neill", ["women", "women", "o'neil"]),
        ("1,000.50 3.5mm 5'2\"x7'4\"", ["1,000.50", "3.5mm", "5'2", "x7'4"]),
        ("a.b.c size:xl 1:2 x.1", ["a.b.c", "size:xl", "1", "2", "x", "1"]),
        ("_foo_ bar_1", ["_foo_", "bar_1"]),
        ("100% cotton®", ["100", "cotton", "®"]),
        ("CAFÉ crème", ["café", "crème"]),
        ("★best☞", ["★", "best", "☞"]),
        ("日本 ひら カタカナ", ["日", "本", "ひ", "ら", "カタカナ"]),
        ("ภาษาไทย", ["ภาษาไทย"]),
        ("한국어", ["한국어"]),
        ("אב'ג ד\"ה", ["אב'ג", 'ד"ה']),
        ("אב'", ["אב'"]),
        ("İstanbul ΟΔΟΣ", ["istanbul", "οδοσ"]),
        ("👍🏻👍", ["👍🏻", "👍"]),
        ("👨\u200d👩\u200d👧 ❤\ufe0f\u200d🔥", ["👨\u200d👩\u200d👧", "❤\ufe0f\u200d🔥"]),
        ("1\ufe0f\u20e3 #\ufe0f\u20e3 🇩🇪🇫", ["1\ufe0f\u20e3", "#\ufe0f\u20e3", "🇩🇪"]),
        ("soft\u00adware", ["soft\u00adwar"]),
        ("\ud800 ok \udfff", ["ok"]),
    ],
)
def test_a_text_has_the_terms_lucene_gives_it(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


@pytest.mark.parametrize(
    ("letter", "pieces"), [("x", [255, 255, 90]), ("é", [255, 255, 90]), ("𝒜", [127] * 4 + [92])]
)
def test_a_long_word_is_cut_at_255_utf_16_units(letter: str, pieces: list[int]) -> None:
    assert [len(token) for token in tokens(letter * 600)] == pieces


def test_a_cut_falls_where_a_word_may_end() -> None:
    assert [len(token) for token in tokens("x" * 254 + "'" + "x" * 10)] == [254, 10]


def test_there_are_33_stop_words() -> None:
    assert len(STOP_WORDS) == 33


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_terms_without_spaces_that_encode(text: str) -> None:
    for token in tokens(text):
        assert token
        assert len(token.split()) == 1
        token.encode()


@given(st.text(alphabet="ab1_.,:';\" é", max_size=30))
@settings(max_examples=200, deadline=None)
def test_an_accent_elsewhere_does_not_change_how_ascii_is_cut(text: str) -> None:
    """The pattern for plain text and the one for any text agree."""
    from rollgym.envs.webshop.search.analysis import _ASCII_WORD, _unicode_word

    plain = text.replace("é", "")
    assert [m.group() for m in _ASCII_WORD.finditer(plain)] == [
        m.group() for m in _unicode_word().finditer(plain)
    ]
