"""Settings and metrics that 0.2.0 renamed: an error for an old name gives the new one."""

from __future__ import annotations

from typing import Any

SINCE = "0.2.0"

RENAMED_KEYS: dict[str, str] = {
    "address": "ray.address",
    "agent.practice": "agent.format_examples",
    "agent.remember": "agent.history",
    "agent.remind": "agent.format_reminder",
    "constant": "loss.aggregation_constant",
    "credit": "advantage",
    "credit.divide_by": "advantage.normalize_std",
    "gpus": "ray.num_gpus",
    "heartbeat_timeout": "ray.heartbeat_timeout",
    "kl_target": "loss.kl_target",
    "learner.final_share": "learner.min_lr_ratio",
    "learner.micro_tokens": "learner.max_tokens_per_microbatch",
    "rollout.extra": "rollout.oversample",
    "rollout.modules": "imports",
    "rollout.refills": "rollout.max_retries_per_group",
    "rollout.skip_equal_returns": "rollout.filter_zero_variance",
    "rollout.staleness": "rollout.max_staleness",
    "rollout.under_way": "rollout.on_weight_update",
    "rollout.when_short": "rollout.incomplete_groups",
    "shaping": "reward_shaping",
    "shaping.normalise": "reward_shaping.normalize",
    "strategy": "learner.strategy",
    "weighting": "loss.aggregation",
}
"""Old config key -> new key."""

RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "advantage.baseline": {"tag": "env"},
    "advantage.normalize_std": {"std": True, "one": False},
    "advantage.whiten": {"tag": "env"},
    "agent.history": {True: "full", False: "none"},
    "devices.offload": {"optimiser": "optimizer"},
    "engine.kind": {"torch": "embedded"},
    "learner.critic": {"head": "shared", "own": "separate"},
    "learner.old_logprobs": {"behaviour": "rollout"},
    "learner.strategy": {"local": "single"},
    "loss.ratio_level": {"row": "sequence"},
    "reward_shaping.normalize": {"tag": "env"},
}
"""New config key -> old value -> new value."""
