"""Sources of settings: YAML, files that extend files, ``key=value`` overrides, shipped configs."""

import math
from pathlib import Path

import pytest
from config_models import Adam, Root, Sgd, mistakes, write

from rollgym.config.loader import find_config, load, parse
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.types import Limits
from rollgym.rollout.group_state import GroupPolicy
from rollgym.trainer.losses.settings import LossConfig


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
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
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
        ("a: 1\nb:\n  c: 1\n  c: 2", "t:4: b.c: duplicate key; first at t:3"),
        ("a: !!python/object/apply:os.getcwd []", "t:1: a: the tag"),
        ("a: !mine 3", "t:1: a: the tag !mine is not supported"),
        ("a: !!binary aGVsbG8=", "is not supported"),
        ("a: !!set {x}", "is not supported"),
        ("a: !!int x", "'x' is not a valid int"),
        ("a: .nan", "'.nan' is not a valid float"),
        ("a: 1e999", "'1e999' is not a valid float"),
        (f"a: {'9' * 5000}", "is not a valid int"),
        ("a: &x [1]\nb: *x", "t:2: invalid YAML: aliases"),
        ("a: &x [*x]", "aliases"),
        ("a: [1", "t:1: invalid YAML"),
        ("a: 1\n---\nb: 2", "invalid YAML"),
        ("? [a, b]\n: 1", "a key must be text"),
        ("- 1\n- 2", "must contain `key: value` lines, not [1, 2]"),
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


def test_all_duplicate_keys_are_reported() -> None:
    with pytest.raises(UsageError, match="2 errors"):
        parse("a: 1\na: 2\nb: 1\nb: 2")


def test_a_partial_section_keeps_its_other_defaults() -> None:
    config = load(Root, {"loss": {"clip_high": 0.3}, "groups": {"oversample": 1}, "optimizer": {"lr": 0.5}})
    assert config.loss == LossConfig("grpo", clip_low=0.1, clip_high=0.3)
    assert config.groups == GroupPolicy(size=4, oversample=1)
    assert config.optimizer == Adam(lr=0.5)
    assert load(Root, {"optimizer": {"kind": "sgd"}}).optimizer == Sgd()
    assert load(Root, {"envs": [{"id": "a", "limits": {"tokens": 9}}]}).envs[0].limits == Limits(
        turns=5, tokens=9
    )


def test_overrides_reach_every_level() -> None:
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


def test_an_override_without_a_value_is_an_empty_text() -> None:
    assert load(Root, {"name": "x"}, ["name="]).name == ""
    assert load(Root, {"name": "x"}, ["name=a=b"]).name == "a=b"
    assert load(Root, {"shaping": {}}, ["shaping=null"]).shaping is None


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("steps", "expected key=value or key.sub=value"),
        ("=3", "expected key=value or key.sub=value"),
        ("a..b=3", "expected key=value or key.sub=value"),
        ("steps =3", "expected key=value or key.sub=value"),
        ("+steps=3", "+ and ~ are not supported"),
        ("~steps", "+ and ~ are not supported"),
        ("envs.2.id=x", "envs.2 does not exist: envs has elements 0 to 1"),
        ("envs.-1.id=x", "envs.-1 does not exist"),
        ("envs.x.id=x", "envs.x does not exist"),
        ("steps.x=3", "steps is a single value"),
        ("steps=[1", "invalid YAML"),
        ("steps=!!python/name:os.system", "is not supported"),
        ("stpes=3", "Did you mean steps?"),
        ("loss.clip_lwo=3", "Did you mean clip_low"),
    ],
)
def test_an_invalid_override_is_named(word: str, sentence: str) -> None:
    message = mistakes({"steps": 3, "envs": [{"id": "a"}, {"id": "b"}]}, word)
    assert message.startswith(f"override {word!r}: ")
    assert sentence in message


def test_the_source_mapping_is_not_modified() -> None:
    given = {"loss": {"name": "ppo"}, "envs": [{"id": "a"}]}
    load(Root, given, ["loss.name=gspo", "envs.0.id=b"])
    assert given == {"loss": {"name": "ppo"}, "envs": [{"id": "a"}]}


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "base.yaml", "steps: 3\nloss: {name: ppo, clip_low: 0.3}\nenvs: [{id: x}, {id: y}]\n")
    write(tmp_path / "sub" / "mid.yaml", "extends: ../base.yaml\nloss: {clip_low: 0.4}\n")
    top = write(tmp_path / "top.yaml", "extends: sub/mid.yaml\nenvs: [{id: z}]\nloss: {dual_clip: 3}\n")
    config = load(Root, top)
    assert config.steps == 3
    assert config.loss == LossConfig("ppo", clip_low=0.4, dual_clip=3.0)
    assert [env.id for env in config.envs] == ["z"]


def test_an_error_names_the_file_it_is_in(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "steps: many\nenvs:\n  - idd: x\nflag: 3\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\n\nenvs: [{id: 1}]\nflag: 4\n")
    message = mistakes(top)
    assert f"{tmp_path / 'base.yaml'}:1: steps:" in message
    assert f"{top}:3: envs.0.id: must be text, not 1" in message
    assert f"{top}:4: flag:" in message
    assert len(message.splitlines()) == 4


def test_an_error_never_names_a_value_that_was_replaced(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "envs:\n  - id: x\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\n\nenvs: [{kwargs: {}}]\n")
    assert mistakes(top) == f"{top}:3: envs.0.id: is required and has no default"
    word = "envs=[{kwargs: {}}]"
    assert mistakes(tmp_path / "base.yaml", word).startswith(f"override {word!r}: envs.0.id: is required")


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yaml", "extends: b.yaml")
    write(tmp_path / "b.yaml", "extends: ./a.yaml")
    assert "circular extends: a.yaml -> b.yaml -> a.yaml" in mistakes(a)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends: no.yaml", ":1: extends: no file"),
        ("steps: 1\nextends: [a.yaml]", ":2: extends: must be the path of a YAML file"),
        ("extends:", "must be the path of a YAML file"),
    ],
)
def test_an_invalid_extends_is_reported(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in mistakes(write(tmp_path / "a.yaml", text))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    assert "no.yaml: cannot read the file: No such file" in mistakes(tmp_path / "no.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert "not a UTF-8 text file" in mistakes(tmp_path / "bytes.yaml")
    assert load(Root, write(tmp_path / "empty.yaml", "# nothing\n")) == Root()


def test_a_config_is_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = tmp_path / "shipping" / "configs"
    configs.mkdir(parents=True)
    (tmp_path / "shipping" / "__init__.py").touch()
    lake = write(configs / "lake.yaml", "")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_config("lake", "shipping") == lake
    assert find_config(str(lake), "shipping") == lake
    with pytest.raises(UnknownName, match=r"called 'lakes'. Did you mean lake\? Configs: lake"):
        find_config("lakes", "shipping")
    with pytest.raises(UsageError, match=r"Config file not found: lakes.yaml"):
        find_config("lakes.yaml", "shipping")
    with pytest.raises(UsageError, match="Config file not found"):
        find_config(str(tmp_path / "x" / "lake"), "shipping")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "lake", "")
    assert find_config("lake", "shipping") == Path("lake")
