"""``rollgym check tokens``: what it prints, and its exit code."""

import json
import re
import shutil
import sys

import pytest
from talkers import CHATML, FAMILIES, TOOL_FAMILIES, family, make

from rollgym.chat import load_tokenizer
from rollgym.cli.tokens import check_tokens
from rollgym.core.errors import MissingExtra, UsageError
from rollgym.core.extras import install_command


@pytest.fixture
def folder(tmp_path):
    def save(tokenizer):
        path = tmp_path / "model"
        shutil.rmtree(path, ignore_errors=True)
        tokenizer.save_pretrained(path)
        return path

    return save


@pytest.mark.parametrize("name", sorted(FAMILIES | TOOL_FAMILIES))
def test_every_family_is_explained(folder, capsys, name):
    path = folder(family(name))
    assert check_tokens(path, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["observations"] == "text"
    assert [part["mask"] for part in report["example"]] == [0, 1, 0, 1]
    assert "Open it" in report["example"][1]["text"]
    assert check_tokens(path, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "Conversations can be continued in token ids." in shown
    assert report["end_of_turn"] in shown


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("qwen2.5 tools", "rendered by the template, calls in the form hermes"),
        ("llama3 tools", "rendered by the template, calls in the form llama, one call per turn"),
        (
            "gemma",
            "described in the system message, calls in the form json: the template does not show tools",
        ),
    ],
)
def test_tools_are_explained(folder, capsys, name, line):
    path = folder(family(name))
    assert check_tokens(path, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    template, call, result, reply = report["tool_example"]
    assert [part["mask"] for part in report["tool_example"]] == [0, 1, 0, 1]
    assert "Open something." in template["text"]
    assert report["tools"]["call"] in call["text"]
    assert "It opens." in result["text"]
    assert "Go in" in reply["text"]
    assert check_tokens(path, as_json=False) == 0
    assert line in " ".join(capsys.readouterr().out.split())


def test_the_example_is_the_conversation_itself(folder, capsys):
    check_tokens(folder(family("smollm2")), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [part["text"] for part in report["example"]] == [
        "<|im_start|>system\nYou play a game.<|im_end|>\n<|im_start|>user\nThe door is shut.<|im_end|>\n"
        "<|im_start|>assistant\n",
        "Open it<|im_end|>",
        "\n<|im_start|>user\nIt opens.<|im_end|>\n<|im_start|>assistant\n",
        "Go in<|im_end|>",
    ]
    assert {part["row"] for part in report["example"]} == {1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "qwen3",
            ["reasoning in a reply is rewritten, which starts a new training sequence", "'<|im_end|>' (id "],
        ),
        ("gemma", ["none: its text is prepended to the first user message"]),
        ("mistral", ["the system message is rewritten", "marked with plain text", "before a reply     ' '"]),
        (
            "qwen2.5",
            ["kept unchanged: one training sequence per episode", "spelled out in an observation stay text"],
        ),
        ("words", ["no separate token"]),
    ],
)
def test_what_is_special_about_a_family_is_said(folder, capsys, name, words):
    check_tokens(folder(family(name)), as_json=False)
    shown = capsys.readouterr().out
    for word in words:
        assert word in shown


def test_a_template_that_cannot_be_used_is_shown_with_the_difference(folder, capsys):
    template = "{{- strftime_now('%d %b %Y') -}}" + CHATML
    path = folder(make(template, special=["<|im_start|>"], eos="<|im_end|>"))
    assert check_tokens(path, as_json=False) == 1
    assert "expected '03 Feb 2001" in capsys.readouterr().out
    assert check_tokens(path, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["problem"].endswith("Set a fixed date: date=YYYY-MM-DD.")
    assert check_tokens(path, as_json=True, date="2024-07-26") == 0


def test_template_kwargs_are_passed_to_the_template(folder, capsys):
    path = folder(family("qwen3"))
    assert check_tokens(path, as_json=True, chat_kwargs={"enable_thinking": False}) == 0
    report = json.loads(capsys.readouterr().out)
    assert [part["row"] for part in report["example"]] == [1, 1, 2, 2]


def test_a_broken_folder_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"^There is no folder .*nowhere: name one"):
        check_tokens(tmp_path / "nowhere", as_json=False)
    with pytest.raises(
        UsageError, match=r"^The folder .* does not hold a tokenizer: tokenizer.json is missing\.$"
    ):
        check_tokens(tmp_path, as_json=False)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="The tokenizer in .* cannot be loaded") as caught:
        check_tokens(tmp_path, as_json=False)
    assert "\n" not in str(caught.value)


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=re.escape(install_command("train"))):
        load_tokenizer(tmp_path)


def test_a_long_text_is_the_engines_affair(folder, capfd):
    tokenizer = family(min(FAMILIES))
    tokenizer.model_max_length = 4
    loaded = load_tokenizer(folder(tokenizer))
    assert len(loaded.encode("one two three four five six", add_special_tokens=False)) > 4
    assert "longer than" not in capfd.readouterr().err
