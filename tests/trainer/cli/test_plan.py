"""``rollgym plan``: a plan as text, as JSON and as an image."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
BIG = ("sokoban-ppo", "learner.critic=separate", "learner.gradient_checkpointing=true", "--tokens", 8192)


def test_a_plan_as_text(rollgym_command: Command) -> None:
    ran = rollgym_command("plan", "frozen-lake-grpo", "--cluster", "cpu:2")
    assert ran.code == 0, ran.err
    assert "colocated on 2 cpu slots" in ran.out
    for heading in ("Memory per device", "Timeline of one step", "Reasons", "Alternatives"):
        assert heading in ran.out


def test_json_and_an_image(rollgym_command: Command, tmp_path: Path) -> None:
    ran = rollgym_command("plan", *BIG, "--model", "7b", "--cluster", "8xH100", "--json", "--svg", "plan.svg")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert set(found["placements"]) == {"actor_train", "actor_infer", "critic"}
    assert found["placements"]["actor_train"]["devices"] == "gpu[0-7]"
    assert all(one["used"] <= one["limit"] for one in found["memory"])
    assert ET.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")


def test_constraints_are_settings(rollgym_command: Command) -> None:
    wishes = ("runtime=ray", "devices.actor_train=gpu[0-3]", "devices.actor_infer=gpu[4-7]")
    ran = rollgym_command("plan", *BIG, *wishes, "--model", "1.5b", "--cluster", "8xH100", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["layout"] == "split"
    assert found["placements"]["actor_infer"]["devices"] == "gpu[4-7]"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan"], "No config given: pass a YAML file or a name from `rollgym config list`."),
        (["plan", *BIG, "--model", "72b", "--cluster", "2xA10"], "does not fit on 2 A10"),
        (["plan", *BIG, "--cluster", "nowhere.yaml"], "Cluster file nowhere.yaml not found"),
        (["plan", *BIG, "--model", "7bb", "--cluster", "cpu:1"], "no model called '7bb'"),
        (
            ["plan", *BIG, "runtime=ray", "devices.actor_train=gpu[0-9]", "--cluster", "8xH100"],
            "device 9 does not exist",
        ),
        (["plan", *BIG, "--svg", "no/such/folder.svg", "--cluster", "cpu:1"], "Cannot write the image"),
        (["plan", "webshop-qwen", "--cluster", "8xH100"], "--model 7b"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    rollgym_command: Command, words: list[Any], sentence: str
) -> None:
    ran = rollgym_command(*words)
    assert ran.code == 2, ran.err
    assert sentence in ran.err
    assert len(ran.err.strip().splitlines()) == 1
