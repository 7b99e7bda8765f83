"""KL divergence between policies, estimated from log-probs of tokens sampled from the first one.

With x = log reference - log policy, the estimators of KL(policy || reference) (Schulman, 2020) are

    k1 = -x                 unbiased, high variance, either sign
    k2 = x * x / 2          biased, low variance, never negative
    k3 = exp(x) - 1 - x     unbiased, low variance, never negative

A good estimate need not have a good gradient (arXiv 2510.01555). In expectation over the policy's samples:

                in the loss                             in the reward
    k1          zero: no penalty                        the gradient of the KL
    k2          the gradient of the KL                  biased
    k3          that of KL(reference || policy)         biased

So k2 belongs in the loss and k1 in the reward; both have the same expected gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from rollgym.core.errors import UnknownName

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before ``exp``, which overflows float32 at 88. A token above it (500 million
times more likely than before) has a finite loss and no gradient. Small ratios need no bound."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of the log-ratio clamped to `LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()


def kl_per_token(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Each token's estimate of KL(policy || reference), with the gradient of ``logprobs``."""
    x = reference - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        # Both terms use the bounded x: with an unbounded linear term the gradient would change its sign.
        x = x.clamp(max=LOG_RATIO_LIMIT)
        return x.exp() - 1 - x
    raise UnknownName("KL estimator", estimator, ESTIMATORS, f"Choose one of {', '.join(ESTIMATORS)}.")


def kl_rewards(logprobs: Tensor, reference: Tensor, coef: float, *, estimator: Estimator = "k1") -> Tensor:
    """The KL reward of each token: ``-coef * KL`` without gradient."""
    return -coef * kl_per_token(logprobs.detach(), reference.detach(), estimator)
