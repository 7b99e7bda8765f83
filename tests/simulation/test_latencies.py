"""Latencies: parametric ones, and those of a recorded run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgym.core.errors import UsageError
from rollgym.simulation.durations import duration_text, seconds
from rollgym.simulation.latencies import ParametricLatencies, RecordedEpisode, read_latencies


def test_a_group_depends_on_its_number_and_the_seed_alone() -> None:
    latencies = ParametricLatencies(slow=0.5)
    first, same = latencies.group(1, 7, 4), latencies.group(1, 7, 4)
    assert np.array_equal(first.work, same.work)
    assert np.array_equal(first.step, same.step)
    assert not np.array_equal(first.start, latencies.group(2, 7, 4).start)
    assert not np.array_equal(first.start, latencies.group(1, 8, 4).start)


def test_means_and_the_share_of_slow_groups_are_as_set() -> None:
    latencies = ParametricLatencies(turns=6, reply=200, step=2.0, start=3.0, slow=0.2, slow_factor=5.0)
    plans = [latencies.group(0, number, 8) for number in range(400)]
    quick = [plan for plan in plans if not plan.slow]
    slow = [plan for plan in plans if plan.slow]
    assert len(slow) / 400 == pytest.approx(0.2, abs=0.05)
    assert np.mean([plan.turns.mean() for plan in plans]) == pytest.approx(6, rel=0.05)
    assert np.mean([plan.tokens.mean() for plan in plans]) == pytest.approx(200, rel=0.05)
    assert np.mean([plan.step.mean() for plan in quick]) == pytest.approx(2.0, rel=0.05)
    assert np.mean([plan.step.mean() for plan in slow]) == pytest.approx(10.0, rel=0.15)
    assert np.mean([plan.start.mean() for plan in quick]) == pytest.approx(3.0, rel=0.1)


def write_run(folder: Path, groups: int = 6, outcome: str = "terminated") -> Path:
    """A run folder with an event log: group ``n`` has two episodes of two turns; its steps take n + 1 s."""
    folder.mkdir()
    events: list[dict[str, Any]] = []
    for number in range(groups):
        began = 100.0 * number
        for member in range(2):
            name = f"g{number:06d}-{member}"
            own: dict[str, Any] = {"episode": name, "group": f"g{number:06d}"}
            events.append({"t": began, "kind": "episode_started", **own})
            now = began
            states = [("resetting", 0, 0.5), ("generating", 0, 0.25), ("stepping", 0, number + 1.0)]
            states += [("generating", 1, 0.25), ("stepping", 1, number + 1.0), ("closing", 2, 0.125)]
            for state, turn, took in states:
                fields = {"state": state, "turn": turn, "worker": "w", "engine": None}
                events.append({"t": now, "kind": "episode_state", "episode": name, **fields})
                now += took
            events.append({"t": now, "kind": "episode_finished", "outcome": outcome, **own})
        events.append({"t": began + 90.0, "kind": "weights_updated", "version": number + 1})
        events.append({"t": began + 91.0, "kind": "group_taken", "group": f"g{number:06d}"})
    lines = [json.dumps(event) for event in sorted(events, key=lambda event: event["t"])]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    steps = [{"step": n, "seconds_train": 2.0 + n, "seconds_sync": 0.5} for n in range(groups)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    return folder


def test_latencies_of_a_run_are_read_from_its_events(tmp_path: Path) -> None:
    latencies = read_latencies(write_run(tmp_path / "run", groups=12))
    # The first step warmed up.
    assert len(latencies.groups) == 11
    assert latencies.groups[0] == (RecordedEpisode(0.625, ((0.25, 2.0), (0.25, 2.0))),) * 2
    assert latencies.train == tuple(3.0 + n for n in range(11))
    assert latencies.sync == (0.5,) * 11
    assert latencies.mean_turns == 2.0
    numbers = [latencies.group(5, n, 2).step[0, 0] - 1 for n in range(22)]
    assert sorted(numbers[:11]) == list(range(1, 12)), "each group once"
    assert numbers[:11] == numbers[11:], "and again in the same order"
    assert latencies.group(5, 0, 3).turns.tolist() == [2, 2, 2], "more members than recorded"
    assert "12" not in latencies.describe()
    assert "22 episodes of 11 groups" in latencies.describe()


def test_episodes_that_failed_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", groups=12, outcome="worker_lost")
    with pytest.raises(UsageError, match="0 finished episodes"):
        read_latencies(tmp_path / "run")


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run folder: it has no events.jsonl"):
        read_latencies(tmp_path)


def test_durations() -> None:
    assert [seconds(text) for text in ("500ms", "30", "30s", "5m", "4h", "2d", "1.5min")] == [
        0.5, 30.0, 30.0, 300.0, 14_400.0, 172_800.0, 90.0
    ]  # fmt: skip
    assert seconds(3) == 3
    for wrong in ("4 hours", "-1s", "h", ""):
        with pytest.raises(ValueError, match="expected a duration"):
            seconds(wrong)
    assert [duration_text(value) for value in (0.25, 90.0, 7200.0, 1e6)] == [
        "250 ms",
        "90.0 s",
        "2.0 h",
        "11.6 d",
    ]
