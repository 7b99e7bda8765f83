"""Settings of the policy loss.

Imports no torch, so that a mistake in a config is found at once. A setting that the chosen loss does not read
is refused.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import Literal

from rollgym.core.errors import UnknownName, UsageError
from rollgym.trainer.deferred_names import deferred_names_allowed
from rollgym.trainer.losses.aggregation import Mode, check_aggregation

_COMMON = frozenset(
    {"name", "entropy_coef", "entropy_target", "kl_coef", "kl_estimator", "kl_in", "kl_target"}
    | {"aggregation", "aggregation_constant"}
)
_IMPORTANCE = frozenset({"tis_cap", "reject_tokens", "reject_sequences"})
_CLIP = frozenset({"clip_low", "clip_high", "decoupled"}) | _IMPORTANCE


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The settings a loss reads, and its default clip bounds if it clips."""

    reads: frozenset[str]
    clip: tuple[float, float] = (math.nan, math.nan)


LOSS_SPECS: dict[str, LossSpec] = {
    "ppo": LossSpec(_CLIP | {"dual_clip"}, (0.2, 0.2)),
    "grpo": LossSpec(_CLIP, (0.2, 0.2)),
    "gspo": LossSpec(_CLIP | {"ratio_level"}, (3e-4, 4e-4)),
    "cispo": LossSpec(_CLIP, (1.0, 4.0)),
    "topr": LossSpec(frozenset({"topr_positive", "topr_negative", "ratio_level"})),
    "reinforce": LossSpec(_IMPORTANCE),
}


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy loss and its settings; `docs/losses.md` has the formulas.

    Example:
        >>> LossConfig("grpo", clip_high=0.28).clip
        (0.2, 0.28)
    """

    name: str
    """Policy loss: ppo, grpo, gspo, cispo, topr, reinforce, or a registered one."""
    _: KW_ONLY
    clip_low: float | None = None
    """The lower bound of the ratio is 1 - clip_low. Default: depends on the loss (0.2 for ppo and grpo)."""
    clip_high: float | None = None
    """The upper bound of the ratio is 1 + clip_high. Default: depends on the loss (0.2 for ppo and grpo)."""
    dual_clip: float | None = None
    """Upper bound of the ratio where the advantage is negative, above 1. Default: no bound."""
    topr_positive: tuple[float, float] = (1.0, 1.0)
    """Lower and upper bound of ``topr``'s ratio where the advantage is 0 or more."""
    topr_negative: tuple[float, float] = (0.0, 1.0)
    """Lower and upper bound of ``topr``'s ratio where the advantage is negative."""
    ratio_level: Literal["sequence", "episode"] = "sequence"
    """Tokens that share one ratio in ``gspo`` and ``topr``: those of a training sequence (the whole episode,
    unless the chat template rewrote its history), or those of all sequences of an episode."""
    decoupled: bool = True
    """True: the ratio is to the proximal policy, and ``tis_cap`` corrects for the rollout policy. False: the
    ratio is to the rollout policy."""
    tis_cap: float | None = 2.0
    """Truncated importance sampling: cap of the weight proximal / rollout. ``.inf``: no cap; ``null``: no
    importance weight."""
    reject_tokens: tuple[float, float] | None = None
    """Bounds of the ratio proximal / rollout of a token; outside them it has no policy gradient. Default: no
    bounds."""
    reject_sequences: tuple[float, float] | None = None
    """Bounds of the geometric mean of that ratio over a training sequence (an episode, with
    ``ratio_level=episode``); outside them none of its tokens has a policy gradient. Default: no bounds."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. Default: no bonus."""
    entropy_target: float | None = None
    """Adapt ``entropy_coef`` after each step so that the entropy per token approaches this, in nats. Default:
    ``entropy_coef`` stays constant."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty to the initial policy. Default: no penalty, and no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """KL estimator. Default: the one with the right gradient, k2 in the loss and k1 in the reward."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty applies: as a term of the loss, or subtracted from the rewards."""
    kl_target: float | None = None
    """Adapt ``kl_coef`` after each step so that the KL to the initial policy approaches this, in nats.
    Default: ``kl_coef`` stays constant."""
    aggregation: Mode = "token-mean"
    """Weights of tokens: the same for every token of the batch (token-mean), the same for every episode
    (sequence-mean), or 1 / (episodes * aggregation_constant) (constant, Dr. GRPO)."""
    aggregation_constant: float | None = None
    """Divisor of ``aggregation: constant``, in tokens per episode, such as the maximum episode length."""

    def __post_init__(self) -> None:
        spec = LOSS_SPECS.get(self.name)
        if spec is None and not deferred_names_allowed():
            raise UnknownName("policy loss", self.name, LOSS_SPECS, f"Losses: {', '.join(LOSS_SPECS)}.")
        for name in ("topr_positive", "topr_negative", "reject_tokens", "reject_sequences"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_values()
        self._check_kl()
        check_aggregation(self.aggregation, self.aggregation_constant)
        for name in sorted(self.changed - spec.reads - _COMMON) if spec is not None else ():
            others = [loss for loss, spec in LOSS_SPECS.items() if name in spec.reads]
            raise UsageError(
                f"The loss {self.name!r} does not read {name}. Remove it, or choose {' or '.join(others)}."
            )
        unread = sorted(self.changed & _IMPORTANCE)
        if not self.decoupled and unread:
            raise UsageError(
                f"decoupled=false takes the ratio to the rollout policy and does not read {unread[0]}. "
                "Remove one of the two."
            )

    @property
    def changed(self) -> frozenset[str]:
        """The settings that are not at their default."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @property
    def rejects(self) -> bool:
        """Whether tokens or sequences are rejected by their importance ratio."""
        return self.reject_tokens is not None or self.reject_sequences is not None

    @property
    def clip(self) -> tuple[float, float]:
        """Maximum distance of the ratio below and above 1."""
        low, high = LOSS_SPECS[self.name].clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def estimator(self) -> Literal["k1", "k2", "k3"]:
        """The KL estimator in use."""
        return self.kl_estimator or ("k2" if self.kl_in == "loss" else "k1")

    def _check_values(self) -> None:
        _require(
            self.clip_low is None or 0 <= self.clip_low <= 1,
            "clip_low must be between 0 and 1",
            self.clip_low,
        )
        _require(self.clip_high is None or self.clip_high >= 0, "clip_high must be 0 or more", self.clip_high)
        _require(self.dual_clip is None or self.dual_clip > 1, "dual_clip must be above 1", self.dual_clip)
        _require(self.tis_cap is None or self.tis_cap > 0, "tis_cap must be above 0", self.tis_cap)
        for name in ("topr_positive", "topr_negative"):
            bounds = getattr(self, name)
            valid = len(bounds) == 2 and 0 <= bounds[0] <= bounds[1]
            _require(valid, f"{name} must be two bounds, 0 <= low <= high", bounds)
        for name in ("reject_tokens", "reject_sequences"):
            bounds = getattr(self, name)
            valid = bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1])
            _require(valid, f"{name} must be two bounds, 0 <= low <= 1 <= high", bounds)
        levels = ("sequence", "episode")
        _require(self.ratio_level in levels, "ratio_level must be 'sequence' or 'episode'", self.ratio_level)
        for name in ("entropy_coef", "kl_coef"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name} must be 0 or more and finite", value)

        target = self.entropy_target
        _require(target is None or 0 < target < math.inf, "entropy_target must be above 0", target)
        if target is not None and not self.entropy_coef:
            raise UsageError(
                "entropy_target is only read with entropy_coef > 0, the coefficient it starts with."
            )

    def _check_kl(self) -> None:
        _require(self.kl_in in ("loss", "reward"), "kl_in must be 'loss' or 'reward'", self.kl_in)
        estimators = (None, "k1", "k2", "k3")
        _require(self.kl_estimator in estimators, "kl_estimator must be k1, k2 or k3", self.kl_estimator)
        _require(self.kl_target is None or self.kl_target > 0, "kl_target must be above 0", self.kl_target)
        unread = self.changed & {"kl_estimator", "kl_in", "kl_target"}
        if unread and not self.kl_coef:
            raise UsageError(
                f"{' and '.join(sorted(unread))} {'is' if len(unread) == 1 else 'are'} only read with "
                "kl_coef > 0: set kl_coef too."
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise UsageError(
                "kl_estimator=k1 in the loss has an expected gradient of zero and penalizes nothing. "
                "Choose kl_estimator=k2, or kl_in=reward."
            )


def _require(condition: bool, expected: str, value: object) -> None:
    if not condition:
        raise UsageError(f"{expected}, not {value!r}.")
