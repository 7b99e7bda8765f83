"""Credit: how good each action token was, from the rewards of whole episodes. See docs/credit.md.

Arrays hold action tokens only, so what the environment wrote carries no value, reward or discount. Time
passes from one turn with action tokens to the next; a turn without any adds its reward to the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollgym.errors import UnknownName, UsageError
from rollgym.trainer.credit_types import Credit, CreditSettings, FloatArray, Trajectory

__all__ = ["ESTIMATORS", "Credit", "CreditSettings", "Estimator", "Trajectory", "estimator", "find_estimator"]

Batch = Sequence[Trajectory]
Rule = Callable[[Batch, CreditSettings], tuple[list[FloatArray], list[FloatArray] | None]]
Describe = Callable[[Batch], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Estimator:
    """A named way to give credit: call it with trajectories and settings."""

    name: str
    rule: Rule
    reads: tuple[str, ...]
    centred: bool
    """True where advantages are relative to a group: whitening then does not shift them, and 0 stays 0."""
    describe: Describe | None = None
    """Metrics of its own about a batch."""

    def __call__(self, trajectories: Batch, settings: CreditSettings | None = None) -> Credit:
        """Advantages of a batch. `UsageError` where a setting is given that would be ignored."""
        settings = settings or CreditSettings()
        self._check(settings)
        if not trajectories:
            raise UsageError(f"{self.name} was given no trajectories; it needs at least one.")
        advantages, returns = self.rule(trajectories, settings)
        pools = _pools(trajectories, settings.whiten)
        advantages = _whitened(advantages, pools, settings, centre=not self.centred)
        metrics = _metrics(trajectories, settings, advantages)
        if self.describe is not None:
            metrics |= self.describe(trajectories)
        return Credit(advantages, returns, metrics)

    def _check(self, settings: CreditSettings) -> None:
        reads = {*self.reads, "tolerance"}
        if "whiten" in reads and settings.whiten == settings.baseline == "none":
            reads.discard("weigh")
        if settings.level == "turn" and "level" in reads:
            reads.discard("discount")
        if settings.divide_by == "one":
            reads.discard("std_correction")
        changed = {f.name for f in dataclasses.fields(settings) if getattr(settings, f.name) != f.default}
        ignored = sorted(changed - reads)
        if ignored:
            raise UsageError(
                f"{self.name} would ignore {', '.join(ignored)}; with the other settings as they are "
                f"it reads {', '.join(sorted(reads))}. Leave the others out, or choose another estimator."
            )


ESTIMATORS: dict[str, Estimator] = {}
"""All estimators by name."""


def find_estimator(name: str) -> Estimator:
    """The estimator of that name."""
    if name not in ESTIMATORS:
        raise UnknownName("estimator", name, ESTIMATORS, f"Estimators: {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[name]


def estimator(
    *reads: str, centred: bool = False, describe: Describe | None = None
) -> Callable[[Rule], Estimator]:
    """Register a rule as an estimator under its own name.

    Args:
        reads: The settings it reads; others that are changed are refused.
        centred: Whether its advantages are relative to a group already.
        describe: Metrics of its own about a batch.
    """

    def register(rule: Rule) -> Estimator:
        name = rule.__name__
        ESTIMATORS[name] = Estimator(name, rule, reads, centred, describe)
        return ESTIMATORS[name]

    return register


@estimator("whiten", "weigh", "std_correction", centred=True)
def grpo(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """An episode's score less the mean of its group, divided by the group's standard deviation."""
    return _whole(batch, _against_group(batch, settings, "std")), None


@estimator("whiten", "weigh", centred=True)
def dr_grpo(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """An episode's score less the mean of its group."""
    return _whole(batch, _against_group(batch, settings, "one")), None


@estimator("whiten", "weigh", centred=True)
def rloo(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """An episode's score less the mean of the others in its group."""
    return _whole(batch, _against_group(batch, settings, "others")), None


@estimator("gamma", "discount", "baseline", "whiten", "weigh")
def reinforce(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """The discounted return from each token on, less a constant where one is asked for."""
    found = [_returns(t, settings) for t in batch]
    for members in _pools(batch, settings.baseline):
        mean, _ = _moments([found[i] for i in members], settings.weigh)
        for i in members:
            found[i] = found[i] - mean
    return found, None


@estimator("gamma", "discount", "weigh")
def reinforce_pp(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """REINFORCE++: returns from each token on, then mean 0 and standard deviation 1 over the whole batch."""
    found = [_returns(t, settings) for t in batch]
    return _whitened(found, _pools(batch, "batch"), settings, centre=True), None


@estimator("level", "gamma", "lam", "discount", "whiten", "weigh")
def gae(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], list[FloatArray]]:
    """Generalised advantage estimation with a critic, over turns or over action tokens."""
    made = [_gae_turns(t, settings) if settings.level == "turn" else _gae_tokens(t, settings) for t in batch]
    return [advantages for advantages, _ in made], [returns for _, returns in made]


@estimator("gamma", "divide_by", "std_correction", "whiten", "weigh", centred=True)
def grpo_turns(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """The return from each turn on, against what the episodes of its group have from a turn on."""
    found = [_turn_returns(t, settings) for t in batch]
    relative = [np.zeros_like(own) for own in found]
    for members in _groups(batch):
        mean, std = _moments([found[i] for i in members], "trajectory")
        compared = sum(len(found[i]) > 0 for i in members)
        if std > settings.tolerance and compared > 1:
            scale = _corrected(std, compared, settings) if settings.divide_by == "std" else 1.0
            for i in members:
                relative[i] = (found[i] - mean) / scale
    return [np.repeat(own, t.played) for t, own in zip(batch, relative, strict=True)], None


def _equal_states(batch: Batch) -> dict[Hashable, list[int]]:
    """Turns with action tokens, numbered through the batch, by their group and the state they began in."""
    alike: dict[Hashable, list[int]] = {}
    number = 0
    for t in batch:
        if len(t.states) != len(t.tokens):
            raise UsageError(f"gigpo needs the state before each turn, but {t} has none. Give states.")
        for turn in np.flatnonzero(t.tokens).tolist():
            alike.setdefault((t.group, t.states[turn]), []).append(number)
            number += 1
    return alike


def _describe_states(batch: Batch) -> dict[str, float]:
    """How often states met: without shared states ``gigpo`` is ``grpo``."""
    sizes = np.array([len(turns) for turns in _equal_states(batch).values()])
    shared = sizes > 1
    turns = float(sizes.sum())
    return {
        "shared_state_frac": float(sizes[shared].sum()) / turns if turns else 0.0,
        "shared_states": float(shared.sum()),
        "turns_per_shared_state": float(sizes[shared].mean()) if shared.any() else 0.0,
    }


@estimator(
    "gamma",
    "step_weight",
    "divide_by",
    "std_correction",
    "whiten",
    "weigh",
    centred=True,
    describe=_describe_states,
)
def gigpo(batch: Batch, settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """GRPO's advantage, and a weighted one among all turns of the group that began in the same state."""
    alike = _equal_states(batch)
    steps = [step for t in batch for step in _turn_returns(t, settings)]
    episodes = _against_group(batch, settings, settings.divide_by)
    own = settings.step_weight * _relative(np.array(steps), alike.values(), settings, settings.divide_by)
    parts = np.split(own, np.cumsum([len(t.played) for t in batch])[:-1])
    return [np.repeat(a + b, t.played) for t, a, b in zip(batch, episodes, parts, strict=True)], None


def _gae_tokens(t: Trajectory, settings: CreditSettings) -> tuple[FloatArray, FloatArray]:
    values = _values(t)
    gamma = _per_token(t, settings.gamma, settings.discount)
    lam = _per_token(t, settings.lam, settings.discount)
    advantages = _gae(t.by_token(), values, t.last, gamma, lam)
    return advantages, advantages + values


def _gae_turns(t: Trajectory, settings: CreditSettings) -> tuple[FloatArray, FloatArray]:
    values = _values(t)[t.starts]
    gamma, lam = np.full(len(values), settings.gamma), np.full(len(values), settings.lam)
    advantages = _gae(t.by_turn(), values, t.last, gamma, lam)
    return np.repeat(advantages, t.played), np.repeat(advantages + values, t.played)


def _values(t: Trajectory) -> FloatArray:
    if t.values is None:
        raise UsageError(f"gae needs a critic's values, but {t} has none. Give values, or use reinforce.")
    return t.values


def _gae(
    rewards: FloatArray, values: FloatArray, last: float, gamma: FloatArray, lam: FloatArray
) -> FloatArray:
    following = np.append(values, last)[1:] if len(values) else values
    return _accumulate(rewards + gamma * following - values, gamma * lam)


def _returns(t: Trajectory, settings: CreditSettings) -> FloatArray:
    """The discounted return from each action token on."""
    return _accumulate(t.by_token(), _per_token(t, settings.gamma, settings.discount), t.last)


def _turn_returns(t: Trajectory, settings: CreditSettings) -> FloatArray:
    """The discounted return from each turn on that has action tokens, without what a critic would add."""
    return _accumulate(t.by_turn(), np.full(len(t.played), settings.gamma))


def _accumulate(terms: FloatArray, decay: FloatArray, last: float = 0.0) -> FloatArray:
    """``sum[i] = terms[i] + decay[i] * sum[i + 1]``, and ``last`` beyond the end."""
    sums = np.empty(len(terms))
    for i in range(len(terms) - 1, -1, -1):
        last = sums[i] = terms[i] + decay[i] * last
    return sums


def _per_token(t: Trajectory, factor: float, unit: str) -> FloatArray:
    """The factor from each token to the next: by turns, it is 1 except where a turn ends."""
    factors = np.full(int(t.tokens.sum()), factor if unit == "token" else 1.0)
    factors[t.ends] = factor
    return factors


def _against_group(batch: Batch, settings: CreditSettings, divide_by: str) -> FloatArray:
    """Each episode's score against those of its group: once per episode, however long it is."""
    return _relative(np.array([t.score for t in batch]), _groups(batch), settings, divide_by)


def _relative(
    scores: FloatArray, groups: Iterable[list[int]], settings: CreditSettings, divide_by: str
) -> FloatArray:
    """Differences from the mean of the group; 0 where a group has one member or no variance."""
    relative = np.zeros(len(scores))
    for members in groups:
        own = scores[members]
        if not _flat(own, settings):
            std = _corrected(float(own.std()), len(own), settings)
            scale = {"std": std, "one": 1.0, "others": (len(own) - 1) / len(own)}[divide_by]
            relative[members] = (own - own.mean()) / scale
    return relative


def _corrected(std: float, count: int, settings: CreditSettings) -> float:
    """A standard deviation over ``count`` members that divides by n - `std_correction` instead of n."""
    return std * float(np.sqrt(count / (count - settings.std_correction)))


def _flat(scores: FloatArray, settings: CreditSettings) -> bool:
    return len(scores) < 2 or bool(scores.std() <= settings.tolerance)


def _whole(batch: Batch, scores: FloatArray) -> list[FloatArray]:
    """Each episode's number for all of its action tokens."""
    return [np.full(int(t.tokens.sum()), score) for t, score in zip(batch, scores, strict=True)]


def _groups(batch: Batch) -> list[list[int]]:
    return _by_key(t.group for t in batch)


def _pools(batch: Batch, over: str) -> list[list[int]]:
    """Who shares a mean: nobody, the whole batch, or the episodes of one environment."""
    return [] if over == "none" else _by_key(t.tag if over == "tag" else "" for t in batch)


def _by_key(keys: Iterable[str]) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


def _moments(arrays: Sequence[FloatArray], weigh: str, *, centre: bool = True) -> tuple[float, float]:
    """Mean (0 without ``centre``) and standard deviation about it, each trajectory or each token once."""
    weights = np.concatenate(
        [np.full(len(a), 1 / len(a) if weigh == "trajectory" else 1.0) for a in arrays if len(a)]
        or [np.zeros(0)]
    )
    numbers = np.concatenate(arrays)
    if not len(numbers):
        return 0.0, 0.0
    mean = float(np.average(numbers, weights=weights)) if centre else 0.0
    return mean, float(np.sqrt(np.average((numbers - mean) ** 2, weights=weights)))


def _whitened(
    arrays: Sequence[FloatArray], pools: list[list[int]], settings: CreditSettings, *, centre: bool
) -> list[FloatArray]:
    white = list(arrays)
    for members in pools:
        mean, std = _moments([arrays[i] for i in members], settings.weigh, centre=centre)
        for i in members:
            white[i] = (arrays[i] - mean) / std if std > settings.tolerance else np.zeros(len(arrays[i]))
    return white


def _metrics(batch: Batch, settings: CreditSettings, advantages: Sequence[FloatArray]) -> dict[str, float]:
    """What the batch was like; shares are of groups or of trajectories."""
    scores = np.array([t.score for t in batch])
    groups = _groups(batch)
    sizes = np.array([len(members) for members in groups])
    flat = np.array([_flat(scores[members], settings) for members in groups])
    mean, std = _moments(advantages, "token")
    return {
        "groups": float(len(groups)),
        "groups_of_one": float(np.mean(sizes == 1)),
        "groups_without_variance": float(np.mean(flat & (sizes > 1))),
        "cut_short": float(np.mean([not t.terminated for t in batch])),
        "score_mean": float(scores.mean()),
        "advantage_mean": mean,
        "advantage_std": std,
        "advantage_largest": max((float(np.abs(a).max()) for a in advantages if len(a)), default=0.0),
    }
