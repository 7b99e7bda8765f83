"""The gradient of pairs on a real model: against a plain implementation, and however a batch is cut."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import Gradient, assert_same, episode, gradient, make_row, reordered, tiny  # noqa: E402

from rollgym.trainer.data.batch import Batch  # noqa: E402
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence  # noqa: E402
from rollgym.trainer.dpo.loop import batch_metrics, pair_batch  # noqa: E402
from rollgym.trainer.dpo.pairs import Pair, make_pair  # noqa: E402
from rollgym.trainer.losses.preference_settings import DPOSettings, PreferenceLoss  # noqa: E402

SETTINGS = DPOSettings(beta=0.4, label_smoothing=0.1, sft_weight=0.3)
LOSS = PreferenceLoss(settings=SETTINGS)


def conversation(rng: np.random.Generator, prompt: np.ndarray[Any, Any], rows: int) -> TokenEpisode:
    """Replies after a shared prompt; of two rows where a template rewrote the history."""
    made = []
    for number in range(rows):
        row = make_row(rng, [(3, int(rng.integers(1, 6))), (2, int(rng.integers(1, 4)))])
        ids = np.concatenate([prompt, row.ids]) if not number else row.ids
        shift = len(prompt) if not number else 0
        made.append(TokenSequence(ids, row.action_positions + shift))
    return episode(made)


def pairs(count: int = 5, seed: int = 0) -> list[Pair]:
    """Pairs of different lengths that share prompts, with log-probs of a reference."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = rng.integers(0, 50, int(rng.integers(2, 30)))
        chosen, rejected = (conversation(rng, prompt, 1 + (number + side) % 2) for side in range(2))
        pair = make_pair(f"p{number}", number, chosen, rejected)
        reference = rng.normal(-4, 1, pair.tokens.num_tokens)
        found.append(Pair(pair.tokens, number, chosen_tokens=chosen.num_tokens, reference=reference))
    return found


def plain(given: list[Pair]) -> tuple[float, Gradient]:
    """Loss and gradient from padded forward passes of transformers, pair by pair as the paper writes it."""
    model = tiny()
    model.zero_grad()
    losses = []
    for pair in given:
        assert pair.reference is not None
        rows = pair.tokens.sequences
        width = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.from_numpy(row.ids)
            mask[number, : len(row.ids)] = 1
        logprobs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits, -1)
        taken = torch.cat(
            [
                logprobs[number, at - 1, row.ids[at]].reshape(1)
                for number, row in enumerate(rows)
                for at in row.action_positions
            ]
        )
        ratio = taken - torch.from_numpy(pair.reference).float()
        count = pair.chosen_tokens
        margin = SETTINGS.beta * (ratio[:count].sum() - ratio[count:].sum())
        smooth = SETTINGS.label_smoothing
        loss = -(1 - smooth) * torch.log(torch.sigmoid(margin)) - smooth * torch.log(torch.sigmoid(-margin))
        losses.append(loss - SETTINGS.sft_weight * taken[:count].mean())
    total = torch.stack(losses).mean()
    total.backward()
    grads = {f"model.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), grads


def batch() -> Batch:
    return pair_batch(pairs())


def test_the_gradient_is_that_of_a_plain_implementation() -> None:
    loss, expected = plain(pairs())
    assert_same(gradient(batch(), loss=LOSS), expected, 1e-5)
    from learner_cases import make_learner

    learner = make_learner(loss=LOSS, learning_rate=0.0)
    found = learner.update(batch())
    assert found["policy_loss"] == pytest.approx(loss, rel=1e-5)
    measured = batch_metrics(batch(), learner.logprobs(batch()), LOSS)
    names = ("preference_accuracy", "ranking_accuracy", "reward_margin", "reward_chosen", "logprob_rejected")
    for name in ("policy_loss", *names):
        assert measured[name] == pytest.approx(found[name], rel=1e-4), name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_any_cut_into_micro_batches_gives_the_same_gradient(layout: str, budget: int) -> None:
    """Rule 16: pairs stay whole, one by one or all at once, padded or packed with prompts shared."""
    expected = gradient(batch(), loss=LOSS, layout="padded", max_tokens_per_microbatch=10_000)
    assert_same(gradient(batch(), loss=LOSS, layout=layout, max_tokens_per_microbatch=budget), expected, 2e-6)


def test_the_order_of_pairs_changes_nothing() -> None:
    expected = gradient(batch(), loss=LOSS)
    assert_same(gradient(reordered(batch(), [3, 0, 4, 2, 1]), loss=LOSS), expected, 2e-6)


def test_a_smaller_batch_averages_over_its_own_pairs() -> None:
    """Rule 17: the mean over two batches of equal size is the batch of both."""
    given = pairs(4)
    whole = gradient(pair_batch(given), loss=LOSS)
    halves = [gradient(pair_batch(part), loss=LOSS) for part in (given[:2], given[2:])]
    mean = {name: (halves[0][name] + halves[1][name]) / 2 for name in whole}
    assert_same(mean, whole, 2e-6)
