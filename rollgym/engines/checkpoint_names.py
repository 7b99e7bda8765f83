"""The names and shapes that weights have in checkpoints, where a transformers module has others.

transformers keeps the weights of all experts of a layer in one tensor. Checkpoints, and what other software
reads (vLLM, SGLang), have one set of matrices for each expert.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def to_checkpoint(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of a transformers model under the names, and in the shapes, of a checkpoint.

    Args:
        model: The model, which may be on the meta device: only its kind matters.
        tensors: By the module's names. Some of them are enough where `separable` says so.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 has no fused experts
        return dict(tensors)
    recorded = getattr(model, "_weight_conversions", None)
    if recorded is None or recorded:
        return dict(revert_weight_conversion(model, dict(tensors)))
    # Read from a folder whose names were the module's already: checkpoints still have the usual ones.
    model._weight_conversions = None
    try:
        return dict(revert_weight_conversion(model, dict(tensors)))
    finally:
        model._weight_conversions = recorded


def separable(model: Any, shapes: Mapping[str, Any]) -> bool:
    """Whether weights can be renamed one by one, instead of all at once.

    Args:
        model: The model.
        shapes: Of all its weights, by the module's names.
    """
    import torch

    every = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    whole = {name: one.shape for name, one in to_checkpoint(model, every).items()}
    single = {
        name: one.shape
        for key, tensor in every.items()
        for name, one in to_checkpoint(model, {key: tensor}).items()
    }
    return whole == single


def in_memory(tensor: Any) -> Any:
    """The tensor on the CPU, contiguous, in memory that no other tensor shares."""
    found = tensor.detach().cpu().contiguous()
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


@functools.lru_cache(4)
def model_on_meta(folder: Path) -> Any:
    """A model of the kind that a folder holds, without weights; ``None`` where transformers knows none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            return cast(Any, AutoModelForCausalLM).from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
