"""Invariances of losses: partition of a batch, order, padding, masked tokens."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from loss_cases import NAMES, SETTINGS, Fields, make_batch, tokens_of  # noqa: E402

from rollgym.trainer.losses.aggregation import MODES, Mode, token_weights  # noqa: E402
from rollgym.trainer.losses.metrics import Metric, merge, summary  # noqa: E402
from rollgym.trainer.losses.policy import LossConfig, policy_loss  # noqa: E402
from rollgym.trainer.losses.value import value_loss  # noqa: E402

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)
few = settings(max_examples=25, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(fields: Fields, chosen: LossConfig, parts: list[Any] | None = None) -> tuple[Any, Any, Any]:
    """(loss, gradients by the log-probs and entropies, numbers) of a batch split into parts."""
    everything = torch.arange(len(fields["sequence_ids"]))
    loss, grads = 0.0, torch.zeros(2, len(everything), dtype=fields["old"].dtype)
    metrics: list[dict[str, Metric]] = []
    for part in [everything] if parts is None else parts:
        cut = dict(fields)
        # Sequence ids start at 0 in each micro-batch.
        cut["sequence_ids"] = torch.unique(fields["sequence_ids"][part], return_inverse=True)[1]
        tokens = tokens_of({k: v if k == "sequence_ids" else v[part] for k, v in cut.items()})
        result = policy_loss(tokens, chosen)
        result.loss.backward()
        loss += result.loss.item()
        grads[0, part] = tokens.logprobs.grad
        if tokens.entropy.grad is not None:
            grads[1, part] = tokens.entropy.grad
        metrics.append(result.metrics)
    return loss, grads, summary(merge(metrics))


def assert_same(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6, rel=1e-6)
    assert torch.allclose(found[1], expected[1], atol=1e-6, rtol=1e-6)
    assert found[2] == pytest.approx(expected[2], abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("chosen", SETTINGS, ids=NAMES)
@few
@given(
    data=st.data(),
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    mode=st.sampled_from(["token-mean", "sequence-mean"]),
)
def test_any_partition_into_micro_batches_gives_the_same_gradient(
    chosen: LossConfig, data: st.DataObject, lengths: list[int], seed: int, mode: str
) -> None:
    """Rule 16: sequences go to micro-batches in any order, empty ones included."""
    fields = make_batch(lengths, seed, torch.float32, mode)
    homes = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    home = torch.tensor(homes)[fields["sequence_ids"]]
    parts = [torch.nonzero(home == number)[:, 0] for number in range(4)]
    assert_same(run(fields, chosen, parts), run(fields, chosen))


@pytest.mark.parametrize("chosen", SETTINGS, ids=NAMES)
def test_the_order_of_tokens_does_not_matter(chosen: LossConfig) -> None:
    fields = make_batch([3, 8, 1, 5], 6, torch.float32)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    # grads come back in the original places, so they compare directly.
    assert_same(run(fields, chosen, [order]), run(fields, chosen))


@pytest.mark.parametrize("chosen", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf, -math.inf, 1e30])
def test_sequences_of_weight_zero_change_nothing(chosen: LossConfig, poison: float) -> None:
    """Rules 18 and 19: padding is in no sum, mean or maximum, and nothing in it leaks."""
    fields = make_batch([4, 6], 7, torch.float32)
    padding = {k: torch.full((5,), poison) for k in fields if k not in ("sequence_ids", "weights")}
    padding |= {"weights": torch.zeros(5), "sequence_ids": torch.tensor([2, 2, 3, 3, 3])}
    padded = {k: torch.cat([v, padding[k]]) for k, v in fields.items()}
    loss, grads, numbers = run(padded, chosen)
    assert (grads[:, 10:] == 0).all()
    assert_same((loss, grads[:, :10], numbers), run(fields, chosen))


@pytest.mark.parametrize("chosen", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("poison", [math.nan, -math.inf, 50.0])
def test_masked_tokens_inside_a_sequence_are_as_if_absent(chosen: LossConfig, poison: float) -> None:
    """Rule 19: also in the length and the ratio of their sequence."""
    fields = make_batch([5, 7], 8, torch.float32)
    dead = torch.tensor([1, 4, 9])
    for name in fields:
        if name != "sequence_ids":
            fields[name][dead] = 0.0 if name == "weights" else poison
    alive = torch.tensor([i for i in range(12) if i not in dead])
    loss, grads, numbers = run(fields, chosen)
    assert (grads[:, dead] == 0).all()
    assert_same((loss, grads, numbers), run(fields, chosen, [alive]))


@pytest.mark.parametrize("chosen", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("count", [0, 3])
def test_an_empty_micro_batch_has_loss_zero(chosen: LossConfig, count: int) -> None:
    """Rules 18 and 19: no tokens, or masked ones only, still have a gradient: zero."""
    fields = make_batch([count], 9, torch.float32)
    fields["weights"] = torch.zeros(count)
    loss, grads, numbers = run(fields, chosen)
    assert loss == 0
    assert (grads == 0).all()
    assert set(numbers.values()) == {0.0}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["ppo", "cispo", "reinforce"])
def test_the_split_of_an_episode_does_not_change_its_gradient(mode: Mode, name: str) -> None:
    """Rule 5: one episode of ten tokens, as one sequence or as four, beside one of two tokens."""
    found = []
    for cut in ([10], [1, 3, 0, 6]):
        weights = token_weights([cut, [2]], mode, constant=16 if mode == "constant" else None)
        fields = make_batch([10, 2], 10)
        fields["weights"] = torch.cat([torch.from_numpy(w) for w in weights])
        rows = [row for row, n in enumerate([*cut, 2]) for _ in range(n)]
        found.append(run(fields | {"sequence_ids": torch.tensor(rows)}, LossConfig(name)))
    assert_same(found[1], found[0])


def test_the_train_rollout_logprob_diff_is_always_reported() -> None:
    """Rule 21: mean and maximum of the absolute difference, for every loss and token."""
    fields = make_batch([4, 4], 11)
    for chosen in SETTINGS:
        same = run(fields | {"behavior": fields["old"]}, chosen)[2]
        assert same["train_rollout_logprob_diff"] == same["train_rollout_logprob_diff_max"] == 0
        gap = torch.tensor([0, 0, -0.5, 0, 0, 0.1, 0, 0], dtype=torch.float64)
        halves = [torch.arange(4), torch.arange(4, 8)]
        numbers = run(fields | {"behavior": fields["old"] + gap}, chosen, halves)[2]
        assert numbers["train_rollout_logprob_diff_max"] == pytest.approx(0.5)
        assert numbers["train_rollout_logprob_diff"] == pytest.approx(0.6 / 8)


def test_metrics_are_means_over_tokens() -> None:
    fields = make_batch([19, 2, 14], 12)
    numbers = run(fields, LossConfig("ppo", tis_cap=1.2))[2]
    ratio, advantages = (fields["logprobs"] - fields["old"]).exp(), fields["advantages"]
    full = (fields["old"] - fields["behavior"]).exp()
    c = full.clamp(max=1.2)
    log_ratio = fields["logprobs"] - fields["old"]
    expected = {
        "ratio": ratio.mean(),
        "ratio_max": ratio.max(),
        "clipped_low": ((ratio < 0.8) & (advantages < 0)).double().mean(),
        "clipped_high": ((ratio > 1.2) & (advantages > 0)).double().mean(),
        "importance": c.mean(),
        "tis_clip_frac": (full > 1.2).double().mean(),
        "importance_ess": c.sum() ** 2 / (35 * (c**2).sum()),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "entropy": fields["entropy"].mean(),
    }
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value.item(), rel=1e-6), name
        assert numbers[name] > 0


def test_value_loss_adds_up_and_ignores_masked_tokens() -> None:
    """Rules 16 and 19, for the value head."""
    values, old, returns = torch.randn(3, 12, generator=torch.Generator().manual_seed(13))
    weights = torch.full((12,), 1 / 9)
    for tensor, poison in ((values, math.nan), (old, math.inf), (returns, math.nan), (weights, 0.0)):
        tensor[[0, 5, 11]] = poison
    alive = weights != 0

    def grads(*parts: Any) -> tuple[Any, Any]:
        leaf = values.clone().requires_grad_()
        results = [value_loss(leaf[p], old[p], returns[p], weights[p], 0.2) for p in parts]
        torch.stack([r.loss for r in results]).sum().backward()
        return leaf.grad, summary(merge(r.metrics for r in results))

    (whole, numbers), (halves, joined) = grads(alive), grads(torch.arange(4), torch.arange(4, 12))
    assert torch.isfinite(whole).all()
    assert torch.allclose(halves, whole, atol=1e-6)
    assert joined == pytest.approx(numbers, abs=1e-6)
