"""What a training run can be told, and what is refused before anything starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import SMALL, merged

from rollgym.config import dump, find_config, known_configs, load, parse
from rollgym.errors import UsageError
from rollgym.trainer.config import TrainConfig

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def refused(words: list[str], **changes: Any) -> str:
    with pytest.raises(UsageError) as error:
        load(TrainConfig, merged(SMALL, changes), words)
    return str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration_loads_and_survives_being_written_down(name: str) -> None:
    config = load(TrainConfig, find_config(name))
    assert load(TrainConfig, parse(dump(config))) == config


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration_says_at_its_top_what_it_is(name: str) -> None:
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# ")


def test_shipped_configurations_are_known_by_name() -> None:
    assert SHIPPED
    assert set(SHIPPED) <= set(known_configs())


def test_one_environment_is_all_that_must_be_said() -> None:
    config = load(TrainConfig, {"envs": [{"id": "rollgym/Sokoban-v0"}]})
    assert config.estimator == "grpo"
    assert config.envs[0].split == "train"
    assert config.evaluation.split == "test"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gae without a critic": ({"estimator": "gae"}, "estimator gae needs a critic"),
    "a critic without gae": ({"learner": {"critic": "head"}}, "only gae uses one"),
    "an estimator nobody knows": ({"estimator": "grop"}, "Did you mean grpo"),
    "top_p": ({"agent": {"top_p": 0.9}}, "no top_p, top_k or min_p"),
    "top_k": ({"agent": {"top_k": 5}}, "no top_p, top_k or min_p"),
    "min_p": ({"agent": {"min_p": 0.1}}, "no top_p, top_k or min_p"),
    "no temperature": ({"agent": {"temperature": 0.0}}, "temperature > 0"),
    "constant weighting without one": ({"weighting": "constant"}, "go together"),
    "a constant nobody reads": ({"constant": 8.0}, "go together"),
    "a KL target without a coefficient": ({"kl_target": 0.1}, "must start above 0"),
    "an address without Ray": ({"address": "auto"}, "read with runtime=ray"),
    "a strategy without Ray": ({"strategy": "ddp"}, "read with runtime=ray"),
    "a server's address without SGLang": ({"engine": {"url": "http://host:1"}}, "engine.kind to sglang"),
    "episodes under way in turns": ({"rollout": {"under_way": "restart"}}, "rollout.staleness"),
    "a curriculum of one": ({"curriculum": {}}, "at least two environments"),
    "no environment": ({"envs": []}, "envs"),
    "a group of nobody": ({"rollout": {"group_size": 0}}, "rollout.group_size"),
    "a weight of nothing": ({"envs": [{"id": "lessons:Yes", "weight": 0}]}, "weight"),
    "a share above one": ({"stop": {"success": 1.5}}, "stop.success"),
    "a context too short for anything": ({"model": {"context": 8}}, "model.context"),
    "a size nobody made": ({"model": {"size": "large"}}, "model.size"),
    "a setting nobody reads": ({"rollout": {"gruops": 3}}, "groups"),
    "a negative seed": ({"seed": -1}, "seed"),
}


@pytest.mark.parametrize(("changes", "told"), REFUSED.values(), ids=REFUSED)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], told: str) -> None:
    assert told in refused([], **changes)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "gigpo"])
def test_what_compares_the_members_of_a_group_needs_two_of_them(estimator: str) -> None:
    told = refused([f"estimator={estimator}", "rollout.group_size=1"])
    assert f"estimator {estimator} compares the members of a group" in told


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_pp"])
def test_what_compares_nobody_does_with_groups_of_one(estimator: str) -> None:
    config = load(TrainConfig, SMALL, [f"estimator={estimator}", "rollout.group_size=1"])
    assert config.rollout.group_size == 1


ACCEPTED: list[dict[str, Any]] = [
    {"estimator": "gae", "learner": {"critic": "own"}, "rollout": {"group_size": 1}},
    {"weighting": "constant", "constant": 16.0},
    {"loss": {"name": "grpo", "kl_coef": 0.1}, "kl_target": 0.05},
    {"curriculum": {}, "envs": [{"id": "lessons:Yes"}, {"id": "lessons:No"}]},
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=[next(iter(changes)) for changes in ACCEPTED])
def test_settings_that_belong_together_are_accepted_together(changes: dict[str, Any]) -> None:
    load(TrainConfig, merged(SMALL, changes))


@pytest.mark.parametrize("changes", [{}, *ACCEPTED])
def test_every_setting_survives_being_written_down(changes: dict[str, Any]) -> None:
    config = load(TrainConfig, merged(SMALL, changes))
    assert load(TrainConfig, parse(dump(config))) == config


def test_several_mistakes_are_told_at_once() -> None:
    told = refused(["rollout.groups=many", "stop.stpes=3"])
    assert "rollout.groups" in told
    assert "stop.stpes" in told


@pytest.mark.parametrize("code", ["import rollgym", "from rollgym.cli import main; main(['--help'])"])
def test_nobody_waits_for_torch_who_does_not_train(code: str) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
