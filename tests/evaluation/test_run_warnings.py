"""Four mistakes that look like a score of zero are said by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.evaluation.run_warnings import long_demonstrations, warnings_of


def episode(outcome: Outcome = Outcome.TURN_LIMIT, *, valid: bool = True, **turn: Any) -> Episode:
    spec = EpisodeSpec(episode_id="a", env_id="E")
    one = Turn(observation="o", action="x", reward=0.0, info={"valid": valid}, **turn)
    return Episode(spec=spec, outcome=outcome, turns=(one,) * 3)


CASES = {
    "all_failed": [episode(Outcome.ENGINE_ERROR)] * 4,
    "few_valid_actions": [episode(valid=False)] * 4,
    "empty_replies": [episode(response=" ")] * 4,
    "reasoning_without_content": [episode(response="<think>\nhm\n</think>\n\n")] * 4,
    "cut_replies": [episode(response="go", finish_reason="length", valid=False)] * 4,
}


@pytest.mark.parametrize(("name", "episodes"), CASES.items(), ids=CASES)
def test_a_mistake_is_named(name: str, episodes: list[Episode]) -> None:
    assert name in [one.name for one in warnings_of(episodes)]


def test_sound_episodes_have_no_warning() -> None:
    good = episode(response="<think>hm</think>go", finish_reason="stop")
    assert warnings_of([good] * 4 + [episode(Outcome.ENV_ERROR)]) == []
    assert warnings_of([]) == []


def test_a_reward_that_may_be_forged_is_named() -> None:
    stated = dataclasses.replace(episode(), reset_info={"forgeable": True})
    (found,) = warnings_of([stated, episode(), dataclasses.replace(stated, reset_info={"forgeable": False})])
    assert (found.name, found.figure) == ("forgeable_reward", pytest.approx(1 / 3))
    assert "1 of 3 episodes" in found.sentence


def test_demonstrations_longer_than_a_reply_are_named() -> None:
    assert long_demonstrations([3, 9], 8) == []  # the ninth ends the turn
    (found,) = long_demonstrations([3, 10, 12], 8)
    assert found.figure == pytest.approx(2 / 3)
    assert "2 of 3" in found.sentence
    assert "at least 12" in found.sentence
