"""What a policy loss can be told.

Nothing here imports torch: a mistake in a configuration is found at once. A setting that the chosen loss
would not read is refused, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import Literal

from rollgym.errors import UnknownName, UsageError
from rollgym.trainer.late_names import may_be_late

_COMMON = frozenset({"name", "entropy_coef", "kl_coef", "kl_estimator", "kl_in"})
_CLIP = frozenset({"clip_low", "clip_high", "decoupled", "tis_cap"})


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which settings a loss reads, and its own clip bounds where it has some."""

    reads: frozenset[str]
    clip: tuple[float, float] = (math.nan, math.nan)


LOSS_SPECS: dict[str, LossSpec] = {
    "ppo": LossSpec(_CLIP | {"dual_clip"}, (0.2, 0.2)),
    "grpo": LossSpec(_CLIP, (0.2, 0.2)),
    "gspo": LossSpec(_CLIP | {"ratio_level"}, (3e-4, 4e-4)),
    "cispo": LossSpec(_CLIP, (1.0, 4.0)),
    "topr": LossSpec(frozenset({"topr_positive", "topr_negative", "ratio_level"})),
    "reinforce": LossSpec(frozenset({"tis_cap"})),
}


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A policy loss by name, with its settings. `docs/losses.md` has the formulas."""

    name: str
    _: KW_ONLY
    clip_low: float | None = None
    """The ratio's lower bound is 1 - clip_low. ``None``: the loss's own (see `LOSS_SPECS`)."""
    clip_high: float | None = None
    """The ratio's upper bound is 1 + clip_high. ``None``: the loss's own."""
    dual_clip: float | None = None
    """Where the advantage is negative, the ratio counts up to this. ``None``: without bound."""
    topr_positive: tuple[float, float] = (1.0, 1.0)
    """Bounds of a row's ratio where the advantage is 0 or more."""
    topr_negative: tuple[float, float] = (0.0, 1.0)
    """Bounds of a row's ratio where the advantage is negative."""
    ratio_level: Literal["row", "episode"] = "row"
    """What ``gspo`` and ``topr`` take one ratio over. ``row``: a training row, which is the whole episode
    unless the chat template rewrote its history. ``episode``: all rows of an episode together."""
    decoupled: bool = True
    """True: the ratio is to the proximal policy, and `tis_cap` corrects for the behaviour policy.
    False: the ratio is to the behaviour policy."""
    tis_cap: float | None = 2.0
    """Where the importance weight proximal / behaviour is cut off; ``inf``: nowhere, ``None``: no weight."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """``None``: the one with the right gradient, k2 in the loss and k1 in the reward."""
    kl_in: Literal["loss", "reward"] = "loss"

    def __post_init__(self) -> None:
        spec = LOSS_SPECS.get(self.name)
        if spec is None and not may_be_late():
            raise UnknownName("policy loss", self.name, LOSS_SPECS, f"There are {', '.join(LOSS_SPECS)}.")
        for name in ("topr_positive", "topr_negative"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_values()
        self._check_kl()
        for name in sorted(self.changed - spec.reads - _COMMON) if spec is not None else ():
            others = [loss for loss, spec in LOSS_SPECS.items() if name in spec.reads]
            raise UsageError(
                f"The loss {self.name!r} does not read {name}. Leave it out, or choose {' or '.join(others)}."
            )
        if not self.decoupled and "tis_cap" in self.changed:
            raise UsageError(
                "With decoupled=False the ratio is to the behaviour policy already, and tis_cap is not read. "
                "Leave one of them out."
            )

    @property
    def changed(self) -> frozenset[str]:
        """The settings that are not at their default."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio may go below and above 1."""
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
            self.clip_low is None or 0 <= self.clip_low <= 1, "clip_low must be from 0 to 1", self.clip_low
        )
        _require(self.clip_high is None or self.clip_high >= 0, "clip_high must be 0 or more", self.clip_high)
        _require(self.dual_clip is None or self.dual_clip > 1, "dual_clip must be above 1", self.dual_clip)
        _require(self.tis_cap is None or self.tis_cap > 0, "tis_cap must be above 0", self.tis_cap)
        for name in ("topr_positive", "topr_negative"):
            bounds = getattr(self, name)
            fine = len(bounds) == 2 and 0 <= bounds[0] <= bounds[1]
            _require(fine, f"{name} must be two bounds, 0 <= low <= high", bounds)
        levels = ("row", "episode")
        _require(self.ratio_level in levels, "ratio_level must be 'row' or 'episode'", self.ratio_level)
        for name in ("entropy_coef", "kl_coef"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name} must be 0 or more and finite", value)

    def _check_kl(self) -> None:
        _require(self.kl_in in ("loss", "reward"), "kl_in must be 'loss' or 'reward'", self.kl_in)
        known = (None, "k1", "k2", "k3")
        _require(self.kl_estimator in known, "kl_estimator must be k1, k2 or k3", self.kl_estimator)
        unread = self.changed & {"kl_estimator", "kl_in"}
        if unread and not self.kl_coef:
            raise UsageError(
                f"{' and '.join(sorted(unread))} is not read while kl_coef is 0. Set kl_coef too."
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise UsageError(
                "k1 in the loss has a gradient of zero on average: it holds nothing back. "
                "Choose kl_estimator k2, or kl_in='reward'."
            )


def _require(condition: bool, expected: str, value: object) -> None:
    if not condition:
        raise UsageError(f"{expected}, not {value!r}")
