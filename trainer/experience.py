"""From groups of episodes to a training batch: shaping, credit, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollgym.errors import UsageError
from rollgym.trainer.batch import Batch, make_batch
from rollgym.trainer.config import TrainConfig, env_labels
from rollgym.trainer.credit import find_estimator
from rollgym.trainer.credit_types import Trajectory
from rollgym.trainer.kl import kl_rewards
from rollgym.trainer.learner import Learner, Metrics
from rollgym.trainer.rows import FloatArray, TokenEpisode, token_episode
from rollgym.trainer.shaping import Shaped, format_check, shape
from rollgym.types import Episode, Group


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """A batch, and what there is to say about where it came from."""

    batch: Batch
    metrics: Metrics


def make_experience(
    groups: Sequence[Group],
    config: TrainConfig,
    learner: Learner,
    kl_coef: float,
    version: int | None = None,
) -> Experience:
    """Everything that an update needs to know about these groups.

    Args:
        groups: Finished groups of episodes.
        config: The run's settings.
        learner: Computes reference log-probs and values.
        kl_coef: The KL coefficient as adapted so far.
        version: The learner's policy version. Tokens of older versions are left out of ``logprob_gap``.
    """
    parser = format_check(config.agent.parser) if config.shaping.format_penalty else None
    shaped = shape(groups, config.shaping, format_missed=parser)
    if not any(one.episode.turns for one in shaped):
        raise UsageError(
            "There is nothing to learn from: no episode had a single turn. If they all ended with "
            "token_limit, the context is too short for the first prompt: raise model.context."
        )
    tokens = [token_episode(one.episode) for one in shaped]
    batch = make_batch(tokens)
    extra, values, last = _judged(batch, config, learner, kl_coef)
    penalties, worths = _cut(batch, extra.get("penalty")), _cut(batch, values)
    trajectories = [
        _trajectory(one, token, penalty, worth, after)
        for one, token, penalty, worth, after in zip(shaped, tokens, penalties, worths, last, strict=True)
    ]
    credit = find_estimator(config.estimator)(trajectories, config.credit)
    arrays = {"advantages": np.concatenate(credit.advantages)}
    if credit.returns is not None and values is not None:
        arrays |= {"returns": np.concatenate(credit.returns), "values": values}
    if "reference" in extra:
        arrays["reference"] = extra["reference"]
    staleness = token_staleness([one.episode for one in shaped], version)
    if staleness.any():
        arrays["staleness"] = staleness
    metrics = {f"credit_{name}": value for name, value in credit.metrics.items()}
    episodes = [one.episode for one in shaped]
    return Experience(batch.having(**arrays), metrics | describe(episodes) | describe_envs(episodes, config))


def zero_variance(group: Group, config: TrainConfig) -> bool:
    """Whether a group teaches nothing: equal shaped returns, and no advantage where turns are compared.

    The same rewards as in `make_experience`, but for a KL penalty, which needs the learner.
    """
    parser = format_check(config.agent.parser) if config.shaping.format_penalty else None
    shaped = shape([group], replace(config.shaping, normalise="none"), format_missed=parser)
    totals = [float(one.rewards.sum()) for one in shaped]
    if max(totals) - min(totals) > config.rollout.equal_tolerance:
        return False
    estimator = find_estimator(config.estimator)
    if not estimator.centred:
        return True
    # grpo_turns and gigpo compare turns as well: equal totals can still hold a signal.
    tolerance = max(config.credit.tolerance, config.rollout.equal_tolerance)
    credit = replace(config.credit, whiten="none", weigh="trajectory", tolerance=tolerance)
    trajectories = [_trajectory(one, token_episode(one.episode), None, None, 0.0) for one in shaped]
    return not any(advantages.any() for advantages in estimator(trajectories, credit).advantages)


PER_ENV = ("episodes", "success", "return", "length", "valid_actions")
"""Metrics that a mixture reports of each of its environments."""


def describe(episodes: Sequence[Episode]) -> Metrics:
    """Numbers for the log about episodes that were trained on."""
    known = [episode.success for episode in episodes if episode.success is not None]
    turns = [turn for episode in episodes for turn in episode.turns]
    found = {
        "episodes": float(len(episodes)),
        "return": float(np.mean([episode.total_reward for episode in episodes])),
        "length": float(np.mean([episode.length for episode in episodes])),
        "cut_short": float(np.mean([episode.outcome.cut_short for episode in episodes])),
        "action_tokens": float(sum(len(turn.action_ids) for turn in turns)),
        "valid_actions": float(np.mean([bool(turn.info.get("valid", True)) for turn in turns] or [False])),
        "episode_generate": sum(turn.seconds.generate for turn in turns),
        "episode_step": sum(turn.seconds.step for turn in turns),
    }
    return found | ({"success": float(np.mean(known))} if known else {})


def describe_envs(episodes: Sequence[Episode], config: TrainConfig) -> Metrics:
    """In a mixture: the same of each environment, as ``env/NAME/success`` and so on."""
    found: Metrics = {}
    for env, label in zip(config.envs, env_labels(config), strict=True) if len(config.envs) > 1 else ():
        own = [one for one in episodes if one.spec.env_id == env.id and one.spec.env_kwargs == env.kwargs]
        numbers = describe(own) if own else {"episodes": 0.0}
        found |= {f"env/{label}/{name}": numbers[name] for name in PER_ENV if name in numbers}
    return found


def token_values(learner: Learner, batch: Batch) -> list[dict[str, list[float]]]:
    """After an update: of each episode's action tokens the advantage, and how far their probability moved."""
    ratios = np.exp(learner.logprobs(batch) - batch.arrays["behaviour"])
    both = zip(batch.by_episode(batch.arrays["advantages"]), batch.by_episode(ratios), strict=True)
    return [{"advantages": _rounded(advantages), "ratios": _rounded(moved)} for advantages, moved in both]


def _rounded(values: FloatArray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def token_staleness(episodes: Sequence[Episode], version: int | None) -> FloatArray:
    """For each action token, how many weight updates old the policy was that sampled it; 0 if unknown."""
    ages: list[float] = []
    for turn in (turn for episode in episodes for turn in episode.turns):
        spans = turn.version_spans if version is not None else ()
        for sampled_by, count in spans or ((version, len(turn.action_ids)),):
            ages.extend([float((version or 0) - (sampled_by or 0))] * count)
    return np.array(ages)


def age(groups: Sequence[Group], version: int) -> Metrics:
    """How many updates old the weights behind the action tokens are, on average and at most."""
    spans = [
        (version - played, count)
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
        for played, count in turn.version_spans
    ]
    tokens = sum(count for _, count in spans)
    return {
        "staleness": sum(old * count for old, count in spans) / tokens if tokens else 0.0,
        "staleness_max": float(max((old for old, count in spans if count), default=0)),
    }


def _judged(
    batch: Batch, config: TrainConfig, learner: Learner, kl_coef: float
) -> tuple[dict[str, FloatArray], FloatArray | None, list[float]]:
    """Passes of other models over the batch, where the settings ask for them."""
    extra: dict[str, FloatArray] = {}
    if config.loss.kl_coef:
        extra["reference"] = learner.reference(batch)
        if config.loss.kl_in == "reward":
            ours, theirs = torch.from_numpy(learner.logprobs(batch)), torch.from_numpy(extra["reference"])
            extra["penalty"] = kl_rewards(ours, theirs, kl_coef, estimator=config.loss.estimator).numpy()
    if not learner.has_critic:
        return extra, None, [0.0] * len(batch.episodes)
    values, last = learner.values(batch)
    return extra, values, last


def _cut(batch: Batch, values: FloatArray | None) -> Sequence[FloatArray | None]:
    return [None] * len(batch.episodes) if values is None else batch.by_episode(values)


def _trajectory(
    one: Shaped, token: TokenEpisode, penalty: FloatArray | None, values: FloatArray | None, last: float
) -> Trajectory:
    episode = one.episode
    return Trajectory(
        group=episode.spec.group_id,
        name=episode.spec.episode_id,
        tag=episode.spec.env_id,
        rewards=one.rewards,
        tokens=token.per_turn,
        terminated=not episode.outcome.cut_short,
        states=[turn.observation for turn in episode.turns],
        values=values,
        last_value=last,
        token_rewards=penalty,
    )
