"""From groups to a batch: advantages meet their tokens, and what cannot be learnt from is named."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import make_learner  # noqa: E402

from rollgym.errors import UsageError  # noqa: E402
from rollgym.trainer.config import EnvChoice, TrainConfig, env_labels  # noqa: E402
from rollgym.trainer.credit_types import CreditSettings  # noqa: E402
from rollgym.trainer.experience import (  # noqa: E402
    Experience,
    describe,
    describe_envs,
    make_experience,
    zero_variance,
)
from rollgym.trainer.learner.local import LocalLearner  # noqa: E402
from rollgym.trainer.learner.settings import LearnerSettings  # noqa: E402
from rollgym.trainer.losses import LossSettings  # noqa: E402
from rollgym.trainer.shaping import ShapingSettings  # noqa: E402
from rollgym.trainer.weighting import token_weights  # noqa: E402
from rollgym.types import Episode, EpisodeSpec, Group, Outcome, Seconds, Turn  # noqa: E402

ENV = "rollgym/FrozenLake-v0"
Spans = Sequence[tuple[Sequence[int], Sequence[int]]]


def settings(**more: Any) -> TrainConfig:
    return TrainConfig(envs=[EnvChoice(id=ENV)], **more)


def turn(prompt: Sequence[int], action: Sequence[int], **more: Any) -> Turn:
    logprobs = tuple(-1.0 - 0.1 * token for token in action)
    known = {"prompt_ids": tuple(prompt), "action_ids": tuple(action), "logprobs": logprobs}
    return Turn(**{"observation": "see", "action": "do", **known, **more})


def played(group: str, member: int, spans: Spans, reward: float = 0.0, **more: Any) -> Episode:
    """An episode that ends by itself, with its reward at the end."""
    turns = [turn(*span, **more.get("each", {})) for span in spans[:-1]]
    turns += [turn(*span, reward=reward, terminated=True, **more.get("each", {})) for span in spans[-1:]]
    name = f"{group}/{member}"
    spec = EpisodeSpec(episode_id=name, env_id=ENV, group_id=group, member=member, sampling_seed=member)
    return Episode(
        spec=spec, outcome=Outcome.TERMINATED, turns=tuple(turns), success=more.get("success", reward > 0)
    )


def unplayed(group: str, member: int, outcome: Outcome = Outcome.TOKEN_LIMIT) -> Episode:
    spec = EpisodeSpec(episode_id=f"{group}/{member}", env_id=ENV, group_id=group, member=member)
    return Episode(spec=spec, outcome=outcome)


def grouped(*episodes: Episode) -> Group:
    return Group(group_id=episodes[0].spec.group_id, size=len(episodes), episodes=episodes)


def two_groups() -> list[Group]:
    short, long = [([1, 2], [3])], [([1, 2], [3, 4]), ([5], [6, 7, 8])]
    return [
        grouped(played("a", 0, short, 1.0), played("a", 1, long, 0.0)),
        grouped(played("b", 0, long, 3.0), played("b", 1, short, 1.0)),
    ]


def learn(
    groups: Sequence[Group], by: LocalLearner | None = None, coef: float = 0.0, **more: Any
) -> Experience:
    return make_experience(groups, settings(**more), by or make_learner(), coef)


def test_each_token_gets_the_advantage_of_its_own_episode() -> None:
    """Rules 11 and 12: by group and by trajectory, whatever their lengths."""
    batch = learn(two_groups()).batch
    assert [one.name for one in batch.episodes] == ["a/0", "a/1", "b/0", "b/1"]
    assert batch.arrays["advantages"].tolist() == [1.0, *[-1.0] * 5, *[1.0] * 5, -1.0]
    assert batch.arrays["behaviour"][:3] == pytest.approx([-1.3, -1.3, -1.4])
    assert set(batch.arrays) == {"behaviour", "advantages"}


def wordy(group: Group) -> Group:
    """The same with far more to read."""
    episodes = []
    for one in group.episodes:
        turns = tuple(
            Turn(
                **{
                    **{name: getattr(old, name) for name in ("action", "action_ids", "logprobs", "reward")},
                    **{"observation": old.observation, "terminated": old.terminated},
                    "prompt_ids": (9,) * 50 + old.prompt_ids,
                }
            )
            for old in one.turns
        )
        episodes.append(Episode(spec=one.spec, outcome=one.outcome, turns=turns, success=one.success))
    return grouped(*episodes)


@pytest.mark.parametrize(
    "more",
    [
        {"estimator": "grpo"},
        {"estimator": "reinforce", "credit": CreditSettings(gamma=0.9, discount="token")},
        {
            "estimator": "gae",
            "credit": CreditSettings(gamma=0.99, lam=0.95, level="token", discount="token"),
            "learner": LearnerSettings(critic="head", device="cpu"),
        },
    ],
    ids=lambda more: more["estimator"],
)
def test_more_observation_changes_no_advantage_and_no_weight(more: dict[str, Any]) -> None:
    """Rules 7 and 8: discounts and returns go over action tokens alone (the critic says 0.5 everywhere)."""
    learner = make_learner(critic="head" if "learner" in more else "none")
    if learner.critic is not None:
        with torch.no_grad():
            learner.critic.head.bias.fill_(0.5)
    short = learn(two_groups(), learner, **more).batch
    long = learn([wordy(group) for group in two_groups()], learner, **more).batch
    assert sum(len(row.ids) for row in long.rows) > 4 * sum(len(row.ids) for row in short.rows)
    assert np.array_equal(long.arrays["advantages"], short.arrays["advantages"])
    for mode in ("token-mean", "sequence-mean"):
        for one, other in zip(*(token_weights(batch.lengths, mode) for batch in (long, short)), strict=True):
            assert np.array_equal(one, other)


def test_episodes_without_turns_have_no_tokens_and_disturb_nobody() -> None:
    groups = [grouped(unplayed("a", 0), played("a", 1, [([1], [2, 3])], 1.0), unplayed("a", 2))]
    made = learn(groups)
    assert [one.count for one in made.batch.episodes] == [0, 2, 0]
    assert made.batch.tokens == 2
    assert made.metrics["episodes"] == 3
    assert np.isfinite(make_learner().update(made.batch)["grad_norm"])
    critic = LearnerSettings(critic="head", device="cpu")
    judged = learn(groups, make_learner(critic="head"), estimator="gae", learner=critic).batch
    assert judged.arrays["returns"].tolist() == [1.0, 1.0]


def test_when_no_episode_had_a_turn_the_setting_to_change_is_named() -> None:
    """Rule 6."""
    with pytest.raises(UsageError, match=r"no episode had a single turn.*token_limit.*raise model\.context"):
        learn([grouped(unplayed("a", 0), unplayed("a", 1))])


def spoilt(reward: float) -> Group:
    """A reward that no turn lets through by itself."""
    bad, good = played("a", 0, [([1], [2])], 1.0), played("a", 1, [([1], [2])])
    object.__setattr__(bad.turns[0], "reward", reward)
    return grouped(bad, good)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e200])
def test_a_reward_that_is_no_number_is_refused_by_the_episodes_name(reward: float) -> None:
    with pytest.raises(UsageError, match="'a/0'"):
        learn([spoilt(reward)])
    with pytest.raises(ValueError, match="a reward must be finite"):
        turn([1], [2], reward=float("nan"))


def test_a_value_that_is_no_number_is_refused_by_the_episodes_name() -> None:
    learner = make_learner(critic="head")
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.bias.fill_(float("nan"))
    with pytest.raises(UsageError, match="'a/0'.*values"):
        learn(two_groups(), learner, estimator="gae", learner=learner.settings)


def test_a_failed_episode_is_not_a_reward_of_0() -> None:
    """Rule 10."""
    with pytest.raises(UsageError, match="'a/0' failed .env_error."):
        learn([grouped(unplayed("a", 0, Outcome.ENV_ERROR), played("a", 1, [([1], [2])]))])


def test_an_agent_without_tokens_is_refused_by_the_episodes_name() -> None:
    one = played("a", 0, [([1], [2])])
    bare = Episode(spec=one.spec, outcome=Outcome.TURN_LIMIT, turns=(Turn(observation="see", action="do"),))
    with pytest.raises(UsageError, match="Episode a/0 cannot be trained on"):
        learn([grouped(bare)])


def test_rewards_are_shaped_before_they_are_given_credit() -> None:
    shaping = ShapingSettings(turn_penalty=0.5, format_penalty=2.0)
    each = {"response": "<answer>do</answer>"}
    groups = [grouped(played("a", 0, [([1], [2])], 1.0, each=each), played("a", 1, [([1], [2])], 1.0))]
    options = {"parser": "answer"}
    batch = learn(groups, estimator="reinforce", shaping=shaping, agent=options).batch
    assert batch.arrays["advantages"].tolist() == [0.5, -1.5]


def moved(loss: LossSettings) -> LocalLearner:
    """A learner that has left its reference behind."""
    learner = make_learner(loss=loss)
    batch = learn(two_groups(), learner).batch
    learner.update(batch.having(reference=learner.reference(batch), advantages=np.ones(batch.tokens)))
    return learner


def test_a_kl_in_the_loss_brings_the_references_log_probs() -> None:
    loss = LossSettings("grpo", kl_coef=0.1)
    learner = moved(loss)
    batch = learn(two_groups(), learner, 0.1, loss=loss).batch
    assert np.array_equal(batch.arrays["reference"], learner.reference(batch))
    assert np.abs(batch.arrays["reference"] - learner.logprobs(batch)).max() > 1e-3
    assert batch.arrays["advantages"].tolist() == learn(two_groups()).batch.arrays["advantages"].tolist()


def test_a_kl_in_the_reward_is_taken_from_each_token_with_the_coefficient_of_now() -> None:
    loss = LossSettings("reinforce", kl_coef=0.1, kl_in="reward")
    learner = moved(loss)
    more: dict[str, Any] = {"estimator": "reinforce", "loss": loss}
    batch = learn(two_groups(), learner, 0.3, **more).batch
    penalty = -0.3 * (learner.logprobs(batch) - learner.reference(batch))
    rewards = [1.0, 0.0, 3.0, 1.0]
    expected = []
    for number, reward in enumerate(rewards):
        own = penalty[batch.flat(batch.rows_of([number]))]
        expected += [reward + own[at:].sum() for at in range(len(own))]
    assert batch.arrays["advantages"] == pytest.approx(expected, abs=1e-6)


def test_what_there_is_to_say_about_a_batch() -> None:
    made = learn(two_groups())
    metrics = made.metrics
    assert (metrics["episodes"], metrics["return"], metrics["length"]) == (4, 1.25, 1.5)
    assert (metrics["success"], metrics["cut_short"], metrics["action_tokens"]) == (0.75, 0, 12)
    assert (metrics["credit_groups"], metrics["credit_groups_without_variance"]) == (2, 0)
    each = {"info": {"valid": False}, "seconds": Seconds(generate=0.5, step=0.25)}
    wrong = describe([played("a", 0, [([1], [2]), ([3], [4])], each=each), unplayed("a", 1)])
    assert (wrong["valid_actions"], wrong["cut_short"]) == (0, 0.5)
    assert (wrong["episode_generate"], wrong["episode_step"]) == (1.0, 0.5)
    assert wrong["success"] == 0, "an episode that says nothing about success is not counted"
    assert "success" not in describe([unplayed("a", 0)])


def test_every_number_for_the_log_is_a_number() -> None:
    made = learn([grouped(unplayed("a", 0), played("a", 1, [([1], [2])], 1.0))])
    assert all(isinstance(value, float) and np.isfinite(value) for value in made.metrics.values())


def test_tokens_of_older_weights_are_marked_with_their_age() -> None:
    """A turn that played on while the weights changed has tokens of both versions."""
    first = played("a", 0, [([1, 2], [3, 4, 5])], 1.0, each={"version_spans": ((5, 2), (7, 1))})
    second = played("a", 1, [([1, 2], [3])], 0.0, each={"version_spans": ((7, 1),)})
    made = make_experience([grouped(first, second)], settings(), make_learner(), 0.0, version=7)
    assert made.batch.arrays["staleness"].tolist() == [2, 2, 0, 0]
    fresh = make_experience([grouped(second, first)], settings(), make_learner(), 0.0)
    assert "staleness" not in fresh.batch.arrays


def test_zero_variance_looks_at_the_rewards_that_advantages_are_made_of() -> None:
    long, short = [([1, 2], [3, 4]), ([5], [6, 7, 8])], [([1, 2], [3])]
    group = grouped(played("a", 0, long, 1.0), played("a", 1, short, 1.0))
    assert zero_variance(group, settings())
    assert not zero_variance(group, settings(shaping=ShapingSettings(turn_penalty=0.1)))
    unequal = grouped(played("a", 0, short, 5.0), played("a", 1, short, 1.0))
    assert not zero_variance(unequal, settings())
    assert zero_variance(unequal, settings(shaping=ShapingSettings(clip=(0.0, 1.0))))


@pytest.mark.parametrize("estimator", ["grpo", "grpo_turns", "gigpo"])
def test_zero_variance_asks_the_estimator_about_turns(estimator: str) -> None:
    """Equal totals, earned at different turns: turns have different returns, whole episodes do not."""
    early = played("a", 0, [([1], [2])], 0.0)
    turns = (turn([1], [2], reward=1.0), turn([3], [4], terminated=True))
    early = replace(early, turns=turns)
    late = played("a", 1, [([1], [2]), ([3], [4])], 1.0)
    group = grouped(early, late)
    assert zero_variance(group, settings(estimator=estimator)) == (estimator == "grpo")


def test_a_mixture_reports_each_of_its_environments() -> None:
    envs = [EnvChoice(id=ENV), EnvChoice(id=ENV, kwargs={"size": 3}), EnvChoice(id="rollgym/Bandit-v0")]
    config = TrainConfig(envs=envs)
    labels = env_labels(config)
    assert labels == [ENV, f"{ENV} size=3", "rollgym/Bandit-v0"]
    good = played("a", 0, [([1], [2])], 1.0)
    bad = played("b", 0, [([1], [2]), ([3], [4])], 0.0)
    bad = replace(bad, spec=replace(bad.spec, env_kwargs={"size": 3}))
    told = describe_envs([good, good, bad], config)
    assert told[f"env/{ENV}/success"] == 1.0
    assert told[f"env/{ENV}/episodes"] == 2.0
    assert told[f"env/{ENV} size=3/success"] == 0.0
    assert told[f"env/{ENV} size=3/length"] == 2.0
    assert told["env/rollgym/Bandit-v0/episodes"] == 0.0
    assert "env/rollgym/Bandit-v0/success" not in told
    assert describe_envs([good], settings()) == {}
