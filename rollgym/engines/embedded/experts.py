"""Experts whose result for a token does not depend on the other tokens of a pass.

The implementations of transformers give each expert as many rows as tokens chose it, and the kernels of a
matrix product choose their order of summation by that number. Here an expert's rows are padded to a multiple
of `ReductionRule.rows`, as those of all other layers are, and a token's experts are summed in the order in
which its router chose them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["pad_experts"]

_NAME = "rollgym_padded"
_ROWS = "rollgym_rows"


def pad_experts(model: nn.Module, rows: int) -> bool:
    """Pad the rows of every expert to a multiple of ``rows``; returns whether the model has such experts."""
    found = [module for module in model.modules() if _can_pad(module)]
    module: Any
    for module in found:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)
        setattr(module, _ROWS, rows)
        module.config._experts_implementation = _NAME
    return bool(found)


def _can_pad(module: Any) -> bool:
    """Return whether the implementation of these experts can be chosen, and this one computes them."""
    known = hasattr(module, "_is_expert_parallel") and hasattr(module, "down_proj")
    return known and not module.has_post_expert_norm


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute experts with transformers' signature."""
    count, choices = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    sizes = torch.bincount(chosen, minlength=self.num_experts).tolist()
    rows: int = getattr(self, _ROWS)
    outputs = hidden_states.new_zeros(count * choices, hidden_states.shape[-1])
    start = 0
    for expert, size in enumerate(sizes[: self.num_experts]):
        if not size:
            continue
        places = order[start : start + size]
        start += size
        states = hidden_states[places // choices]
        if more := -size % rows:
            states = F.pad(states, (0, 0, 0, more))
        outputs[places] = _expert(self, states, expert)[:size]
    weighted = (outputs * top_k_weights.reshape(-1, 1)).view(count, choices, -1).unbind(1)
    total = weighted[0]
    for part in weighted[1:]:
        total = total + part
    return total.to(hidden_states.dtype)


def _expert(self: Any, states: Tensor, number: int) -> Tensor:
    if self.has_gate:
        states = self._apply_gate(_linear(self, states, "gate_up_proj", number))
    else:
        states = self.act_fn(_linear(self, states, "up_proj", number))
    return _linear(self, states, "down_proj", number)


def _linear(self: Any, states: Tensor, name: str, number: int) -> Tensor:
    weight = getattr(self, name)[number]
    bias = getattr(self, f"{name}_bias")[number] if self.has_bias else None
    return F.linear(states, weight.T if self.is_transposed else weight, bias)
