"""Writing and describing configs: YAML, fingerprints, differences, explanations, a schema."""

import math
from pathlib import Path

import pytest
from config_models import Adam, Env, Root, Sgd, write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollgym.config.loader import ABSENT, diff, dump, explain, fingerprint, load, parse, schema, values_of
from rollgym.core.errors import UsageError
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.reward_shaping import RewardShapingConfig

names = st.text(max_size=12)
numbers = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
roots = st.builds(
    Root,
    steps=st.integers(1, 12),
    out=st.sampled_from([Path("a/b"), Path("1e-3"), Path("yes")]),
    flag=st.booleans(),
    name=names | st.sampled_from(["yes", "1e-3", "null", "~", "", "010", "0x1", "- a", "a: b", "#", ".inf"]),
    either=st.integers() | names,
    ratio=numbers,
    envs=st.lists(st.builds(Env, id=names, kwargs=st.dictionaries(names, plain, max_size=3)), max_size=2),
    loss=st.builds(LossConfig, st.just("ppo"), clip_low=st.floats(0, 1), tis_cap=st.just(math.inf)),
    shaping=st.none() | st.builds(RewardShapingConfig, scale=st.floats(0.1, 10)),
    optimizer=st.builds(Adam, lr=st.floats(1e-8, 1)) | st.builds(Sgd, momentum=st.floats(0, 1)),
)


@settings(max_examples=60, deadline=None)
@given(roots)
@example(Root(name="\x85", either="a\u2028b", envs=[Env(id="\r", kwargs={"\u2029": "\ufeff\n "})]))
def test_dump_and_load_round_trip(config: Root) -> None:
    again = load(Root, parse(dump(config)))
    assert again == config
    assert fingerprint(again) == fingerprint(config)
    assert diff(again, config) == []


def test_round_trip_of_the_defaults_and_through_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", dump(Root()))
    assert load(Root, path) == Root() == load(Root)
    assert load(Root, values_of(Root())) == Root()


def test_the_fingerprint_depends_on_values_not_on_how_they_were_written() -> None:
    base = fingerprint(load(Root))
    assert len(base) == 64
    assert fingerprint(load(Root, {"steps": 10, "ratio": 1, "loss": {}})) == base
    assert fingerprint(load(Root, {"steps": 11})) != base
    assert fingerprint(load(Root, {"loss": {"clip_low": 0.2}})) != base
    a, b = ({"id": "e", "kwargs": {"p": 1, "q": 2}}, {"id": "e", "kwargs": {"q": 2, "p": 1}})
    assert fingerprint(load(Root, {"envs": [a]})) == fingerprint(load(Root, {"envs": [b]}))


def test_a_difference_has_its_key_and_both_values() -> None:
    a = load(Root)
    b = load(
        Root, {"steps": 3, "envs": [{"id": "z"}], "optimizer": {"kind": "sgd"}, "loss": {"clip_low": None}}
    )
    found = {one.key: (one.a, one.b) for one in diff(a, b)}
    assert found["steps"] == (10, 3)
    assert found["envs.0.id"] == ("a", "z")
    assert found["envs.1"][1] is ABSENT
    assert found["loss.clip_low"] == (0.1, None)
    assert found["optimizer.betas"] == ([0.9, 0.99], ABSENT)
    assert str(diff(a, b)[0]) == "steps: 10 / 3"
    assert diff({"a": 1}, {"a": True})[0].b is True
    assert diff(values_of(a), a) == []


def test_every_key_is_explained_with_type_default_and_description() -> None:
    rows = {row.key: row for row in explain(Root)}
    steps = rows["steps"]
    assert (steps.type, steps.default, steps.description) == (
        "whole number >= 1",
        "10",
        "How many steps it takes.",
    )
    assert rows["envs"].type == "list of section"
    assert (rows["envs.N.id"].type, rows["envs.N.id"].default) == ("text", "required")
    assert rows["envs.N.limits.turns"].default == "5"
    assert rows["loss.name"].default == "grpo"
    assert rows["loss.clip_low"].default == "0.1"
    assert rows["loss.clip_low"].description.startswith("The lower bound of the ratio")
    assert rows["credit"].description.startswith("Settings of the advantage estimators")
    assert rows["shaping"].default == "null"
    assert rows["groups.incomplete_groups"].type == "keep | drop"
    assert rows["optimizer.betas"].type == "list: number, number"
    assert rows["optimizer.momentum"].description == "Only with kind: sgd."


def test_explaining_a_key_includes_the_keys_below_it() -> None:
    assert [row.key for row in explain(Root, "optimizer.lr")] == ["optimizer.lr", "optimizer.lr"]
    assert [row.key for row in explain(Root, "envs.0.limits")][:2] == ["envs.N.limits", "envs.N.limits.turns"]
    assert all(row.key.split(".")[0] == "loss" for row in explain(Root, "loss"))


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("los", "Did you mean loss?"),
        ("loss.clip_lwo", "Did you mean clip_low"),
        ("clip_low", "Did you mean loss.clip_low?"),
        ("steps.x", "steps is a single value without keys below it"),
    ],
)
def test_an_unknown_key_cannot_be_explained(key: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        explain(Root, key)


def test_the_schema_knows_every_section_and_closes_it() -> None:
    made = schema(Root)
    assert {"Limits", "LossConfig", "Adam", "Env"} <= set(made["$defs"])
    assert all(
        part["additionalProperties"] is False for part in made["$defs"].values() if "properties" in part
    )
    assert made["additionalProperties"] is False
    assert "extends" in made["properties"]
    assert made["$defs"]["LossConfig"]["properties"]["clip_low"]["description"].startswith("The lower bound")
