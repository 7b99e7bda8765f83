"""Learning from others before reinforcement learning: who is imitated, on which tasks, until when."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training import SMALL, Story, digest, lines, merged

from rollgym.config.loader import load
from rollgym.core.agent import Briefing, FunctionAgent
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.pool.inline import InlinePool
from rollgym.rollout.scheduler import Scheduler
from rollgym.trainer.config import EnvConfig, TrainConfig
from rollgym.trainer.imitation import warm_start
from rollgym.trainer.imitation.noisy_expert import NoisyAgent

Run = Callable[..., Path]
Command = Callable[..., Any]
TAUGHT: dict[str, Any] = {
    "agent": "lessons:Teacher",
    "episodes": 24,
    "epochs": 12,
    "batch": 6,
    "learning_rate": 0.01,
}


def phases(folder: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["phase"]) for line in lines(folder / "evaluations.jsonl")]


def test_a_policy_that_was_shown_how_succeeds(train_here: Run) -> None:
    folder = train_here("run", imitate=True, warm_start=TAUGHT, evaluation={"episodes": 20})
    before, after, last = (line["success_rate"] for line in lines(folder / "evaluations.jsonl"))
    assert before < 0.2
    assert after == last > 0.9


def test_imitation_alone_ends_without_a_training_step(train_here: Run) -> None:
    folder = train_here("run", imitate=True, warm_start={**TAUGHT, "epochs": 1})
    assert phases(folder) == [(0, "before"), (0, "warm_start"), (0, "after")]
    assert (folder / "metrics.jsonl").read_text() == ""
    assert json.loads((folder / "summary.json").read_text())["ended"] == "all 0 steps are done"
    assert digest(folder / "final" / "model.safetensors") != digest(folder / "model" / "model.safetensors")


def test_what_was_imitated_can_be_trained_further(train_here: Run) -> None:
    settings = {"warm_start": {**TAUGHT, "epochs": 1}}
    expected = Story.of(train_here("whole", **settings))
    train_here("run", imitate=True, **settings)
    assert Story.of(train_here("run", resume=True, **settings)) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"learner": {"lora": {"rank": 4}}, "loss": {"name": "grpo", "kl_coef": 0.05}},
        {"learner": {"critic": "separate"}, "estimator": "gae", "loss": {"name": "ppo", "kl_coef": 0.05}},
    ],
    ids=["lora", "a separate critic"],
)
def test_a_run_with_a_warm_start_resumes_as_if_it_had_never_stopped(
    train_here: Run, more: dict[str, Any]
) -> None:
    """Rule 35, with what a warm start leaves: matrices, a reference and a critic."""
    settings = {"warm_start": {**TAUGHT, "epochs": 1}, "agent": {"temperature": 0.8}, **more}
    expected = Story.of(train_here("whole", stop={"steps": 3}, **settings))
    train_here("run", stop={"steps": 1}, **settings)
    assert Story.of(train_here("run", resume=True, stop={"steps": 3}, **settings)) == expected


def test_training_continues_from_the_imitated_policy(train_here: Run) -> None:
    folder = train_here("run", warm_start={**TAUGHT, "epochs": 2}, stop={"steps": 1})
    assert phases(folder) == [(0, "before"), (0, "warm_start"), (1, "after")]
    versions = {turn["policy_version"] for one in lines(folder / "episodes.jsonl") for turn in one["turns"]}
    assert versions == {2}, "one for each epoch of imitation"


def test_imitation_stops_when_enough_succeed(train_here: Run, capfd: pytest.CaptureFixture[str]) -> None:
    enough = {**TAUGHT, "epochs": 40, "until_success": 0.3, "validation_episodes": 20}
    folder = train_here("run", imitate=True, warm_start=enough, evaluation={"episodes": 20})
    notes = [line for line in capfd.readouterr().err.splitlines() if "imitation, batch" in line]
    rates = [float(line.rsplit(" ", 1)[1]) for line in notes]
    assert 0 < len(rates) < 40
    assert all(rate < 0.3 for rate in rates[:-1])
    assert rates[-1] >= 0.3
    assert lines(folder / "evaluations.jsonl")[1]["phase"] == "warm_start"


def test_an_easy_domain_does_not_end_the_imitation_of_the_others(
    train_here: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mean over both would be at least one half from the start."""
    envs = [{"id": "lessons:Granted", "domain": "easy"}, {"id": "lessons:Yes", "domain": "hard"}]
    enough = {**TAUGHT, "epochs": 40, "until_success": 0.3, "validation_episodes": 40}
    train_here("run", imitate=True, envs=envs, warm_start=enough, evaluation={"episodes": 5})
    notes = [line for line in capfd.readouterr().err.splitlines() if "success easy" in line]
    rates = [float(line.rsplit("hard ", 1)[1]) for line in notes]
    assert 1 < len(rates) < 40
    assert all("easy 1.000" in line for line in notes)
    assert all(rate < 0.3 for rate in rates[:-1])
    assert rates[-1] >= 0.3


def validated(*rates: float) -> Any:
    """Ten validation episodes of each environment, with this success."""
    return [[SimpleNamespace(success=number < round(10 * rate)) for number in range(10)] for rate in rates]


def test_a_domain_rests_while_it_is_at_its_target_and_learns_again_below_it() -> None:
    envs = [{"id": "a", "domain": "x"}, {"id": "b", "domain": "y"}, {"id": "c", "domain": "y"}, {"id": "d"}]
    targets = warm_start.SuccessTargets(load(TrainConfig, merged(SMALL, {"envs": envs})), 0.5)
    assert (targets.reached, targets.text) == (set(), "")
    targets.update(validated(0.6, 0.2, 0.4, 0.0))
    assert (targets.reached, targets.all_reached) == ({0}, False)
    assert targets.text == "x 0.600, y 0.300, 0.000"
    targets.update(validated(0.4, 0.1, 0.9, 0.5))
    assert (targets.reached, targets.all_reached) == ({1, 2, 3}, False)
    targets.update(validated(0.5, 0.5, 0.5, 0.5))
    assert targets.all_reached


def test_without_a_target_nothing_is_reached() -> None:
    targets = warm_start.SuccessTargets(load(TrainConfig, SMALL), None)
    targets.update([])
    assert not targets.all_reached


def test_batches_without_resting_examples_are_full() -> None:
    schedule = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert list(warm_start.learning_batches(schedule, 3, lambda index: True)) == schedule
    even = list(warm_start.learning_batches(schedule, 3, lambda index: index % 2 == 0))
    assert even == [[0, 2, 4], [6, 8]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[EpisodeSpec]]:
    """The tasks of the demonstrations, and of what was evaluated."""
    found: dict[str, list[EpisodeSpec]] = {"shown": [], "evaluated": []}
    real_play, real_evaluate = warm_start.run_episodes, Scheduler.evaluate

    async def play(specs: Sequence[EpisodeSpec], *args: Any, **options: Any) -> list[Episode]:
        found["shown"] += specs
        return await real_play(specs, *args, **options)

    async def evaluate(self: Scheduler, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        found["evaluated"] += specs
        return await real_evaluate(self, specs)

    monkeypatch.setattr(warm_start, "run_episodes", play)
    monkeypatch.setattr(Scheduler, "evaluate", evaluate)
    return found


def test_demonstrations_and_their_check_are_on_different_training_tasks(
    train_here: Run, seen: dict[str, list[EpisodeSpec]]
) -> None:
    """Rule 32: nothing that is held out is shown."""
    settings = {**TAUGHT, "epochs": 1, "until_success": 1.0, "validation_episodes": 25}
    envs = [{"id": "lessons:Small"}]
    train_here("run", imitate=True, envs=envs, warm_start=settings)
    shown = {spec.task for spec in seen["shown"]}
    checks = {spec.task for spec in seen["evaluated"] if spec.split == "train"}
    assert {spec.split for spec in seen["shown"]} == {"train"}
    assert (len(shown), len(checks)) == (24, 25)
    assert not shown & checks


def test_demonstrations_depend_on_the_seed(train_here: Run, seen: dict[str, list[EpisodeSpec]]) -> None:
    once = {**TAUGHT, "epochs": 1}
    train_here("first", imitate=True, warm_start=once)
    train_here("second", imitate=True, warm_start=once, seed=1)
    first, second = seen["shown"][:24], seen["shown"][24:]
    assert [spec.task for spec in first] != [spec.task for spec in second]


def test_an_agent_that_never_succeeds_is_not_imitated(train_here: Run) -> None:
    with pytest.raises(UsageError, match="'lessons:Wrong' did not succeed once: there is nothing to imitate"):
        train_here("run", warm_start={**TAUGHT, "agent": "lessons:Wrong"})


def test_an_environment_without_an_expert_is_named(train_here: Run) -> None:
    with pytest.raises(UsageError, match="has no expert"):
        train_here("run", warm_start={**TAUGHT, "agent": "expert"})


def record(rollgym_command: Command, agent: str, split: str) -> str:
    words = ("--agent", agent, "--split", split, "--episodes", 12, "--out", f"shown-{split}")
    assert rollgym_command("eval", "lessons:Yes", *words).code == 0
    return f"shown-{split}"


def test_recorded_episodes_are_imitated(rollgym_command: Command, train_here: Run) -> None:
    shown = record(rollgym_command, "lessons:Teacher", "train")
    folder = train_here("run", imitate=True, warm_start={**TAUGHT, "run": shown}, evaluation={"episodes": 20})
    assert lines(folder / "evaluations.jsonl")[-1]["success_rate"] > 0.9


def test_recorded_episodes_of_held_out_tasks_are_not_imitated(
    rollgym_command: Command, train_here: Run
) -> None:
    """Rule 32: nothing that is held out is shown."""
    shown = record(rollgym_command, "lessons:Teacher", "test")
    with pytest.raises(UsageError, match=r"training split: there is nothing to imitate.*--split train"):
        train_here("run", warm_start={**TAUGHT, "run": shown})


def test_recorded_episodes_that_failed_are_not_imitated(rollgym_command: Command, train_here: Run) -> None:
    shown = record(rollgym_command, "lessons:Wrong", "train")
    with pytest.raises(UsageError, match="No episode in shown-train succeeded"):
        train_here("run", warm_start={**TAUGHT, "run": shown})


def test_a_folder_without_recorded_episodes_is_named(train_here: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run folder: it has no manifest\.json"):
        train_here("run", warm_start={**TAUGHT, "run": str(tmp_path)})


def test_demonstrations_are_distributed_by_weight_with_at_least_one_each() -> None:
    envs = [EnvConfig(id="a", weight=6), EnvConfig(id="b", weight=3), EnvConfig(id="c", weight=0.001)]
    assert warm_start._shares(envs, 9) == [6, 3, 1]


def test_the_check_takes_no_task_that_was_shown_even_if_few_are_left() -> None:
    config = load(TrainConfig, merged(SMALL, {"envs": [{"id": "lessons:Small"}], "warm_start": TAUGHT}))
    assert config.warm_start is not None
    specs = warm_start._specs(config, config.envs[0], "imitation", 0, 45)
    shown: Any = [SimpleNamespace(episode=SimpleNamespace(spec=spec)) for spec in specs]
    settings = config.warm_start.model_copy(update={"validation_episodes": 5})
    (check,) = warm_start._validation(config, settings, shown)
    assert {spec.task for spec in check} == set(range(50)) - {spec.task for spec in specs}


ERRING: dict[str, Any] = {**TAUGHT, "episodes": 40, "mistakes": 0.5, "only_successful": False}


def test_a_teacher_that_errs_is_not_imitated_in_that(train_here: Run) -> None:
    """It says no in a fourth of its turns; the policy learns to say yes alone."""
    folder = train_here("run", imitate=True, warm_start=ERRING, evaluation={"episodes": 40})
    assert lines(folder / "evaluations.jsonl")[-1]["success_rate"] > 0.9


def test_mistakes_are_imitated_on_demand(train_here: Run) -> None:
    asked = {**ERRING, "imitate_mistakes": True}
    folder = train_here("run", imitate=True, warm_start=asked, evaluation={"episodes": 40})
    assert 0.5 < lines(folder / "evaluations.jsonl")[-1]["success_rate"] < 0.95


def test_another_agent_can_make_the_mistakes() -> None:
    values = {"envs": [{"id": "lessons:Yes"}], "warm_start": {**ERRING, "mistakes_agent": "lessons:Wrong"}}
    config = load(TrainConfig, values)
    assert config.warm_start is not None
    demos = asyncio.run(warm_start.play(config.warm_start, config, InlinePool()))
    said = Counter(
        (turn.action, erred)
        for demo in demos
        for turn, erred in zip(demo.episode.turns, demo.erred, strict=True)
    )
    assert set(said) == {("yes", False), ("no", True)}
    assert min(said.values()) > 20


def test_which_turns_are_mistakes_depends_on_the_episode_alone() -> None:
    def player(episode_id: str) -> Any:
        agent = NoisyAgent(FunctionAgent(lambda o, i: "right"), FunctionAgent(lambda o, i: "wrong"), 0.3)
        spec = EpisodeSpec(episode_id=episode_id, env_id="lessons:Yes")
        return agent, agent.player(Briefing(spec=spec, instructions=""))

    async def turns(episode_id: str) -> list[bool]:
        agent, one = player(episode_id)
        said = [await one.act("", {}) for _ in range(400)]
        assert [word == "wrong" for word in said] == agent.erred(episode_id)
        return list(agent.erred(episode_id))

    first, again, other = (asyncio.run(turns(name)) for name in ("a", "a", "b"))
    assert first == again != other
    assert 80 < sum(first) < 160
