"""The losses against plain loops, hand-made numbers and the docs page."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from loss_cases import NAMES, SETTINGS, by_hand, make_batch, tokens_of  # noqa: E402

from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.trainer.losses.metrics import summary  # noqa: E402
from rollgym.trainer.losses.policy import POLICY_LOSSES, LossConfig, Tokens, policy_loss  # noqa: E402
from rollgym.trainer.losses.value import value_loss  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"
PLAIN = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensor(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.float64)


def one_token(ratio: float, advantage: float, settings: LossConfig, c: float = 1.0) -> tuple[float, float]:
    """(loss, derivative by the log-prob) of a single token of weight 1."""
    fields = make_batch([1]) | {"logprobs": tensor(-1.0 + math.log(ratio)), "old": tensor(-1.0)}
    fields |= {"behavior": tensor(-1.0 - math.log(c)), "advantages": tensor(advantage)}
    tokens = tokens_of(fields)
    loss = policy_loss(tokens, settings).loss
    loss.backward()
    return loss.item(), tokens.logprobs.grad.item()


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_loss_and_gradient_are_those_of_a_plain_loop(settings: LossConfig, seed: int) -> None:
    fields = make_batch([7, 1, 12, 5], seed)
    fields["weights"][[2, 9, 20]] = 0.0
    tokens = tokens_of(fields)
    result = policy_loss(tokens, settings)
    result.loss.backward()
    loss, slopes = by_hand(fields, settings)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert tokens.logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-12)
    if settings.entropy_coef:
        expected = (-settings.entropy_coef * fields["weights"]).tolist()
        assert tokens.entropy.grad.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.2, 0.0),  # good, up-weighted enough: clipped
        (1.5, -1.0, 1.5, 1.5),  # bad and up-weighted: never clipped
        (0.5, -1.0, 0.8, 0.0),  # bad, down-weighted enough: clipped
        (0.5, 1.0, -0.5, -0.5),  # good and down-weighted: never clipped
        (1.1, 2.0, -2.2, -2.2),  # within the bounds
        (1.0, 1.0, -1.0, -1.0),  # before the first step
    ],
)
def test_clipping_binds_only_where_it_should(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    for name in ("ppo", "grpo", "gspo"):
        assert one_token(ratio, advantage, LossConfig(name, **PLAIN)) == pytest.approx((loss, slope))


def test_the_bounds_are_asymmetric() -> None:
    settings = LossConfig("ppo", clip_low=0.1, clip_high=0.4)
    assert one_token(1.5, 1.0, settings) == pytest.approx((-1.4, 0.0))
    assert one_token(1.3, 1.0, settings) == pytest.approx((-1.3, -1.3))
    assert one_token(0.5, -1.0, settings) == pytest.approx((0.9, 0.0))


def test_the_dual_clip_bounds_bad_tokens_only() -> None:
    settings = LossConfig("ppo", dual_clip=3.0)
    assert one_token(5.0, -1.0, settings) == pytest.approx((3.0, 0.0))
    assert one_token(2.9, -1.0, settings) == pytest.approx((2.9, 2.9))
    assert one_token(5.0, 1.0, settings) == pytest.approx((-1.2, 0.0))
    assert one_token(5.0, -1.0, LossConfig("ppo")) == pytest.approx((5.0, 5.0))


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    settings = LossConfig("cispo", clip_low=0.2, clip_high=0.2)
    assert one_token(1.5, 1.0, settings)[1] == pytest.approx(-1.2)
    assert one_token(0.5, -1.0, settings)[1] == pytest.approx(0.8)
    assert one_token(4.0, 1.0, LossConfig("cispo"))[1] == pytest.approx(-4.0)
    assert one_token(9.0, 1.0, LossConfig("cispo"))[1] == pytest.approx(-5.0)


def test_topr_imitates_good_tokens_and_tapers_bad_ones() -> None:
    assert one_token(0.25, 1.0, LossConfig("topr"))[1] == pytest.approx(-1.0)
    assert one_token(0.25, -1.0, LossConfig("topr"))[1] == pytest.approx(0.25)
    assert one_token(4.0, -1.0, LossConfig("topr"))[1] == pytest.approx(1.0)
    # Its ratio is to the behavior policy: 0.25 * 2.
    assert one_token(0.25, -1.0, LossConfig("topr"), c=2.0)[1] == pytest.approx(0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bounds", [3e-4, 0.05, 0.9])
def test_gspo_is_the_papers_where_a_sequence_has_one_advantage(sign: float, bounds: float) -> None:
    fields = make_batch([6], seed=3) | {"advantages": torch.full((6,), sign, dtype=torch.float64)}
    tokens = tokens_of(fields)
    policy_loss(tokens, LossConfig("gspo", clip_low=bounds, clip_high=bounds, tis_cap=None)).loss.backward()
    plain = fields["logprobs"].clone().requires_grad_()
    s = (plain - fields["old"]).mean().exp()
    loss = -torch.minimum(s * sign, s.clamp(1 - bounds, 1 + bounds) * sign)
    loss.backward()
    assert torch.allclose(tokens.logprobs.grad, plain.grad, atol=1e-12)


def test_grpo_is_ppo_without_the_dual_clip() -> None:
    assert POLICY_LOSSES["grpo"] is POLICY_LOSSES["ppo"]
    tokens = tokens_of(make_batch([5, 9]))
    assert policy_loss(tokens, LossConfig("grpo")).loss == policy_loss(tokens, LossConfig("ppo")).loss
    with pytest.raises(UsageError, match="does not read dual_clip"):
        LossConfig("grpo", dual_clip=3.0)


def test_current_logprobs_as_old_disable_clipping() -> None:
    """Rule 22: tokens are clipped only with the proximal policy as old."""
    fields = make_batch([30], seed=4)
    settings = LossConfig("ppo", tis_cap=None)
    right = policy_loss(tokens_of(fields), settings).metrics
    assert right["clipped_low"].value > 0
    assert right["clipped_high"].value > 0
    tokens = tokens_of(fields | {"old": fields["logprobs"]})
    wrong = policy_loss(tokens, settings)
    wrong.loss.backward()
    assert wrong.metrics["clipped_low"].value == wrong.metrics["clipped_high"].value == 0
    # The rest is plain REINFORCE, which keeps its gradient where PPO clips.
    assert torch.allclose(tokens.logprobs.grad, -fields["weights"] * fields["advantages"])
    for name in ("old", "behavior", "reference"):
        moving = {k: v for k, v in fields.items() if k != name}
        with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
            Tokens(**moving, **{name: fields[name].clone().requires_grad_()})


def test_the_three_policies_are_kept_apart() -> None:
    """Rule 22: the ratio is to the proximal policy; the behavior policy is in the importance weight only."""
    capped = LossConfig("ppo", tis_cap=2.0)
    assert one_token(1.5, 1.0, capped, c=1.25) == pytest.approx((-1.2 * 1.25, 0.0))
    assert one_token(1.1, 1.0, capped, c=1.25) == pytest.approx((-1.1 * 1.25, -1.1 * 1.25))
    assert one_token(1.1, 1.0, capped, c=8.0) == pytest.approx((-2.2, -2.2))
    assert one_token(1.1, 1.0, LossConfig("ppo", tis_cap=math.inf), c=8.0)[0] == pytest.approx(-8.8)
    assert one_token(1.1, 1.0, LossConfig("ppo", tis_cap=None), c=8.0)[0] == pytest.approx(-1.1)
    # Coupled, the ratio is to the behavior policy: 1.1 * 1.25 is clipped, and nothing corrects it again.
    coupled = LossConfig("ppo", decoupled=False)
    assert one_token(1.1, 1.0, coupled, c=1.25) == pytest.approx((-1.2, 0.0))


def test_importance_weights_give_the_on_policy_gradient() -> None:
    """Rule 21: samples of an engine that differs, corrected, have the learner's expected gradient."""
    logits = tensor(0.3, -0.4, 1.0, 0.0).requires_grad_()
    engine = torch.log_softmax(tensor(0.0, 0.2, 0.4, -0.3), 0)
    reward = tensor(1.0, -2.0, 0.5, 3.0)
    current = torch.log_softmax(logits, 0)
    common = {"old": current.detach(), "behavior": engine, "advantages": reward}
    tokens = Tokens(logprobs=current, weights=engine.exp(), sequence_ids=torch.arange(4), **common)
    (true,) = torch.autograd.grad(-(current.exp() * reward).sum(), logits, retain_graph=True)
    for name in ("ppo", "grpo", "cispo", "reinforce"):
        found = {}
        for cap in (math.inf, None):
            loss = policy_loss(tokens, LossConfig(name, tis_cap=cap)).loss
            (found[cap],) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(found[math.inf], true, atol=1e-12), name
        assert not torch.allclose(found[None], true, atol=1e-2), name


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_far_ratios_stay_finite_and_are_counted(name: str) -> None:
    fields = {k: v.float() if k != "sequence_ids" else v for k, v in make_batch([2]).items()}
    fields |= {"advantages": torch.tensor([-1.0, -1.0]), "old": torch.tensor([-300.0, -1.0])}
    fields |= {"behavior": fields["old"], "logprobs": torch.tensor([-1.0, -300.0])}
    tokens = tokens_of(fields | {"sequence_ids": torch.tensor([0, 1])})
    settings = LossConfig(name, kl_coef=0.1, kl_estimator="k3")
    result = policy_loss(tokens, settings)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert torch.isfinite(tokens.logprobs.grad).all()
    numbers = summary(result.metrics)
    assert all(math.isfinite(x) for x in numbers.values()), numbers
    if name != "reinforce":
        assert numbers["ratio_cut_off"] == 0.5


def gradients(settings: LossConfig, ratios: list[float], lengths: list[int]) -> tuple[list[float], Any]:
    """Derivatives by the log-probs, for tokens with these ratios proximal / rollout; and the metrics."""
    fields = make_batch(lengths) | {
        "logprobs": torch.full((len(ratios),), -1.0, dtype=torch.float64),
        "old": torch.full((len(ratios),), -1.0, dtype=torch.float64),
        "behavior": tensor(*(-1.0 - math.log(ratio) for ratio in ratios)),
        "advantages": torch.ones(len(ratios), dtype=torch.float64),
        "weights": torch.full((len(ratios),), 0.25, dtype=torch.float64),
    }
    tokens = tokens_of(fields)
    result = policy_loss(tokens, settings)
    result.loss.backward()
    return tokens.logprobs.grad.tolist(), summary(result.metrics)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_rejected_tokens_have_no_gradient_and_change_no_other(cap: float | None) -> None:
    settings = LossConfig("grpo", tis_cap=cap, reject_tokens=(0.5, 4.0))
    slopes, metrics = gradients(settings, [1.0, 0.4, 3.0, 5.0], [4])
    assert slopes == pytest.approx([-0.25, 0.0, -0.25 * (cap or 1.0), 0.0])
    assert metrics["rejected_tokens"] == 0.5


def test_a_sequence_is_rejected_by_its_mean_ratio() -> None:
    """The first sequence has the geometric mean 1, though single tokens are far off; the second has 3."""
    settings = LossConfig("grpo", tis_cap=None, reject_sequences=(0.5, 2.0))
    slopes, metrics = gradients(settings, [8.0, 0.125, 3.0, 3.0], [2, 2])
    assert slopes == pytest.approx([-0.25, -0.25, 0.0, 0.0])
    assert metrics["rejected_sequences"] == 0.5
    both = LossConfig("grpo", tis_cap=None, reject_sequences=(0.5, 2.0), reject_tokens=(0.5, 10.0))
    assert gradients(both, [8.0, 0.125, 3.0, 3.0], [2, 2])[0] == pytest.approx([-0.25, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "grpo", "reject_tokens": (1.5, 2.0)},
        {"name": "grpo", "reject_sequences": (0.5,)},
        {"name": "topr", "reject_tokens": (0.5, 2.0)},
        {"name": "grpo", "decoupled": False, "reject_tokens": (0.5, 2.0)},
    ],
)
def test_rejection_bounds_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reject"):
        LossConfig(**wrong)


def test_terms_without_their_inputs_are_refused() -> None:
    fields = make_batch([3])
    bare = Tokens(**{k: v for k, v in fields.items() if k not in ("entropy", "reference")})
    with pytest.raises(UsageError, match="entropy_coef"):
        policy_loss(bare, LossConfig("ppo", entropy_coef=0.1))
    with pytest.raises(UsageError, match="kl_coef"):
        policy_loss(bare, LossConfig("ppo", kl_coef=0.1))
    policy_loss(bare, LossConfig("ppo", kl_coef=0.1, kl_in="reward"))


def test_shapes_that_would_broadcast_are_refused() -> None:
    fields = make_batch([3])
    with pytest.raises(ValueError, match=r"advantages has shape \(3, 1\)"):
        Tokens(**(fields | {"advantages": fields["advantages"][:, None]}))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_is_that_of_a_plain_loop(clip: float | None) -> None:
    noise = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, 20, generator=noise, dtype=torch.float64)
    weights = torch.rand(20, generator=noise, dtype=torch.float64)
    values.requires_grad_()
    result = value_loss(values, old, returns, weights, clip)
    result.loss.backward()
    loss, slopes, clipped = 0.0, [], 0
    for v, o, g, w in zip(values.tolist(), old.tolist(), returns.tolist(), weights.tolist(), strict=True):
        held = v if clip is None else min(max(v, o - clip), o + clip)
        binds = (held - g) ** 2 > (v - g) ** 2
        loss += w / 2 * max((v - g) ** 2, (held - g) ** 2)
        slopes.append(0.0 if binds else w * (v - g))
        clipped += binds
    assert result.loss.item() == pytest.approx(loss)
    assert values.grad.tolist() == pytest.approx(slopes)
    numbers = summary(result.metrics)
    assert numbers["value_explained"] == pytest.approx(
        1 - ((values - returns).var(correction=0) / returns.var(correction=0)).item()
    )
    if clip is not None:
        assert 0 < clipped < 20
        assert numbers["value_clipped"] == pytest.approx(clipped / 20)
    with pytest.raises(UsageError, match="above 0"):
        value_loss(values, old, returns, weights, 0.0)


def test_the_example_on_the_docs_page_is_correct() -> None:
    table = PAGE.read_text().split("## PPO by hand")[1]
    lines = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    columns = list(zip(*([float(x) for x in line.strip("|").split("|")] for line in lines), strict=True))
    behavior, old, current, advantages, weights, ratio, c, counted, losses, terms = (
        tensor(*column) for column in columns
    )
    tokens = tokens_of(
        {"logprobs": current.log(), "old": old.log(), "behavior": behavior.log(), "weights": weights}
        | {"advantages": advantages, "sequence_ids": torch.tensor([0, 0, 1, 1, 1, 1]), "entropy": old}
    )
    result = policy_loss(tokens, LossConfig("ppo", dual_clip=3.0))
    result.loss.backward()
    assert torch.allclose(current / old, ratio)
    assert torch.allclose((old / behavior).clamp(max=2), c)
    assert torch.allclose(-c * counted * advantages, losses)
    assert torch.allclose(weights * losses, terms)
    (stated,) = re.findall(r"The loss is \*\*(-?[\d.]+)\*\*", table)
    assert result.loss.item() == pytest.approx(float(stated), abs=1e-9)
    moving = [i + 1 for i, slope in enumerate(tokens.logprobs.grad.tolist()) if slope]
    assert moving == [int(n) for n in re.findall(r"\d", table.split("Tokens")[-1])]
