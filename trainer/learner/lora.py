"""LoRA by peft: what is trained is small; what an engine gets is the whole, merged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollgym.errors import MissingExtra, UsageError, one_line
from rollgym.trainer.learner.settings import LoraSettings


def add_lora(model: Any, settings: LoraSettings) -> Any:
    """The model with trainable low-rank matrices beside its own; they begin at zero."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("LoRA", "train") from error
    _check_targets(model, settings.targets)
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets,
    )
    # The first matrices are drawn at random, from torch's global generator: it must not notice.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"LoRA cannot be added to {type(model).__name__}: {one_line(error)}") from error


def _check_targets(model: Any, targets: tuple[str, ...] | str) -> None:
    """An engine knows tied weights by one name: it could not be given two versions of them."""
    embedding = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        named = not isinstance(targets, str) and any(f".{name}".endswith(f".{target}") for target in targets)
        if named and getattr(module, "weight", None) is embedding:
            raise UsageError(f"LoRA cannot train {name}: embeddings and heads tied to them stay as they are.")


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the plain model with the low-rank matrices added in. The model itself stays as it is."""
    found: dict[str, Tensor] = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "base_layer"):
            delta = module.get_delta_weight(next(iter(module.lora_A)))
            found[f"{name}.weight"] = module.base_layer.weight + delta.to(module.base_layer.weight.dtype)
            if getattr(module.base_layer, "bias", None) is not None:
                found[f"{name}.bias"] = module.base_layer.bias.detach()
    for name, tensor in model.get_base_model().named_parameters():
        if "lora_" not in name and ".base_layer." not in name:
            found[name] = tensor.detach()
    return found
