"""Constraints: what satisfies each, and what does not."""

from typing import Any

import pytest

from rollgym.envs.instructions.rules import RULES, constraint

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["river", "old stone"]},
        ["A River; an OLD stone."],
        ["rivers old stone", ""],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["old"]}, ["cold river"], ["An old river", "OLD"]),
    (
        "keywords:frequency",
        {"keyword": "sea", "frequency": 2, "relation": "at least"},
        ["sea, sea", "Sea sea sea"],
        ["sea", "seas seas"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "less than"},
        ["q"],
        ["Q and q"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "exactly"},
        ["a b, c!"],
        ["a b", "a b c d"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, ["a b c", "a"], ["a b c d"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "exactly"},
        ["One. Two!", 'He said "go." She went'],
        ["One, two.", "One. Two. Three."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo"],
        ["one", "***\n***", "a***b***c"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ["One thing.\n\nThen another."],
        ["Then.\n\nOne.", "One.\n\nThen.\n\nThree."],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b c]"], ["[a]", "[] []"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Hi\nP.S. again", "p. s. x"],
        ["Hi P.S. x", "P.S."],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "Text\n- a\n- b"],
        ["* a", "* \n* ", "* a\n* b\n* c", "* -\n* -"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is no."],
        ["no", "My answer is no. My answer is yes."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and **b**"],
        ["*a*", "* *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        ["Part 1\na\nPart 2\nb"],
        ["Part 1", "a Part 1 b Part 2"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n["a"]\n```'], ["{}", "text", "{'a': 1}"]),
    ("detectable_format:title", {}, ["<<a day>>\ntext"], ["<<>>", "<a day>", "<< >>"]),
    ("combination:two_responses", {}, ["one******two"], ["one******one", "one", "******", "a******b******c"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it."},
        ["Say it. I say it."],
        ["Say it.", "I say it."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "good night"},
        ["Well, good night", '"Good Night"'],
        ["good night all"],
    ),
    ("startend:quotation", {}, ['"a b"'], ["a b", '""', '"a b']),
    ("change_case:english_capital", {}, ["A B 1"], ["A b", "1 2"]),
    ("change_case:english_lowercase", {}, ["a b."], ["A b", "1 2"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "at least"},
        ["so LOUD"],
        ["so loud"],
    ),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
    (
        "rollgym:json_keys",
        {"keys": ["a", "b"]},
        ['{"b": "x", "a": 2}'],
        ['{"a": 1}', '{"a": "", "b": 1}', "{}", "[]"],
    ),
    (
        "rollgym:json_keys",
        {"keys": ["a"]},
        ['{"a": ["x"]}'],
        ['{"a": null}', '{"a": 1, "b": 2}', '"a"', '{"a": []}'],
    ),
    ("rollgym:first_word", {"word": "river"}, ['"River" flows'], ["The river", "rivers flow"]),
]


def test_every_rule_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(RULES)


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_holds_for_the_good_texts_only(
    name: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    made = constraint(name, arguments)
    assert [text for text in good if not made.holds(text)] == []
    assert [text for text in bad if made.holds(text)] == []
    assert len(made.sentence) > 10


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("language:response_language", {"language": "kn"}, "'language:response_language' is not supported"),
        ("length_constraints:number_words", {"relation": "at least"}, "needs num_words"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, "one of at least"),
        ("keywords:existence", {"keywords": []}, "a list of texts"),
        ("keywords:existence", {"keywords": "river"}, "needs keywords, a list"),
    ],
)
def test_bad_constraints_are_refused_with_a_reason(name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        constraint(name, arguments)
