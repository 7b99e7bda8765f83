"""The settings of a training run, and what is refused before anything starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import SMALL, merged

from rollgym.config.loader import dump, load, parse
from rollgym.core.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config, known_configs

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def refused(words: list[str], **changes: Any) -> str:
    with pytest.raises(UsageError) as error:
        load(TrainConfig, merged(SMALL, changes), words)
    return str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_and_round_trips(name: str) -> None:
    config = load(TrainConfig, find_config(name))
    assert load(TrainConfig, parse(dump(config))) == config


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_starts_with_a_comment(name: str) -> None:
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# ")


def test_shipped_configs_are_found_by_name() -> None:
    assert SHIPPED
    assert set(SHIPPED) <= set(known_configs())


def test_only_envs_is_required() -> None:
    config = load(TrainConfig, {"envs": [{"id": "rollgym/Sokoban-v0"}]})
    assert config.estimator == "grpo"
    assert config.envs[0].split == "train"
    assert config.evaluation.split == "test"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gae without a critic": ({"estimator": "gae"}, "estimator=gae requires a critic"),
    "a critic without gae": ({"learner": {"critic": "shared"}}, "only gae uses one"),
    "an unknown estimator": ({"estimator": "grop"}, "Did you mean grpo"),
    "top_p": ({"agent": {"top_p": 0.9}}, "no top_p, top_k or min_p"),
    "top_k": ({"agent": {"top_k": 5}}, "no top_p, top_k or min_p"),
    "min_p": ({"agent": {"min_p": 0.1}}, "no top_p, top_k or min_p"),
    "a program and an evaluation temperature": (
        {"program": "true", "evaluation": {"temperature": 0.0}},
        "program and evaluation.temperature cannot be combined",
    ),
    "an agent for no mistakes": (
        {"warm_start": {"mistakes_agent": "expert"}},
        "warm_start.mistakes_agent requires warm_start.mistakes > 0",
    ),
    "no temperature": ({"agent": {"temperature": 0.0}}, "temperature > 0"),
    "constant aggregation without a constant": (
        {"loss": {"aggregation": "constant"}},
        "aggregation=constant needs a positive, finite aggregation_constant",
    ),
    "an unused constant": ({"loss": {"aggregation_constant": 8.0}}, "does not read aggregation_constant"),
    "a KL target without a coefficient": ({"loss": {"kl_target": 0.1}}, "only read with kl_coef > 0"),
    "an address without Ray": ({"ray": {"address": "auto"}}, "require runtime=ray"),
    "GPUs without Ray": ({"ray": {"num_gpus": 2}}, "require runtime=ray"),
    "a strategy without Ray": ({"learner": {"strategy": "ddp"}}, "require runtime=ray"),
    "a route of weights without servers": (
        {"engine": {"weight_route": "disk"}},
        "weight_route=disk requires runtime=ray, or engine.kind=sglang or vllm",
    ),
    "a broadcast to an embedded engine": (
        {"runtime": "ray", "engine": {"weight_route": "group"}},
        "weight_route=group requires engine.kind=sglang or vllm",
    ),
    "an object store without Ray": (
        {"engine": {"weight_route": "object_store"}},
        "weight_route=object_store requires runtime=ray",
    ),
    "an object store to servers": (
        {"runtime": "ray", "engine": {"kind": "vllm", "weight_route": "object_store"}},
        "weight_route=object_store requires engine.kind=embedded",
    ),
    "deltas without Ray": ({"engine": {"weight_delta": True}}, "weight_delta=true requires runtime=ray"),
    "deltas through a folder": (
        {"engine": {"kind": "vllm", "weight_route": "disk", "weight_delta": True}},
        "weight_delta=true requires engine.weight_route tensor or group",
    ),
    "no full update": ({"engine": {"full_update_every": 0}}, "engine.full_update_every"),
    "a server URL without servers": (
        {"engine": {"url": "http://host:1"}},
        "engine.url/replicas/python require engine.kind=sglang or vllm",
    ),
    "restart in a synchronous run": (
        {"rollout": {"on_weight_update": "restart"}},
        "requires rollout.max_staleness >= 1",
    ),
    "an agent history it does not support": (
        {"agent": {"history": "last:3"}},
        "history must be full or none",
    ),
    "no reward at all": ({"keep_environment_reward": False}, "requires at least one entry in rewards"),
    "a module name with a space": ({"imports": ["my module"]}, "'my module' is not a valid module name"),
    "a curriculum of one": ({"curriculum": {}}, "at least two environments"),
    "no environment": ({"envs": []}, "envs"),
    "an empty group": ({"rollout": {"group_size": 0}}, "rollout.group_size"),
    "a weight of 0": ({"envs": [{"id": "lessons:Yes", "weight": 0}]}, "weight"),
    "a success rate above 1": ({"stop": {"success": 1.5}}, "stop.success"),
    "a context that is too short": ({"model": {"context": 8}}, "model.context"),
    "an unknown model size": ({"model": {"size": "large"}}, "model.size"),
    "an unknown setting": ({"rollout": {"gruops": 3}}, "groups"),
    "a negative seed": ({"seed": -1}, "seed"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refused([], **changes)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "gigpo"])
def test_group_estimators_need_two_episodes_per_group(estimator: str) -> None:
    message = refused([f"estimator={estimator}", "rollout.group_size=1"])
    assert f"estimator={estimator} compares the episodes of a group" in message


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_pp"])
def test_estimators_without_groups_accept_groups_of_one(estimator: str) -> None:
    config = load(TrainConfig, SMALL, [f"estimator={estimator}", "rollout.group_size=1"])
    assert config.rollout.group_size == 1


ACCEPTED: list[dict[str, Any]] = [
    {"estimator": "gae", "learner": {"critic": "separate"}, "rollout": {"group_size": 1}},
    {"loss": {"aggregation": "constant", "aggregation_constant": 16.0}},
    {"loss": {"name": "grpo", "kl_coef": 0.1, "kl_target": 0.05}},
    {"curriculum": {}, "envs": [{"id": "lessons:Yes"}, {"id": "lessons:No"}]},
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=[next(iter(changes)) for changes in ACCEPTED])
def test_settings_that_require_each_other_are_accepted_together(changes: dict[str, Any]) -> None:
    load(TrainConfig, merged(SMALL, changes))


@pytest.mark.parametrize("changes", [{}, *ACCEPTED])
def test_every_setting_round_trips(changes: dict[str, Any]) -> None:
    config = load(TrainConfig, merged(SMALL, changes))
    assert load(TrainConfig, parse(dump(config))) == config


def test_several_errors_are_reported_at_once() -> None:
    message = refused(["rollout.groups=many", "stop.stpes=3"])
    assert "rollout.groups" in message
    assert "stop.stpes" in message


@pytest.mark.parametrize("code", ["import rollgym", "from rollgym.cli import main; main(['--help'])"])
def test_torch_is_not_imported_without_training(code: str) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
