"""Converts weights between the names of a transformers module and those of its checkpoints.

transformers keeps the weights of all experts of a layer in one tensor. Checkpoints, and what other software
reads (vLLM, SGLang), have one set of matrices for each expert.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def to_checkpoint(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert weights of a transformers model to the names and shapes of a checkpoint.

    Args:
        model: The model; it may be on the meta device.
        tensors: Weights by the module's names; a subset suffices if `separable` returns True.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 has no fused experts
        return dict(tensors)
    recorded = getattr(model, "_weight_conversions", None)
    if recorded is None or recorded:
        return dict(revert_weight_conversion(model, dict(tensors)))
    # Loaded from a folder with the module's names: checkpoints still use the standard ones.
    model._weight_conversions = None
    try:
        return dict(revert_weight_conversion(model, dict(tensors)))
    finally:
        model._weight_conversions = recorded


def separable(model: Any, shapes: Mapping[str, Any]) -> bool:
    """Return True if weights can be converted one by one instead of all at once.

    Args:
        model: The model.
        shapes: Shapes of all its weights, by the module's names.
    """
    import torch

    every = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    whole = {name: converted.shape for name, converted in to_checkpoint(model, every).items()}
    single = {
        name: converted.shape
        for key, tensor in every.items()
        for name, converted in to_checkpoint(model, {key: tensor}).items()
    }
    return whole == single


def in_memory(tensor: Any) -> Any:
    """Return the tensor on the CPU, contiguous, with its own storage."""
    copy = tensor.detach().cpu().contiguous()
    return copy if copy.untyped_storage().nbytes() == copy.nbytes else copy.clone()


@functools.lru_cache(4)
def model_on_meta(folder: Path) -> Any:
    """Return the model of a folder without weights, or None if transformers does not support it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            return cast(Any, AutoModelForCausalLM).from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
