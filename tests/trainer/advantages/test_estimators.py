"""Advantage estimators by hand: the rules, what is refused, and the docs page."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollgym.core.errors import UnknownName, UsageError
from rollgym.trainer.advantages import ESTIMATORS, AdvantageConfig, Trajectory, find_estimator

PAGE = Path(__file__).parents[3] / "docs" / "advantages.md"
RELATIVE = ["grpo", "dr_grpo", "rloo", "grpo_turns", "gigpo"]


def trajectory(rewards, tokens, *, group="g", terminated=True, **more):
    return Trajectory(group=group, rewards=rewards, tokens=tokens, terminated=terminated, **more)


def credit(name, trajectories, **changes):
    return find_estimator(name)(trajectories, AdvantageConfig(**changes))


def advantages(name, trajectories, **changes):
    return [a.tolist() for a in credit(name, trajectories, **changes).advantages]


def near(expected, **how):
    return [pytest.approx(row, **({"abs": 1e-9} | how)) for row in expected]


def test_observation_tokens_carry_no_delta_and_no_decay():
    """Rule 7: eight action tokens of value .5, reward 1; +0.296 whatever the observation in between is."""
    how = {"level": "token", "discount": "token", "gamma": 0.99, "lam": 0.95}
    right = trajectory([0, 1], [4, 4], values=[0.5] * 8)
    assert advantages("gae", [right], **how)[0][0] == pytest.approx(0.296, abs=5e-4)
    talkative = trajectory([0, *[0] * 50, 1], [4, *[0] * 50, 4], values=[0.5] * 8)
    assert advantages("gae", [talkative], **how) == advantages("gae", [right], **how)
    # Were the 50 observation tokens taken for action tokens, it would be this:
    wrong = trajectory([0, 1], [4 + 50, 4], values=[0.5] * 58)
    assert advantages("gae", [wrong], **how)[0][0] == pytest.approx(-0.066, abs=5e-4)


@pytest.mark.parametrize("name", ["reinforce", "gae"])
def test_returns_flow_across_observations(name):
    """Rule 8: a reward at the end reaches the first action."""
    t = trajectory([0, 0, 0, 4], [1, 0, 0, 1], values=[0, 0])
    assert advantages(name, [t], gamma=0.5) == [[2, 4]]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gae", {"level": "turn"}),
        ("gae", {"level": "token"}),
        ("gae", {"level": "token", "discount": "token"}),
        ("reinforce", {}),
    ],
)
def test_only_truncated_episodes_bootstrap_from_the_last_value(name, changes):
    """Rule 9: terminated means V = 0, truncated means V of the final state."""
    over = trajectory([1.0], [1], values=[0.0], last_value=10.0)
    cut = replace(over, terminated=False)
    assert advantages(name, [over, cut], gamma=0.5, **changes) == [[1.0], [6.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dr_grpo", 5.0), ("rloo", 10.0), ("grpo", 1.0), ("grpo_turns", 1.0), ("reinforce_pp", 1.0)],
)
def test_an_episode_counts_once_however_long_it_is(name, expected):
    """Rule 11: of scores 10 in one turn and 0 in five turns, the baseline is 5, not 1.67."""
    short = trajectory([10], [1])
    long = trajectory([0] * 5, [1] * 5)
    assert advantages(name, [short, long]) == near([[expected], [-expected] * 5])


def test_means_are_over_tokens_only_if_configured():
    """Rule 11: a mean over tokens needs weigh=token."""
    batch = [trajectory([10], [1]), trajectory([0] * 5, [1] * 5)]
    assert advantages("reinforce", batch, baseline="batch")[0] == pytest.approx([5.0])
    found = advantages("reinforce", batch, baseline="batch", weigh="token")[0]
    assert found == pytest.approx([10 - 10 / 6])


@pytest.mark.parametrize("name", RELATIVE)
def test_groups_are_formed_by_id(name):
    """Rule 12: members of two groups in turn; by position the differences would be others."""
    turns = [(0, "a"), (100, "b"), (2, "a"), (100, "b"), (4, "a")]
    batch = [trajectory([r], [1], group=g, states=["s"]) for r, g in turns]
    found = [row[0] for row in advantages(name, batch)]
    assert found[1] == found[3] == found[2] == 0
    assert found[4] == -found[0] > 0


@pytest.mark.parametrize("whiten", ["none", "batch"])
@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one_has_no_advantage(name, whiten):
    """Rule 12: neither its raw reward nor its difference from a batch mean."""
    alone = trajectory([7, 1], [3, 2], group="alone", states=["s", "t"])
    others = [trajectory([r], [n], group="b", states=["s"]) for r, n in [(1, 1), (0, 4), (3, 2)]]
    weigh = {} if whiten == "none" else {"weigh": "token"}
    made = credit(name, [alone, *others], whiten=whiten, **weigh)
    assert made.advantages[0].tolist() == [0] * 5
    assert any(made.advantages[1])
    assert made.metrics["singleton_group_frac"] == 0.5


@pytest.mark.parametrize("name", [name for name in RELATIVE if name != "grpo_turns"])
def test_rounding_errors_are_not_variance(name):
    """Rule 12: 0.1 + 0.2 is not better than 0.3."""
    batch = [
        trajectory([0.1, 0.2], [1, 1], states=["s", "t"]),
        trajectory([0.3, 0], [1, 1], states=["s", "u"]),
    ]
    assert batch[0].score != batch[1].score
    made = credit(name, batch)
    assert not np.concatenate(made.advantages).any()
    assert made.metrics["zero_std_group_frac"] == 1.0


def test_turns_with_equal_returns_have_no_variance():
    """Rule 12: the same for comparisons by turn, whose returns differ by no more than rounding."""
    batch = [trajectory([0, 0.1 + 0.2], [1, 1]), trajectory([0, 0.3], [1, 1])]
    assert advantages("grpo_turns", batch) == [[0, 0], [0, 0]]


def test_std_up_to_the_tolerance_counts_as_zero():
    batch = [trajectory([0], [1]), trajectory([1e-3], [1])]
    assert advantages("grpo", batch) == near([[-1], [1]])
    assert advantages("grpo", batch, tolerance=1e-2) == [[0], [0]]


def test_the_discount_counts_turns_or_tokens():
    """Rule 14: by turns, gamma counts once for a turn of three tokens; by tokens, three times."""
    t = trajectory([0, 8], [3, 2])
    assert advantages("reinforce", [t], gamma=0.5) == [[4, 4, 4, 8, 8]]
    assert advantages("reinforce", [t], gamma=0.5, discount="token") == [[0.5, 1, 2, 4, 8]]


RICH = [
    trajectory([0.5, 1], [2, 1], group="a", env_id="x", states="pq", values=[0.1, 0.2, 0.3]),
    trajectory(
        [0.25, 3, 1],
        [1, 3, 2],
        group="a",
        env_id="y",
        states="ppq",
        values=[0.1, 0.5, 0.2, 0.3, 1, 2],
        terminated=False,
        last_value=2.0,
    ),
    trajectory([2, -1], [2, 1], group="b", env_id="y", states="pr", values=[1, 0.2, 0.3]),
    trajectory([4], [3], group="b", env_id="x", states="p", values=[0, 1, 0.3]),
    trajectory([1, 1], [1, 2], group="b", env_id="x", states="pr", values=[0, 1, 0.3]),
    trajectory([1], [4], group="c", env_id="x", states="p", values=[0, 1, 0, 1]),
]
OTHER = {
    "gamma": 0.5,
    "lam": 0.5,
    "discount": "token",
    "level": "token",
    "baseline": "batch",
    "whiten": "batch",
    "weigh": "token",
    "tolerance": 50.0,
    "step_weight": 3.0,
    "normalize_std": False,
}
NEEDED = {"discount": {"gamma": 0.5, "level": "token"}, "weigh": {"whiten": "batch"}}


def outcome(name, **changes):
    made = credit(name, RICH, **changes)
    return [a.tolist() for a in made.advantages], made.metrics


@pytest.mark.parametrize("setting", OTHER)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_setting_is_read_or_refused(name, setting):
    """Rule 15: an accepted setting changes something."""
    reads = ESTIMATORS[name].reads
    base = {key: value for key, value in NEEDED.get(setting, {}).items() if key in reads}
    if setting not in (*reads, "tolerance"):
        with pytest.raises(UsageError, match=f"{name} does not read {setting}; .* reads .*tolerance"):
            outcome(name, **{setting: OTHER[setting]})
        return
    assert outcome(name, **base, **{setting: OTHER[setting]}) != outcome(name, **base)


def test_a_setting_that_needs_another_is_refused_without_it():
    """Rule 15: a setting that is read only with another one."""
    with pytest.raises(UsageError, match="gae does not read discount"):
        credit("gae", RICH, discount="token")
    with pytest.raises(UsageError, match="grpo does not read weigh"):
        credit("grpo", RICH, weigh="token")
    credit("reinforce", RICH, baseline="batch", weigh="token")
    credit("reinforce_pp", RICH, weigh="token")


def test_all_estimators_differ():
    """Rule 15: each name is a different estimator."""
    found = [str(advantages(name, RICH)) for name in ESTIMATORS]
    assert len(set(found)) == len(ESTIMATORS) == 9


# --- refused inputs ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("field", ["rewards", "values", "token_rewards", "last_value"])
def test_non_finite_values_are_refused_with_the_trajectory_name(field, bad):
    good = {"rewards": [0.0], "values": [0.0], "token_rewards": [0.0], "last_value": 0.0}
    wrong = bad if field == "last_value" else [bad]
    with pytest.raises(UsageError, match=f"trajectory 'e7' of group 'g3': {field}"):
        Trajectory(group="g3", name="e7", tokens=[1], terminated=True, **{**good, field: wrong})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1.0]}, "rewards has shape"),
        ({"rewards": [[1.0, 2.0]]}, "rewards has shape"),
        ({"values": [1.0]}, "values has shape"),
        ({"token_rewards": [1.0] * 4}, "token_rewards has shape"),
        ({"states": ["s"]}, "got 1 states for 2 turns"),
        ({"tokens": [1, -1]}, "tokens must be integers >= 0"),
        ({"tokens": [1.5, 1.5]}, "tokens must be integers >= 0"),
    ],
)
def test_lengths_must_match(changes, message):
    with pytest.raises(UsageError, match=message):
        trajectory(**{"rewards": [0, 0], "tokens": [1, 2], **changes})


def test_an_empty_batch_a_missing_critic_and_missing_states_are_refused():
    with pytest.raises(UsageError, match="at least one trajectory, got none"):
        credit("grpo", [])
    bare = trajectory([1], [1], name="e1")
    with pytest.raises(UsageError, match="'e1'.*values"):
        credit("gae", [bare])
    with pytest.raises(UsageError, match="'e1'.*states"):
        credit("gigpo", [bare])
    with pytest.raises(UsageError, match="'e1'.*states"):
        credit("gae_states", [bare])
    with pytest.raises(UnknownName, match="grpo"):
        find_estimator("grop")


@pytest.mark.parametrize(
    "changes",
    [{"gamma": 1.01}, {"gamma": math.nan}, {"lam": -0.1}, {"tolerance": -1.0}, {"step_weight": math.inf}]
    + [{"state_prior": -1.0}]
    + [{name: "neither"} for name in ("discount", "level", "baseline", "whiten", "weigh", "normalize_std")],
)
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(UsageError, match=next(iter(changes))):
        AdvantageConfig(**changes)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_episode_without_action_tokens_has_no_advantages_and_still_a_score(name):
    batch = [
        trajectory([1.0, 0.0], [0, 0], states="pq", values=[]),
        trajectory([], [], values=[]),
        trajectory([3.0], [2], states="p", values=[0, 0]),
    ]
    found = advantages(name, batch)
    assert [len(row) for row in found] == [0, 0, 2]
    assert advantages(name, batch[:2]) == [[], []]
    if name == "dr_grpo":
        assert found[2] == near([[3 - 4 / 3] * 2])[0]


def test_a_trajectory_copies_its_arrays():
    rewards = np.array([1.0])
    t = trajectory(rewards, [1])
    rewards[0] = 9
    assert t.score == 1
    with pytest.raises(ValueError, match="read-only"):
        t.rewards[0] = 2


def test_batch_metrics_by_hand():
    batch = [
        trajectory([0], [1], group="a"),
        trajectory([2], [3], group="a", terminated=False),
        trajectory([5], [1], group="b"),
        trajectory([1], [1], group="c"),
        trajectory([1], [1], group="c"),
    ]
    metrics = credit("dr_grpo", batch).metrics
    assert metrics == pytest.approx(
        {
            "groups": 3,
            "singleton_group_frac": 1 / 3,
            "zero_std_group_frac": 1 / 3,
            "truncated_frac": 0.2,
            "score_mean": 1.8,
            "advantage_mean": 2 / 7,
            "advantage_std": math.sqrt(4 / 7 - (2 / 7) ** 2),
            "advantage_abs_max": 1,
        }
    )


# --- the page ---


def table(first):
    """The rows of the page's table whose header begins with these words, as dictionaries."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[
            start : start + next(i for i, x in enumerate(lines[start:]) if not x.startswith("|"))
        ]
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


EXAMPLE = trajectory([0, 1], [2, 1], values=[0.4, 0.5, 0.6], last_value=0.2)


def test_the_worked_example_of_the_page_is_right():
    rows = sorted(table("token | turn"), key=lambda row: int(row["token"]))
    assert [float(row["V"]) for row in rows] == EXAMPLE.values.tolist()
    made = credit("gae", [EXAMPLE], gamma=0.9, lam=0.5, level="token")
    assert made.advantages[0].tolist() == pytest.approx([float(row["A"]) for row in rows])
    assert made.returns is not None
    assert made.returns[0].tolist() == pytest.approx([float(row["return"]) for row in rows])
    later = 0.0
    for row in reversed(rows):
        n = {key: float(row[key]) for key in row}
        assert n["delta"] == pytest.approx(n["r"] + n["gamma"] * n["next V"] - n["V"])
        later = n["delta"] + n["gamma"] * n["lam"] * later
        assert n["A"] == pytest.approx(later)
        assert n["return"] == pytest.approx(n["A"] + n["V"])


@pytest.mark.parametrize("row", table("level"), ids=lambda row: "-".join(list(row.values())[:3]))
def test_the_other_settings_of_the_example_are_right(row):
    t = replace(EXAMPLE, terminated=row["ends"] == "terminated")
    found = advantages("gae", [t], gamma=0.9, lam=0.5, level=row["level"], discount=row["discount"])[0]
    assert found == pytest.approx([float(row[f"A of token {i}"]) for i in (1, 2, 3)])


def test_the_page_lists_every_estimator_with_its_settings():
    rows = {row["name"].strip("`"): row["reads, besides `tolerance`"] for row in table("name")}
    assert {name: tuple(re.findall(r"`(\w+)`", reads)) for name, reads in rows.items()} == {
        name: estimator.reads for name, estimator in ESTIMATORS.items()
    }


def test_the_page_s_remark_on_units_is_right():
    match = re.search(r"keeps ([\d.]+) % of its worth by turns and ([\d.]+) % by tokens", PAGE.read_text())
    assert match is not None
    t = trajectory([0] * 20 + [1], [50] * 20 + [1])
    by_turn, by_token = (
        advantages("reinforce", [t], gamma=0.99, discount=u)[0][0] for u in ("turn", "token")
    )
    assert f"{100 * by_turn:.0f}" == match[1]
    assert f"{100 * by_token:.3f}" == match[2]


@pytest.mark.parametrize("name", ["grpo", "grpo_turns", "gigpo"])
def test_std_correction_divides_by_n_minus_1(name):
    """TRL and verl: torch.std of the group's scores, which divides by n - 1."""
    group = [trajectory([score], [1], states=[n]) for n, score in enumerate([0.0, 1.0, 1.0, 4.0])]
    scores = np.array([0.0, 1.0, 1.0, 4.0])
    expected = (scores - scores.mean()) / scores.std(ddof=1)
    assert advantages(name, group, std_correction=1) == near([[value] for value in expected])
    plain = (scores - scores.mean()) / scores.std()
    assert advantages(name, group) == near([[value] for value in plain])


def test_std_correction_is_refused_without_normalization():
    group = [trajectory([score], [1], states=[0]) for score in (0.0, 1.0)]
    with pytest.raises(UsageError, match="does not read std_correction"):
        credit("gigpo", group, normalize_std=False, std_correction=1)
    with pytest.raises(UsageError, match="does not read std_correction"):
        credit("dr_grpo", group, std_correction=1)
    with pytest.raises(UsageError, match="std_correction must be 0 or 1, not 2"):
        AdvantageConfig(std_correction=2)


def test_gae_states_learns_from_a_group_that_fails_as_a_whole():
    """The other groups show what the shared first state is worth, so leaving it to fail is worse."""
    good, back = (trajectory([0, 1], [1, 1], states=["fork", "goal"], group=g) for g in "ab")
    lost = [trajectory([0, 0], [1, 1], states=["fork", "pit"], group="c") for _ in range(2)]
    batch = [good, back, *lost]
    assert advantages("gigpo", batch)[2:] == [[0, 0]] * 2
    # Without a prior: goal is worth 1, pit 0, fork the mean of both. All of it is decided at the fork.
    assert advantages("gae_states", batch, state_prior=0.0) == [[0.5, 0]] * 2 + [[-0.5, 0]] * 2
    # A prior of one visit: the mean return 1/2 counts once more. Goal: (1 + 1 + 1/2) / 3, pit: (1/2) / 3.
    goal, pit = 2.5 / 3, 0.5 / 3
    values = advantages("gae_states", batch, lam=0.0)
    assert values[0] == pytest.approx([goal - 0.5, 1 - goal])
    assert values[2] == pytest.approx([pit - 0.5, 0 - pit])


def test_gae_states_uses_the_values_of_states_that_others_reached():
    """A detour that ends badly in its own episode is judged by what the state it leads to is worth."""
    detour = trajectory([0, 0], [1, 1], states=["dead end", "crossing"])
    others = [trajectory([1], [1], states=["crossing"], group=g) for g in "hij"]
    values = advantages("gae_states", [detour, *others], lam=0.0, state_prior=0.0)
    assert values[0] == pytest.approx([0.0, -0.75])  # the state seen once is its own baseline
    step_in = trajectory([0.0], [1], states=["dead end"], group="k")
    found = advantages("gae_states", [detour, step_in, *others], lam=0.0, state_prior=0.0)
    assert found[0][0] == pytest.approx(0.375)  # 3/4 against the mean of 3/4 and 0
    assert found[1] == pytest.approx([-0.375])


def test_gae_states_with_a_discount_of_1_and_a_loop_ends():
    """Two states that lead to one another and to nothing else have no unique value; the prior decides."""
    loop = trajectory([0] * 4, [1] * 4, states=list("xyxy"), terminated=False, last_value=2.0)
    assert np.isfinite(advantages("gae_states", [loop], state_prior=0.0)[0]).all()
    assert np.isfinite(advantages("gae_states", [loop])[0]).all()


def test_gae_states_keeps_environments_and_roles_apart():
    def found(**other):
        batch = [
            trajectory([1.0], [1], states=["x"], group="a"),
            trajectory([0.0], [1], states=["x"], group="b", **other),
        ]
        return advantages("gae_states", batch, state_prior=0.0)

    assert found() == [[0.5], [-0.5]]
    assert found(role="seller") == [[0], [0]]
    assert found(env_id="other") == [[0], [0]]


def test_gae_states_reports_shared_states():
    a = trajectory([0, 0, 1], [1, 1, 1], states=["x", "y", "x"])
    b = trajectory([0.0, 0.0], [1, 0], states=["x", "unused"], group="h")
    metrics = credit("gae_states", [a, b]).metrics
    assert metrics["shared_state_frac"] == pytest.approx(3 / 4)
    assert metrics["turns_per_state"] == 2
    silent = credit("gae_states", [trajectory([1], [0], states=["x"])])
    assert silent.advantages[0].tolist() == []
    assert silent.metrics["turns_per_state"] == 0


def test_gigpo_reports_shared_states():
    a = trajectory([0, 0, 1], [1, 1, 1], states=["x", "y", "x"])
    b = trajectory([0, 0], [1, 1], states=["x", "z"])
    other = trajectory([0.0], [1], states=["x"], group="h")
    found = credit("gigpo", [a, b, other]).metrics
    # x is met three times in group g and once in group h; y, z and h's x once each.
    assert found["shared_state_frac"] == pytest.approx(3 / 6)
    assert found["shared_states"] == 1
    assert found["turns_per_shared_state"] == 3
    lonely = credit("gigpo", [trajectory([1], [1], states=["x"]), trajectory([0], [1], states=["y"])]).metrics
    assert lonely["shared_state_frac"] == lonely["turns_per_shared_state"] == 0
