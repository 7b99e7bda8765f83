"""The curriculum by pass rate: weights, shares of domains, and an exact resume."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import lines

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec, Group, Outcome, Turn
from rollgym.trainer.config import EnvConfig, TrainConfig
from rollgym.trainer.curriculum import pass_rate_weights, updated_pass_rates
from rollgym.trainer.run_tasks import domain_success

Run = Callable[..., Path]


def config(*envs: dict[str, Any], **more: Any) -> TrainConfig:
    made = TrainConfig(envs=[EnvConfig(**env) for env in envs], curriculum={"kind": "pass_rate", **more})
    assert made.curriculum is not None
    return made


LEVELS = config(
    {"id": "rollgym/Math-v0", "kwargs": {"level": 1}, "domain": "math"},
    {"id": "rollgym/Math-v0", "kwargs": {"level": 2}, "domain": "math", "weight": 3.0},
    {"id": "rollgym/Bandit-v0", "domain": "bandit", "weight": 2.0},
)


def group(kwargs: dict[str, Any], *successes: bool) -> Group:
    episodes = [
        Episode(
            spec=EpisodeSpec(
                episode_id=f"g-{n}", env_id="rollgym/Math-v0", env_kwargs=kwargs, group_id="g", member=n
            ),
            outcome=Outcome.TERMINATED,
            turns=(Turn(observation="", action="", terminated=True),),
            success=success,
        )
        for n, success in enumerate(successes)
    ]
    return Group(group_id="g", episodes=tuple(episodes), size=len(episodes))


def test_pass_rates_are_moving_averages_of_what_was_played() -> None:
    first = updated_pass_rates([], [group({"level": 1}, True, False)], LEVELS, 0.5)
    assert first == [0.5, None, None]
    second = updated_pass_rates(
        first, [group({"level": 1}, True, True), group({"level": 2}, False)], LEVELS, 0.5
    )
    assert second == [0.75, 0.0, None]


def test_a_domain_keeps_its_share_and_its_levels_share_it_by_pass_rate() -> None:
    assert LEVELS.curriculum is not None
    even = pass_rate_weights([None, None, None], LEVELS, LEVELS.curriculum)
    assert even == pytest.approx([1.0, 3.0, 2.0])
    weights = pass_rate_weights([0.5, 1.0, 0.2], LEVELS, LEVELS.curriculum)
    # 1 * 1 against 3 * 0.1, scaled to the domain's 4.
    assert weights == pytest.approx([4 / 1.3, 4 * 0.3 / 1.3, 2.0])
    assert sum(weights[:2]) == pytest.approx(4.0)


def test_environments_without_a_domain_share_one() -> None:
    made = config({"id": "rollgym/Math-v0", "kwargs": {"level": 1}}, {"id": "rollgym/Bandit-v0"})
    assert made.curriculum is not None
    assert pass_rate_weights([0.5, 0.0], made, made.curriculum) == pytest.approx([2 / 1.1, 0.2 / 1.1])


def test_filtered_groups_are_refused_because_they_would_not_count() -> None:
    made = config({"id": "rollgym/Math-v0"}, {"id": "rollgym/Bandit-v0"})
    with pytest.raises(UsageError, match="filter_zero_variance=false"):
        made.model_copy(
            update={"rollout": made.rollout.model_copy(update={"filter_zero_variance": True})}
        ).check()


def test_success_of_domains_is_the_mean_over_their_environments() -> None:
    evaluations = [
        {"step": step, "phase": phase, "env": env, "domain": domain, "success_rate": rate}
        for step, phase, env, domain, rate in [
            (0, "before", "a", "math", 0.0),
            (0, "before", "b", "math", 0.5),
            (0, "before", "c", "", 0.9),
            (5, "after", "a", "math", 0.5),
            (5, "after", "b", "math", 1.0),
        ]
    ]
    assert domain_success(evaluations) == {"math": {"first": 0.25, "last": 0.75}}


SETTINGS: dict[str, Any] = {
    "envs": [
        {"id": "lessons:Granted", "domain": "one"},
        {"id": "lessons:Yes", "domain": "one"},
        {"id": "lessons:No", "domain": "two", "weight": 2.0},
    ],
    "curriculum": {"kind": "pass_rate", "floor": 0.1, "momentum": 1.0},
    "rollout": {"groups": 8, "group_size": 2},
    "stop": {"steps": 4},
}


def test_a_run_plays_mastered_environments_less_and_keeps_the_share_of_domains(
    train_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [1.0, 0.5, 0.0]
    monkeypatch.setattr("rollgym.trainer.train_run.updated_pass_rates", lambda *args: rates)
    folder = train_here("run", **SETTINGS)
    sources: Counter[tuple[int, str]] = Counter()
    for line in lines(folder / "episodes.jsonl"):
        sources[line["step"], line["spec"]["env_id"]] += 1
    first, last = ({env: n for (step, env), n in sources.items() if step == wanted} for wanted in (1, 4))
    assert first == {"lessons:Granted": 4, "lessons:Yes": 4, "lessons:No": 8}
    assert last["lessons:No"] == 8
    assert last.get("lessons:Granted", 0) < 4
    metrics = lines(folder / "metrics.jsonl")
    assert metrics[-1]["success/one"] <= 1.0
    assert "success/two" in metrics[-1]
    shares = [metrics[-1][f"share/lessons:{name}"] for name in ("Granted", "Yes", "No")]
    assert sum(shares) == pytest.approx(1.0)
    assert shares[2] == pytest.approx(0.5)


def test_a_resumed_run_plays_the_same_groups(train_here: Run) -> None:
    settings = {**SETTINGS, "checkpoints": {"every": 1}, "evaluation": {"every": 0, "episodes": 1}}
    expected = lines(train_here("whole", **settings) / "episodes.jsonl")
    train_here("parts", **{**settings, "stop": {"steps": 2}})
    folder = train_here("parts", resume=True, **settings)
    story = lines(folder / "episodes.jsonl")
    for ours, theirs in zip(story, expected, strict=True):
        assert ours["spec"] == theirs["spec"]
        assert [turn["action"] for turn in ours["turns"]] == [turn["action"] for turn in theirs["turns"]]
