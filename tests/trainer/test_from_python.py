"""Training from a mapping of settings that holds classes and functions in place of names."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from lessons import Yes
from training import SMALL, fast_versions, lines

from rollgym.core.errors import UsageError
from rollgym.trainer.advantages import ESTIMATORS
from rollgym.trainer.config_objects import named_settings
from rollgym.trainer.losses.policy import POLICY_LOSSES
from rollgym.trainer.main import run_training


def settings(**changes: Any) -> dict[str, Any]:
    short = {"stop": {"steps": 1}, "evaluation": {"every": 1, "episodes": 2}}
    return {**SMALL, **short, **changes}


def test_classes_and_functions_as_settings_inside_a_running_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    scored: list[str] = []

    class Yeah(Yes):
        pass

    def brief(episode: Any) -> float:
        scored.append(episode.spec.episode_id)
        return 0.25

    given = settings(
        envs=[{"id": Yeah}],
        rewards=[{"kind": "function", "target": brief}],
        estimator=ESTIMATORS["rloo"],
        loss={"name": POLICY_LOSSES["cispo"]},
    )

    async def main() -> Any:
        return run_training(given, (), tmp_path / "run", plain=True)

    summary = asyncio.run(main())
    assert scored
    assert summary["eval_commands"] == []
    episode = lines(tmp_path / "run" / "episodes.jsonl")[0]
    assert episode["spec"]["env_id"] == "local/Yeah-v0"
    assert episode["turns"][-1]["info"]["rewards"]["brief"] == 0.25
    assert json.loads((tmp_path / "run" / "summary.json").read_text())
    further = {**given, "stop": {"steps": 2}}
    assert run_training(further, (), tmp_path / "run", resume=True, plain=True)["steps"] == 2
    message = (
        "envs.0.id: other processes cannot import local/Yeah-v0, which is not defined .* "
        "use rollout.workers=0"
    )
    with pytest.raises(UsageError, match=message):
        run_training(given, ["rollout.workers=1"], tmp_path / "other", plain=True)
    assert not (tmp_path / "other").exists()


def test_objects_become_names() -> None:
    named = named_settings(
        {
            "envs": [{"id": Yes}, {"id": "a/B-v0"}],
            "estimator": ESTIMATORS["gae"],
            "loss": {"name": POLICY_LOSSES["topr"]},
            "warm_start": {"agent": Yes.random_action},
            "seed": 3,
        }
    )
    assert named == {
        "envs": [{"id": "lessons:Yes"}, {"id": "a/B-v0"}],
        "estimator": "gae",
        "loss": {"name": "topr"},
        "warm_start": {"agent": "lessons:Yes.random_action"},
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"estimator": print}, "estimator: .* is not a registered estimator"),
        ({"loss": {"name": print}}, "loss.name: .* is not a registered policy loss"),
        (
            {"rewards": [{"kind": "function", "target": 3}]},
            "A reward function cannot be an object of type int",
        ),
        ({"envs": [{"id": Yes()}]}, "passed as an instance of Yes"),
    ],
)
def test_unsuitable_objects_are_a_usage_error(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_training(settings(**changes), (), tmp_path / "run", plain=True)
    assert not (tmp_path / "run").exists()
