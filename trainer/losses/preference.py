"""The DPO loss of preference pairs: a pure function of the action tokens of one micro-batch.

    reward(reply) = beta * sum over its tokens of (log-prob - reference log-prob)
    margin        = reward(chosen) - reward(rejected)
    loss          = -(1 - label_smoothing) * log sigmoid(margin) - label_smoothing * log sigmoid(-margin)

A pair's tokens share a sequence id, and all of them are in the micro-batch. Their advantages are 1 in the
chosen reply and -1 in the rejected one.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rollgym.core.errors import UsageError
from rollgym.trainer.losses.metrics import LossResult, mean_of, sum_of
from rollgym.trainer.losses.policy import Tokens
from rollgym.trainer.losses.preference_settings import DPOSettings


def preference_loss(tokens: Tokens, settings: DPOSettings) -> LossResult:
    """Compute the loss of whole pairs; its metrics are means over pairs."""
    if tokens.reference is None:
        raise UsageError("The DPO loss needs Tokens.reference, which is None.")
    tokens = tokens.masked()
    assert tokens.reference is not None
    count = int(tokens.sequence_ids.max()) + 1 if len(tokens.sequence_ids) else 0

    def by_pair(values: Tensor) -> Tensor:
        return tokens.weights.new_zeros(count).index_add(0, tokens.sequence_ids, values.to(tokens.weights))

    chosen, rejected = tokens.advantages > 0, tokens.advantages < 0
    log_ratio = tokens.logprobs - tokens.reference
    reward_chosen = settings.beta * by_pair(log_ratio * chosen)
    reward_rejected = settings.beta * by_pair(log_ratio * rejected)
    margin = reward_chosen - reward_rejected
    smoothing = settings.label_smoothing
    dpo = -(1 - smoothing) * logsigmoid(margin)
    if smoothing:
        dpo = dpo - smoothing * logsigmoid(-margin)
    logprob_chosen, logprob_rejected = (by_pair(tokens.logprobs * side) for side in (chosen, rejected))
    nll = -logprob_chosen / by_pair(chosen).clamp(min=1)
    # The weights of a pair's tokens add up to the weight of the pair.
    weights = by_pair(tokens.weights)
    terms = {"dpo_loss": weights * dpo}
    if settings.sft_weight:
        terms["sft_loss"] = settings.sft_weight * weights * nll
    loss = sum((term.sum() for term in terms.values()), weights.new_zeros(()))
    means = {
        "preference_accuracy": margin > 0,
        "ranking_accuracy": logprob_chosen > logprob_rejected,
        "reward_margin": margin,
        "reward_chosen": reward_chosen,
        "reward_rejected": reward_rejected,
        "logprob_chosen": logprob_chosen,
        "logprob_rejected": logprob_rejected,
    }
    metrics = {"policy_loss": sum_of(loss.reshape(1))} | {name: sum_of(term) for name, term in terms.items()}
    metrics |= {name: mean_of(values, weights != 0) for name, values in means.items()}
    if tokens.entropy is not None:
        metrics["entropy"] = mean_of(tokens.entropy, tokens.mask)
    return LossResult(loss, metrics)
