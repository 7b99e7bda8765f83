"""``rollgym replay``: recorded actions in fresh environments, and the first difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollgym import StepResult, Task, TextEnv
from rollgym.core.serialization import encode_episode, read_episodes
from rollgym.core.types import Episode
from rollgym.evaluation.replay import Settings, choose, replay
from rollgym.evaluation.runner import Request, evaluate

Command = Callable[..., Any]
HERE = "rollgym_replay_fixture"
NAMED = Settings(modules=("faulty",))


@pytest.fixture
def rollgym_command(rollgym_command: Command) -> Command:
    """Runs of environments in the module faulty, which a command must name before it is imported."""

    def run(*words: object) -> Any:
        return rollgym_command(*words, "--env-module", "faulty")

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An evaluation of eight episodes."""
    out = tmp_path / "run"
    evaluate(Request(env_id="faulty:Counting", agent="random", episodes=8, seed=2), out)
    return out


def rewrite(run: Path, change: Callable[[int, dict[str, Any]], Any]) -> None:
    path = run / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        change(number, line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answer(ran: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_replays_the_same(rollgym_command: Command, run: Path, workers: int) -> None:
    ran = rollgym_command("replay", run, "--workers", workers, "--json")
    assert ran.code == 0, ran.err
    assert answer(ran) == {
        "run": str(run),
        "episodes": 8,
        "turns": 24,
        "same": 8,
        "different": [],
        "notes": [],
    }


@pytest.mark.parametrize("env", ["rollgym/Sokoban-v0", "rollgym/FrozenLake-v0", "CartPole-v1"])
def test_real_environments_replay_the_same(rollgym_command: Command, tmp_path: Path, env: str) -> None:
    evaluate(Request(env_id=env, agent="random", episodes=4, seed=1), tmp_path / "r")
    assert rollgym_command("replay", "r").code == 0


def test_the_first_difference_is_named_with_turn_and_field(rollgym_command: Command, run: Path) -> None:
    def change(number: int, line: dict[str, Any]) -> None:
        if number == 2:
            line["turns"][1]["reward"] = 7.0
            line["turns"][2]["observation"] = "later"
        if number == 5:
            line["turns"][0]["info"]["valid"] = False
        if number == 6:
            line["turns"][0]["observation"] = "another task"
        if number == 7:
            line["final_observation"] = "the end"

    rewrite(run, change)
    ran = rollgym_command("replay", run, "--json")
    assert ran.code == 1
    found = answer(ran)
    assert (found["episodes"], found["same"]) == (8, 4)
    places = [(one["difference"]["turn"], one["difference"]["field"]) for one in found["different"]]
    assert places == [(2, "reward"), (1, "info.valid"), (1, "observation"), (3, "final_observation")]
    assert found["different"][0]["difference"]["recorded"] == 7.0
    ran = rollgym_command("replay", run)
    assert ran.code == 1
    assert "in turn 2, reward: recorded 7.0, now" in ran.out
    assert "8 episodes replayed: 4 identical, 4 different" in ran.out


def test_another_action_gives_another_episode(rollgym_command: Command, run: Path) -> None:
    def change(number: int, line: dict[str, Any]) -> None:
        line["turns"][2]["action"] = "no" if line["turns"][2]["action"] == "yes" else "yes"

    rewrite(run, change)
    found = answer(rollgym_command("replay", run, "--json"))
    assert {one["difference"]["field"] for one in found["different"]} == {"reward"}
    assert found["same"] == 0


def test_success_and_outcome_must_follow_from_the_episode(run: Path) -> None:
    episodes = read_episodes(run / "episodes.jsonl")
    wrong = replace(episodes[0], success=not episodes[0].success)
    (done,) = replay([wrong], NAMED)
    assert done.difference is not None
    assert done.difference.field == "success"


def test_one_episode_can_be_chosen(rollgym_command: Command, run: Path) -> None:
    wanted = read_episodes(run / "episodes.jsonl")[3].spec.episode_id
    assert answer(rollgym_command("replay", run, "--episode", wanted, "--json"))["episodes"] == 1
    ran = rollgym_command("replay", run, "--episode", "test-99999-0")
    assert (ran.code, "has no episode 'test-99999-0'" in ran.err) == (2, True)


def test_a_sample_is_chosen_by_its_seed(rollgym_command: Command, run: Path) -> None:
    episodes = read_episodes(run / "episodes.jsonl")
    assert choose(episodes, 3, seed=1) == choose(episodes, 3, seed=1) != choose(episodes, 3, seed=2)
    assert choose(episodes, 0, seed=1) == episodes
    assert answer(rollgym_command("replay", run, "--sample", 3, "--json"))["episodes"] == 3


def test_an_environment_that_changed_is_found_out(rollgym_command: Command, run: Path) -> None:
    import faulty

    class Changed(faulty.Counting):
        def respond(self, action: str) -> StepResult:
            reply = super().respond(action)
            return replace(reply, observation=reply.observation.replace("turn 2", "turn two"))

    Changed.__module__ = "faulty"
    faulty.Changed = Changed  # type: ignore[attr-defined]
    try:
        rewrite(run, lambda number, line: line["spec"].update(env_id="faulty:Changed"))
        found = answer(rollgym_command("replay", run, "--json"))
    finally:
        del faulty.Changed  # type: ignore[attr-defined]
    assert {(one["difference"]["turn"], one["difference"]["field"]) for one in found["different"]} == {
        (3, "observation")
    }
    assert len(found["different"]) == 8


class Remembers(TextEnv):
    """Not fit for reuse: it counts its episodes."""

    episodes = 0

    def begin(self, task: Task) -> str:
        self.episodes += 1
        return f"episode {self.episodes} of this environment"

    def respond(self, action: str) -> StepResult:
        return StepResult("over", terminated=True)

    def facts(self) -> Mapping[str, Any]:
        return {"actions": ["go"]}


@pytest.mark.parametrize("workers", [0, 1])
def test_every_episode_gets_a_fresh_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    import sys

    source = Path(__file__).read_text()
    start, end = source.index("class Remembers"), source.index('@pytest.mark.parametrize("workers", [0, 1])')
    head = "from typing import Any, Mapping\nfrom rollgym import StepResult, Task, TextEnv\n"
    (tmp_path / f"{HERE}.py").write_text(head + source[start:end])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    try:
        evaluate(Request(env_id=f"{HERE}:Remembers", agent="random", episodes=3), tmp_path / "r")
        episodes = read_episodes(tmp_path / "r" / "episodes.jsonl")
        done = replay(episodes, Settings(workers=workers, modules=(HERE,)))
    finally:
        sys.modules.pop(HERE, None)
    # The evaluation used one environment for all; only the first episode is what a fresh one gives.
    assert [one.same for one in done] == [True, False, False]
    assert {one.difference.now for one in done[1:] if one.difference} == {"episode 1 of this environment"}


def test_versions_that_differ_are_named(rollgym_command: Command, tmp_path: Path) -> None:
    out = tmp_path / "r"
    evaluate(Request(env_id="rollgym/GuessTheNumber-v0", agent="random", episodes=2), out)
    rewrite(out, lambda number, line: line["spec"].update(env_version="v7"))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["versions"]["numpy"] = "0.1"
    (out / "manifest.json").write_text(json.dumps(manifest))
    notes = answer(rollgym_command("replay", out, "--json"))["notes"]
    assert notes[0] == "rollgym/GuessTheNumber-v0 was recorded as version v7 and is v0 now"
    assert notes[1].startswith("numpy was 0.1 and is ")


def scored(episode: Episode) -> bytes:
    """As a training run with a reward worker writes it: the environment's own reward is on record."""
    last = episode.turns[-1]
    info = {
        **last.info,
        "rewards": {"environment": last.reward, "length": -0.5},
        "reward_details": {"length": {"score": -0.5, "weight": 1.0}},
    }
    turns = (*episode.turns[:-1], replace(last, reward=last.reward - 0.5, info=info))
    return b'{"step":3,' + encode_episode(replace(episode, turns=turns, success=False))[1:] + b"\n"


def test_rewards_of_reward_workers_are_set_apart_in_training_runs_alone(
    rollgym_command: Command, run: Path
) -> None:
    episodes = read_episodes(run / "episodes.jsonl")
    (run / "episodes.jsonl").write_bytes(b"".join(map(scored, episodes)))
    assert answer(rollgym_command("replay", run, "--json"))["same"] == 0
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "kind": "train"}))
    ran = rollgym_command("replay", run)
    assert ran.code == 0, ran.out


def test_failed_episodes_are_played_as_far_as_they_came(rollgym_command: Command, tmp_path: Path) -> None:
    for number, env in enumerate(("faulty:RaisesInStep", "faulty:RaisesOnSomeTasks")):
        out = tmp_path / str(number)
        evaluate(Request(env_id=env, agent="random", episodes=8), out)
        ran = rollgym_command("replay", out)
        assert ran.code == 0, ran.out


def test_half_written_empty_corrupt_and_newer_runs(rollgym_command: Command, run: Path) -> None:
    path = run / "episodes.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:100])
    found = answer(rollgym_command("replay", run, "--json"))
    assert (found["same"], "is incomplete and was skipped" in found["notes"][0]) == (3, True)
    path.write_bytes(lines[0] + b"{]\n" + lines[2])
    ran = rollgym_command("replay", run)
    assert (ran.code, "line 2: not valid JSON" in ran.err) == (1, True)
    path.write_bytes(lines[0].replace(b'"schema":2', b'"schema":3'))
    ran = rollgym_command("replay", run)
    assert (ran.code, "written with schema 3" in ran.err) == (1, True)
    path.write_bytes(b"")
    ran = rollgym_command("replay", run)
    assert (ran.code, "contains no episodes yet" in ran.err) == (1, True)
    path.unlink()
    assert "Cannot read" in rollgym_command("replay", run).err
    (run / "manifest.json").write_text('{"schema": 3}')
    assert "upgrade rollgym" in rollgym_command("replay", run).err
    (run / "manifest.json").unlink()
    assert rollgym_command("replay", run).code == 2
    assert f"Run folder {run / 'nowhere'} does not exist" in rollgym_command("replay", run / "nowhere").err


def test_an_unknown_environment_is_reported_at_once(rollgym_command: Command, run: Path) -> None:
    rewrite(run, lambda number, line: line["spec"].update(env_id="their/Game-v3"))
    ran = rollgym_command("replay", run)
    assert (ran.code, "no environment called 'their/Game-v3'" in ran.err) == (2, True)


def test_arguments_can_be_overridden(rollgym_command: Command, run: Path) -> None:
    rewrite(run, lambda number, line: line["spec"]["env_kwargs"].update(render_mode="wrong"))
    assert rollgym_command("replay", run, "--env-arg", "render_mode=null").code == 0
