"""Loading configs: nothing is ignored or guessed, and all errors are reported at once."""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_models import Env, Root, mistakes, write
from pydantic import BaseModel

from rollgym.config.loader import Closed, Settings, explain, load
from rollgym.core.extras import install_command
from rollgym.core.types import Limits, Outcome
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.reward_shaping import RewardShapingConfig


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"steps": "10"}, "steps: must be a whole number, not '10'"),
        ({"steps": 10.0}, "steps: must be a whole number, not 10.0; write 10"),
        ({"steps": True}, "steps: must be a whole number, not true"),
        ({"steps": None}, "steps: must be a whole number, not null"),
        ({"steps": 0}, "steps: must be 1 or more, not 0"),
        ({"ratio": "inf"}, "ratio: must be a number, not 'inf'; infinity is written .inf"),
        ({"ratio": True}, "ratio: must be a number, not true"),
        ({"flag": 1}, "flag: must be true or false, not 1"),
        ({"flag": "yes"}, "flag: must be true or false, not 'yes'"),
        ({"name": 3}, "name: must be text, not 3"),
        ({"either": 1.5}, "either: must be a whole number or text, not 1.5"),
        ({"envs": {"id": "a"}}, "envs: must be a list, not {id: a}"),
        ({"envs": [{"id": "a"}, {}]}, "envs.1.id: is required and has no default"),
        ({"loss": 7}, "loss: must be a section (key: value), not 7"),
        ({"loss": None}, "loss: must be a section"),
        ({"optimizer": {"betas": [1]}}, "optimizer.betas: must be a list of at least 2, not [1]"),
        ({"optimizer": {"betas": [1, 2, 3]}}, "optimizer.betas: must be a list of at most 2"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr: must be above 0"),
        ({"optimizer": {"kind": "adm"}}, "optimizer.kind: must be 'adam' or 'sgd', not 'adm'. Did you mean"),
        (
            {"groups": {"on_outcome": {"cancelled": "trian"}}},
            "groups.on_outcome.cancelled: must be 'train', 'retry' or",
        ),
        ({"groups": {"on_outcome": {"cancelle": "drop"}}}, "Did you mean cancelled?"),
        ({"ratio": math.nan}, "NaN"),
        ({"name": object()}, "contain a value that YAML cannot represent"),
        ({"name": "\ud800"}, ""),
    ],
)
def test_an_invalid_value_is_reported_with_its_key_and_the_expected_type(
    values: dict[str, Any], sentence: str
) -> None:
    message = mistakes(values)
    assert sentence in message
    assert "\n" not in message


def test_values_are_converted_to_the_declared_types() -> None:
    config = load(
        Root, {"ratio": 2, "out": "here", "groups": {"on_outcome": {"cancelled": "retry"}}, "shaping": {}}
    )
    assert type(config.ratio) is float
    assert config.out == Path("here")
    assert config.groups.on_outcome == {Outcome.CANCELLED: "retry"}
    assert config.shaping == RewardShapingConfig()
    assert load(Root, {"loss": {"name": "topr", "clip_low": None, "topr_positive": [0, 2]}}).loss == (
        LossConfig("topr", topr_positive=(0.0, 2.0))
    )
    assert load(Root, {"loss": {"tis_cap": math.inf}}).loss.tis_cap == math.inf


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(Root).steps = 3  # type: ignore[misc]


def test_settings_made_in_python_are_validated_and_converted() -> None:
    made = Root(ratio=2, envs=[Env(id="a", limits=Limits(seconds=5))])
    assert type(made.envs[0].limits.seconds) is float
    with pytest.raises(ValueError, match="steps"):
        Root(steps="3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens"):
        Env(id="a", limits=Limits(tokens=1.5))  # type: ignore[arg-type]


# --- unknown keys


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stpes": 3}, "stpes: unknown setting. Did you mean steps?"),
        ({"clip_low": 3}, "clip_low: unknown setting. Did you mean loss.clip_low?"),
        ({"loss": {"clip_lwo": 3}}, "loss.clip_lwo: unknown setting. Did you mean clip_low"),
        ({"credit": {"gama": 1}}, "credit.gama: unknown setting. Did you mean gamma?"),
        ({"shaping": {"scal": 1}}, "shaping.scal: unknown setting. Did you mean scale?"),
        ({"groups": {"sizes": 1}}, "groups.sizes: unknown setting. Did you mean size?"),
        ({"envs": [{"id": "a", "limits": {"turn": 1}}]}, "envs.0.limits.turn: unknown setting. Did"),
        ({"envs": [{"id": "a", "steps": 1}]}, "envs.0.steps: unknown setting. Did you mean steps?"),
        ({"optimizer": {"kind": "adam", "momentum": 1}}, "Did you mean optimizer.momentum (with kind: sgd)?"),
        ({"optimizer": {"kind": "sgd", "beta": 1}}, "Settings here: kind, lr, momentum."),
        ({"qqq": 1}, "Settings here: steps, out"),
        ({"extends": "x.yaml"}, "extends: unknown setting"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(values: dict[str, Any], sentence: str) -> None:
    """Rule 36: an unknown setting is an error with a suggestion, at every level and in dataclasses."""
    assert sentence in mistakes(values)


def test_free_mappings_accept_any_key() -> None:
    assert load(Root, {"envs": [{"id": "a", "kwargs": {"size": [1, 2]}}]}).envs[0].kwargs == {"size": [1, 2]}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"loss": {"name": "grpoo"}}, "loss: There is no policy loss called 'grpoo'. Did you mean grpo"),
        ({"loss": {"name": "grpo", "dual_clip": 3}}, "loss: The loss 'grpo' does not read dual_clip"),
        ({"credit": {"gamma": 3}}, "credit: gamma must be between 0 and 1"),
        ({"shaping": {"scale": 0}}, "shaping: scale must be finite"),
        ({"groups": {"size": 0}}, "groups: A group needs size >= 1"),
        ({"envs": [{"id": "a", "limits": {"turns": 0}}]}, "envs.0.limits: limits.turns must be positive"),
        ({"steps": 13}, "steps must not be 13."),
    ],
)
def test_errors_of_a_section_are_reported_under_its_key(values: dict[str, Any], sentence: str) -> None:
    assert mistakes(values).startswith(sentence)


def test_all_errors_are_reported_at_once_one_line_each(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "steps: many\nloss:\n  clip_lwo: 1\nshaping: {scale: 0}\nlr: 1e-3\n")
    head, *lines = mistakes(path, "flag=on", "nonsense").splitlines()
    assert head == "6 errors in the config:"
    assert [one.strip().split(f"{tmp_path}/")[-1][:26] for one in lines] == [
        "override 'nonsense': expec",
        "c.yaml:1: steps: must be a",
        "override 'flag=on': flag: ",
        "c.yaml:3: loss.clip_lwo: u",
        "c.yaml:4: shaping: scale m",
        "c.yaml:5: lr: unknown sett",
    ]


def test_a_check_error_of_a_section_does_not_hide_other_errors() -> None:
    message = mistakes({"optimizer": {"kind": "sgd", "momentum": 2}, "flag": 3})
    assert "\n  optimizer: momentum must be at most 1." in message
    assert "\n  flag: must be true or false" in message


def test_a_section_that_would_ignore_unknown_keys_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match=r"write Closed\[Limits\]"):

        class Open(Settings):
            limits: Limits | None = None

    class Loose(BaseModel):
        x: int = 0

    with pytest.raises(TypeError, match="Loose must be derived from Settings"):

        class Holder(Settings):
            many: list[Loose] = []


@dataclass(frozen=True)
class Inner:
    x: int = 1
    """The value of x."""


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    more: tuple[Inner, ...] = ()


class Nested(Settings):
    outer: Closed[Outer] = Outer()


def test_dataclasses_within_dataclasses_are_closed_too() -> None:
    assert load(Nested, {"outer": {"more": [{"x": 2}]}}).outer == Outer(more=(Inner(2),))
    assert "outer.more.0.y: unknown setting" in mistakes({"outer": {"more": [{"y": 2}]}}, model=Nested)
    assert "outer.inner.xx: unknown setting" in mistakes({"outer": {"inner": {"xx": 2}}}, model=Nested)
    assert explain(Nested, "outer.inner.x")[0].description == "The value of x."


@pytest.mark.parametrize("missing", ["pydantic", "yaml"])
def test_a_missing_library_is_one_sentence_with_the_pip_command(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
import rollgym
from rollgym.core.errors import MissingExtra
try:
    import rollgym.config.loader
except MissingExtra as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_command("train") in ran.stdout


def test_neither_rollgym_nor_the_command_imports_pydantic_or_yaml() -> None:
    code = "import sys, rollgym, rollgym.cli; print({'pydantic', 'yaml'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
