"""On-policy distillation: the advantages of teachers, what a policy learns from them, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import Gradient, assert_same, gradient, make_learner, mixed_batch, reordered, tiny
from safetensors.torch import load_file
from scoring_server import scoring_server
from training import Forge, Story, lines, write
from tuning import write_config as write_sft

import rollgym
from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.embedded.model import read_module
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.distill_config import DistillConfig
from rollgym.trainer.distillation import Teachers
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.rollout_batch import RolloutBatch

Run = Callable[..., Path]


def plain_logprobs(model: Any, batch: Any) -> list[float]:
    """Log-probs of the action tokens from plain forward passes of transformers, row by row."""
    found: list[float] = []
    for row in batch.sequences:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.from_numpy(row.ids)[None]).logits[0].double(), -1)
        found += [float(logprobs[at - 1, row.ids[at]]) for at in row.action_positions]
    return found


def test_advantages_are_the_reverse_kl_of_sampled_tokens() -> None:
    batch = mixed_batch()
    models = [tiny(1), tiny(2)]
    settings = DistillConfig.model_validate(
        {
            "teachers": [{"path": "a", "weight": 3.0}, {"path": "b", "weight": 1.0}],
            "weight": 0.5,
            "reward_weight": 0.25,
        }
    )
    made = Teachers(settings, [make_learner(model) for model in models]).add(RolloutBatch(batch, {"x": 1.0}))
    first, second = (np.array(plain_logprobs(model, batch)) for model in models)
    kl = batch.arrays["behavior"] - (0.75 * first + 0.25 * second)
    expected = 0.25 * batch.arrays["advantages"] - 0.5 * kl
    assert made.batch.arrays["advantages"] == pytest.approx(expected, abs=1e-5)
    assert made.metrics["teacher_kl"] == pytest.approx(kl.mean(), abs=1e-5)
    assert made.metrics["teacher_kl/1"] == pytest.approx((batch.arrays["behavior"] - second).mean(), abs=1e-5)
    assert made.metrics["x"] == 1.0


def test_a_policy_that_is_its_teacher_learns_nothing_from_it() -> None:
    batch = mixed_batch()
    learner = make_learner()
    batch = batch.with_arrays(behavior=learner.logprobs(batch))
    settings = DistillConfig.model_validate({"teachers": [{"path": "a"}], "reward_weight": 0.0})
    made = Teachers(settings, [make_learner()]).add(RolloutBatch(batch, {}))
    assert np.abs(made.batch.arrays["advantages"]).max() < 1e-6


def scored(batch: Batch, **learner: Any) -> RolloutBatch:
    """A batch with the distillation term of two teachers, whose learners have these settings."""
    settings = DistillConfig.model_validate(
        {"teachers": [{"path": "a", "weight": 3.0}, {"path": "b"}], "weight": 0.5, "reward_weight": 0.25}
    )
    teachers = [make_learner(tiny(seed), **learner) for seed in (1, 2)]
    return Teachers(settings, teachers).add(RolloutBatch(batch, {}))


def plain_gradient(batch: Batch) -> Gradient:
    """REINFORCE with the distillation term, token by token from forward passes of transformers."""
    student = tiny(0)
    first, second = (np.array(plain_logprobs(tiny(seed), batch)) for seed in (1, 2))
    reverse_kl = batch.arrays["behavior"] - (0.75 * first + 0.25 * second)
    advantages = iter((0.25 * batch.arrays["advantages"] - 0.5 * reverse_kl).tolist())
    losses = []
    for row in batch.sequences:
        logprobs = torch.log_softmax(student(torch.from_numpy(row.ids)[None]).logits[0], -1)
        losses += [-next(advantages) * logprobs[at - 1, row.ids[at]] for at in row.action_positions]
    torch.stack(losses).mean().backward()
    return {f"model.{name}": p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def test_the_gradient_is_that_of_a_plain_implementation() -> None:
    batch = mixed_batch()
    found = gradient(
        scored(batch).batch, loss=LossConfig("reinforce", tis_cap=None, aggregation="token-mean")
    )
    assert_same(found, plain_gradient(batch), 1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_any_cut_into_micro_batches_gives_the_same_gradient(layout: str, budget: int) -> None:
    """Rule 16, for the teachers' passes and the policy's."""
    cut: dict[str, Any] = {"layout": layout, "max_tokens_per_microbatch": budget}
    whole: dict[str, Any] = {"layout": "padded", "max_tokens_per_microbatch": 10_000}
    expected = gradient(scored(mixed_batch(), **whole).batch, **whole)
    assert_same(gradient(scored(mixed_batch(), **cut).batch, **cut), expected, 2e-5)


def test_the_order_of_episodes_changes_nothing() -> None:
    batch, order = mixed_batch(), [3, 0, 4, 2, 1]
    found, expected = scored(reordered(batch, order)), scored(batch)
    assert found.metrics["teacher_kl"] == pytest.approx(expected.metrics["teacher_kl"])
    assert_same(gradient(found.batch), gradient(expected.batch), 1e-5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that says `yes`."""
    folder = tmp_path_factory.mktemp("teacher")
    config = write_sft(folder, data={"episodes": 24}, epochs=12, evaluation={"every": 0, "episodes": 8})
    result = rollgym.sft(config, out=folder / "run", plain=True)
    assert result.last_success is not None
    assert result.last_success > 0.9
    return result.policy


def distill(path: Path, **more: Any) -> dict[str, Any]:
    return {"teachers": [{"path": str(path)}], "reward_weight": 0.0, **more}


def test_a_policy_learns_from_its_teacher_without_rewards(train_here: Run, teacher: Path) -> None:
    folder = train_here(
        distill=distill(teacher),
        seed=5,
        rollout={"groups": 4, "group_size": 4},
        learner={"learning_rate": 0.01, "mini_batches": 1},
        evaluation={"every": 0, "episodes": 20},
        checkpoints={"every": 60},
        stop={"steps": 120},
    )
    before, after = (line["success_rate"] for line in lines(folder / "evaluations.jsonl"))
    assert before < 0.3
    assert after > 0.9
    kl = [line["teacher_kl"] for line in lines(folder / "metrics.jsonl")]
    assert np.mean(kl[-5:]) < 0.3 * np.mean(kl[:5])


def test_a_run_killed_and_resumed_ends_the_same(forge: Forge, tmp_path: Path, teacher: Path) -> None:
    """Rule 35."""
    write(tmp_path, distill=distill(teacher, reward_weight=1.0))
    assert forge.run(tmp_path, "train", "small.yaml", "--out", "whole") == 0, (
        tmp_path / "err.txt"
    ).read_text()
    update = ("rollgym.trainer.learner.learner:Learner.update", 3)
    assert forge.run(tmp_path, "train", "small.yaml", "--out", "run", at=update) < 0
    words = ("train", "small.yaml", "--resume", "--out", "run")
    moved = teacher.with_name("moved")
    shutil.copytree(teacher, moved)
    weights = teacher / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert forge.run(tmp_path, *words) == 2
    assert "A teacher has changed since the run in run was started" in (tmp_path / "err.txt").read_text()
    shutil.copy(moved / "model.safetensors", weights)
    assert forge.run(tmp_path, *words) == 0, (tmp_path / "err.txt").read_text()
    assert Story.of(tmp_path / "run") == Story.of(tmp_path / "whole")


def test_a_teacher_on_a_server_teaches_the_same(train_here: Run, teacher: Path) -> None:
    """The server computes real log-probs with the teacher's weights, in vLLM's form."""
    short = {"rollout": {"groups": 2, "group_size": 2}, "stop": {"steps": 2}, "seed": 3}
    local = train_here("local", distill=distill(teacher), **short)
    with scoring_server(read_module(teacher), "vllm") as server:
        served = train_here("served", distill=distill_on(server.url, teacher), **short)
        assert server.asked("/v1/completions")
    kl = [[line["teacher_kl"] for line in lines(run / "metrics.jsonl")] for run in (local, served)]
    assert kl[1] == pytest.approx(kl[0], abs=1e-4)
    one, other = (load_file(run / "final" / "model.safetensors") for run in (local, served))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-3
    record = json.loads((served / "teachers.json").read_text())
    assert record["teachers"] == [{"server_model": "teacher"}]


def distill_on(url: str, path: Path) -> dict[str, Any]:
    return {"teachers": [{"path": str(path), "url": url}], "reward_weight": 0.0}


def test_a_run_whose_teacher_vanishes_resumes_with_it_elsewhere(
    train_here: Run, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.engines.servers.scoring.RETRY_SECONDS", 0.0)
    short = {"rollout": {"groups": 2, "group_size": 2}, "seed": 3, "checkpoints": {"every": 1}}
    with scoring_server(read_module(teacher), "vllm") as server:
        whole = train_here("whole", distill=distill_on(server.url, teacher), **short, stop={"steps": 4})
        answers = 3 * len(server.asked("/v1/completions")) // 4

        def vanish(body: Any) -> Any:
            return server.vllm(body) if len(server.asked("/v1/completions")) <= answers else "cut"

        server.seen.clear()
        server.scripts["/v1/completions"] = vanish
        with pytest.raises(AgentError, match=rf"The teacher at {server.url} could not score a batch"):
            train_here("run", distill=distill_on(server.url, teacher), **short, stop={"steps": 4})
    folder = whole.with_name("run")
    done = len(lines(folder / "metrics.jsonl"))
    assert 0 < done < 4
    with scoring_server(read_module(teacher), "vllm") as other:
        train_here("run", resume=True, distill=distill_on(other.url, teacher), **short, stop={"steps": 4})
    assert Story.of(folder) == Story.of(whole)


def test_a_teacher_with_another_tokenizer_is_refused(train_here: Run, teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    path = other / "tokenizer.json"
    path.write_text(json.dumps(_renamed(json.loads(path.read_text()))))
    with pytest.raises(UsageError, match=r"the tokenizer in .*other differs from the policy's"):
        train_here(distill=distill(other))


def _renamed(tokenizer: Any) -> Any:
    """The same tokenizer with another word for one id."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        word = next(word for word in vocabulary if word.isalpha())
        vocabulary[f"{word}x"] = vocabulary.pop(word)
    return tokenizer


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"distill": {"teachers": []}}, "distill.teachers"),
    ({"distill": {"teachers": [{"path": "nowhere"}]}}, "distill.teachers path nowhere: folder not found"),
    (
        {"distill": {"teachers": [{"path": "a"}]}, "runtime": "ray"},
        r"distill\.teachers\.0 requires runtime=local, or a url",
    ),
    (
        {
            "distill": {"teachers": [{"path": "a", "url": "http://127.0.0.1:1"}]},
            "agent": {"temperature": 0.5},
        },
        r"distill\.teachers\.0\.url requires agent\.temperature=1, not 0\.5",
    ),
    (
        {"distill": {"teachers": [{"path": "a", "api_key_env": "KEY"}]}},
        r"distill\.teachers\.0\.api_key_env requires distill\.teachers\.0\.url",
    ),
    (
        {"distill": {"teachers": [{"path": "a"}]}, "rollout": {"filter_zero_variance": True}},
        "cannot be combined",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_wrong_settings_are_refused(
    train_here: Run, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        train_here(**changes)
    assert not (tmp_path / "run").exists()
