"""Advantage estimators against plain loops, and invariances."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.advantages import AdvantageConfig, Trajectory, find_estimator

RELATIVE = ["grpo", "dr_grpo", "rloo", "grpo_turns", "gigpo"]
FEW = settings(max_examples=40, deadline=None)


def credit(name, trajectories, **changes):
    return find_estimator(name)(trajectories, AdvantageConfig(**changes))


def advantages(name, trajectories, **changes):
    return [a.tolist() for a in credit(name, trajectories, **changes).advantages]


def near(expected, **how):
    return [pytest.approx(row, **({"abs": 1e-9} | how)) for row in expected]


numbers = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def trajectories(draw):
    tokens = draw(st.lists(st.integers(0, 3), max_size=5))
    turns, total = len(tokens), sum(tokens)

    def some(count):
        return draw(st.lists(numbers, min_size=count, max_size=count))

    return Trajectory(
        group=draw(st.sampled_from("abc")),
        env_id=draw(st.sampled_from("xy")),
        rewards=some(turns),
        tokens=tokens,
        terminated=draw(st.booleans()),
        states=draw(st.lists(st.sampled_from("pqr"), min_size=turns, max_size=turns)),
        values=some(total),
        last_value=draw(numbers),
        token_rewards=some(total) if draw(st.booleans()) else None,
    )


batches = st.lists(trajectories(), min_size=1, max_size=6)
units = st.sampled_from(["turn", "token"])
factors = st.sampled_from([0.0, 0.5, 0.9, 1.0])


# --- the same once more, as plain as can be ---


def places(t):
    """(turn, whether it is the turn's last) of every action token."""
    return [(turn, i == count - 1) for turn, count in enumerate(t.tokens) for i in range(count)]


def reward_at(t, i):
    turn, last = places(t)[i]
    found = 0.0 if t.token_rewards is None else t.token_rewards[i]
    if last:
        found += t.rewards[turn]
        for later in range(turn + 1, len(t.tokens)):
            if t.tokens[later]:
                break
            found += t.rewards[later]
    return found


def clock(t, unit):
    """The time of every action token, and of the end."""
    met = sorted({turn for turn, _ in places(t)})
    times = [i if unit == "token" else met.index(turn) for i, (turn, _) in enumerate(places(t))]
    return [*times, len(times) if unit == "token" else len(met)]


def plain_returns(t, gamma, unit):
    times = clock(t, unit)
    count = len(times) - 1
    last = 0.0 if t.terminated else t.last_value
    return [
        sum(gamma ** (times[k] - times[i]) * reward_at(t, k) for k in range(i, count))
        + gamma ** (times[count] - times[i]) * last
        for i in range(count)
    ]


def plain_gae(t, gamma, lam, unit):
    times = clock(t, unit)
    count = len(times) - 1
    values = [*t.values, 0.0 if t.terminated else t.last_value]
    deltas = [
        reward_at(t, k) + gamma ** (times[k + 1] - times[k]) * values[k + 1] - values[k] for k in range(count)
    ]
    return [
        sum((gamma * lam) ** (times[k] - times[i]) * deltas[k] for k in range(i, count)) for i in range(count)
    ]


def as_turns(t):
    """The episode with one token for each turn that had any: its turn-level view."""
    starts = [i for i, (turn, _) in enumerate(places(t)) if i == 0 or places(t)[i - 1][0] != turn]
    ends = [*starts[1:], len(places(t))] if starts else []
    extra = t.token_rewards
    return replace(
        t,
        tokens=[min(count, 1) for count in t.tokens],
        values=[t.values[i] for i in starts],
        token_rewards=None if extra is None else [sum(extra[i:j]) for i, j in zip(starts, ends, strict=True)],
    )


def stretch(t, per_turn):
    counts = [count for count in t.tokens if count]
    return [x for x, count in zip(per_turn, counts, strict=True) for _ in range(count)]


def score(t):
    return sum(t.rewards) + (0.0 if t.token_rewards is None else sum(t.token_rewards))


def mean_std(xs, weights=None):
    weights = weights or [1.0] * len(xs)
    mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)
    square = sum(w * (x - mean) ** 2 for w, x in zip(weights, xs, strict=True)) / sum(weights)
    return mean, math.sqrt(square)


def plain_relative(own, group, how):
    mean, std = mean_std(group)
    if len(group) == 1 or std <= 1e-6:
        return 0.0
    if how == "rloo":
        others = list(group)
        others.remove(own)
        return own - sum(others) / len(others)
    return (own - mean) / (std if how == "grpo" else 1.0)


def plain_scores(batch, how):
    return [
        plain_relative(score(t), [score(other) for other in batch if other.group == t.group], how)
        for t in batch
    ]


def plain_whitened(rows, keys, weigh, centre):
    made = []
    for row, key in zip(rows, keys, strict=True):
        pool = [r for r, k in zip(rows, keys, strict=True) if k == key]
        xs = [x for r in pool for x in r]
        weights = [1 / len(r) if weigh == "trajectory" else 1.0 for r in pool for _ in r]
        if not xs:
            made.append([])
            continue
        mean, std = mean_std(xs, weights)
        if not centre:
            mean, std = 0.0, mean_std([x * x for x in xs], weights)[0] ** 0.5
        made.append([(x - mean) / std if std > 1e-6 else 0.0 for x in row])
    return made


@FEW
@given(batches, st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_scores_are_compared_in_the_group_and_given_to_every_token(batch, name):
    expected = [[a] * int(t.tokens.sum()) for t, a in zip(batch, plain_scores(batch, name), strict=True)]
    assert advantages(name, batch) == near(expected)


@FEW
@given(batches, factors, units, st.sampled_from(["none", "batch", "env"]), st.sampled_from([0, 1]))
def test_reinforce_is_the_return_to_go_minus_a_baseline(batch, gamma, unit, baseline, by_token):
    returns = [plain_returns(t, gamma, unit) for t in batch]
    expected = []
    for t, row in zip(batch, returns, strict=True):
        pool = [
            r
            for other, r in zip(batch, returns, strict=True)
            if r and (baseline == "batch" or other.env_id == t.env_id)
        ]
        weights = [1.0 if by_token else 1 / len(r) for r in pool for _ in r]
        constant = mean_std([x for r in pool for x in r], weights)[0] if pool and baseline != "none" else 0.0
        expected.append([x - constant for x in row])
    weigh = {"weigh": "token"} if by_token and baseline != "none" else {}
    assert advantages("reinforce", batch, gamma=gamma, discount=unit, baseline=baseline, **weigh) == near(
        expected
    )


@FEW
@given(batches, factors, units, st.sampled_from(["trajectory", "token"]))
def test_reinforce_pp_is_the_return_to_go_whitened_over_the_batch(batch, gamma, unit, weigh):
    returns = [plain_returns(t, gamma, unit) for t in batch]
    expected = plain_whitened(returns, ["all"] * len(batch), weigh, centre=True)
    assert advantages("reinforce_pp", batch, gamma=gamma, discount=unit, weigh=weigh) == near(expected)


@FEW
@given(batches, factors, factors, units)
def test_gae_over_tokens(batch, gamma, lam, unit):
    made = credit("gae", batch, level="token", gamma=gamma, lam=lam, discount=unit)
    expected = [plain_gae(t, gamma, lam, unit) for t in batch]
    assert [a.tolist() for a in made.advantages] == near(expected)
    assert made.returns is not None
    targets = [(np.array(row) + t.values).tolist() for t, row in zip(batch, expected, strict=True)]
    assert [r.tolist() for r in made.returns] == near(targets)


@FEW
@given(batches, factors, factors)
def test_gae_over_turns_is_gae_over_turns_of_one_token(batch, gamma, lam):
    made = credit("gae", batch, gamma=gamma, lam=lam)
    short = [plain_gae(as_turns(t), gamma, lam, "token") for t in batch]
    assert [a.tolist() for a in made.advantages] == near(
        [stretch(t, row) for t, row in zip(batch, short, strict=True)]
    )
    assert made.returns is not None
    targets = [(np.array(row) + as_turns(t).values).tolist() for t, row in zip(batch, short, strict=True)]
    assert [r.tolist() for r in made.returns] == near(
        [stretch(t, row) for t, row in zip(batch, targets, strict=True)]
    )


@FEW
@given(batches, factors, st.booleans())
def test_grpo_turns_compares_the_returns_of_all_turns_of_the_group(batch, gamma, normalize_std):
    returns = [plain_returns(replace(as_turns(t), terminated=True), gamma, "token") for t in batch]
    expected = []
    for t, own in zip(batch, returns, strict=True):
        pairs = zip(batch, returns, strict=True)
        group = [row for other, row in pairs if other.group == t.group and row]
        weights = [1 / len(row) for row in group for _ in row]
        mean, std = mean_std([r for row in group for r in row], weights) if group else (0.0, 0.0)
        silent = len(group) < 2 or std <= 1e-6
        divisor = std if normalize_std and not silent else 1.0
        expected.append(stretch(t, [0.0 if silent else (r - mean) / divisor for r in own]))
    assert advantages("grpo_turns", batch, gamma=gamma, normalize_std=normalize_std) == near(expected)


@FEW
@given(batches, factors, st.sampled_from([0.0, 0.5, 2.0]), st.booleans())
def test_gigpo_adds_a_comparison_among_equal_states_of_the_group(batch, gamma, weight, normalize_std):
    how = "grpo" if normalize_std else "dr_grpo"
    met = []
    for number, t in enumerate(batch):
        short = replace(as_turns(t), terminated=True)
        returns = plain_returns(short, gamma, "token")
        states = [t.states[turn] for turn, count in enumerate(t.tokens) if count]
        met += [(number, (t.group, s), r) for s, r in zip(states, returns, strict=True)]
    expected = []
    for number, (t, whole) in enumerate(zip(batch, plain_scores(batch, how), strict=True)):
        steps = [
            plain_relative(own, [r for _, other, r in met if other == key], how)
            for n, key, own in met
            if n == number
        ]
        expected.append(stretch(t, [whole + weight * step for step in steps]))
    found = advantages("gigpo", batch, gamma=gamma, step_weight=weight, normalize_std=normalize_std)
    assert found == near(expected)


@FEW
@given(batches, st.sampled_from([0.0, 0.5, 0.9]), factors, st.sampled_from([0.0, 1.0, 2.5]))
def test_gae_states_is_gae_with_the_values_of_states(batch, gamma, lam, prior):
    """Values by repeated replacement, one state after the other, instead of all at once."""
    short = [as_turns(t) for t in batch]
    turns = [
        (number, i, (t.env_id, t.states[turn]))
        for number, t in enumerate(batch)
        for i, turn in enumerate(np.flatnonzero(t.tokens).tolist())
    ]
    keys = [[key for n, _, key in turns if n == number] for number in range(len(batch))]
    means = {}
    for env_id in "xy":
        own = [r for t in short if t.env_id == env_id for r in plain_returns(t, gamma, "token")]
        means[env_id] = sum(own) / len(own) if own else 0.0
    values = {key: 0.0 for _, _, key in turns}

    def after(number, i):
        return values[keys[number][i + 1]] if i + 1 < len(keys[number]) else short[number].bootstrap

    for _ in range(400):
        for state in values:
            targets = [reward_at(short[n], i) + gamma * after(n, i) for n, i, key in turns if key == state]
            values[state] = (sum(targets) + prior * means[state[0]]) / (len(targets) + prior)
    expected = []
    for number, t in enumerate(batch):
        deltas = [
            reward_at(short[number], i) + gamma * after(number, i) - values[key]
            for i, key in enumerate(keys[number])
        ]
        rows = [
            sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(deltas)))
            for i in range(len(deltas))
        ]
        expected.append(stretch(t, rows))
    found = advantages("gae_states", batch, gamma=gamma, lam=lam, state_prior=prior)
    assert found == near(expected, abs=1e-6)


@FEW
@given(
    batches,
    st.sampled_from(["grpo", "rloo", "grpo_turns", "gigpo", "reinforce", "gae", "gae_states"]),
    st.sampled_from(["batch", "env"]),
    st.sampled_from(["trajectory", "token"]),
)
def test_whitening_comes_last(batch, name, over, weigh):
    keys = [t.env_id if over == "env" else "" for t in batch]
    expected = plain_whitened(advantages(name, batch), keys, weigh, centre=name not in RELATIVE)
    assert advantages(name, batch, whiten=over, weigh=weigh) == near(expected)


# --- changes that must not matter ---

EVERY = [
    ("grpo", {}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("reinforce", {"gamma": 0.9}),
    ("reinforce", {"gamma": 0.9, "discount": "token", "baseline": "env"}),
    ("reinforce_pp", {"gamma": 0.9}),
    ("gae", {"gamma": 0.9, "lam": 0.5}),
    ("gae", {"gamma": 0.9, "lam": 0.5, "level": "token"}),
    ("gae", {"gamma": 0.9, "lam": 0.5, "level": "token", "discount": "token", "whiten": "batch"}),
    ("grpo_turns", {"gamma": 0.9}),
    ("gigpo", {"gamma": 0.9}),
    ("gae_states", {"gamma": 0.9, "lam": 0.5}),
    ("gae_states", {"gamma": 0.9, "state_prior": 0.0, "whiten": "env"}),
]
every = pytest.mark.parametrize(("name", "changes"), EVERY, ids=lambda x: str(x))


@every
@FEW
@given(batch=batches, seed=st.integers(0, 99))
def test_the_order_of_trajectories_does_not_matter(name, changes, batch, seed):
    """Rule 12: groups are formed by id, never by position."""
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    before = advantages(name, batch, **changes)
    assert advantages(name, [batch[i] for i in order], **changes) == near([before[i] for i in order])


@every
@FEW
@given(batch=batches)
def test_the_names_of_groups_do_not_matter(name, changes, batch):
    renamed = [replace(t, group={"a": "z", "b": "a", "c": "m"}[t.group]) for t in batch]
    assert advantages(name, renamed, **changes) == advantages(name, batch, **changes)


@every
@FEW
@given(batch=batches, seed=st.integers(0, 99))
def test_turns_without_action_tokens_take_no_time(name, changes, batch, seed):
    """Rule 7: observations in between change no advantage."""
    rng = random.Random(seed)
    longer = []
    for t in batch:
        at = rng.randint(0, len(t.tokens))
        states = [*t.states[:at], rng.choice("pqr"), *t.states[at:]]
        longer.append(
            replace(
                t, rewards=np.insert(t.rewards, at, 0.0), tokens=np.insert(t.tokens, at, 0), states=states
            )
        )
    assert advantages(name, longer, **changes) == near(advantages(name, batch, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {}),
        ("rloo", {}),
        ("reinforce", {"gamma": 0.9, "discount": "token"}),
        ("reinforce_pp", {"gamma": 0.9, "discount": "token"}),
        ("gae", {"gamma": 0.9, "lam": 0.5, "level": "token", "discount": "token"}),
    ],
)
@FEW
@given(batch=batches)
def test_token_level_estimates_do_not_depend_on_turn_boundaries(name, changes, batch):
    """Rule 8 and 14: returns flow from turn to turn, and the unit is the token."""
    split = []
    for t in batch:
        cut = [
            (1, 0.0, count - 1, r) if count > 1 else (count, r)
            for count, r in zip(t.tokens, t.rewards, strict=True)
        ]
        flat = [x for piece in cut for x in piece]
        split.append(replace(t, tokens=[int(x) for x in flat[::2]], rewards=flat[1::2], states=()))
    assert advantages(name, split, **changes) == near(advantages(name, batch, **changes))


@FEW
@given(batches, factors, factors)
def test_both_levels_of_gae_agree_at_the_first_token_of_a_turn(batch, gamma, lam):
    by_turn = advantages("gae", batch, gamma=gamma, lam=lam)
    by_token = advantages("gae", batch, gamma=gamma, lam=lam, level="token")
    for t, turns, tokens in zip(batch, by_turn, by_token, strict=True):
        firsts = [i for i, (turn, _) in enumerate(places(t)) if i == 0 or places(t)[i - 1][0] != turn]
        # Rewards inside a turn come before its last token only by way of token_rewards, at no discount.
        assert [turns[i] for i in firsts] == pytest.approx([tokens[i] for i in firsts], abs=1e-9)


@FEW
@given(batches)
def test_grpo_always_normalizes_in_the_group(batch):
    """Rule 15: scores ten times as large make no difference; to dr_grpo they do."""
    tenfold = [
        replace(
            t, rewards=10 * t.rewards, token_rewards=None if t.token_rewards is None else 10 * t.token_rewards
        )
        for t in batch
    ]
    before = advantages("dr_grpo", batch)
    assert advantages("grpo", tenfold) == near(advantages("grpo", batch))
    assert advantages("dr_grpo", tenfold) == near([[10 * x for x in row] for row in before])
