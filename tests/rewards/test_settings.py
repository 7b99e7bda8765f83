"""Rewards from plain settings: what each kind reads, and that anything else is refused."""

import asyncio
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from spelt import END, Spelt, spell

from rollgym.core.errors import UnknownName, UsageError
from rollgym.rewards import score_episode
from rollgym.rewards.function import FunctionScorer
from rollgym.rewards.http import HttpScorer
from rollgym.rewards.judge import JudgeScorer
from rollgym.rewards.settings import _COMMON, _READ, RewardSettings, make_scorer
from rollgym.testing import ScriptedEngine

WHOLE: dict[str, dict[str, Any]] = {
    "function": {"target": "judges:length", "workers": 1, "memory_mb": 900.0},
    "http": {
        "url": "http://localhost:1/",
        "header_env": {},
        "retries": 0,
        "concurrency": 1,
        "allow_plain_http": False,
    },
    "judge": {
        "model": "folder",
        "template": "{transcript}",
        "pattern": "x",
        "lowest": 0.0,
        "highest": 1.0,
        "max_tokens": 3,
        "temperature": 0.5,
        "longest": 100,
    },
}
"""Every setting of every kind."""


def test_every_setting_is_read_by_some_kind() -> None:
    """rule 36"""
    read = {*_COMMON, *(name for names in _READ.values() for name in names)}
    assert read == {field.name for field in fields(RewardSettings)}
    assert {kind: tuple(options) for kind, options in WHOLE.items()} == _READ


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("other", WHOLE)
def test_a_setting_its_kind_does_not_read_is_refused(kind: Any, other: str) -> None:
    """rule 36"""
    RewardSettings(kind=kind, **WHOLE[kind])
    for name, value in WHOLE[other].items():
        if other != kind:
            with pytest.raises(
                UsageError, match=f"kind={kind} has no setting {name}; its settings are name, "
            ):
                RewardSettings(kind=kind, **WHOLE[kind], **{name: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "function"}, "requires target"),
        ({"kind": "http"}, "requires url"),
        ({"kind": "judge", "weight": float("nan")}, "must be finite, not nan"),
        ({"kind": "judge", "timeout": 0.0}, "positive and finite, not 0.0"),
        ({"kind": "judge", "name": "environment"}, "the name of the environment's reward"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RewardSettings(**options)


def test_an_unknown_kind_suggests_a_near_one() -> None:
    with pytest.raises(UnknownName, match="no kind of reward called 'funktion'. Did you mean function"):
        RewardSettings(kind="funktion")  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        RewardSettings(kind="judge").weight = 2.0  # type: ignore[misc]


def test_each_kind_becomes_its_scorer_with_its_name_weight_and_timeout() -> None:
    engine = ScriptedEngine([*spell("x"), END])
    scorer = make_scorer(
        [
            RewardSettings(kind="function", target="judges:length", weight=0.5, timeout=5.0),
            RewardSettings(kind="http", url="http://localhost:1/", retries=7, name="service"),
            RewardSettings(kind="judge", weight=0.1),
        ],
        keep_environment=False,
        engine=engine,
        tokenizer=Spelt(),
    )
    assert scorer.weights == {"length": 0.5, "service": 1.0, "judge": 0.1}
    assert not scorer.keep_environment
    function, http, judge = scorer.scorers.values()
    assert isinstance(function, FunctionScorer)
    assert isinstance(http, HttpScorer)
    assert isinstance(judge, JudgeScorer)
    assert (function.timeout, function.name, http.http.policy.retries, http.name) == (
        5.0,
        "length",
        7,
        "service",
    )
    assert judge.engine is engine


def test_one_reward_is_made_and_scores(kit: Any) -> None:
    async def main() -> Any:
        scorer = make_scorer(
            RewardSettings(kind="function", target="judges:length", weight=3.0, name="turns")
        )
        try:
            return await score_episode(scorer, kit.episode(1.0, 2.0))
        finally:
            await scorer.close()

    episode = asyncio.run(main())
    assert episode.turns[-1].info["rewards"] == {"environment": 2.0, "turns": 6.0}


def test_two_of_the_same_name_are_refused() -> None:
    twice = [RewardSettings(kind="function", target="judges:length")] * 2
    with pytest.raises(UsageError, match="Two rewards are called 'length'"):
        make_scorer(twice)


def test_a_judge_requires_a_model_or_an_engine() -> None:
    with pytest.raises(UsageError, match="'judge' requires model"):
        make_scorer(RewardSettings(kind="judge"))
    with pytest.raises(UsageError, match="There is no folder nowhere"):
        make_scorer(RewardSettings(kind="judge", model="nowhere"))


def test_an_empty_list_of_rewards_is_rejected() -> None:
    with pytest.raises(UsageError, match="at least one scorer"):
        make_scorer([])
