"""One episode as the page gets it: bounded, and with what its tokens were worth."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import line_of, make_episode
from role_episodes import FIRST, SECOND, game
from role_episodes import turn as role_turn

from rollgym.view import RunView
from rollgym.view.episode_detail import EpisodeDetails
from rollgym.view.page import TEXT

MakeRun = Callable[..., Path]
TOKENS = {
    "prompt_ids": (1, 2),
    "action_ids": (3, 4),
    "logprobs": (-0.5, -2.0),
    "version_spans": ((0, 1), (1, 1)),
}


def bodies(folder: Path) -> EpisodeDetails:
    run = RunView(folder)
    run.follow(final=True)
    return EpisodeDetails(run)


def test_a_turn_keeps_what_it_has(make_run: MakeRun) -> None:
    (turn,) = bodies(make_run([make_episode(0, turn=TOKENS | {"info": {"valid": False}})])).body(0)["turns"]
    assert turn["observation"] == "The door 0 is shut."
    assert turn["seconds"] == [0.0, 0.25, 0.5]
    assert turn["info"] == {"valid": False}
    assert turn["logprobs"] == (-0.5, -2.0)
    assert "usage" not in turn


def test_roles_have_players_returns_and_instructions(make_run: MakeRun) -> None:
    turns = [role_turn(FIRST), role_turn(SECOND, first=-1, second=1)]
    body = bodies(make_run([game(0, turns, players={FIRST: "policy", SECOND: "past"})])).body(0)
    assert [turn["role"] for turn in body["turns"]] == [FIRST, SECOND]
    assert body["turns"][1]["rewards"] == {FIRST: -1, SECOND: 1}
    roles = [(role["name"], role["player"], role["return"], role["success"]) for role in body["roles"]]
    assert roles == [(FIRST, "policy", -1.0, False), (SECOND, "past", 1.0, True)]
    assert body["roles"][0]["instructions"] == "You are first."


def test_an_episode_of_one_agent_has_no_roles(make_run: MakeRun) -> None:
    body = bodies(make_run([make_episode(0)])).body(0)
    assert "roles" not in body
    assert "role" not in body["turns"][0]


def test_a_megabyte_is_cut_and_said_so(make_run: MakeRun) -> None:
    long = {"observation": "x" * 1_000_000, "info": {"deep": [{"text": "y" * 300_000}], "many": [0] * 9_999}}
    (turn,) = bodies(make_run([make_episode(0, turn=long)])).body(0)["turns"]
    assert len(turn["observation"]) < TEXT + 100
    assert turn["observation"].endswith("800,000 more characters are in the run's folder only.")
    assert len(turn["info"]["deep"][0]["text"]) < TEXT + 100
    assert turn["info"]["many"][-1] == "… 7999 more"


def test_recorded_values_are_used(make_run: MakeRun) -> None:
    kept = {"advantages": [0.5, -0.5], "ratios": [1.1, 0.9]}
    body = bodies(make_run([line_of(make_episode(0, turn=TOKENS), step=1, tokens=kept)])).body(0)
    assert body["values"] == kept
    assert body["source"] == {"advantages": "recorded", "ratios": "recorded"}


def test_values_of_the_wrong_length_are_not(make_run: MakeRun) -> None:
    body = bodies(make_run([line_of(make_episode(0, turn=TOKENS), tokens={"ratios": [1.0]})])).body(0)
    assert body["values"] == {}
    assert body["source"]["ratios"] == "not recorded"


def test_advantages_are_worked_out_as_the_run_did(make_run: MakeRun) -> None:
    pytest.importorskip("pydantic")
    from rollgym.config.loader import dump
    from rollgym.trainer.config import EnvConfig, TrainConfig

    group = [make_episode(n, group="g", member=n, success=n < 1, turn=TOKENS) for n in range(4)]
    folder = make_run([line_of(one, step=1) for one in group], manifest={"kind": "train"})
    config = TrainConfig(envs=[EnvConfig(id="rollgym/Bandit-v0")], estimator="grpo")
    (folder / "config.yaml").write_text(dump(config))
    made = bodies(folder)
    # Scores 1, 0, 0, 0: mean 1/4, standard deviation sqrt(3)/4.
    assert made.body(0)["values"]["advantages"] == pytest.approx([3**0.5, 3**0.5])
    assert made.body(3)["values"]["advantages"] == pytest.approx([-(3**-0.5)] * 2)
    assert made.body(3)["source"]["advantages"] == "recomputed with grpo"
    assert made.body(3)["source"]["ratios"] == "not recorded"


def test_without_settings_advantages_are_not_recorded(make_run: MakeRun) -> None:
    body = bodies(make_run([line_of(make_episode(0, turn=TOKENS), step=1)], manifest={"kind": "train"})).body(
        0
    )
    assert body["values"] == {}
    assert body["source"]["advantages"].startswith("not recorded")


def test_ids_become_texts_by_the_runs_own_tokenizer(make_run: MakeRun) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = make_run([make_episode(0, turn=TOKENS)])
    assert bodies(folder).body(0)["texts"] == {}
    words = {"[UNK]": 0, "the": 1, "door": 2, "open": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    (folder / "model").mkdir()
    made.save(str(folder / "model" / "tokenizer.json"))
    assert bodies(folder).body(0)["texts"] == {"1": "the", "2": "door", "3": "open"}  # 4 is unknown to it


def test_a_broken_tokenizer_leaves_the_ids(make_run: MakeRun) -> None:
    folder = make_run([make_episode(0, turn=TOKENS)])
    (folder / "final").mkdir()
    (folder / "final" / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    assert bodies(folder).body(0)["texts"] == {}
