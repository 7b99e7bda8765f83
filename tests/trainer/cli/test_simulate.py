"""``rollgym simulate``: text, JSON, a picture, and mistakes."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.trainer.cluster.workload import WhatIf
from rollgym.trainer.simulation import SimulationRequest, parse_failures, parse_latencies, simulate_training

Command = Callable[..., Any]
SMALL = (
    "frozen-lake-grpo", "rollout.groups=4", "rollout.group_size=2", "rollout.max_in_flight=16",
    "--cluster", "cpu:2", "--latencies", "turns=3,step=500ms", "--steps", 3,
)  # fmt: skip


def request(**more: Any) -> SimulationRequest:
    return SimulationRequest(
        config="sokoban-grpo",
        overrides=[
            "agent.history=full", "agent.max_tokens=256", "rollout.groups=4", "rollout.group_size=2",
            "rollout.max_in_flight=16", "engine.kind=sglang", "rollout.max_staleness=1",
            "learner.gradient_checkpointing=true",
            *more.pop("overrides", ()),
        ],
        cluster="4x8xH100",
        what_if=WhatIf(model="7b", tokens=4096),
        latencies=["turns=4"],
        steps=3,
        days=7,
        **more,
    )  # fmt: skip


def test_text_json_and_a_picture(rollgym_command: Command, tmp_path: Path) -> None:
    ran = rollgym_command("simulate", *SMALL, "--failures", "engine=2h", "--no-variants")
    assert ran.code == 0, ran.err
    for heading in ("Utilization", "Time of the learner", "Lost work", "Staleness", "x engine"):
        assert heading in ran.out
    ran = rollgym_command("simulate", *SMALL, "--json", "--svg", "picture.svg")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["kind"] == "simulation"
    assert found["level"] == "events"
    assert found["throughput"]["steps"] > 100
    assert sum(found["time"].values()) == pytest.approx(86_400, rel=0.01)
    assert found["variants_tried"] == len([s for s in found["suggestions"] if "; " not in s["change"]]) + (
        any("; " in s["change"] for s in found["suggestions"])
    )
    assert found["suggestions"][0]["gain"] == max(s["gain"] for s in found["suggestions"])
    assert ET.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")


def test_the_same_seed_gives_the_same_report() -> None:
    first, again = (simulate_training(request(variants=False, failures=["node=4h"])) for _ in range(2))
    assert first.to_json() == again.to_json()
    other = simulate_training(request(variants=False, failures=["node=4h"], seed=1))
    assert other.to_json() != first.to_json()


def test_a_plan_gives_the_engines_the_nodes_and_the_times() -> None:
    split = simulate_training(request(variants=False, overrides=["devices.layout=split"]))
    scenario, nodes = split.base.scenario, split.base.scenario.nodes
    assert scenario.engine.lent == 0
    assert nodes.total == 4
    assert nodes.train_devices + nodes.engine_devices == 32
    span = [span for span in split.plan.timeline if span.name == "sync weights"][0]
    assert scenario.learner.sync == pytest.approx((span.end - span.start,))
    assert scenario.learner.mean_train > 0
    assert scenario.engine.seconds_per_unit(8) > scenario.engine.seconds_per_unit(1)
    colocated = simulate_training(request(variants=False, overrides=["devices.layout=colocated"]))
    assert colocated.base.scenario.engine.lent == colocated.base.scenario.engine.engines
    lent = simulate_training(request(variants=False, overrides=["devices.layout=overlapping"]))
    assert 0 < lent.base.scenario.engine.lent < lent.base.scenario.engine.engines


def test_suggestions_are_ranked_and_reduce_what_costs_time() -> None:
    slow = ["checkpoints.every=1", "evaluation.every=1", "evaluation.episodes=64"]
    report = simulate_training(request(overrides=slow, failures=["engine=6h"]))
    gains = {suggestion.change: suggestion.gain for suggestion in report.suggestions}
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert gains["evaluation every 1 -> 4 steps"] > 0.05
    assert gains["checkpoint every 1 -> 4 steps"] > 0
    assert any(change.startswith("layout") or change.startswith("learner on") for change in gains)
    assert report.suggestions[0].settings


def test_failures_and_latencies_as_words() -> None:
    failures = parse_failures(["node=4h,engine=1d", "node_back=30m"])
    assert (failures.node, failures.engine, failures.node_back) == (14_400.0, 86_400.0, 1800.0)
    assert failures.any
    assert not parse_failures([]).any
    latencies = parse_latencies(["turns=16,step=2s", "slow=0.1"])
    assert latencies.model_dump(include={"turns", "step", "slow"}) == {"turns": 16, "step": 2.0, "slow": 0.1}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["simulate"], "No config given: pass a YAML file or a name from `rollgym config list`."),
        (["simulate", *SMALL, "--failures", "4h"], "--failures '4h': expected node=4h."),
        (["simulate", *SMALL, "--failures", "nodes=4h"], "node"),
        (
            ["simulate", *SMALL, "--failures", "node=often"],
            "expected a duration such as 500ms, 30s, 5m, 4h or 2d",
        ),
        (["simulate", *SMALL, "--failures", "node=0"], "node"),
        (
            ["simulate", "frozen-lake-grpo", "--latencies", "no/run"],
            "is not a run folder: it has no events.jsonl.",
        ),
        (["simulate", *SMALL, "--latencies", "slow=2"], "slow"),
        (["simulate", *SMALL, "--level", "fine"], "--level 'fine' is not one of auto, events, ticks."),
        (["simulate", *SMALL, "--days", "0"], "days must be more than 0 and at most 366, not 0."),
        (["simulate", *SMALL, "--steps", "0"], "steps must be 1 to 1000, not 0."),
        (["simulate", *SMALL[:4], "--cluster", "nowhere.yaml"], "Cluster file nowhere.yaml not found"),
        (["simulate", "sokoban-grpo", "--model", "72b", "--cluster", "2xA10"], "does not fit on 2 A10"),
        (["simulate", *SMALL, "--no-variants", "--svg", "no/such/folder.svg"], "Cannot write the image"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    rollgym_command: Command, words: list[Any], sentence: str
) -> None:
    ran = rollgym_command(*words)
    assert ran.code == 2, ran.err
    assert sentence in ran.err
    assert "Traceback" not in ran.err
    assert len(ran.err.strip().splitlines()) <= 2


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="on_stale"):
        simulate_training(request(overrides=["rollout.max_staleness=0", "rollout.on_stale=mask"]))
