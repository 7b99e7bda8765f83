"""Two runs are compared task by task, and only where they played the same."""

import json

import pytest

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Turn
from rollgym.evaluation.compare import compare_runs
from rollgym.io.run_dir import RunFolder

MANIFEST = {
    "schema": 1,
    "env": {"id": "a/B-v0", "version": "v0", "kwargs": {}},
    "agent": {"name": "random"},
    "limits": {"turns": None},
    "task_set": {"hash": "abc"},
    "versions": {"rollgym": "0.1.0"},
}


def episode(task, success, reward=0.0, *, member=0, seed=0, text="start", split="test"):
    spec = EpisodeSpec(
        episode_id=f"{split}-{task}-{seed}-{member}",
        env_id="a/B-v0",
        task=task,
        split=split,
        env_seed=seed,
        member=member,
    )
    turn = Turn(observation=text, action="go", reward=reward, terminated=True)
    return Episode(spec=spec, outcome=Outcome.TERMINATED, turns=(turn,), success=success)


def failed(task):
    spec = EpisodeSpec(episode_id=f"failed-{task}", env_id="a/B-v0", task=task, split="test")
    error = Failure(type="E", message="boom")
    return Episode(spec=spec, outcome=Outcome.ENV_ERROR, error=error)


@pytest.fixture
def compare(tmp_path):
    """Compare two lists of episodes, with changes to the second manifest."""

    def run(a, b, **changes):
        for name, episodes, change in (("a", a, {}), ("b", b, changes)):
            folder = RunFolder.create(tmp_path / name, MANIFEST | {"agent": {"name": name}} | change)
            for one in episodes:
                folder.append(one)
            folder.close()
        return compare_runs(tmp_path / "a", tmp_path / "b")

    return run


def test_a_comparison_by_hand(compare):
    a = [episode(0, True, 1.0), episode(1, True, 0.5), episode(2, True, 0.0)]
    b = [episode(2, False, 0.5), episode(1, True, 0.5), episode(0, False, 0.0)]
    found = compare(a, b)
    assert (found["env"], found["tasks"], found["warnings"]) == ("a/B-v0", 3, [])
    assert (found["a"]["agent"], found["b"]["agent"]) == ("a", "b")
    success = found["success"]
    assert (success["mean_a"], success["mean_b"]) == pytest.approx((1.0, 1 / 3))
    assert (success["a_better"], success["b_better"], success["equal"]) == (2, 0, 1)
    assert success["p_value"] == 0.5
    assert found["return"]["difference"] == pytest.approx(1 / 6)
    assert (found["return"]["a_better"], found["return"]["b_better"]) == (1, 1)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_task_played_several_times_counts_once_with_its_mean(compare):
    a = [episode(0, i < 3, float(i), member=i) for i in range(4)] + [episode(1, False)]
    found = compare(a, [episode(0, True, 1.0), episode(1, False)])
    assert found["tasks"] == 2
    assert found["success"]["mean_a"] == pytest.approx((0.75 + 0) / 2)
    assert found["return"]["mean_a"] == pytest.approx((1.5 + 0) / 2)


def test_the_same_runs_do_not_differ(compare):
    episodes = [episode(task, task % 2 == 0, float(task)) for task in range(6)]
    found = compare(episodes, episodes)
    for score in ("success", "return"):
        assert (found[score]["difference"], found[score]["p_value"], found[score]["equal"]) == (0.0, 1.0, 6)


@pytest.mark.parametrize(
    "env",
    [
        {"id": "a/C-v0", "version": "v0", "kwargs": {}},
        {"id": "a/B-v0", "version": "v0", "kwargs": {"size": 9}},
        {"id": "a/B-v0", "version": "v1", "kwargs": {}},
    ],
)
def test_different_environments_are_refused(compare, env):
    with pytest.raises(UsageError, match="played different environments .* so they cannot be compared"):
        compare([episode(0, True)], [episode(0, True)], env=env)


@pytest.mark.parametrize("other", [episode(1, True), episode(0, True, seed=1), episode(0, True, split="dev")])
def test_runs_without_a_common_task_are_refused(compare, other):
    with pytest.raises(UsageError, match="have no task in common: evaluate both with the same --seed"):
        compare([episode(0, True)], [other])


def test_failed_episodes_do_not_count_as_common_tasks(compare):
    with pytest.raises(UsageError, match="no task in common"):
        compare([episode(0, True)], [failed(0)])


def test_tasks_of_one_side_are_left_out_with_a_warning(compare):
    a = [episode(0, True), episode(1, False), episode(2, False)]
    found = compare(a, [episode(0, True), failed(1), episode(3, False)])
    assert found["tasks"] == 1
    assert found["success"]["mean_a"] == 1.0
    assert found["warnings"] == ["3 tasks were played by one side only and do not count"]


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"task_set": {"hash": "def"}}, "the task sets differ"),
        ({"limits": {"turns": 5}}, "the limits on turns or time differ"),
        ({"versions": {"rollgym": "9.9"}}, "the runs were made by different versions of rollgym"),
    ],
)
def test_runs_made_under_other_conditions_get_a_warning(compare, change, warning):
    assert compare([episode(0, True)], [episode(0, True)], **change)["warnings"] == [warning]


def test_another_first_observation_gets_a_warning(compare):
    found = compare([episode(0, True)], [episode(0, True, text="changed")])
    assert found["warnings"] == [
        "some tasks showed a different first observation: was the environment changed?"
    ]


def test_an_episode_without_turns_has_its_first_observation_all_the_same(compare):
    slow = Episode(
        spec=episode(0, True).spec, outcome=Outcome.TIME_LIMIT, final_observation="start", success=False
    )
    assert compare([episode(0, True)], [slow])["warnings"] == []


def test_environments_without_success_or_tasks_are_compared_by_return(compare):
    a = [episode(None, None, 2.0, seed=seed) for seed in (1, 2)]
    b = [episode(None, None, 1.0, seed=seed) for seed in (2, 1)]
    found = compare(a, b)
    assert (found["success"], found["tasks"], found["return"]["difference"]) == (None, 2, 1.0)


def test_folders_that_cannot_be_read_are_named(tmp_path, compare):
    with pytest.raises(UsageError, match="Run folder .*none does not exist"):
        compare_runs(tmp_path / "none", tmp_path / "none")
    compare([episode(0, True)], [episode(0, True)])
    (tmp_path / "b" / "episodes.jsonl").write_text("oops\n")
    with pytest.raises(ResultsError, match=r"b/episodes\.jsonl, line 1"):
        compare_runs(tmp_path / "a", tmp_path / "b")
