"""reasoning-gym's own datasets through the adapter."""

import random

import pytest

pytest.importorskip("reasoning_gym", reason="the extra [adapters] is not installed: no reasoning-gym")

import rollgym
from rollgym.core.errors import UnknownName, UsageError
from rollgym.evaluation.replay import replay

DATASETS = ["leg_counting", "basic_arithmetic", "word_sorting"]


def oracle(env):
    """The dataset's own answer of the running task."""
    return str(env.unwrapped._entry["answer"])


@pytest.mark.parametrize("episodes", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DATASETS)
def test_episodes_through_worker_processes_are_the_same_twice(name, episodes, tmp_path):
    runs = [
        rollgym.evaluate(
            f"reasoning_gym:{name}", "random", episodes=episodes, workers=1, out=tmp_path / folder
        )
        for folder in ("a", "b")
    ]
    first, second = (
        {e.spec.episode_id: (e.turns[0].observation, e.turns[0].reward) for e in run.episodes} for run in runs
    )
    assert first == second
    assert len(first) == episodes
    assert len({observation for observation, _ in first.values()}) > 0.9 * episodes
    assert {e.outcome for e in runs[0].episodes} == {"terminated"}


def test_the_datasets_own_answer_succeeds_and_another_does_not():
    env = rollgym.make("reasoning_gym:leg_counting")
    for task in range(5):
        env.reset(seed=0, options={"task": task, "split": "test"})
        _, reward, terminated, _, info = env.step(f"I think <answer>{oracle(env)}</answer>")
        assert (reward, terminated, info["success"]) == (1.0, True, True)
        env.reset(seed=0, options={"task": task, "split": "test"})
        assert env.step("no idea")[1] < 1.0


def test_splits_share_no_question():
    env = rollgym.make("reasoning_gym:basic_arithmetic", splits={"train": 300, "dev": 100, "test": 100})
    seen = {
        split: {env.reset(seed=0, options={"task": task, "split": split})[0] for task in range(size)}
        for split, size in (("train", 300), ("dev", 100), ("test", 100))
    }
    assert not seen["train"] & seen["dev"]
    assert not seen["train"] & seen["test"]
    assert not seen["dev"] & seen["test"]


def test_settings_of_the_dataset_are_used_and_named_in_the_task_set():
    env = rollgym.make("reasoning_gym:leg_counting", min_animals=1, max_animals=1)
    assert "," not in env.reset(seed=1)[0].partition("if you have")[2]
    other = rollgym.make("reasoning_gym:leg_counting")
    assert env.unwrapped.tasks.fingerprint("test") != other.unwrapped.tasks.fingerprint("test")


def test_an_answer_on_which_the_score_function_raises_is_invalid_and_scores_nothing():
    env = rollgym.make("reasoning_gym:prime_factorization")
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("nonsense")
    assert (reward, terminated, info["valid"], info["success"]) == (0.0, True, False, False)


def test_global_generators_stay_untouched():
    random.seed(1)
    before = random.getstate()
    env = rollgym.make("reasoning_gym:word_sorting")
    env.reset(seed=0)
    env.step("a")
    assert random.getstate() == before


def test_replay_confirms_a_recorded_run(tmp_path):
    results = rollgym.evaluate("reasoning_gym:leg_counting", "random", episodes=5, out=tmp_path / "run")
    replayed = replay(list(results.episodes))
    assert [episode.same for episode in replayed] == [True] * 5


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"max_animal": 3}, UnknownName, "Did you mean max_animals"),
        ({"seed": 3}, UnknownName, "no setting"),
        ({"max_animals": -1}, UsageError, "does not accept the settings"),
        ({"success_score": "high"}, UsageError, "must be a number"),
        ({"splits": {"train": 0}}, UsageError, "splits must map"),
    ],
)
def test_wrong_options_are_one_sentence(options, error, sentence):
    with pytest.raises(error, match=sentence):
        rollgym.make("reasoning_gym:leg_counting", **options)


def test_an_unknown_dataset_gets_a_suggestion():
    with pytest.raises(UnknownName, match="Did you mean leg_counting"):
        rollgym.make("reasoning_gym:leg_countin")


def test_it_keeps_the_contract():
    rules = [
        "runs",
        "gymnasium",
        "deterministic",
        "global-rng",
        "tasks",
        "range",
        "before-reset",
        "after-end",
    ]
    assert rollgym.check("reasoning_gym:leg_counting", quick=True, rules=rules).ok
