"""Settings of losses: complete, and every one of them is read."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UnknownName, UsageError
from rollgym.trainer.losses.settings import LOSS_SPECS, LossConfig

OTHER: dict[str, Any] = {
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "topr_positive": (0.5, 1.0),
    "topr_negative": (0.0, 0.5),
    "decoupled": False,
    "tis_cap": 5.0,
    "reject_tokens": (0.9, 1.1),
    "reject_sequences": (0.9, 1.1),
}
COMMON = {"entropy_coef", "kl_coef", "kl_estimator", "kl_in"}
BY_THE_LEARNER = {"ratio_level", "entropy_target", "kl_target", "aggregation", "aggregation_constant"}
"""Read by the learner: tested in learner/test_invariance.py and learner/test_learner.py."""


def test_every_setting_is_covered_here() -> None:
    assert {f.name for f in fields(LossConfig)} == {"name"} | set(OTHER) | COMMON | BY_THE_LEARNER


@pytest.mark.parametrize("loss", sorted(LOSS_SPECS))
def test_ratio_level_is_refused_by_token_level_losses(loss: str) -> None:
    if loss in ("gspo", "topr"):
        assert LossConfig(loss, ratio_level="episode").ratio_level == "episode"
        with pytest.raises(UsageError, match="ratio_level must be 'sequence' or 'episode', not 'turn'"):
            LossConfig(loss, ratio_level="turn")  # type: ignore[arg-type]
    else:
        with pytest.raises(UsageError, match="does not read ratio_level"):
            LossConfig(loss, ratio_level="episode")


@pytest.mark.parametrize("setting", OTHER)
@pytest.mark.parametrize("loss", LOSS_SPECS)
def test_a_setting_is_read_or_refused(loss: str, setting: str) -> None:
    """Rule 15: an accepted setting changes the loss or its gradient; any other is refused."""
    torch = pytest.importorskip("torch")
    from loss_cases import make_batch, tokens_of

    from rollgym.trainer.losses.policy import policy_loss

    if setting not in LOSS_SPECS[loss].reads:
        with pytest.raises(UsageError, match=f"{loss!r} does not read {setting}"):
            LossConfig(loss, **{setting: OTHER[setting]})
        return
    batch = make_batch([1] * 12 + [5, 9], 1)
    batch["logprobs"][0] = batch["old"][0] + 2  # far enough for the dual clip
    batch["advantages"][0] = -1.0
    found = []
    for chosen in (LossConfig(loss), LossConfig(loss, **{setting: OTHER[setting]})):
        tokens = tokens_of(batch)
        policy_loss(tokens, chosen).loss.backward()
        found.append(tokens.logprobs.grad)
    assert not torch.allclose(found[0], found[1], atol=1e-4)


def test_every_loss_has_a_spec() -> None:
    pytest.importorskip("torch")
    from rollgym.trainer.losses.policy import POLICY_LOSSES

    assert list(POLICY_LOSSES) == list(LOSS_SPECS)


def test_clip_bounds_default_to_those_of_the_loss() -> None:
    assert LossConfig("ppo").clip == LossConfig("grpo").clip == (0.2, 0.2)
    assert LossConfig("gspo").clip == (3e-4, 4e-4)
    assert LossConfig("cispo").clip == (1.0, 4.0)
    assert LossConfig("ppo", clip_high=0.28).clip == (0.2, 0.28)
    assert LossConfig("ppo", clip_low=0.0).clip == (0.0, 0.2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must be between 0 and 1"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"tis_cap": 0.0}, "tis_cap"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"kl_coef": math.inf}, "kl_coef"),
        ({"kl_coef": 0.1, "kl_in": "rewards"}, "'loss' or 'reward'"),
        ({"kl_coef": 0.1, "kl_estimator": "k4"}, "k1, k2 or k3"),
        ({"kl_in": "reward"}, "kl_in is only read with kl_coef > 0"),
        ({"kl_estimator": "k3"}, "kl_estimator is only read with kl_coef > 0"),
        ({"entropy_target": 0.4}, "entropy_target is only read with entropy_coef > 0"),
        ({"entropy_coef": 0.1, "entropy_target": 0.0}, "entropy_target must be above 0"),
        ({"kl_target": 0.1}, "kl_target is only read with kl_coef > 0"),
        ({"kl_coef": 0.1, "kl_target": 0.0}, "kl_target must be above 0"),
        ({"aggregation": "constant"}, "needs a positive, finite aggregation_constant"),
        ({"aggregation_constant": 8.0}, "token-mean does not read aggregation_constant"),
        ({"decoupled": False, "tis_cap": 5.0}, "does not read tis_cap"),
        ({"topr_negative": (0.5, 0.2)}, "0 <= low <= high"),
    ],
)
def test_invalid_values_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LossConfig("ppo", **wrong)


def test_an_unknown_loss_gets_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="Did you mean grpo"):
        LossConfig("gprpo")


def test_lists_from_a_file_are_bounds_too() -> None:
    assert LossConfig("topr", topr_negative=[0.0, 1.0]) == LossConfig("topr")  # type: ignore[arg-type]


def test_a_changed_coefficient_can_be_passed_on() -> None:
    settings = LossConfig("gspo", kl_coef=0.1, kl_estimator="k3")
    assert replace(settings, kl_coef=0.2).kl_coef == 0.2


def test_settings_are_checked_without_torch() -> None:
    code = (
        "import sys\nfrom rollgym.trainer.losses import settings, aggregation\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that registers a loss, as a user would have one."""
    pytest.importorskip("torch")
    from rollgym.trainer.losses.policy import POLICY_LOSSES

    (tmp_path / "own_losses_of_a_test.py").write_text(
        "from rollgym.trainer.losses.policy import register_loss\n"
        "@register_loss('tis_cap')\n"
        "def twice(tokens, settings):\n"
        "    return -2 * tokens.advantages * tokens.logprobs, {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_losses_of_a_test"
    sys.modules.pop("own_losses_of_a_test", None)
    POLICY_LOSSES.pop("twice", None)
    LOSS_SPECS.pop("twice", None)


def test_a_registered_loss_is_selected_by_name_and_reads_its_settings(own_module: str) -> None:
    import torch

    from rollgym.config.loader import load
    from rollgym.core.registry import import_module
    from rollgym.trainer.config import TrainConfig
    from rollgym.trainer.losses.policy import Tokens, policy_loss

    base = {"envs": [{"id": "rollgym/Bandit-v0"}]}
    with pytest.raises(UsageError, match="no policy loss called 'twice'"):
        load(TrainConfig, base, ["loss.name=twice"])
    words = [f"imports=[{own_module}]", "loss.name=twice"]
    assert load(TrainConfig, base, words).loss.name == "twice", "it may be one of the module's"
    assert own_module not in sys.modules, "reading imports nothing"
    import_module(own_module)
    with pytest.raises(UsageError, match="no policy loss called 'thrice'"):
        load(TrainConfig, base, [words[0], "loss.name=thrice"])
    config = load(TrainConfig, base, words)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    same = logprobs.detach()
    tokens = Tokens(
        logprobs=logprobs,
        old=same,
        behavior=same,
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.25, 0.75]),
        sequence_ids=torch.tensor([0, 1]),
    )
    policy_loss(tokens, config.loss).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 1.5]
    with pytest.raises(UsageError, match="'twice' does not read clip_low"):
        LossConfig("twice", clip_low=0.1)


def test_an_invalid_registration_of_a_loss_is_refused() -> None:
    pytest.importorskip("torch")
    from rollgym.trainer.losses.policy import register_loss

    def ppo(tokens: Any, settings: Any) -> Any:
        raise AssertionError

    with pytest.raises(UsageError, match="A policy loss 'ppo' is already registered"):
        register_loss()(ppo)
    with pytest.raises(UsageError, match="LossConfig has no field clips"):
        register_loss("clips")
    message = r"Pass clip=\(low, high\) if and only if the loss reads clip_low or clip_high"
    with pytest.raises(UsageError, match=message):
        register_loss("clip_low")
    with pytest.raises(UsageError, match=message):
        register_loss("tis_cap", clip=(0.1, 0.1))
