"""The tick level against the event level, which is the real scheduler in virtual time."""

from typing import Any

import pytest
from scenarios import make_scenario

from rollgym.rollout.group_state import version_range
from rollgym.simulation.event_level import simulate_events
from rollgym.simulation.samples import age_quantile, ages, discarded_share, mean, mean_age
from rollgym.simulation.simulate import check_ticks, choose_level, reduced, representative
from rollgym.simulation.tick_level import simulate_ticks

STEPS = 12


@pytest.mark.parametrize(
    "how",
    [
        {"bound": 0},
        {"bound": 1},
        {"bound": 2, "train": 60.0},
        {"bound": 2, "on_stale": "mask"},
        {"bound": 2, "on_stale": "replay"},
        {"bound": 1, "oversample": 2},
        {"bound": 1, "in_flight": 7},
        {"bound": 2, "filtered": 0.3},
        {"bound": 1, "train": 60.0, "lent": 1},
    ],
    ids=str,
)
def test_both_levels_agree(how: dict[str, Any]) -> None:
    scenario = make_scenario(**how)
    events = simulate_events(scenario, STEPS).steps
    ticks = simulate_ticks(scenario, STEPS)
    # Once in a while a group is one step earlier or later; of so few groups, one slow one shows in the mean.
    assert mean(s.seconds for s in ticks) == pytest.approx(mean(s.seconds for s in events), rel=0.05)
    assert mean_age(ages(ticks)) == pytest.approx(mean_age(ages(events)), abs=0.05)
    assert discarded_share(ticks) == pytest.approx(discarded_share(events), abs=0.02)
    assert mean(s.engine_busy for s in ticks) == pytest.approx(mean(s.engine_busy for s in events), abs=0.03)
    assert mean(s.in_flight for s in ticks) == pytest.approx(mean(s.in_flight for s in events), rel=0.05)
    if "lent" not in how and "oversample" not in how:
        same = [a.turns == b.turns and a.slow == b.slow for a, b in zip(ticks, events, strict=True)]
        assert sum(same) >= STEPS // 2, "most batches have the same groups"


@pytest.mark.parametrize("on_stale", ["wait", "replay", "mask"])
def test_the_event_level_keeps_the_bound(on_stale: str) -> None:
    run = simulate_events(make_scenario(2, on_stale, train=5.0), STEPS, keep_groups=True)
    assert len({group.group_id for group in run.groups}) == len(run.groups) == 6 * STEPS
    for number, group in enumerate(run.groups):
        oldest, newest = version_range(turn for episode in group.episodes for turn in episode.turns)
        assert oldest is not None
        assert newest is not None
        version = number // 6
        assert version - newest <= 2
        assert on_stale == "mask" or version - oldest <= 2
    bounded = max(ages(run.steps)) <= 2
    assert bounded or on_stale == "mask"


def test_dead_engines_and_environment_actors_cost_turns_and_time_but_no_episode() -> None:
    quiet = simulate_events(make_scenario(1, train=5.0), STEPS, keep_groups=True)
    failing = simulate_events(make_scenario(1, train=5.0, engine=30.0, engine_back=20.0, env=40.0), STEPS)
    assert sum(s.discarded for s in quiet.steps) == 0
    assert sum(s.discarded for s in failing.steps) > 0
    assert failing.counts["infra_retries"] > 0
    assert failing.counts["dropped"] == 0
    assert mean(s.seconds for s in failing.steps) > mean(s.seconds for s in quiet.steps)
    assert sum(s.turns for s in failing.steps) == pytest.approx(sum(s.turns for s in quiet.steps), rel=0.1)


def test_the_same_seed_gives_the_same_steps() -> None:
    for simulate in (lambda s: simulate_events(s, 4).steps, lambda s: simulate_ticks(s, 4)):
        first, again = simulate(make_scenario(seed=3)), simulate(make_scenario(seed=3))
        assert first == again
        assert first != simulate(make_scenario(seed=4))


def test_the_comparison_runs_at_a_reduced_size() -> None:
    scenario = make_scenario(1, batch=64, size=4, engines=16, slow=0.0)
    assert choose_level(scenario, "auto", 12) == "ticks"
    assert choose_level(make_scenario(), "auto", 4) == "events"
    small = reduced(scenario, 1 / 16)
    assert (small.batch, small.engine.engines, small.scheduler.max_ahead) == (4, 1, 8)
    accuracy = check_ticks(small)
    assert accuracy.scale == 1.0
    assert abs(accuracy.error) < 0.03


def test_fewer_engines_take_longer_and_a_longer_update_leaves_less_waiting() -> None:
    few = representative(make_scenario(1, engines=1, train=5.0, slow=0.0), 4, "ticks")
    many = representative(make_scenario(1, engines=3, train=5.0, slow=0.0), 4, "ticks")
    assert mean(s.seconds for s in few) > mean(s.seconds for s in many)
    slow = representative(make_scenario(1, engines=3, train=50.0, slow=0.0), 4, "ticks")
    assert mean(s.wait for s in slow) < mean(s.wait for s in many)


def test_quantiles_of_ages() -> None:
    assert age_quantile({0: 50.0, 1: 45.0, 2: 5.0}, 0.5) == 0
    assert age_quantile({0: 50.0, 1: 45.0, 2: 5.0}, 0.9) == 1
    assert age_quantile({0: 50.0, 1: 45.0, 2: 5.0}, 0.99) == 2
    assert age_quantile({}, 0.5) == 0
