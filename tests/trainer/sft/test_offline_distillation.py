"""Offline distillation: its loss against a plain implementation, what is learned, resuming, and refusals."""

from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import (  # noqa: E402
    VOCABULARY,
    Gradient,
    assert_same,
    episode,
    gradient,
    make_learner,
    make_row,
    tiny,
)
from scoring_server import scoring_server  # noqa: E402
from training import Forge, Story, lines  # noqa: E402
from tuning import write_config  # noqa: E402

import rollgym  # noqa: E402
from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.engines.servers.scoring import TokenScorer  # noqa: E402
from rollgym.io.run_dir import read_json  # noqa: E402
from rollgym.trainer.data.batch import Batch  # noqa: E402
from rollgym.trainer.data.sequences import TokenEpisode  # noqa: E402
from rollgym.trainer.distill_config import OfflineDistillConfig  # noqa: E402
from rollgym.trainer.learner.imitation import imitation_loss  # noqa: E402
from rollgym.trainer.server_teacher import ServerTeacher  # noqa: E402
from rollgym.trainer.sft.dataset import Example  # noqa: E402
from rollgym.trainer.sft.distillation import SoftExample, soft_batch, soften, teacher_targets  # noqa: E402

Tune = Callable[..., Path]
SHARES = (0.75, 0.25)


def episodes(count: int = 5) -> list[TokenEpisode]:
    """Episodes of one or two rows, with the same prompt twice."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(count):
        rows = [make_row(rng, [(int(rng.integers(2, 9)), int(rng.integers(1, 6))) for _ in range(2)])]
        if number % 2:
            rows.append(make_row(rng, [(4, int(rng.integers(1, 4)))]))
        made.append(episode(rows, f"e{number}"))
    return [*made, made[0]]


def settings(top_k: int) -> OfflineDistillConfig:
    teachers = [{"path": "a", "weight": 3.0}, {"path": "b", "weight": 1.0}]
    return OfflineDistillConfig.model_validate({"teachers": teachers, "top_k": top_k})


def softened(top_k: int) -> list[SoftExample]:
    given = episodes()
    found = teacher_targets(given, settings(top_k), [make_learner(tiny(seed)) for seed in (1, 2)])
    made, first = [], 0
    for one in given:
        mine = (found.tokens >= first) & (found.tokens < first + one.num_tokens)
        made.append(soften(Example(one, 0), found.tokens[mine] - first, found.ids[mine], found.weights[mine]))
        first += one.num_tokens
    return made


def batch(top_k: int = 4) -> Batch:
    return soft_batch(softened(top_k))


def plain(top_k: int) -> tuple[float, float, Gradient]:
    """Cross-entropy, forward KL and gradient, token by token over the whole vocabulary."""
    student, teachers = tiny(0), [tiny(1), tiny(2)]
    losses, entropies = [], []
    for row in (row for one in episodes() for row in one.sequences):
        ids = torch.from_numpy(row.ids)[None]
        said = torch.log_softmax(student(ids).logits[0], -1)
        for at in row.action_positions:
            wanted = torch.zeros(VOCABULARY)
            for share, teacher in zip(SHARES, teachers, strict=True):
                with torch.no_grad():
                    probs = torch.softmax(teacher(ids).logits[0, at - 1], -1)
                kept = probs.topk(top_k).indices
                wanted[kept] += share * probs[kept] / probs[kept].sum()
            losses.append(-(wanted * said[at - 1]).sum())
            entropies.append(-float(torch.special.xlogy(wanted, wanted).sum()))
    loss = torch.stack(losses).mean()
    loss.backward()
    grads = {f"model.{name}": p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    return float(loss.detach()), float(loss.detach()) - float(np.mean(entropies)), grads


@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY, 1000])
def test_loss_and_gradient_are_those_of_a_plain_implementation(top_k: int) -> None:
    loss, kl, expected = plain(min(top_k, VOCABULARY))
    given = softened(top_k)
    learner = make_learner(loss=imitation_loss(), learning_rate=0.0)
    found = learner.update(soft_batch(given))["policy_loss"]
    assert found == pytest.approx(loss, rel=1e-5)
    entropy = sum(one.entropy for one in given) / sum(one.learned for one in given)
    assert found - entropy == pytest.approx(kl, rel=1e-4, abs=1e-5)
    assert_same(gradient(soft_batch(given), loss=imitation_loss()), expected, 1e-5)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("top_k", [4, 1000])
def test_teachers_on_servers_give_the_same_targets(kind: str, top_k: int) -> None:
    given = episodes()
    expected = teacher_targets(given, settings(top_k), [make_learner(tiny(seed)) for seed in (1, 2)])
    with scoring_server(tiny(1), kind) as first, scoring_server(tiny(2), kind) as second:
        teachers = [ServerTeacher(TokenScorer(one.url), VOCABULARY) for one in (first, second)]
        found = teacher_targets(given, settings(top_k), teachers)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.weights == pytest.approx(expected.weights, abs=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_any_cut_into_micro_batches_gives_the_same_gradient(layout: str, budget: int) -> None:
    """Rule 16."""
    expected = gradient(batch(), loss=imitation_loss(), layout="padded", max_tokens_per_microbatch=10_000)
    found = gradient(batch(), loss=imitation_loss(), layout=layout, max_tokens_per_microbatch=budget)
    assert_same(found, expected, 2e-6)


def test_logits_in_chunks_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradient(batch(), loss=imitation_loss())
    monkeypatch.setattr("rollgym.trainer.learner.chunked_logprobs.MAX_LOGITS", 3 * VOCABULARY)
    assert_same(gradient(batch(), loss=imitation_loss()), expected, 2e-6)


def test_a_policy_that_is_its_teacher_has_no_gradient() -> None:
    given = [episodes()[0]]
    one = OfflineDistillConfig.model_validate({"teachers": [{"path": "a"}], "top_k": VOCABULARY})
    found = teacher_targets(given, one, [make_learner()])
    soft = soften(Example(given[0], 0), found.tokens, found.ids, found.weights)
    assert found.mass == pytest.approx(1.0, abs=1e-5)
    assert found.weights.sum() == pytest.approx(given[0].num_tokens)
    grads = gradient(soft_batch([soft]), loss=imitation_loss())
    assert max(float(value.abs().max()) for value in grads.values()) < 1e-5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that says `yes`, larger than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    config = write_config(
        folder,
        data={"episodes": 24},
        epochs=6,
        model={"size": "small"},
        evaluation={"every": 0, "episodes": 8},
    )
    result = rollgym.sft(config, out=folder / "run", plain=True)
    assert result.last_success is not None
    assert result.last_success > 0.9
    return result.policy


def distill(path: Path, **more: Any) -> dict[str, Any]:
    return {"teachers": [{"path": str(path)}], "top_k": 4, **more}


def test_a_policy_learns_from_its_teacher_on_episodes_of_a_random_agent(tune: Tune, teacher: Path) -> None:
    """The recorded actions are wrong: only the teacher can have taught the right ones."""
    folder = tune(
        distill=distill(teacher),
        data={"agent": "random", "episodes": 48},
        epochs=6,
        validation={"fraction": 0.25, "every": 10},
        evaluation={"every": 0, "episodes": 20},
    )
    before, after = (line["success_rate"] for line in lines(folder / "evaluations.jsonl"))
    assert before < 0.5
    assert after > 0.9
    metrics = lines(folder / "metrics.jsonl")
    kl = [line["teacher_kl"] for line in metrics if "teacher_kl" in line]
    assert 0 < kl[-1] < 0.2 * kl[0]
    held_out = [line["validation_teacher_kl"] for line in metrics if "validation_teacher_kl" in line]
    assert 0 < held_out[-1] < 0.2 * held_out[0]
    steps = [line for line in metrics if "learned_tokens" in line]
    assert (
        sum(line["learned_tokens"] for line in steps) == 6 * read_json(folder / "data.json")["learned_tokens"]
    )


def test_a_run_killed_and_resumed_ends_the_same(forge: Forge, tmp_path: Path, teacher: Path) -> None:
    """Rule 35."""
    write_config(tmp_path, distill=distill(teacher), validation={"fraction": 0.2, "every": 2})
    assert forge.run(tmp_path, "sft", "small.yaml", "--out", "whole") == 0, (tmp_path / "err.txt").read_text()
    words = ("sft", "--resume", "--trust-code", "--out", "run")
    moments = [
        ("rollgym.trainer.sft.distillation:replacing", 1),  # before the teachers' targets are stored
        ("rollgym.trainer.tracking.jsonl:RunLogger.log_metrics", 2),
        ("rollgym.trainer.learner.learner:Learner.update", 4),  # after a checkpoint
    ]
    for number, moment in enumerate(moments):
        command = words if number else ("sft", "small.yaml", "--out", "run")
        code = forge.run(tmp_path, *command, at=moment)
        assert code == -SIGKILL, (moment, (tmp_path / "err.txt").read_text())
    stored = tmp_path / "run" / "teacher_targets.npz"
    content = stored.read_bytes()
    for broken, sentence in ((None, "it has no teacher_targets.npz"), (content[:-40], "Cannot read")):
        stored.unlink(missing_ok=True)
        if broken is not None:
            stored.write_bytes(broken)
        assert forge.run(tmp_path, *words) == 2
        assert sentence in (tmp_path / "err.txt").read_text()
    stored.write_bytes(content)
    summary = ("rollgym.trainer.train_run:write_json", 2)  # before the summary is written
    assert forge.run(tmp_path, *words, at=summary) == -SIGKILL
    assert forge.run(tmp_path, *words) == 0, (tmp_path / "err.txt").read_text()
    assert Story.of(tmp_path / "run") == Story.of(tmp_path / "whole")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"distill": {"teachers": []}}, "distill.teachers"),
    ({"distill": {"teachers": [{"path": "a"}], "top_k": 0}}, "distill.top_k"),
    ({"distill": {"teachers": [{"path": "nowhere"}]}}, "distill.teachers path nowhere: folder not found"),
    (
        {"distill": {"teachers": [{"path": "a"}]}, "runtime": "ray"},
        r"distill\.teachers\.0 requires runtime=local, or a url",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_wrong_settings_are_refused(
    tune: Tune, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        tune(**changes)
    assert not (tmp_path / "run").exists()
