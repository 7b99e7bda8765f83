"""The DPO loss against the formula in plain numbers."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.trainer.losses.metrics import merge, summary  # noqa: E402
from rollgym.trainer.losses.policy import Tokens  # noqa: E402
from rollgym.trainer.losses.preference import preference_loss  # noqa: E402
from rollgym.trainer.losses.preference_settings import DPOSettings, PreferenceLoss  # noqa: E402

LENGTHS = [(2, 3), (4, 1), (1, 1)]
"""Tokens of the chosen and of the rejected reply of each pair."""


def tokens(weights: list[float] | None = None, pairs: tuple[int, ...] = (0, 1, 2)) -> Tokens:
    """Random log-probs of three pairs, or of some of them."""
    rng = np.random.default_rng(0)
    columns: dict[str, list[float]] = {
        name: [] for name in ("logprobs", "reference", "advantages", "weights")
    }
    ids: list[int] = []
    for number, (chosen, rejected) in enumerate(LENGTHS):
        count = chosen + rejected
        made = {
            "logprobs": rng.normal(-2, 1, count).tolist(),
            "reference": rng.normal(-2, 1, count).tolist(),
            "advantages": [1.0] * chosen + [-1.0] * rejected,
            "weights": [(weights or [1 / 3] * 3)[number] / count] * count,
        }
        if number in pairs:
            ids += [pairs.index(number)] * count
            for name, values in made.items():
                columns[name] += values
    tensors: dict[str, Any] = {name: torch.tensor(v, dtype=torch.float64) for name, v in columns.items()}
    tensors["logprobs"].requires_grad_()
    zeros = torch.zeros(len(ids), dtype=torch.float64)
    return Tokens(**tensors, old=zeros, behavior=zeros, sequence_ids=torch.tensor(ids))


def expected(settings: DPOSettings) -> tuple[float, list[float], list[float]]:
    """The loss, the gradient by token and the margins, one pair after another."""
    given, at, total = tokens(), 0, 0.0
    assert given.reference is not None
    logprobs, reference = given.logprobs.tolist(), given.reference.tolist()
    slopes: list[float] = []
    margins: list[float] = []
    for chosen, rejected in LENGTHS:
        ratios = [a - b for a, b in zip(logprobs[at:], reference[at:], strict=True)][: chosen + rejected]
        margin = settings.beta * (sum(ratios[:chosen]) - sum(ratios[chosen:]))
        sigmoid = 1 / (1 + math.exp(-margin))
        smooth = settings.label_smoothing
        total -= (1 - smooth) * math.log(sigmoid) + smooth * math.log(1 - sigmoid)
        total -= settings.sft_weight * sum(logprobs[at : at + chosen]) / chosen
        slope = -(1 - smooth) * (1 - sigmoid) + smooth * sigmoid
        slopes += [(slope * settings.beta - settings.sft_weight / chosen) / 3] * chosen
        slopes += [-slope * settings.beta / 3] * rejected
        margins.append(margin)
        at += chosen + rejected
    return total / 3, slopes, margins


def ranking(logprobs: list[float]) -> float:
    """The share of pairs whose chosen reply is the more probable one."""
    right, at = 0, 0
    for chosen, rejected in LENGTHS:
        middle, end = at + chosen, at + chosen + rejected
        right += sum(logprobs[at:middle]) > sum(logprobs[middle:end])
        at = end
    return right / len(LENGTHS)


@pytest.mark.parametrize(
    "settings",
    [DPOSettings(), DPOSettings(beta=1.5), DPOSettings(label_smoothing=0.2), DPOSettings(sft_weight=0.7)],
    ids=["default", "beta", "smoothing", "sft"],
)
def test_loss_and_gradient_are_those_of_the_formula(settings: DPOSettings) -> None:
    loss, slopes, margins = expected(settings)
    given = tokens()
    result = preference_loss(given, settings)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-12)
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-12)
    found = summary(result.metrics)
    assert found["policy_loss"] == pytest.approx(loss)
    assert found["reward_margin"] == pytest.approx(np.mean(margins))
    assert found["reward_chosen"] - found["reward_rejected"] == pytest.approx(np.mean(margins))
    assert found["preference_accuracy"] == pytest.approx(np.mean([margin > 0 for margin in margins]))
    assert found["ranking_accuracy"] == pytest.approx(ranking(given.logprobs.tolist()))


def test_parts_of_a_batch_add_up() -> None:
    whole = preference_loss(tokens(), DPOSettings())
    parts = [preference_loss(tokens(pairs=pairs), DPOSettings()) for pairs in ((2,), (0, 1))]
    assert sum(float(part.loss.detach()) for part in parts) == pytest.approx(float(whole.loss.detach()))
    joined = summary(merge([part.metrics for part in parts]))
    assert joined == pytest.approx(summary(whole.metrics))


def test_a_pair_of_weight_0_counts_nowhere() -> None:
    kept = preference_loss(tokens([0.5, 0.5, 0.0]), DPOSettings())
    alone = preference_loss(tokens([0.5, 0.5, 0.0], pairs=(0, 1)), DPOSettings())
    assert float(kept.loss.detach()) == pytest.approx(float(alone.loss.detach()))
    assert summary(kept.metrics) == pytest.approx(summary(alone.metrics))


def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin() -> None:
    given = tokens()
    same = Tokens(
        logprobs=given.logprobs,
        old=given.old,
        behavior=given.behavior,
        advantages=given.advantages,
        weights=given.weights,
        sequence_ids=given.sequence_ids,
        reference=given.logprobs.detach(),
    )
    result = preference_loss(same, DPOSettings())
    assert float(result.loss.detach()) == pytest.approx(math.log(2))
    found = summary(result.metrics)
    assert found["reward_margin"] == 0.0
    assert found["ranking_accuracy"] == pytest.approx(ranking(given.logprobs.tolist())), "without a reference"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta": 0.0}, "needs beta > 0"),
        ({"label_smoothing": 0.5}, "needs 0 <= label_smoothing < 0.5"),
        ({"sft_weight": -1.0}, "needs sft_weight >= 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        DPOSettings(**settings)


def test_the_learner_keeps_pairs_whole_and_weighs_them_alike() -> None:
    loss = PreferenceLoss(settings=DPOSettings(beta=0.3))
    assert (loss.ratio_level, loss.aggregation, loss.kl_coef) == ("episode", "sequence-mean", 0.0)
