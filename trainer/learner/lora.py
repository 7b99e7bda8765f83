"""LoRA by peft: what is trained is small; what an engine gets is the whole, merged."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from rollgym.errors import MissingExtra, UsageError, one_line
from rollgym.trainer.learner.buckets import pieces_of
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
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        # peft looks for a module of the name of experts' fused weights, which are parameters.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
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
    pieces = pieces_of(model, lambda parameter: parameter.numel())
    return {piece.name: piece.merge([one.detach() for one in piece.parameters]) for piece in pieces}
