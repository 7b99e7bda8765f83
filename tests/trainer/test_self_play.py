"""Training with roles: what is trained, opponents, the past version, and exact resume."""

import json
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import make_learner
from role_episodes import FIRST, SECOND, game, grouped, turn, zero_sum_group
from training import Forge, Story, lines, write

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, Group
from rollgym.evaluation.replay import Settings, replay
from rollgym.evaluation.run_results import load_run
from rollgym.trainer.config import EnvConfig, PastConfig, TrainConfig, env_labels, role_players
from rollgym.trainer.recorded_advantages import RecomputedAdvantages
from rollgym.trainer.rollout_batch import make_rollout_batch, token_diagnostics, zero_variance
from rollgym.trainer.trusted import code_of

Run = Callable[..., Path]
BOTH = {"left": "policy", "right": "policy"}
PAST = {"left": "policy", "right": "past"}


def duel(roles: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"id": "lessons:Duel", "roles": roles, **more}


def settings(**more: Any) -> TrainConfig:
    return TrainConfig(envs=[EnvConfig(id="e", roles={FIRST: "policy", SECOND: "policy"})], **more)


def against(group: Group, player: str) -> Group:
    """The same games with an opponent in the second role, which recorded no tokens."""
    players = {FIRST: "policy", SECOND: player}
    episodes = []
    for episode in group.episodes:
        turns = [
            turn(each.role, len(each.action_ids) * (each.role == FIRST), first=each.rewards[FIRST],
                 second=each.rewards[SECOND])
            for each in episode.turns
        ]  # fmt: skip
        episodes.append(game(episode.spec.member, turns, players=players))
    return grouped(*episodes)


# --- the batch


def test_a_batch_has_one_trajectory_per_role_of_the_policy() -> None:
    rollout = make_rollout_batch([zero_sum_group()], settings(), make_learner(), 0.0)
    names = [f"g/{n}/{role}" for role in (FIRST, SECOND) for n in range(3)]
    assert [episode.name for episode in rollout.batch.episodes] == names
    assert [episode.num_tokens for episode in rollout.batch.episodes] == [3, 4, 1, 1, 2, 3]
    up, down = 0.7071067, 1.4142135
    parts = rollout.batch.by_episode(rollout.batch.arrays["advantages"])
    assert [part[0] for part in parts] == pytest.approx([up, up, -down, -up, -up, down], abs=1e-6)
    # Metrics of episodes count each game once, from the view of the first player.
    assert (rollout.metrics["episodes"], rollout.metrics["action_tokens"]) == (3.0, 14.0)
    assert rollout.metrics["return"] == pytest.approx(1 / 3)
    assert rollout.metrics[f"role/{SECOND}/return"] == pytest.approx(-1 / 3)
    assert rollout.metrics[f"role/{SECOND}/success"] == pytest.approx(1 / 3)


def test_turns_of_an_opponent_are_not_in_the_batch() -> None:
    both = make_rollout_batch([zero_sum_group()], settings(), make_learner(), 0.0).batch
    one = make_rollout_batch([against(zero_sum_group(), "past")], settings(), make_learner(), 0.0).batch
    assert [episode.name for episode in one.episodes] == [f"g/{n}/{FIRST}" for n in range(3)]
    assert one.arrays["advantages"].tolist() == both.arrays["advantages"][:8].tolist()


def test_token_values_are_recorded_in_the_order_of_play() -> None:
    group, learner = zero_sum_group(), make_learner()
    batch = make_rollout_batch([group], settings(), learner, 0.0).batch
    values = token_diagnostics(learner, batch, [group])
    assert [len(each["advantages"]) for each in values] == [4, 6, 4]
    assert values[2]["advantages"] == pytest.approx([-1.4142, 1.4142, 1.4142, 1.4142], abs=1e-4)
    assert all(len(each["ratios"]) == len(each["advantages"]) for each in values)


def test_a_group_has_no_signal_only_if_no_role_has_one() -> None:
    config = settings()
    assert not zero_variance(zero_sum_group(), config)
    equal = [turn(FIRST), turn(SECOND, first=1, second=-1)]
    assert zero_variance(grouped(game(0, equal), game(1, equal)), config)
    # The first player always gets 0 and the second 0 or 1: a signal for one of them.
    differs = grouped(game(0, [turn(FIRST), turn(SECOND)]), game(1, [turn(FIRST), turn(SECOND, second=1)]))
    assert not zero_variance(differs, config)
    assert zero_variance(against(differs, "past"), config)


# --- runs


def test_self_play_trains_both_roles_and_replays(train_here: Run) -> None:
    folder = train_here(envs=[duel(BOTH)], tracking={"tensorboard": False, "tokens_every": 2})
    episodes = list(load_run(folder).episodes)
    assert {tuple(e.spec.players.items()) for e in episodes} == {tuple(BOTH.items())}
    assert all(t.action_ids and t.role in BOTH for e in episodes for t in e.turns)
    assert {e.spec.env_kwargs["others"] for e in episodes} == {None}
    done = replay(episodes, Settings(modules=("lessons",), scored=True))
    assert [each.difference for each in done] == [None] * len(episodes)
    for line, episode in zip(lines(folder / "episodes.jsonl"), episodes, strict=True):
        if "tokens" in line:
            assert len(line["tokens"]["advantages"]) == sum(len(t.action_ids) for t in episode.turns)
    metrics = lines(folder / "metrics.jsonl")
    for line in metrics:
        assert line["role/left/return"] == pytest.approx(-line["role/right/return"])
    # Evaluations play the form with one agent.
    assert lines(folder / "evaluations.jsonl")[0]["env"] == "lessons:Duel"


def test_recomputed_advantages_are_those_of_training(train_here: Run) -> None:
    folder = train_here(envs=[duel(BOTH)], tracking={"tensorboard": False, "tokens_every": 1})
    recorded = lines(folder / "episodes.jsonl")
    episodes = list(load_run(folder).episodes)
    step = [(line, e) for line, e in zip(recorded, episodes, strict=True) if line["step"] == 1]
    source = RecomputedAdvantages(folder)
    assert source.why == ""
    again = source.of_step([episode for _, episode in step])
    for line, episode in step:
        assert again[episode.spec.episode_id] == pytest.approx(line["tokens"]["advantages"], abs=1e-4)


def test_members_of_both_roles_sample_differently(train_here: Run) -> None:
    """The policy sees the same prompt in both roles; equal seeds would give equal replies."""
    folder = train_here(envs=[duel(BOTH)], agent={"temperature": 5.0})
    pairs = [(e.turns[0], e.turns[1]) for e in load_run(folder).episodes]
    assert any(left.action_ids != right.action_ids for left, right in pairs)


def test_an_agent_can_have_a_role(train_here: Run) -> None:
    folder = train_here(envs=[duel({"left": "random"})])
    episodes = list(load_run(folder).episodes)
    for episode in episodes:
        assert episode.spec.players == {"left": "random", "right": "policy"}
        assert (episode.spec.role, episode.total_reward) == ("right", episode.turns[-1].rewards["right"])
        assert [bool(t.action_ids) for t in episode.turns] == [False, True, False, True]
        assert {t.action for t in episode.turns[::2]} <= {"yes", "no"}


def test_the_past_version_changes_when_due(train_here: Run) -> None:
    folder = train_here(envs=[duel(PAST)], past={"every": 3}, stop={"steps": 5})
    episodes = list(load_run(folder).episodes)
    assert all(not t.action_ids and t.policy_version is None for e in episodes for t in e.turns[1::2])
    assert all(t.response is not None for e in episodes for t in e.turns)
    assert [line["past_age"] for line in lines(folder / "metrics.jsonl")] == [0, 1, 2, 0, 1]
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    assert json.loads((newest / "state.json").read_text())["past_step"] == 3
    weights = [(path / "model.safetensors").read_bytes() for path in (folder / "past", newest / "past")]
    assert weights[0] == weights[1] != (folder / "final" / "model.safetensors").read_bytes()
    assert weights[0] != (folder / "model" / "model.safetensors").read_bytes()


def test_the_first_past_version_is_the_policy_before_the_first_step(train_here: Run) -> None:
    folder = train_here(envs=[duel(PAST)], past={"every": 100}, stop={"steps": 2})
    past, model = ((folder / name / "model.safetensors").read_bytes() for name in ("past", "model"))
    assert len(past) == len(model)
    from safetensors.numpy import load

    first, second = load(past), load(model)
    assert all((first[name] == second[name]).all() for name in first)


def test_a_run_against_the_past_version_resumes_exactly(forge: Forge, tmp_path: Path) -> None:
    """Rule 35: the past version is in the checkpoint, not the newest or the first policy."""
    changes = {
        "envs": [duel(PAST)],
        "past": {"every": 3},
        "stop": {"steps": 7},
        "checkpoints": {"every": 2},
        "learner": {"learning_rate": 0.02},
    }
    stories = []
    for name, moment in (("whole", None), ("killed", ("rollgym.trainer.self_play:PastPolicy.load", 3))):
        (tmp_path / name).mkdir()
        write(tmp_path / name, **changes)
        words: tuple[str, ...] = ("train", "small.yaml", "--out", "run")
        if moment is not None:  # after the past version of step 6 was written, before its checkpoint
            assert forge.run(tmp_path / name, *words, at=moment) == -SIGKILL
            words = ("train", "--resume", "--trust-code", "--out", "run")
        code = forge.run(tmp_path / name, *words)
        assert code == 0, (tmp_path / name / "err.txt").read_text()
        stories.append(Story.of(tmp_path / name / "run"))
    assert stories[0].weights == stories[1].weights
    assert stories[0].metrics == stories[1].metrics
    assert stories[0].episodes == stories[1].episodes


def test_a_mixture_trains_both_roles_against_the_past_version(train_here: Run) -> None:
    mirrored = {"left": "past", "right": "policy"}
    folder = train_here(envs=[duel(PAST), duel(mirrored)], stop={"steps": 2})
    episodes = list(load_run(folder).episodes)
    assert {e.spec.role for e in episodes} == {"left", "right"}
    metrics = lines(folder / "metrics.jsonl")[0]
    labels = [f'lessons:Duel left="{left}" right="{right}"' for left, right in
              (("policy", "past"), ("past", "policy"))]  # fmt: skip
    assert [metrics[f"env/{label}/episodes"] for label in labels] == [4, 4]


# --- settings


def test_agents_in_several_roles_get_names_of_their_own() -> None:
    config = TrainConfig(
        envs=[
            EnvConfig(id="a", roles={"x": "chat", "y": "expert"}),
            EnvConfig(id="b", roles={"x": "chat", "y": "past"}),
        ]
    )
    assert role_players(config) == [{"x": "chat #1", "y": "expert"}, {"x": "chat #2", "y": "past"}]
    same = TrainConfig(envs=[EnvConfig(id="a", roles={"x": "past"}), EnvConfig(id="a", roles={"y": "past"})])
    assert env_labels(same) == ['a x="past"', 'a y="past"']


BAD: list[tuple[dict[str, Any], str]] = [
    ({"envs": [duel({"left": "random", "right": "random"})]}, "so agent 'policy' plays none"),
    ({"envs": [duel({"middle": "random"})]}, "no role of lessons:Duel called 'middle'"),
    ({"envs": [{"id": "lessons:Yes", "roles": {"left": "past"}}]}, "lessons:Yes has no roles"),
    ({"envs": [duel({"left": "someone"})]}, "no agent called 'someone'"),
    ({"envs": [duel(PAST, role_options={"right": {"model": "x"}})]}, "role_options.right requires an agent"),
    ({"envs": [duel(BOTH)], "past": {"every": 2}}, "past requires a role"),
    ({"envs": [duel(PAST)], "runtime": "ray"}, "requires runtime=local"),
    ({"envs": [duel(PAST)], "rollout": {"max_staleness": 1}}, "requires rollout.max_staleness=0"),
    ({"envs": [duel(BOTH)], "program": "true"}, "program and envs.roles"),
    (
        {"envs": [duel(BOTH)], "rewards": [{"kind": "function", "target": "lessons:reward"}]},
        "requires one role",
    ),
    (
        {
            "envs": [{"id": "lessons:Duel", "kwargs": {"others": None}}],
            "rewards": [{"kind": "function", "target": "lessons:reward"}],
        },
        r"not 2 \(left, right\): give the other roles to agents or to `past`",
    ),
    (
        {"envs": [{"id": "lessons:Duel", "kwargs": {"others": None}}], "program": "true"},
        r"program cannot play all roles of lessons:Duel \(others=null\)",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_settings_that_cannot_work_are_refused(train_here: Run, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        train_here(**changes)


def test_code_and_addresses_of_opponents_are_listed() -> None:
    env = EnvConfig(
        id="e",
        roles={"x": "mine:Agent", "y": "chat"},
        role_options={"y": {"base_url": "http://localhost/v1"}},
    )
    assert code_of(TrainConfig(envs=[env])) == [
        "envs.0.roles.x mine:Agent",
        "envs.0.role_options.y.base_url http://localhost/v1",
    ]
    assert PastConfig().every == 20


def test_one_agent_may_play_all_roles_of_an_environment(train_here: Run) -> None:
    """Without `roles` but with others=null, the policy has all roles and trains in all of them."""
    folder = train_here(envs=[{"id": "lessons:Duel", "kwargs": {"others": None}}], stop={"steps": 1})
    episodes: list[Episode] = list(load_run(folder).episodes)
    assert all(t.action_ids for e in episodes for t in e.turns)
    assert episodes[0].spec.players == {}
