"""Where settings come from: YAML, files that extend files, ``key=value`` words, names."""

import math
from pathlib import Path

import pytest
from config_models import Adam, Root, Sgd, mistakes, write

from rollgym.config import find_config, load, parse
from rollgym.errors import UnknownName, UsageError
from rollgym.scheduler.groups import GroupPolicy
from rollgym.trainer.loss_settings import LossSettings
from rollgym.types import Limits


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("null", None),
        ("~", None),
        ("true", True),
        ("FALSE", False),
        *((word, word) for word in ("yes", "no", "on", "off", "Yes", "y", "NO")),
        *((word, word) for word in ("010", "1:30", "1_000", "2024-01-01", "<<", "=", "inf", "e3", "1e", ".")),
        ("'1e-3'", "1e-3"),
        ('"true"', "true"),
        ("[a, 1e2]", ["a", 100.0]),
    ],
)
def test_words_are_read_as_what_they_look_like(text: str, value: object) -> None:
    found = parse(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text() -> None:
    assert parse("1: a\non: b\nnull: c\ntrue: d\n<<: e") == {
        "1": "a",
        "on": "b",
        "null": "c",
        "true": "d",
        "<<": "e",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", "t:4: b.c: is given twice; first at t:3"),
        ("a: !!python/object/apply:os.getcwd []", "t:1: a: the tag"),
        ("a: !mine 3", "t:1: a: the tag !mine is not supported"),
        ("a: !!binary aGVsbG8=", "is not supported"),
        ("a: !!set {x}", "is not supported"),
        ("a: !!int x", "cannot be read"),
        ("a: .nan", "cannot be read"),
        ("a: 1e999", "cannot be read"),
        (f"a: {'9' * 5000}", "cannot be read"),
        ("a: &x [1]\nb: *x", "t:2: this is not valid YAML: aliases"),
        ("a: &x [*x]", "aliases"),
        ("a: [1", "t:1: this is not valid YAML"),
        ("a: 1\n---\nb: 2", "this is not valid YAML"),
        ("? [a, b]\n: 1", "a key must be a word"),
        ("- 1\n- 2", "must hold `key: value` lines, not [1, 2]"),
        ("just words", "not 'just words'"),
        ("a: " + "[" * 100 + "]" * 100, "nested too deeply"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    ],
)
def test_yaml_that_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "t")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_repeated_keys_are_told() -> None:
    with pytest.raises(UsageError, match="2 mistakes"):
        parse("a: 1\na: 2\nb: 1\nb: 2")


def test_a_section_that_is_given_in_part_keeps_its_other_defaults() -> None:
    config = load(Root, {"loss": {"clip_high": 0.3}, "groups": {"extra": 1}, "optimizer": {"lr": 0.5}})
    assert config.loss == LossSettings("grpo", clip_low=0.1, clip_high=0.3)
    assert config.groups == GroupPolicy(size=4, extra=1)
    assert config.optimizer == Adam(lr=0.5)
    assert load(Root, {"optimizer": {"kind": "sgd"}}).optimizer == Sgd()
    assert load(Root, {"envs": [{"id": "a", "limits": {"tokens": 9}}]}).envs[0].limits == Limits(
        turns=5, tokens=9
    )


def test_overrides_reach_every_place() -> None:
    config = load(
        Root,
        {"envs": [{"id": "a"}, {"id": "b"}], "steps": 3},
        ["steps=4", "envs.1.id=c", "envs.0.kwargs.size=[1e-3, yes]", "loss.clip_low=2e-1", "steps=5"],
    )
    assert config.steps == 5
    assert [env.id for env in config.envs] == ["a", "c"]
    assert config.envs[0].kwargs == {"size": [0.001, "yes"]}
    assert config.loss.clip_low == 0.2


def test_overrides_reach_into_default_lists() -> None:
    assert [env.id for env in load(Root, None, ["envs.1.id=q"]).envs] == ["a", "q"]


def test_nothing_after_the_equals_sign_is_an_empty_text() -> None:
    assert load(Root, {"name": "x"}, ["name="]).name == ""
    assert load(Root, {"name": "x"}, ["name=a=b"]).name == "a=b"
    assert load(Root, {"shaping": {}}, ["shaping=null"]).shaping is None


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("steps", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("a..b=3", "is not of the form key=value"),
        ("steps =3", "is not of the form key=value"),
        ("+steps=3", "+ and ~ are not supported"),
        ("~steps", "+ and ~ are not supported"),
        ("envs.2.id=x", "there is no envs.2: envs has 2 elements, from 0"),
        ("envs.-1.id=x", "there is no envs.-1"),
        ("envs.x.id=x", "there is no envs.x"),
        ("steps.x=3", "steps is a single value"),
        ("steps=[1", "this is not valid YAML"),
        ("steps=!!python/name:os.system", "is not supported"),
        ("stpes=3", "Did you mean steps?"),
        ("loss.clip_lwo=3", "Did you mean clip_low"),
    ],
)
def test_a_wrong_override_is_named(word: str, sentence: str) -> None:
    told = mistakes({"steps": 3, "envs": [{"id": "a"}, {"id": "b"}]}, word)
    assert told.startswith(f"override {word!r}: ")
    assert sentence in told


def test_a_mapping_that_is_given_is_not_changed() -> None:
    given = {"loss": {"name": "ppo"}, "envs": [{"id": "a"}]}
    load(Root, given, ["loss.name=gspo", "envs.0.id=b"])
    assert given == {"loss": {"name": "ppo"}, "envs": [{"id": "a"}]}


def test_a_file_extends_another_mappings_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "base.yaml", "steps: 3\nloss: {name: ppo, clip_low: 0.3}\nenvs: [{id: x}, {id: y}]\n")
    write(tmp_path / "sub" / "mid.yaml", "extends: ../base.yaml\nloss: {clip_low: 0.4}\n")
    top = write(tmp_path / "top.yaml", "extends: sub/mid.yaml\nenvs: [{id: z}]\nloss: {dual_clip: 3}\n")
    config = load(Root, top)
    assert config.steps == 3
    assert config.loss == LossSettings("ppo", clip_low=0.4, dual_clip=3.0)
    assert [env.id for env in config.envs] == ["z"]


def test_a_mistake_is_told_with_the_file_it_is_in(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "steps: many\nenvs:\n  - idd: x\nflag: 3\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\n\nenvs: [{id: 1}]\nflag: 4\n")
    told = mistakes(top)
    assert f"{tmp_path / 'base.yaml'}:1: steps:" in told
    assert f"{top}:3: envs.0.id: must be text, not 1" in told
    assert f"{top}:4: flag:" in told
    assert len(told.splitlines()) == 4


def test_what_was_replaced_is_not_where_a_mistake_is(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "envs:\n  - id: x\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\n\nenvs: [{kwargs: {}}]\n")
    assert mistakes(top) == f"{top}:3: envs.0.id: is missing; it has no default"
    word = "envs=[{kwargs: {}}]"
    assert mistakes(tmp_path / "base.yaml", word).startswith(f"override {word!r}: envs.0.id: is missing")


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yaml", "extends: b.yaml")
    write(tmp_path / "b.yaml", "extends: ./a.yaml")
    assert "in a circle: a.yaml -> b.yaml -> a.yaml" in mistakes(a)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends: no.yaml", ":1: extends: there is no file"),
        ("steps: 1\nextends: [a.yaml]", ":2: extends: must be the path of one YAML file"),
        ("extends:", "must be the path of one YAML file"),
    ],
)
def test_a_wrong_extends_is_told(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in mistakes(write(tmp_path / "a.yaml", text))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert "no.yaml: cannot be read: No such file" in mistakes(tmp_path / "no.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert "is not a text file in UTF-8" in mistakes(tmp_path / "bytes.yaml")
    assert load(Root, write(tmp_path / "empty.yaml", "# nothing\n")) == Root()


def test_a_configuration_is_found_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "shipping" / "configs"
    configs.mkdir(parents=True)
    (tmp_path / "shipping" / "__init__.py").touch()
    lake = write(configs / "lake.yaml", "")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_config("lake", "shipping") == lake
    assert find_config(str(lake), "shipping") == lake
    with pytest.raises(UnknownName, match=r"called 'lakes'. Did you mean lake\? There are lake"):
        find_config("lakes", "shipping")
    with pytest.raises(UsageError, match=r"There is no file lakes.yaml"):
        find_config("lakes.yaml", "shipping")
    with pytest.raises(UsageError, match="There is no file"):
        find_config(str(tmp_path / "x" / "lake"), "shipping")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "lake", "")
    assert find_config("lake", "shipping") == Path("lake")
