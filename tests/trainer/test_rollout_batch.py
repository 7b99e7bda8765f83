"""From groups to a batch: advantages match their tokens, and untrainable groups are named."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import make_learner  # noqa: E402

from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.core.types import Episode, EpisodeSpec, Group, Outcome, Seconds, Turn  # noqa: E402
from rollgym.trainer.advantages.types import AdvantageConfig  # noqa: E402
from rollgym.trainer.config import EnvConfig, TrainConfig, env_labels  # noqa: E402
from rollgym.trainer.learner.config import LearnerConfig  # noqa: E402
from rollgym.trainer.learner.learner import Learner  # noqa: E402
from rollgym.trainer.losses.aggregation import token_weights  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402
from rollgym.trainer.reward_shaping import RewardShapingConfig  # noqa: E402
from rollgym.trainer.rollout_batch import (  # noqa: E402
    RolloutBatch,
    env_metrics,
    episode_metrics,
    make_rollout_batch,
    staleness_metrics,
    zero_variance,
)

ENV = "rollgym/FrozenLake-v0"
Spans = Sequence[tuple[Sequence[int], Sequence[int]]]


def settings(**more: Any) -> TrainConfig:
    return TrainConfig(envs=[EnvConfig(id=ENV)], **more)


def turn(prompt: Sequence[int], action: Sequence[int], **more: Any) -> Turn:
    logprobs = tuple(-1.0 - 0.1 * token for token in action)
    known = {"prompt_ids": tuple(prompt), "action_ids": tuple(action), "logprobs": logprobs}
    return Turn(**{"observation": "see", "action": "do", **known, **more})


def played(group: str, member: int, spans: Spans, reward: float = 0.0, **more: Any) -> Episode:
    """A terminated episode with its reward at the end."""
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


def learn(groups: Sequence[Group], by: Learner | None = None, coef: float = 0.0, **more: Any) -> RolloutBatch:
    return make_rollout_batch(groups, settings(**more), by or make_learner(), coef)


def test_each_token_gets_the_advantage_of_its_own_episode() -> None:
    """Rules 11 and 12: by group and by trajectory, whatever their lengths."""
    batch = learn(two_groups()).batch
    assert [one.name for one in batch.episodes] == ["a/0", "a/1", "b/0", "b/1"]
    assert batch.arrays["advantages"].tolist() == [1.0, *[-1.0] * 5, *[1.0] * 5, -1.0]
    assert batch.arrays["behavior"][:3] == pytest.approx([-1.3, -1.3, -1.4])
    assert set(batch.arrays) == {"behavior", "advantages"}


def wordy(group: Group) -> Group:
    """The same with much longer observations."""
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
        {"estimator": "reinforce", "advantage": AdvantageConfig(gamma=0.9, discount="token")},
        {
            "estimator": "gae",
            "advantage": AdvantageConfig(gamma=0.99, lam=0.95, level="token", discount="token"),
            "learner": LearnerConfig(critic="shared", device="cpu"),
        },
    ],
    ids=lambda more: more["estimator"],
)
def test_more_observation_changes_no_advantage_and_no_weight(more: dict[str, Any]) -> None:
    """Rules 7 and 8: discounts and returns count action tokens only (the critic's value is always 0.5)."""
    learner = make_learner(critic="shared" if "learner" in more else "none")
    if learner.critic is not None:
        with torch.no_grad():
            learner.critic.head.bias.fill_(0.5)
    short = learn(two_groups(), learner, **more).batch
    long = learn([wordy(group) for group in two_groups()], learner, **more).batch
    assert sum(len(row.ids) for row in long.sequences) > 4 * sum(len(row.ids) for row in short.sequences)
    assert np.array_equal(long.arrays["advantages"], short.arrays["advantages"])
    for mode in ("token-mean", "sequence-mean"):
        for one, other in zip(*(token_weights(batch.lengths, mode) for batch in (long, short)), strict=True):
            assert np.array_equal(one, other)


def test_episodes_without_turns_have_no_tokens_and_no_effect() -> None:
    groups = [grouped(unplayed("a", 0), played("a", 1, [([1], [2, 3])], 1.0), unplayed("a", 2))]
    made = learn(groups)
    assert [one.num_tokens for one in made.batch.episodes] == [0, 2, 0]
    assert made.batch.num_tokens == 2
    assert made.metrics["episodes"] == 3
    assert np.isfinite(make_learner().update(made.batch)["grad_norm"])
    critic = LearnerConfig(critic="shared", device="cpu")
    judged = learn(groups, make_learner(critic="shared"), estimator="gae", learner=critic).batch
    assert judged.arrays["returns"].tolist() == [1.0, 1.0]


def test_a_batch_without_turns_names_the_setting_to_change() -> None:
    """Rule 6."""
    with pytest.raises(UsageError, match=r"no episode has a turn.*token_limit.*raise model\.context"):
        learn([grouped(unplayed("a", 0), unplayed("a", 1))])


def spoilt(reward: float) -> Group:
    """A reward that Turn itself would refuse."""
    bad, good = played("a", 0, [([1], [2])], 1.0), played("a", 1, [([1], [2])])
    object.__setattr__(bad.turns[0], "reward", reward)
    return grouped(bad, good)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e200])
def test_a_non_finite_reward_is_refused_with_the_episode_name(reward: float) -> None:
    with pytest.raises(UsageError, match="'a/0'"):
        learn([spoilt(reward)])
    with pytest.raises(ValueError, match="a reward must be finite"):
        turn([1], [2], reward=float("nan"))


def test_a_non_finite_value_is_refused_with_the_episode_name() -> None:
    learner = make_learner(critic="shared")
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.bias.fill_(float("nan"))
    with pytest.raises(UsageError, match="'a/0'.*values"):
        learn(two_groups(), learner, estimator="gae", learner=learner.config)


def test_a_failed_episode_is_not_a_reward_of_0() -> None:
    """Rule 10."""
    with pytest.raises(UsageError, match="'a/0' failed .env_error."):
        learn([grouped(unplayed("a", 0, Outcome.ENV_ERROR), played("a", 1, [([1], [2])]))])


def test_an_agent_without_tokens_is_refused_with_the_episode_name() -> None:
    one = played("a", 0, [([1], [2])])
    bare = Episode(spec=one.spec, outcome=Outcome.TURN_LIMIT, turns=(Turn(observation="see", action="do"),))
    with pytest.raises(UsageError, match="Episode a/0 cannot be trained on"):
        learn([grouped(bare)])


def test_rewards_are_shaped_before_advantages_are_computed() -> None:
    shaping = RewardShapingConfig(turn_penalty=0.5, format_penalty=2.0)
    each = {"response": "<answer>do</answer>"}
    groups = [grouped(played("a", 0, [([1], [2])], 1.0, each=each), played("a", 1, [([1], [2])], 1.0))]
    options = {"parser": "answer"}
    batch = learn(groups, estimator="reinforce", reward_shaping=shaping, agent=options).batch
    assert batch.arrays["advantages"].tolist() == [0.5, -1.5]


def moved(loss: LossConfig) -> Learner:
    """A learner that has moved away from its reference."""
    learner = make_learner(loss=loss)
    batch = learn(two_groups(), learner).batch
    learner.update(
        batch.with_arrays(reference=learner.reference(batch), advantages=np.ones(batch.num_tokens))
    )
    return learner


def test_a_kl_in_the_loss_adds_the_reference_logprobs() -> None:
    loss = LossConfig("grpo", kl_coef=0.1)
    learner = moved(loss)
    batch = learn(two_groups(), learner, 0.1, loss=loss).batch
    assert np.array_equal(batch.arrays["reference"], learner.reference(batch))
    assert np.abs(batch.arrays["reference"] - learner.logprobs(batch)).max() > 1e-3
    assert batch.arrays["advantages"].tolist() == learn(two_groups()).batch.arrays["advantages"].tolist()


def test_a_kl_in_the_reward_is_subtracted_with_the_current_coefficient() -> None:
    loss = LossConfig("reinforce", kl_coef=0.1, kl_in="reward")
    learner = moved(loss)
    more: dict[str, Any] = {"estimator": "reinforce", "loss": loss}
    batch = learn(two_groups(), learner, 0.3, **more).batch
    penalty = -0.3 * (learner.logprobs(batch) - learner.reference(batch))
    rewards = [1.0, 0.0, 3.0, 1.0]
    expected = []
    for number, reward in enumerate(rewards):
        own = penalty[batch.token_indices(batch.sequences_of([number]))]
        expected += [reward + own[at:].sum() for at in range(len(own))]
    assert batch.arrays["advantages"] == pytest.approx(expected, abs=1e-6)


def test_episode_metrics_by_hand() -> None:
    made = learn(two_groups())
    metrics = made.metrics
    assert (metrics["episodes"], metrics["return"], metrics["length"]) == (4, 1.25, 1.5)
    assert (metrics["success"], metrics["truncated_frac"], metrics["action_tokens"]) == (0.75, 0, 12)
    assert (metrics["groups"], metrics["zero_std_group_frac"]) == (2, 0)
    each = {"info": {"valid": False}, "seconds": Seconds(generate=0.5, step=0.25)}
    wrong = episode_metrics([played("a", 0, [([1], [2]), ([3], [4])], each=each), unplayed("a", 1)])
    assert (wrong["valid_actions"], wrong["truncated_frac"]) == (0, 0.5)
    assert (wrong["episode_generate"], wrong["episode_step"]) == (1.0, 0.5)
    assert wrong["success"] == 0, "an episode that says nothing about success is not counted"
    assert "success" not in episode_metrics([unplayed("a", 0)])


def test_every_metric_is_finite() -> None:
    made = learn([grouped(unplayed("a", 0), played("a", 1, [([1], [2])], 1.0))])
    assert all(isinstance(value, float) and np.isfinite(value) for value in made.metrics.values())


def test_tokens_of_older_weights_have_their_staleness() -> None:
    """A turn in flight during a weight update has tokens of both versions."""
    first = played("a", 0, [([1, 2], [3, 4, 5])], 1.0, each={"version_spans": ((5, 2), (7, 1))})
    second = played("a", 1, [([1, 2], [3])], 0.0, each={"version_spans": ((7, 1),)})
    made = make_rollout_batch([grouped(first, second)], settings(), make_learner(), 0.0, version=7)
    assert made.batch.arrays["staleness"].tolist() == [2, 2, 0, 0]
    fresh = make_rollout_batch([grouped(second, first)], settings(), make_learner(), 0.0)
    assert "staleness" not in fresh.batch.arrays


def test_with_mask_tokens_older_than_the_bound_are_not_trained() -> None:
    first = played("a", 0, [([1, 2], [3, 4, 5])], 1.0, each={"version_spans": ((5, 2), (7, 1))})
    second = played("a", 1, [([1, 2], [3])], 0.0, each={"version_spans": ((6, 1),)})
    groups, learner = [grouped(first, second)], make_learner()

    def made(**rollout: Any) -> dict[str, Any]:
        config = settings(rollout={"max_staleness": 1, **rollout})
        return make_rollout_batch(groups, config, learner, 0.0, version=7).batch.arrays

    assert made(on_stale="mask")["trained"].tolist() == [0, 0, 1, 1]
    assert "trained" not in made(on_stale="mask", max_staleness=2)
    assert "trained" not in made(on_stale="wait")
    metrics = staleness_metrics(groups, 7, bound=1)
    assert metrics == {
        "staleness": 1.25,
        "staleness_max": 2.0,
        "staleness_p50": 1.0,
        "staleness_p90": 2.0,
        "staleness_p99": 2.0,
        "fresh_token_frac": 0.25,
        "masked_token_frac": 0.5,
        "masked_turns": 0.0,
    }
    old = played("a", 0, [([1], [2]), ([1], [3])], each={"version_spans": ((3, 1),)})
    assert staleness_metrics([grouped(old)], 7, bound=1)["masked_turns"] == 2
    assert staleness_metrics([grouped(unplayed("a", 0))], 7)["fresh_token_frac"] == 1


def test_zero_variance_uses_the_shaped_rewards() -> None:
    long, short = [([1, 2], [3, 4]), ([5], [6, 7, 8])], [([1, 2], [3])]
    group = grouped(played("a", 0, long, 1.0), played("a", 1, short, 1.0))
    assert zero_variance(group, settings())
    assert not zero_variance(group, settings(reward_shaping=RewardShapingConfig(turn_penalty=0.1)))
    unequal = grouped(played("a", 0, short, 5.0), played("a", 1, short, 1.0))
    assert not zero_variance(unequal, settings())
    assert zero_variance(unequal, settings(reward_shaping=RewardShapingConfig(clip=(0.0, 1.0))))


@pytest.mark.parametrize("estimator", ["grpo", "grpo_turns", "gigpo"])
def test_zero_variance_considers_turn_level_advantages(estimator: str) -> None:
    """Equal totals, earned at different turns: turns have different returns, whole episodes do not."""
    early = played("a", 0, [([1], [2])], 0.0)
    turns = (turn([1], [2], reward=1.0), turn([3], [4], terminated=True))
    early = replace(early, turns=turns)
    late = played("a", 1, [([1], [2]), ([3], [4])], 1.0)
    group = grouped(early, late)
    assert zero_variance(group, settings(estimator=estimator)) == (estimator == "grpo")


def test_a_mixture_reports_metrics_per_environment() -> None:
    envs = [EnvConfig(id=ENV), EnvConfig(id=ENV, kwargs={"size": 3}), EnvConfig(id="rollgym/Bandit-v0")]
    config = TrainConfig(envs=envs)
    labels = env_labels(config)
    assert labels == [ENV, f"{ENV} size=3", "rollgym/Bandit-v0"]
    good = played("a", 0, [([1], [2])], 1.0)
    bad = played("b", 0, [([1], [2]), ([3], [4])], 0.0)
    bad = replace(bad, spec=replace(bad.spec, env_kwargs={"size": 3}))
    metrics = env_metrics([good, good, bad], config)
    assert metrics[f"env/{ENV}/success"] == 1.0
    assert metrics[f"env/{ENV}/episodes"] == 2.0
    assert metrics[f"env/{ENV} size=3/success"] == 0.0
    assert metrics[f"env/{ENV} size=3/length"] == 2.0
    assert metrics["env/rollgym/Bandit-v0/episodes"] == 0.0
    assert "env/rollgym/Bandit-v0/success" not in metrics
    assert env_metrics([good], settings()) == {}
