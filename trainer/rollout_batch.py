"""From groups of episodes to a training batch: shaped rewards, reference and values, advantages, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollgym.core.errors import UsageError
from rollgym.core.roles import by_turns, role_groups, role_names, role_return, role_success
from rollgym.core.types import Episode, Group
from rollgym.trainer.advantages import find_estimator
from rollgym.trainer.config import POLICY, TrainConfig, domains, env_labels, plays_in
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import FloatArray, token_episode
from rollgym.trainer.learner.protocol import LearnerProtocol, Metrics
from rollgym.trainer.losses.kl import kl_rewards
from rollgym.trainer.reward_shaping import RewardShapingConfig, ShapedEpisode, format_check, shape_rewards

PER_ENV = ("episodes", "success", "return", "length", "valid_actions")
"""Metrics that a mixture reports for each of its environments."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """A batch, and metrics of the episodes it was made from."""

    batch: Batch
    metrics: Metrics


def make_rollout_batch(
    groups: Sequence[Group],
    config: TrainConfig,
    learner: LearnerProtocol,
    kl_coef: float,
    version: int | None = None,
) -> RolloutBatch:
    """Make the training batch of finished groups.

    Args:
        groups: Finished groups of episodes.
        config: The run's settings.
        learner: Computes reference log-probs and values.
        kl_coef: The current KL coefficient.
        version: The learner's policy version. Tokens of older versions are left out of
            ``train_rollout_logprob_diff``.

    Raises:
        UsageError: No episode has a turn.
    """
    played = [episode for group in groups for episode in group.episodes]
    shaped = _shape(groups, config, config.reward_shaping)
    episodes = [each.episode for each in shaped]
    """One for each role of the policy in each of ``played``."""
    if not any(episode.turns for episode in episodes):
        raise UsageError(
            "Nothing to train on: no episode has a turn. If all of them ended with token_limit, the first "
            "prompt does not fit the context: raise model.context."
        )
    tokens = [token_episode(episode) for episode in episodes]
    batch = make_batch(tokens)
    arrays, kl_penalty, last_values = _model_outputs(batch, config, learner, kl_coef)
    penalties, values = _by_episode(batch, kl_penalty), _by_episode(batch, arrays.get("values"))
    trajectories = [
        shaped[number].trajectory(
            tokens[number].tokens_per_turn,
            values=values[number],
            last_value=last_values[number],
            token_rewards=penalties[number],
        )
        for number in range(len(episodes))
    ]
    result = find_estimator(config.estimator)(trajectories, config.advantage)
    arrays["advantages"] = np.concatenate(result.advantages)
    if result.returns is not None and "values" in arrays:
        arrays["returns"] = np.concatenate(result.returns)
    else:
        arrays.pop("values", None)
    staleness = token_staleness(episodes, version)
    if staleness.any():
        arrays["staleness"] = staleness
    if config.rollout.on_stale == "mask" and (staleness > config.rollout.max_staleness).any():
        arrays["trained"] = (staleness <= config.rollout.max_staleness).astype(np.float64)
    metrics = {
        **result.metrics,
        **episode_metrics(played),
        **env_metrics(played, config),
        **domain_metrics(played, config),
        **role_metrics(played),
    }
    return RolloutBatch(batch.with_arrays(**arrays), metrics)


def _shape(groups: Sequence[Group], config: TrainConfig, shaping: RewardShapingConfig) -> list[ShapedEpisode]:
    """Shape the trajectories of the policy: in an environment with roles, one for each of its roles."""
    format_missed = format_check(config.agent.parser) if shaping.format_penalty else None
    return shape_rewards(role_groups(groups, POLICY), shaping, format_missed=format_missed)


def _model_outputs(
    batch: Batch, config: TrainConfig, learner: LearnerProtocol, kl_coef: float
) -> tuple[dict[str, FloatArray], FloatArray | None, list[float]]:
    """Reference log-probs and values, the KL penalty per token, and the value after each episode.

    Runs only the forward passes that the settings need.
    """
    arrays: dict[str, FloatArray] = {}
    kl_penalty = None
    if config.loss.kl_coef:
        arrays["reference"] = learner.reference(batch)
        if config.loss.kl_in == "reward":
            logprobs = torch.from_numpy(learner.logprobs(batch))
            reference = torch.from_numpy(arrays["reference"])
            kl_penalty = kl_rewards(logprobs, reference, kl_coef, estimator=config.loss.estimator).numpy()
    last_values = [0.0] * len(batch.episodes)
    if learner.has_critic:
        arrays["values"], last_values = learner.values(batch)
    return arrays, kl_penalty, last_values


def _by_episode(batch: Batch, values: FloatArray | None) -> Sequence[FloatArray | None]:
    return [None] * len(batch.episodes) if values is None else batch.by_episode(values)


def zero_variance(group: Group, config: TrainConfig) -> bool:
    """Return whether a group has no learning signal: equal shaped returns and, by turn, no advantages.

    Uses the rewards of `make_rollout_batch` without the KL penalty, which needs the learner.
    """
    shaped = _shape([group], config, replace(config.reward_shaping, normalize="none"))
    totals: dict[str, list[float]] = {}
    for each in shaped:  # by role: each role is compared with itself
        totals.setdefault(each.episode.spec.group_id, []).append(float(each.rewards.sum()))
    if any(max(own) - min(own) > config.rollout.equal_tolerance for own in totals.values()):
        return False
    if not shaped:
        return True
    estimator = find_estimator(config.estimator)
    if not estimator.centered:
        return True
    # grpo_turns and gigpo also compare turns: equal totals can still contain a signal.
    tolerance = max(config.advantage.tolerance, config.rollout.equal_tolerance)
    settings = replace(config.advantage, whiten="none", weigh="trajectory", tolerance=tolerance)
    trajectories = [each.trajectory(token_episode(each.episode).tokens_per_turn) for each in shaped]
    return not any(advantages.any() for advantages in estimator(trajectories, settings).advantages)


def token_diagnostics(
    learner: LearnerProtocol, batch: Batch, groups: Sequence[Group]
) -> list[dict[str, list[float]]]:
    """After an update: advantage and ratio (new / rollout probability) of each episode's action tokens."""
    ratios = np.exp(learner.logprobs(batch) - batch.arrays["behavior"])
    values = {"advantages": batch.arrays["advantages"], "ratios": ratios}
    names = [episode.name for episode in batch.episodes]
    parts = {
        kind: dict(zip(names, map(_rounded, batch.by_episode(array)), strict=True))
        for kind, array in values.items()
    }
    return [
        {kind: by_turns(episode, own) for kind, own in parts.items()}
        for group in groups
        for episode in group.episodes
    ]


def _rounded(values: FloatArray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


# --- metrics of the episodes


def episode_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Metrics of the episodes of a training step; times are seconds, summed over episodes."""
    successes = [episode.success for episode in episodes if episode.success is not None]
    turns = [turn for episode in episodes for turn in episode.turns]
    metrics = {
        "episodes": float(len(episodes)),
        "return": float(np.mean([episode.total_reward for episode in episodes])),
        "length": float(np.mean([episode.length for episode in episodes])),
        "truncated_frac": float(np.mean([episode.outcome.cut_short for episode in episodes])),
        "action_tokens": float(sum(len(turn.action_ids) for turn in turns)),
        "valid_actions": float(np.mean([bool(turn.info.get("valid", True)) for turn in turns] or [False])),
        "episode_generate": sum(turn.seconds.generate for turn in turns),
        "episode_step": sum(turn.seconds.step for turn in turns),
    }
    return metrics | ({"success": float(np.mean(successes))} if successes else {})


def env_metrics(episodes: Sequence[Episode], config: TrainConfig) -> Metrics:
    """In a mixture: metrics of each environment, as ``env/NAME/success`` and so on."""
    result: Metrics = {}
    for env, label in zip(config.envs, env_labels(config), strict=True) if len(config.envs) > 1 else ():
        own = [episode for episode in episodes if plays_in(episode, env)]
        metrics = episode_metrics(own) if own else {"episodes": 0.0}
        result |= {f"env/{label}/{name}": metrics[name] for name in PER_ENV if name in metrics}
    return result


def domain_metrics(episodes: Sequence[Episode], config: TrainConfig) -> Metrics:
    """Success of each domain that ``envs.domain`` names, over all of its environments."""
    result: Metrics = {}
    for domain, members in domains(config).items():
        own = [e for e in episodes if any(plays_in(e, config.envs[number]) for number in members)]
        successes = [bool(episode.success) for episode in own if episode.success is not None]
        if successes:
            result[f"success/{domain}"] = float(np.mean(successes))
    return result


def role_metrics(episodes: Sequence[Episode]) -> Metrics:
    """In environments with roles: return and success of each role, as ``role/NAME/return`` and so on."""
    result: Metrics = {}
    for role in dict.fromkeys(name for episode in episodes for name in role_names(episode)):
        own = [episode for episode in episodes if role in role_names(episode)]
        result[f"role/{role}/return"] = float(np.mean([role_return(episode, role) for episode in own]))
        successes = [role_success(episode, role) for episode in own if episode.success is not None]
        if successes:
            result[f"role/{role}/success"] = float(np.mean([bool(success) for success in successes]))
    return result


def token_staleness(episodes: Sequence[Episode], version: int | None) -> FloatArray:
    """[action tokens] Age of the policy that sampled each token, in weight updates; 0 if unknown."""
    ages: list[float] = []
    for turn in (turn for episode in episodes for turn in episode.turns):
        spans = turn.version_spans if version is not None else ()
        for sampled_by, count in spans or ((version, len(turn.action_ids)),):
            ages.extend([float((version or 0) - (sampled_by or 0))] * count)
    return np.array(ages)


def staleness_metrics(groups: Sequence[Group], version: int, bound: int | None = None) -> Metrics:
    """Age of the weights that sampled the action tokens, in weight updates: mean, quantiles and maximum.

    ``fresh_token_frac`` is the share of tokens of the current weights, over which
    ``train_rollout_logprob_diff`` compares engine and learner. With a bound: ``masked_token_frac`` and
    ``masked_turns``, the tokens and whole turns that are older.
    """
    turns = [
        [(version - sampled_by, count) for sampled_by, count in turn.version_spans if count]
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
    ]
    spans = sorted(span for turn in turns for span in turn)
    ages = np.array([age for age, _ in spans], dtype=np.float64)
    counts = np.array([count for _, count in spans], dtype=np.float64)
    total = counts.sum()
    metrics = {
        "staleness": float((ages * counts).sum() / total) if total else 0.0,
        "staleness_max": float(ages[-1]) if total else 0.0,
        "fresh_token_frac": float(counts[ages == 0].sum() / total) if total else 1.0,
    }
    for percent in (50, 90, 99):
        at = int(np.searchsorted(counts.cumsum(), percent / 100 * total)) if total else 0
        metrics[f"staleness_p{percent}"] = float(ages[at]) if total else 0.0
    if bound is not None:
        metrics["masked_token_frac"] = float(counts[ages > bound].sum() / total) if total else 0.0
        metrics["masked_turns"] = float(sum(bool(turn) and min(turn)[0] > bound for turn in turns))
    return metrics
