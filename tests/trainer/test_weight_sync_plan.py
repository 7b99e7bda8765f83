"""The choice of how weights are sent, and its text."""

from pathlib import Path
from typing import Any

import pytest

from rollgym.config.loader import load
from rollgym.engines.weight_sync.wire import WireFormat
from rollgym.testing import ScriptedEngine
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.weight_sync import FOLDER, plan_text, sync_plan, wire_format


class Half(ScriptedEngine):
    weight_dtype = "bfloat16"
    weight_route = "group"


def config(**engine: Any) -> TrainConfig:
    return load(TrainConfig, {"envs": [{"id": "lessons:Yes"}], "runtime": "ray", "engine": engine})


@pytest.mark.parametrize(
    ("settings", "engine", "expected"),
    [
        ({}, ScriptedEngine, {}),
        ({"weight_delta": True}, ScriptedEngine, {"delta": True}),
        ({}, Half, {"dtype": "bfloat16", "delta": True}),
        ({"weight_delta": False}, Half, {"dtype": "bfloat16"}),
        ({"full_update_every": 3}, Half, {"dtype": "bfloat16", "delta": True, "full_every": 3}),
        ({"weight_route": "disk"}, ScriptedEngine, {"folder": Path("/run", FOLDER)}),
        ({"kind": "vllm", "url": "http://host:1"}, Half, {"dtype": "bfloat16"}),
        ({"kind": "vllm", "weight_route": "disk"}, Half, {"dtype": "bfloat16", "delta": True}),
    ],
)
def test_the_wire_follows_engine_and_settings(
    settings: dict[str, Any], engine: Any, expected: dict[str, Any]
) -> None:
    assert wire_format(config(**settings), engine([1]), Path("/run"), nodes=2) == WireFormat(**expected)


def test_on_one_machine_the_store_is_shared_and_nothing_is_encoded() -> None:
    assert not wire_format(config(), Half([1]), Path("/run")).delta
    assert wire_format(config(weight_delta=True), Half([1]), Path("/run")).delta


def test_the_plan_says_how_weights_are_sent() -> None:
    plan = sync_plan(config(kind="vllm"), Half([1]), Path("/run"), nodes=3)
    assert plan == {
        "route": "object_store",
        "to_server": "group",
        "dtype": "bfloat16",
        "delta": True,
        "full_update_every": 16,
    }
    assert plan_text(plan) == (
        "object store, then group, bfloat16, changed values only, every 16th update in full"
    )
    local = load(
        TrainConfig, {"envs": [{"id": "lessons:Yes"}], "engine": {"kind": "vllm", "weight_delta": True}}
    )
    plan = sync_plan(local, Half([1]), Path("/run"))
    assert plan == {"route": "group", "dtype": "bfloat16", "delta": True, "full_update_every": 16}
    exact = sync_plan(config(weight_route="disk"), ScriptedEngine([1]), Path("/run"))
    assert (exact["route"], plan_text(exact)) == ("disk", "disk, float32")
