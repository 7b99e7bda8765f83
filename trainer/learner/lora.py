"""LoRA by peft: only small matrices are trained; engines and exports get them merged into the weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from rollgym.core.errors import MissingExtra, UsageError, one_line
from rollgym.trainer.learner.config import LoraSettings


def add_lora(model: Any, settings: LoraSettings, device: torch.device | None = None) -> Any:
    """Return the model with trainable low-rank matrices, whose product is zero at first.

    ``device``: where the matrices are; default: where the model is. A model on the meta device needs it.
    """
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
    # peft draws the first matrices from torch's global generator, whose state must not change.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        # peft looks for a module with the name of the experts' fused weights, which are parameters.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"LoRA cannot be added to {type(model).__name__}: {one_line(error)}") from error
        if device is not None and any(parameter.is_meta for parameter in model.parameters()):
            torch.manual_seed(0)
            _fill_matrices(adapted, device)
        return adapted


def _fill_matrices(model: Any, device: torch.device) -> None:
    """Make matrices that peft moved to the meta device again.

    In peft's order, so that their first values are those on a real device; but for fused experts, which peft
    wraps from the inside out.
    """
    for module in model.modules():
        for name in getattr(module, "lora_A", {}):
            for matrices in (module.lora_A, module.lora_B):
                outputs, inputs = matrices[name].weight.shape
                matrices[name] = torch.nn.Linear(inputs, outputs, bias=matrices[name].bias is not None)
            module.reset_lora_parameters(name, True)
            for matrices in (module.lora_A, module.lora_B):
                matrices[name].to(device)


def _check_targets(model: Any, targets: tuple[str, ...] | str) -> None:
    """Reject tied weights as targets: an engine knows them by one name and cannot hold two versions."""
    embedding = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        named = not isinstance(targets, str) and any(f".{name}".endswith(f".{target}") for target in targets)
        if named and getattr(module, "weight", None) is embedding:
            raise UsageError(f"LoRA cannot train {name}: embeddings and heads tied to them must stay frozen.")
