"""The learner: its optimizer, its bounds, its reference, and that it can be stopped and gone on with."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import (  # noqa: E402
    VOCABULARY,
    assert_same,
    differ,
    gradient,
    make_learner,
    mixed_batch,
    shaken,
    tiny,
    weights,
)
from transformers import GPT2Config, GPT2LMHeadModel, StableLmConfig, StableLmForCausalLM  # noqa: E402

from rollgym.core.errors import RunError, UsageError  # noqa: E402
from rollgym.trainer.data.batch import Batch, make_batch  # noqa: E402
from rollgym.trainer.learner.config import LearnerConfig  # noqa: E402
from rollgym.trainer.learner.optim import lr_scale  # noqa: E402
from rollgym.trainer.losses.adaptive import Coefficients  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402

WITH_KL = LossConfig("grpo", kl_coef=0.2)
UNPACKED = StableLmConfig(
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
)


def shares(total: int, **settings: Any) -> list[float]:
    chosen = LearnerConfig(**settings)
    return [round(lr_scale(chosen, step, total), 6) for step in range(total)]


def test_the_rate_rises_in_the_warm_up_and_ends_at_its_final_share() -> None:
    """Rule 24: by optimizer steps, to the very last of them."""
    assert shares(5) == [1.0] * 5
    assert shares(5, schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert shares(5, schedule="linear", min_lr_ratio=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert shares(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.666667, 0.333333, 0.0]
    assert shares(5, schedule="cosine", min_lr_ratio=0.1)[0] == 1.0
    assert shares(5, schedule="cosine", min_lr_ratio=0.1)[2:] == [0.55, 0.231802, 0.1]
    assert shares(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    beyond = LearnerConfig(schedule="linear", min_lr_ratio=0.3)
    assert lr_scale(beyond, 99, 5) == pytest.approx(0.3)


def test_the_schedule_counts_optimizer_steps_and_not_batches() -> None:
    """Rule 24: two epochs of three mini-batches are six steps; the metric is the rate that was used."""
    options = {"total_steps": 12}
    learner = make_learner(
        learning_rate=0.01, schedule="linear", min_lr_ratio=0.1, epochs=2, mini_batches=3, options=options
    )
    used: list[float] = []
    step = learner.strategy.optimizer.step
    learner.strategy.optimizer.step = lambda: (
        used.append(learner.strategy.optimizer.param_groups[0]["lr"]),
        step(),
    )
    first, second = learner.update(mixed_batch()), learner.update(mixed_batch(1))
    assert used == pytest.approx([0.01 * (1 - 0.9 * n / 11) for n in range(12)])
    assert first["learning_rate"] == pytest.approx(used[5])
    assert second["learning_rate"] == pytest.approx(0.001)
    assert learner.steps == 12


def test_a_gradient_is_held_to_its_greatest_norm() -> None:
    batch = mixed_batch()
    free = gradient(batch)
    norm = math.sqrt(sum(float(value.square().sum()) for value in free.values()))
    held = make_learner(learning_rate=0.0, clip_norm=norm / 4)
    assert held.update(batch)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    found = {f"model.{name}": 4 * p.grad for name, p in held.model.named_parameters()}
    assert_same(found, free, 1e-5)
    assert_same(gradient(batch, clip_norm=2 * norm), free, 1e-7)


def test_a_gradient_that_is_not_finite_ends_the_run_and_leaves_the_weights() -> None:
    learner = make_learner(loss="reinforce")
    learner.update(mixed_batch())
    before, state = weights(learner), str(learner.strategy.optimizer.state_dict())
    batch = mixed_batch(1)
    bad = batch.with_arrays(advantages=np.where(np.arange(batch.num_tokens) == 3, np.nan, 1.0))
    with pytest.raises(RunError, match="gradient is not finite.*learner.learning_rate"):
        learner.update(bad)
    assert_same(weights(learner), before, 0.0)
    assert str(learner.strategy.optimizer.state_dict()) == state
    assert learner.steps == 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_same_update_from_the_same_state_gives_the_same_bits(layout: str) -> None:
    """Rule 34."""

    def trained() -> dict[str, Any]:
        learner = make_learner(mini_batches=2, epochs=2, layout=layout, max_tokens_per_microbatch=40)
        for seed in range(2):
            learner.update(mixed_batch(seed))
        return weights(learner)

    assert_same(trained(), trained(), 0.0)
    assert differ(trained(), weights(make_learner())) > 1e-2


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradient_checkpointing_gives_the_same_gradient(layout: str) -> None:
    passes: list[int] = []
    learner = make_learner(learning_rate=0.0, clip_norm=None, layout=layout, gradient_checkpointing=True)
    learner.model.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    found = gradient(mixed_batch(), learner)
    assert_same(found, gradient(mixed_batch(), layout=layout))
    assert len(passes) == 2, "nothing was computed again"


def test_gradient_checkpointing_switches_no_dropout_on() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, embd_pdrop=0.5, resid_pdrop=0.5)
    learner = make_learner(shaken(GPT2LMHeadModel(config)), gradient_checkpointing=True)
    plain = make_learner(shaken(GPT2LMHeadModel(config)))
    batch = mixed_batch()
    assert learner.logprobs(batch) == pytest.approx(plain.logprobs(batch), abs=1e-6)


def test_old_log_probs_are_computed_before_the_first_step_or_taken_from_the_engine() -> None:
    """Rule 22: the proximal policy is the one the update began with, in all of its steps."""
    batch = mixed_batch()
    bare = Batch(batch.episodes, {name: batch.arrays[name] for name in ("behavior", "advantages")})
    recomputed, given, believed = (make_learner(epochs=3), make_learner(epochs=3), make_learner(epochs=3))
    metrics = recomputed.update(bare)
    assert metrics["approx_kl"] > 1e-4, "the proximal policy moved with the current one, and clipping is off"
    given.update(bare.with_arrays(old=given.logprobs(bare)))
    believed.update(bare.with_arrays(old=bare.arrays["behavior"]))
    assert_same(weights(recomputed), weights(given), 0.0)
    trusting = make_learner(epochs=3, old_logprobs="rollout")
    trusting.update(bare)
    assert_same(weights(trusting), weights(believed), 0.0)
    assert differ(weights(trusting), weights(given)) > 1e-4


def test_numbers_for_the_log_do_not_depend_on_steps_and_count_every_row() -> None:
    """Rule 21: the gap to the engine is over all rows, including those without a gradient."""
    batch = mixed_batch()
    still = {"learning_rate": 0.0, "clip_norm": None}
    once, thrice = make_learner(**still), make_learner(epochs=3, **still)
    assert once.update(batch) == pytest.approx(thrice.update(batch), rel=1e-5)
    quiet = batch.with_arrays(advantages=np.zeros(batch.num_tokens))
    gap = np.abs(batch.arrays["old"] - batch.arrays["behavior"])
    metrics = once.update(quiet)
    assert metrics["train_rollout_logprob_diff"] == pytest.approx(gap.mean())
    assert metrics["train_rollout_logprob_diff_max"] == pytest.approx(gap.max())


def test_the_gap_to_the_engine_is_known_where_its_word_is_taken() -> None:
    """Rule 21: with no pass of the trainer's own, it is measured in the first step, before anything moves."""
    batch = mixed_batch()
    bare = Batch(batch.episodes, {name: batch.arrays[name] for name in ("behavior", "advantages")})
    learner = make_learner(old_logprobs="rollout", epochs=3)
    gap = np.abs(learner.logprobs(bare) - bare.arrays["behavior"])
    metrics = learner.update(bare)
    assert metrics["train_rollout_logprob_diff"] == pytest.approx(gap.mean(), rel=1e-5)
    assert metrics["train_rollout_logprob_diff_max"] == pytest.approx(gap.max(), rel=1e-5)


def test_the_reference_stays_the_first_policy() -> None:
    batch = mixed_batch()
    learner = make_learner(loss=WITH_KL)
    first = learner.logprobs(batch)
    assert np.array_equal(learner.reference(batch), first)
    for seed in range(3):
        learner.update(mixed_batch(seed))
    assert np.array_equal(learner.reference(batch), first)
    assert np.abs(learner.logprobs(batch) - first).max() > 1e-2


def test_a_kl_term_holds_the_policy_near_the_reference() -> None:
    def distance(coef: float) -> float:
        learner = make_learner(loss=LossConfig("grpo", kl_coef=coef), epochs=6)
        batch = mixed_batch()
        learner.update(batch.with_arrays(reference=learner.reference(batch), old=learner.logprobs(batch)))
        return float(np.abs(learner.logprobs(batch) - learner.reference(batch)).mean())

    assert distance(10.0) < 0.8 * distance(1e-6)


def test_without_a_kl_term_there_is_no_reference() -> None:
    with pytest.raises(UsageError, match="No reference policy.*kl_coef"):
        make_learner().reference(mixed_batch())


def test_an_adaptive_kl_moves_the_coefficient_and_can_be_restored() -> None:
    learner = make_learner(loss=replace(WITH_KL, kl_target=0.01))
    assert learner.adapt_coefficients({"reference_kl": 1.0}).kl == pytest.approx(0.2 * 1.02)
    assert learner.loss.kl_coef == pytest.approx(0.2 * 1.02)
    assert learner.adapt_coefficients({"reference_kl": 0.0}).kl == pytest.approx(0.2 * 1.02 * 0.98)
    again = make_learner(loss=replace(WITH_KL, kl_target=0.01))
    again.set_coefficients(Coefficients(kl=learner.loss.kl_coef))
    assert again.loss.kl_coef == learner.loss.kl_coef
    metrics = {"reference_kl": 1.0}
    assert again.adapt_coefficients(metrics) == learner.adapt_coefficients(metrics)
    fixed = make_learner(loss=WITH_KL)
    fixed.set_coefficients(Coefficients(kl=0.7))
    assert fixed.adapt_coefficients({}).kl == fixed.loss.kl_coef == 0.2


def test_an_adaptive_entropy_moves_the_coefficient_and_can_be_restored() -> None:
    loss = LossConfig("grpo", entropy_coef=0.1, entropy_target=0.4)
    learner = make_learner(loss=loss)
    metrics = learner.update(mixed_batch())
    coefficients = learner.adapt_coefficients(metrics)
    assert coefficients.entropy == learner.loss.entropy_coef < 0.1, "an untrained policy has more entropy"
    assert coefficients.kl == 0
    again = make_learner(loss=loss)
    again.set_coefficients(coefficients)
    assert again.loss.entropy_coef == learner.loss.entropy_coef
    assert again.adapt_coefficients({"entropy": 0.1}) == learner.adapt_coefficients({"entropy": 0.1})
    fixed = make_learner(loss=replace(loss, entropy_target=None))
    fixed.set_coefficients(coefficients)
    assert fixed.adapt_coefficients(metrics).entropy == fixed.loss.entropy_coef == 0.1


def test_the_model_that_was_given_is_not_touched_unless_it_is_to_be_shared() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    make_learner(model).update(mixed_batch())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    assert model.config._attn_implementation == "sdpa"
    make_learner(model, options={"share_model": True}).update(mixed_batch())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_a_learner_that_shares_learns_as_the_owner_does() -> None:
    owner, alone = make_learner(), make_learner(options={"seed": 1})
    guest = make_learner(owner.model, options={"share_model": True, "seed": 1})
    assert guest.update(mixed_batch()) == alone.update(mixed_batch())
    assert_same(weights(owner), weights(alone), 0.0)


def test_rows_that_cannot_be_packed_are_padded_or_refused() -> None:
    """StableLM drops what says where packed rows begin: they would see one another."""
    model, batch = shaken(StableLmForCausalLM(UNPACKED).eval()), mixed_batch()
    chosen = make_learner(model)
    choice = chosen.describe_layout()
    assert choice.layout == "padded"
    assert choice.gap is not None
    assert choice.gap < 1e-4
    assert "log-probs differ from a plain forward" in str(choice)
    assert chosen.logprobs(batch) == pytest.approx(
        make_learner(model, layout="padded").logprobs(batch), abs=1e-6
    )
    guest = make_learner(chosen.model, options={"share_model": True})
    assert guest.describe_layout().layout == chosen.describe_layout().layout == "padded"
    assert guest.logprobs(batch) == pytest.approx(chosen.logprobs(batch), abs=1e-6)
    with pytest.raises(
        UsageError, match="StableLmForCausalLM cannot be trained on packed rows: .* Set learner.layout=padded"
    ):
        make_learner(model, layout="packed")


def test_batches_that_cannot_be_trained_on_are_refused() -> None:
    with pytest.raises(UsageError, match="the batch has no action tokens"):
        make_learner().update(make_batch([], advantages=[]))
    with pytest.raises(UsageError, match="temperature above 0"):
        make_learner(options={"temperature": 0.0})
    with pytest.raises(UsageError, match="No critic: set learner.critic"):
        make_learner().values(mixed_batch())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate >= 0"),
        ({"learning_rate": math.nan}, "learning_rate >= 0"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio requires schedule=linear or schedule=cosine"),
        ({"clip_norm": 0.0}, "clip_norm > 0"),
        ({"betas": (0.9, 1.0)}, "betas < 1"),
        ({"weight_decay": -0.1}, "weight_decay >= 0"),
        ({"mini_batches": 0}, "mini_batches >= 1"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch >= 1"),
        ({"critic_rate": 0.1}, "critic_rate, value_clip and value_coef require a critic"),
        ({"value_coef": 0.1}, "value_coef require a critic"),
        ({"critic": "shared", "value_clip": 0.0}, "value_clip > 0"),
        ({"critic": "shared", "critic_rate": -1.0}, "critic_rate >= 0"),
    ],
)
def test_invalid_configs_are_refused(settings: dict[str, Any], message: str) -> None:
    """Rule 36."""
    with pytest.raises(UsageError, match=message):
        LearnerConfig(**settings)


def test_entropy_is_over_all_action_tokens_whether_they_teach_or_not() -> None:
    batch = mixed_batch()
    bare = Batch(batch.episodes, {"behavior": batch.arrays["behavior"]})
    first = np.zeros(batch.num_tokens)
    first[: batch.episodes[0].num_tokens] = 1.0
    still = {"learning_rate": 0.0, "clip_norm": None}
    every = make_learner(**still).update(bare.with_arrays(advantages=np.ones(batch.num_tokens)))
    some = make_learner(**still).update(bare.with_arrays(advantages=first))
    assert some["entropy"] == pytest.approx(every["entropy"], rel=1e-6)


@pytest.mark.parametrize("source", ["recompute", "behavior"])
def test_the_gap_to_the_engine_leaves_out_tokens_of_older_weights(source: str) -> None:
    """Staleness is a separate number: tokens of older weights differ because the policy moved."""
    batch = mixed_batch()
    bare = Batch(batch.episodes, {name: batch.arrays[name] for name in ("behavior", "advantages")})
    staleness = np.zeros(batch.num_tokens)
    staleness[::3] = 2.0
    learner = make_learner(old_logprobs=source)
    gap = np.abs(learner.logprobs(bare) - bare.arrays["behavior"])
    metrics = learner.update(bare.with_arrays(staleness=staleness))
    assert metrics["train_rollout_logprob_diff"] == pytest.approx(gap[staleness == 0].mean(), rel=1e-5)
    assert metrics["train_rollout_logprob_diff_max"] == pytest.approx(gap[staleness == 0].max(), rel=1e-5)
    assert metrics["stale_logprob_diff"] == pytest.approx(gap[staleness > 0].mean(), rel=1e-5)


def test_a_batch_of_older_weights_alone_has_no_gap_to_the_engine() -> None:
    batch = mixed_batch()
    metrics = make_learner().update(batch.with_arrays(staleness=np.ones(batch.num_tokens)))
    assert "train_rollout_logprob_diff" not in metrics
    assert metrics["stale_logprob_diff"] > 0


def test_a_batch_is_dealt_otherwise_in_each_epoch_and_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def dealt(seed: int) -> list[list[list[int]]]:
        """The mini-batches of each epoch of two updates."""
        learner = make_learner(epochs=2, mini_batches=2, options={"seed": seed})
        seen: list[list[int]] = []
        usual = learner._accumulate

        def noting(batch: Any, episodes: Any) -> Any:
            seen.append(list(episodes))
            return usual(batch, episodes)

        monkeypatch.setattr(learner, "_accumulate", noting)
        for _ in range(2):
            learner.update(mixed_batch(count=9))
        return [seen[at : at + 2] for at in range(0, 8, 2)]

    epochs = dealt(0)
    assert all(sorted(one + other) == list(range(9)) for one, other in epochs)
    assert all(one != other for number, one in enumerate(epochs) for other in epochs[:number])
    assert dealt(0) == epochs != dealt(1)
