"""Rescoring: the same environment gives the same rewards; a change is found episode by episode."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rollgym
from rollgym.core.errors import UsageError
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode
from rollgym.evaluation.rescore import CHANGES, rescore
from rollgym.io.run_dir import EPISODES
from rollgym.rewards.composite import CompositeScorer
from rollgym.rewards.settings import RewardSettings, make_scorer

Command = Callable[..., Any]


def turns_reward(episode: Episode) -> float:
    return 0.25 * episode.length


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rollgym.evaluate("rollgym/GuessTheNumber-v0", "expert", episodes=5, out=tmp_path / "run")
    return tmp_path / "run"


def change_episode(run: Path, number: int, change: Callable[[Episode], Episode]) -> str:
    recorded = list(rollgym.load_run(run).episodes)
    recorded[number] = change(recorded[number])
    (run / EPISODES).write_bytes(b"".join(encode_episode(e) + b"\n" for e in recorded))
    return recorded[number].spec.episode_id


def test_an_unchanged_environment_changes_nothing(run: Path, tmp_path: Path) -> None:
    before = (run / EPISODES).read_bytes()
    done = rescore(run, tmp_path / "new")
    assert len(done.changes) == 5
    assert done.changed == []
    assert (run / EPISODES).read_bytes() == before
    old, new = rollgym.load_run(run), rollgym.load_run(tmp_path / "new")
    assert new.summary is not None
    assert old.summary is not None
    assert new.summary["content_hash"] == old.summary["content_hash"]
    assert new.manifest["rescored"]["run"] == str(run)


def test_a_changed_reward_is_named_by_episode_and_turn(run: Path, tmp_path: Path) -> None:
    def forge(episode: Episode) -> Episode:
        last = replace(episode.turns[-1], reward=7.0)
        return replace(episode, turns=(*episode.turns[:-1], last), success=False)

    name = change_episode(run, 2, forge)
    done = rescore(run, tmp_path / "new")
    assert [change.episode_id for change in done.changed] == [name]
    change = done.changed[0]
    length = list(rollgym.load_run(run).episodes)[2].length
    assert (change.reward_before, change.reward_after) == (7.0, 1.0)
    assert (change.success_before, change.success_after, change.first_turn) == (False, True, length)
    lines = [json.loads(line) for line in (tmp_path / "new" / CHANGES).read_text().splitlines()]
    assert [line["changed"] for line in lines].count(True) == 1


def test_reward_functions_are_added(run: Path, tmp_path: Path) -> None:
    def scorer() -> CompositeScorer:
        return make_scorer(RewardSettings(kind="function", target=turns_reward, weight=2.0))  # type: ignore[arg-type]

    done = rescore(run, tmp_path / "new", scorer=scorer())
    for old, new in zip(
        rollgym.load_run(run).episodes, rollgym.load_run(tmp_path / "new").episodes, strict=True
    ):
        assert new.total_reward == pytest.approx(old.total_reward + 0.5 * old.length)
        assert new.turns[-1].info["rewards"]["environment"] == old.turns[-1].reward
    assert len(done.changed) == 5
    # Scores of an earlier rescoring are not added twice.
    again = rescore(tmp_path / "new", tmp_path / "newer", scorer=scorer())
    assert again.changed == []


def test_an_episode_that_ends_earlier_now_is_noted(run: Path, tmp_path: Path) -> None:
    def lengthen(episode: Episode) -> Episode:
        last = episode.turns[-1]
        return replace(episode, turns=(*episode.turns[:-1], replace(last, terminated=False), last))

    name = change_episode(run, 0, lengthen)
    done = rescore(run, tmp_path / "new")
    change = next(c for c in done.changes if c.episode_id == name)
    assert "the environment ended in turn" in change.note
    assert change.changed


def test_results_are_never_overwritten(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        rescore(run, run)
    rescore(run, tmp_path / "new")
    with pytest.raises(UsageError):
        rescore(run, tmp_path / "new")


def test_code_that_only_the_recording_names_is_not_imported(run: Path, tmp_path: Path) -> None:
    change_episode(run, 0, lambda e: replace(e, spec=replace(e.spec, env_id="evil_module:Env")))
    with pytest.raises(UsageError, match="--env-module evil_module"):
        rescore(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_rewards_of_the_config_need_trust(run: Path, tmp_path: Path, rollgym_command: Command) -> None:
    (tmp_path / "my_trusted_rewards.py").write_text("def f(episode):\n    return 0.5\n")
    (run / "config.yaml").write_text("rewards: [{kind: function, target: 'my_trusted_rewards:f'}]\n")
    ran = rollgym_command("rescore", run, "--out", "new")
    assert ran.code == 2
    assert "pass --trust-code to use them" in ran.err
    assert not (tmp_path / "new").exists()
    ran = rollgym_command("rescore", run, "--out", "new", "--environment-only")
    assert "0 changed" in ran.out
    ran = rollgym_command("rescore", run, "--out", "newer", "--trust-code")
    assert "5 changed" in ran.out, ran.err
    assert all(e.total_reward == 1.5 for e in rollgym.load_run(tmp_path / "newer").episodes)


def test_the_command(run: Path, tmp_path: Path, rollgym_command: Command) -> None:
    ran = rollgym_command("rescore", run, "--out", "new")
    assert (ran.code, ran.out) == (0, "5 episodes: 0 changed, 0 not rescored; results in new\n")
    ran = rollgym_command("rescore", run, "--out", "other", "--no-replay")
    assert "Nothing to compute" in ran.err
    ran = rollgym_command("rescore", run, "--out", "other", "--reward", "no_such_module:f")
    assert ran.code == 2
    assert "no_such_module" in ran.err
    assert not (tmp_path / "other").exists()
    (tmp_path / "my_rescore_rewards.py").write_text("def f(episode):\n    return 1.0\n")
    ran = rollgym_command(
        "rescore", run, "--out", "other", "--no-replay", "--reward", "my_rescore_rewards:f=0.5", "--json"
    )
    assert ran.code == 0, ran.err
    assert len(json.loads(ran.out)["changed"]) == 5
