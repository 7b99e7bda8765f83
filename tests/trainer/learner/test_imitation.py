"""Imitation by the learner of a run: its own settings, its own optimizer, and what it goes on from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import assert_same, differ, make_learner, mixed_batch, tiny, weights  # noqa: E402

from rollgym.core.errors import RunError  # noqa: E402
from rollgym.trainer.data.batch import Batch  # noqa: E402
from rollgym.trainer.learner.config import LoraSettings  # noqa: E402
from rollgym.trainer.learner.learner import Learner  # noqa: E402
from rollgym.trainer.losses.adaptive import Coefficients  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402

LOSS = LossConfig("reinforce", tis_cap=None)
SCHEDULE: dict[str, Any] = {"learning_rate": 0.02, "schedule": "linear", "min_lr_ratio": 0.1}


def shown(seed: int = 0) -> Batch:
    """Demonstrations: all tokens are equally good."""
    batch = mixed_batch(seed)
    return batch.with_arrays(advantages=np.ones(batch.num_tokens))


def taught(learner: Learner, folder: Path, steps: int = 3) -> Learner:
    """The learner after imitation."""
    learner.start_imitation(0.02, steps)
    for seed in range(steps):
        learner.update(shown(seed))
    folder.mkdir()
    learner.export(folder)
    learner.end_imitation(folder)
    return learner


CASES: dict[str, dict[str, Any]] = {
    "betas": {"betas": (0.5, 0.6)},
    "clip_norm": {"clip_norm": 0.01},
    "eps": {"eps": 0.1},
    "weight_decay": {"weight_decay": 0.3},
    "dtype": {"dtype": "bfloat16"},
    "lora": {"lora": LoraSettings(rank=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_imitation_uses_the_learners_own_settings(case: str, tmp_path: Path) -> None:
    own = CASES[case]
    found = weights(taught(make_learner(epochs=2, mini_batches=3, **own), tmp_path / "taught"))
    expected = make_learner(loss=LOSS, options={"total_steps": 3}, **SCHEDULE, **own)
    for seed in range(3):
        expected.update(shown(seed))
    assert_same(found, weights(expected), 0.0)
    without = weights(taught(make_learner(), tmp_path / "without"))
    assert differ(found, without) > 1e-4, "the setting changes nothing"


def test_imitation_uses_gradient_checkpointing() -> None:
    def passes(**settings: Any) -> int:
        """Number of forward passes of a layer in one update."""
        learner = make_learner(**settings)
        learner.start_imitation(0.01, 1)
        count = []
        learner.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: count.append(1))
        learner.update(shown())
        return len(count)

    assert passes(gradient_checkpointing=True) == 2 * passes()


@pytest.mark.parametrize("critic", ["none", "shared", "separate"])
def test_after_imitation_training_is_that_of_a_new_learner_of_the_taught_policy(
    critic: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"critic": critic, "schedule": "cosine", "warmup_steps": 2, "mini_batches": 2}
    options = {"total_steps": 8, "seed": 3}
    loss = LossConfig("grpo", aggregation="sequence-mean")
    learner = make_learner(loss=loss, options=options, **settings)
    before = weights(learner)
    taught(learner, tmp_path / "taught")
    assert differ(weights(learner), before) > 1e-2
    new = make_learner(tmp_path / "taught", loss=loss, options=options, **settings)
    for seed in range(2):
        batch = mixed_batch(seed, also=("returns", "values"))
        assert learner.update(batch) == new.update(batch)
    assert_same(weights(learner), weights(new), 0.0)
    if critic != "none":
        assert np.array_equal(learner.values(batch)[0], new.values(batch)[0])


def test_with_lora_a_separate_critic_starts_from_the_merged_policy(tmp_path: Path) -> None:
    def body(learner: Any) -> dict[str, Any]:
        return {name: one.detach() for name, one in learner.critic.body.named_parameters()}

    learner = taught(make_learner(critic="separate", lora=LoraSettings(rank=2)), tmp_path / "taught")
    assert_same(body(learner), body(make_learner(tmp_path / "taught", critic="separate")), 0.0)
    assert differ(body(learner), body(make_learner(critic="separate"))) > 1e-2


def test_imitation_leaves_the_usual_loss_and_schedule(tmp_path: Path) -> None:
    learner = make_learner(loss=LossConfig("ppo", kl_coef=0.1, kl_target=0.1), options={"gap_limit": 0.01})
    config, loss = learner.config, learner.loss
    learner.set_coefficients(Coefficients(kl=0.3))
    taught(learner, tmp_path / "taught")
    assert learner.config == config
    assert learner.loss == LossConfig("ppo", kl_coef=0.3, kl_target=0.1)
    assert loss.kl_coef == 0.1
    assert (learner.steps, len(learner.strategy.optimizer.state)) == (0, 0)
    with pytest.raises(RunError, match="0.01"):
        learner.update(mixed_batch())  # demonstrations may have any log-probs, what an engine sampled may not


def test_what_was_moved_to_the_host_stays_there(tmp_path: Path) -> None:
    learner = make_learner(critic="separate")
    learner.start_imitation(0.01, 1)
    learner.update(shown())
    learner.offload()
    (tmp_path / "taught").mkdir()
    learner.export(tmp_path / "taught")
    learner.end_imitation(tmp_path / "taught")
    assert learner.offloaded == ("optimizer", "weights")
    assert learner.held() == {"optimizer": 0, "weights": 0}


def test_weights_of_more_precision_than_the_configuration_names_are_read_whole(tmp_path: Path) -> None:
    """A policy that was trained from a bfloat16 model is exported in float32 with that model's config."""
    model = tiny()
    model.config.dtype = torch.bfloat16
    learner = make_learner(model, loss=LossConfig("grpo", kl_coef=0.1))
    learner.export(tmp_path)
    batch = mixed_batch()
    learner.set_reference(tmp_path)
    assert np.array_equal(learner.reference(batch), learner.logprobs(batch))
