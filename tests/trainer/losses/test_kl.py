"""KL estimators by exact enumeration of a small policy, and the adaptive coefficient."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rollgym.core.errors import UnknownName, UsageError  # noqa: E402
from rollgym.trainer.losses.kl import ESTIMATORS, Estimator, kl_per_token, kl_rewards  # noqa: E402
from rollgym.trainer.losses.policy import LossConfig, Tokens, policy_loss  # noqa: E402

LOGITS = (0.7, -0.2, 0.1, -1.0)
REFERENCE = torch.log_softmax(torch.tensor((0.0, 0.5, -0.4, 0.2), dtype=torch.float64), 0)


def policy() -> tuple[Any, Any]:
    """(logits, log-probs) of a policy over four tokens; its samples are all four, weighted."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, torch.log_softmax(logits, 0)


def true_gradient(*, forward: bool = False) -> Any:
    logits, p = policy()
    kl = (REFERENCE.exp() * (REFERENCE - p)).sum() if forward else (p.exp() * (p - REFERENCE)).sum()
    return torch.autograd.grad(kl, logits)[0]


def loss_gradient(**chosen: Any) -> Any:
    """The expected gradient, over the policy's samples, of the KL term inside a policy loss."""
    logits, p = policy()
    weights, zeros = p.detach().exp(), torch.zeros(4, dtype=torch.float64)
    tokens = Tokens(
        logprobs=p, old=p.detach(), behavior=p.detach(), advantages=zeros, weights=weights,
        sequence_ids=torch.arange(4), reference=REFERENCE,
    )  # fmt: skip
    return torch.autograd.grad(policy_loss(tokens, LossConfig("grpo", **chosen)).loss, logits)[0]


def test_the_estimators_by_hand() -> None:
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    found = [kl_per_token(p, q, estimator).item() for estimator in ESTIMATORS]
    assert found == pytest.approx([math.log(2), math.log(2) ** 2 / 2, 0.5 - 1 + math.log(2)])


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    _, p = policy()
    true = (p.exp() * (p - REFERENCE)).sum().item()
    means = {k: (p.exp() * kl_per_token(p, REFERENCE, k)).sum().item() for k in ESTIMATORS}
    assert means["k1"] == pytest.approx(true)
    assert means["k3"] == pytest.approx(true)
    assert abs(means["k2"] - true) > 1e-3


def test_k2_in_the_loss_has_the_gradient_of_the_kl() -> None:
    """Rule 23: and is the default of the loss."""
    for chosen in ({}, {"kl_estimator": "k2"}):
        assert torch.allclose(loss_gradient(kl_coef=0.5, **chosen), 0.5 * true_gradient(), atol=1e-12)


def test_k3_in_the_loss_has_the_gradient_of_another_kl() -> None:
    """Rule 23: biased; it is that of the forward KL."""
    found = loss_gradient(kl_coef=1.0, kl_estimator="k3")
    assert torch.allclose(found, true_gradient(forward=True), atol=1e-12)
    assert not torch.allclose(found, true_gradient(), atol=1e-2)


def test_k1_in_the_loss_has_no_gradient_and_is_refused() -> None:
    """Rule 23."""
    logits, p = policy()
    mean = (p.detach().exp() * kl_per_token(p, REFERENCE, "k1")).sum()
    assert torch.allclose(
        torch.autograd.grad(mean, logits)[0], torch.zeros(4, dtype=torch.float64), atol=1e-12
    )
    with pytest.raises(UsageError, match="expected gradient of zero"):
        LossConfig("grpo", kl_coef=0.1, kl_estimator="k1")


@pytest.mark.parametrize(("estimator", "right"), [("k1", True), ("k2", False), ("k3", False)])
def test_k1_in_the_reward_has_the_gradient_of_the_kl(estimator: Estimator, right: bool) -> None:
    """Rule 23: the expected policy gradient of the penalty is that of the KL only for k1."""
    logits, p = policy()
    rewards = kl_rewards(p, REFERENCE, 0.5, estimator=estimator)
    assert not rewards.requires_grad
    loss = -(p.detach().exp() * rewards * p).sum()
    found = torch.autograd.grad(loss, logits)[0]
    assert torch.allclose(found, 0.5 * true_gradient(), atol=1e-12) == right


def test_a_kl_in_the_reward_is_not_in_the_loss_as_well() -> None:
    """Rule 23."""
    settings = LossConfig("grpo", kl_coef=0.5, kl_in="reward")
    assert settings.estimator == "k1"
    assert LossConfig("grpo", kl_coef=0.5).estimator == "k2"
    assert torch.equal(loss_gradient(kl_coef=0.5, kl_in="reward"), torch.zeros(4, dtype=torch.float64))


def test_k3_does_not_overflow_and_its_gradient_keeps_its_sign() -> None:
    p = torch.tensor([-200.0, -25.0, -1.0], requires_grad=True)
    kl = kl_per_token(p, torch.tensor([-1.0, -1.0, -200.0]), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert p.grad is not None
    assert p.grad.tolist() == [0.0, 0.0, 1.0]


def test_unknown_estimators_are_named() -> None:
    with pytest.raises(UnknownName, match="k4"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
