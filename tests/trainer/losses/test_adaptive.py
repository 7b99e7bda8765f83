"""Coefficients that approach a target KL or entropy."""

import math

import pytest

from rollgym.core.errors import RunError, UsageError
from rollgym.trainer.losses.adaptive import AdaptiveEntropy, AdaptiveKL


def test_the_adaptive_kl_coefficient_follows_the_paper() -> None:
    control = AdaptiveKL(0.2, target=6.0)
    assert control.update(6.0) == pytest.approx(0.2)
    assert control.update(6.6) == pytest.approx(0.2 * 1.01)  # 10 % above: up by 1 %
    assert control.update(600.0) == pytest.approx(0.2 * 1.01 * 1.02)  # never more than 2 %
    assert control.update(0.0) == pytest.approx(0.2 * 1.01 * 1.02 * 0.98)


def test_the_adaptive_kl_coefficient_refuses_invalid_values() -> None:
    for arguments in ({"coef": 0.0}, {"target": -1.0}, {"rate": math.nan}, {"rate": 5.0}):
        with pytest.raises(UsageError, match=next(iter(arguments))):
            AdaptiveKL(**({"coef": 0.1, "target": 1.0} | arguments))
    control = AdaptiveKL(0.1, target=1.0)
    with pytest.raises(RunError, match="nan"):
        control.update(math.nan)
    assert control.coef == 0.1


def test_the_entropy_coefficient_grows_below_the_target_and_shrinks_above() -> None:
    control = AdaptiveEntropy(0.1, target=0.4)
    assert control.update(0.4) == pytest.approx(0.1)
    assert control.update(0.2) == pytest.approx(0.1 * math.exp(0.15))
    assert control.update(0.0) == pytest.approx(0.1 * math.exp(0.45))
    assert control.update(0.6) == pytest.approx(0.1 * math.exp(0.3))
    assert control.update(50.0) == pytest.approx(0.1), "never by more than one target"


def test_the_adaptive_entropy_coefficient_refuses_invalid_values() -> None:
    for arguments in ({"coef": 0.0}, {"target": math.inf}, {"rate": -0.1}):
        with pytest.raises(UsageError, match=next(iter(arguments))):
            AdaptiveEntropy(**({"coef": 0.1, "target": 1.0} | arguments))
    control = AdaptiveEntropy(0.1, target=1.0)
    with pytest.raises(RunError, match="nan"):
        control.update(math.nan)
    assert control.coef == 0.1
