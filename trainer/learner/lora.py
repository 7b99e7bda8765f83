"""LoRA by peft: only small matrices are trained; engines and exports get them merged into the weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from rollgym.core.errors import MissingExtra, UsageError, one_line
from rollgym.trainer.learner.config import LoraSettings


def add_lora(model: Any, settings: LoraSettings) -> Any:
    """Return the model with trainable low-rank matrices, whose product is zero at first."""
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
            return get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"LoRA cannot be added to {type(model).__name__}: {one_line(error)}") from error


def _check_targets(model: Any, targets: tuple[str, ...] | str) -> None:
    """Reject tied weights as targets: an engine knows them by one name and cannot hold two versions."""
    embedding = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        named = not isinstance(targets, str) and any(f".{name}".endswith(f".{target}") for target in targets)
        if named and getattr(module, "weight", None) is embedding:
            raise UsageError(f"LoRA cannot train {name}: embeddings and heads tied to them must stay frozen.")
