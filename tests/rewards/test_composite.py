"""Scores: what they may be, how several are one, and what an episode looks like afterwards."""

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from virtual import run

from rollgym.core.errors import AgentError, ContextFull, RewardError, UsageError, WorkerLost
from rollgym.core.failures import failure_of, outcome_of
from rollgym.core.serialization import decode_episode, encode_episode
from rollgym.core.types import Episode, Failure, Outcome
from rollgym.rewards import CompositeScorer, Score, read_score, score_episode


def scored(scorer: Any, episode: Episode) -> Episode:
    async def main() -> Episode:
        return await score_episode(scorer, episode)

    return run(main)


def refusal(scorer: Any, episode: Episode) -> RewardError:
    with pytest.raises(RewardError) as caught:
        scored(scorer, episode)
    return caught.value


# Valid and invalid scores


@pytest.mark.parametrize(
    ("answer", "reward"),
    [(1, 1.0), (0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0)],
)
def test_any_real_number_is_a_reward(answer: Any, reward: float) -> None:
    score = read_score(answer)
    assert (score.reward, type(score.reward)) == (reward, float)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (float("nan"), "the reward must be finite, not nan"),
        (float("-inf"), "the reward must be finite, not -inf"),
        (10**400, "the reward must be finite, not inf"),
        ("1.0", "the reward must be a number, not a str"),
        (None, "the reward must be a number, not null"),
        ([1.0], "the reward must be a number, not a list"),
        (1j, "the reward must be a number, not a complex"),
        ({"reward": None}, "the reward must be a number, not null"),
        ({"score": 1.0}, "'reward' is missing"),
        ({"reward": 1, "sucess": True}, "unknown keys 'sucess'"),
        ({"reward": 1, "success": 1}, "success must be true, false or null, not a int"),
        ({"reward": 1, "parts": [1]}, "parts must map names to numbers, not a list"),
        ({"reward": 1, "parts": {"a": "b"}}, "the part 'a' must be a number, not a str"),
        ({"reward": 1, "parts": {"a": float("nan")}}, "the part 'a' must be finite"),
        ({"reward": 1, "note": 3}, "the note must be text, not a int"),
    ],
)
def test_anything_else_is_refused_with_the_reason(answer: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        read_score(answer)


def test_what_a_service_says_besides_is_not_read() -> None:
    assert read_score({"reward": 1, "took": 3}, strict=False) == Score(1.0)


# What an episode looks like afterwards


def test_a_score_is_added_to_the_last_turn_and_recorded(kit: Any, says: Any) -> None:
    before = kit.episode(1.0, 2.0)
    after = scored(says(0.5), before)
    assert [turn.reward for turn in after.turns] == [1.0, 2.5]
    assert after.total_reward == 3.5
    assert after.turns[0] == before.turns[0]
    assert after.turns[-1].info == {
        "success": True,
        "turn": 1,
        "rewards": {"environment": 2.0, "Says": 0.5},
        "reward_details": {"Says": {"score": 0.5, "weight": 1.0}},
    }
    assert after.success is True, "a scorer without an opinion leaves what the environment said"
    assert before.total_reward == 3.0, "the episode that was scored is another"
    assert decode_episode(encode_episode(after)) == after


def test_the_environment_s_rewards_can_be_replaced_and_stay_on_record(kit: Any, says: Any) -> None:
    after = scored(
        CompositeScorer({"tests": (says(0.5), 2.0)}, keep_environment=False), kit.episode(1.0, 2.0)
    )
    assert [turn.reward for turn in after.turns] == [0.0, 1.0]
    assert [turn.info["rewards"] for turn in after.turns] == [
        {"environment": 1.0},
        {"environment": 2.0, "tests": 1.0},
    ]
    assert after.total_reward == 1.0


def test_weights_parts_notes_and_raw_scores_are_data(kit: Any, says: Any) -> None:
    first = says(Score(4.0, parts={"style": 3.0, "speed": 1.0}, note="quick"))
    after = scored(CompositeScorer({"a": (first, 0.25), "b": (says(7.0), 0.0)}), kit.episode(1.0))
    assert after.turns[-1].reward == 2.0
    assert after.turns[-1].info["rewards"] == {"environment": 1.0, "a": 1.0, "b": 0.0}
    assert after.turns[-1].info["reward_details"] == {
        "a": {"score": 4.0, "weight": 0.25, "parts": {"style": 3.0, "speed": 1.0}, "note": "quick"},
        "b": {"score": 7.0, "weight": 0.0},
    }


@pytest.mark.parametrize(
    ("said", "success"),
    [((None, None), True), ((False, None), False), ((True, False), False), ((True, True), True)],
)
def test_success_is_what_all_who_have_an_opinion_agree_on(
    kit: Any, says: Any, said: tuple[Any, ...], success: bool
) -> None:
    scorers = {str(n): says(Score(0.0, success=opinion)) for n, opinion in enumerate(said)}
    assert scored(CompositeScorer(scorers), kit.episode()).success is success


def test_a_scorer_can_grant_success_where_the_environment_defines_none(kit: Any, says: Any) -> None:
    episode = kit.episode(success=None)
    assert scored(says(0.0), episode).success is None
    assert scored(says(Score(0.0, success=True)), episode).success is True


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.failed])
def test_a_failed_episode_is_not_scored(kit: Any, says: Any, outcome: Outcome) -> None:
    """rule 10: a failure has no reward."""
    scorer, episode = says(1.0), kit.episode(outcome=outcome)
    assert scored(scorer, episode) is episode
    assert not scorer.asked


def test_an_episode_without_turns_is_not_scored(kit: Any, says: Any) -> None:
    scorer, episode = says(1.0), kit.episode(outcome=Outcome.TIME_LIMIT, turns=())
    assert scored(scorer, episode) is episode
    assert not scorer.asked


# Several at once


def test_scorers_run_at_once_and_neither_order_nor_timing_changes_anything(kit: Any, says: Any) -> None:
    scores = {"a": (0.1, 0.3), "b": (0.7, 1e16), "c": (1.3, -1e16), "d": (0.9, 0.1)}
    seen = set()
    for names in itertools.permutations(scores):
        scorers = {n: (says(scores[n][0], seconds=float(i + 1)), scores[n][1]) for i, n in enumerate(names)}

        async def main(scorers: Any = scorers) -> tuple[Episode, float]:
            episode = await score_episode(CompositeScorer(scorers), kit.episode(0.3))
            return episode, asyncio.get_running_loop().time()

        episode, now = run(main)
        assert now == 4.0, "they do not wait for one another"
        assert list(episode.turns[-1].info["rewards"]) == ["environment", *names], "in the order given"
        seen.add((episode.total_reward, frozenset(episode.turns[-1].info["rewards"].items())))
    assert len(seen) == 1


def test_the_first_failure_stops_the_others_at_once(kit: Any, says: Any) -> None:
    slow, bad = says(1.0, seconds=100.0), says(ValueError("no key"), seconds=1.0)

    async def main() -> float:
        with pytest.raises(RewardError, match="reward 'bad': ValueError: no key"):
            await score_episode(CompositeScorer({"slow": slow, "bad": bad}), kit.episode())
        return asyncio.get_running_loop().time()

    assert run(main) == 1.0
    assert slow.cancelled == 1


def test_of_two_simultaneous_failures_the_first_scorer_is_reported(kit: Any, says: Any) -> None:
    for names in (("a", "b"), ("b", "a")):
        scorers = {name: says(ValueError(name), seconds=1.0) for name in names}
        assert f"reward {names[0]!r}" in str(refusal(CompositeScorer(scorers), kit.episode()))


def test_scorers_nest(kit: Any, says: Any) -> None:
    inner = CompositeScorer({"x": (says(1.0), 2.0), "y": says(3.0)})
    after = scored(CompositeScorer({"both": (inner, 0.5)}), kit.episode(0.0))
    assert after.total_reward == 2.5
    assert after.turns[-1].info["reward_details"]["both"]["parts"] == {"x": 2.0, "y": 3.0}
    broken = CompositeScorer({"both": CompositeScorer({"x": says(ValueError("no"))})})
    assert str(refusal(broken, kit.episode())) == "reward 'both': reward 'x': ValueError: no"


def test_closing_closes_everybody_even_where_one_raises(says: Any) -> None:
    class Stuck(says):  # type: ignore[misc]
        async def close(self) -> None:
            raise OSError("stuck")

    good = says(1.0)

    async def main() -> None:
        with pytest.raises(OSError, match="stuck"):
            await CompositeScorer({"a": good, "b": Stuck(), "c": object()}).close()  # type: ignore[dict-item]

    run(main)
    assert good.closed == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda s: CompositeScorer({}), "at least one scorer"),
        (lambda s: CompositeScorer({"environment": s}), "a name other than 'environment'"),
        (lambda s: CompositeScorer({"": s}), "needs a name"),
        (lambda s: CompositeScorer({"a": (s, float("nan"))}), "must be a finite number, not nan"),
        (lambda s: CompositeScorer({"a": (s, "1")}), "must be a finite number, not '1'"),
        (lambda s: CompositeScorer({"a": s}, timeout=0.0), "timeout must be positive"),
        (
            lambda s: CompositeScorer({"a": CompositeScorer({"b": s}, keep_environment=False)}),
            "keep_environment=False on the outer",
        ),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(says: Any, make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make(says(1.0))


# Failures are data


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ValueError("no"), "ValueError: no"),
        (TimeoutError(), "TimeoutError"),
        (ContextFull("too long"), "too long"),
        (AgentError("engine gone"), "engine gone"),
        (WorkerLost("dead"), "dead"),
        (UsageError("The pool is closed."), "The pool is closed."),
        (asyncio.CancelledError(), "it was cancelled from within"),
        (3, "a scorer must return a Score, not a int"),
        (Score(1e308), "OverflowError"),
    ],
)
def test_whatever_a_scorer_does_is_one_kind_of_failure_that_names_it(
    kit: Any, says: Any, answer: Any, said: str
) -> None:
    error = refusal(says(answer), kit.episode(1.7e308))
    assert str(error).startswith("reward 'Says': ")
    assert said in str(error)
    assert outcome_of(error) is Outcome.ENV_ERROR
    failure = failure_of(error)
    assert (failure.type, failure.message) == ("RewardError", str(error))
    assert failure.traceback


def test_the_traceback_of_another_process_is_kept(kit: Any, says: Any) -> None:
    error = RewardError("raised")
    error.failure = Failure(type="KeyError", message="raised", traceback="in a worker, line 3")
    assert failure_of(refusal(says(error), kit.episode())).traceback == "in a worker, line 3"


def test_a_timeout_ends_scorers_without_a_timeout(kit: Any, says: Any) -> None:
    slow = says(1.0, seconds=1e9)
    error = refusal(CompositeScorer({"quick": says(1.0), "slow": slow}, timeout=5.0), kit.episode())
    assert str(error) == "reward 'slow': took longer than 5 s"
    assert slow.cancelled == 1


def test_a_scorer_that_will_not_stop_is_left_behind(kit: Any) -> None:
    class Deaf:
        left = 0

        async def score(self, episode: Episode) -> Score:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                await asyncio.sleep(50.0)
                self.left += 1
                raise ValueError("too late for anybody to hear") from None
            return Score(0.0)

    deaf = Deaf()

    async def main() -> float:
        with pytest.raises(RewardError, match="took longer than 5 s"):
            await score_episode(CompositeScorer({"deaf": deaf}, timeout=5.0), kit.episode())
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(100.0)
        return now

    assert run(main) == 10.0
    assert deaf.left == 1
