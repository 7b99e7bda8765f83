"""Any other attention decoder: the transformers module's own forward, with attention over our arena.

Every row goes in as a sequence of one token with its position; the attention function, which transformers
lets us register, keeps keys and values in the arena and looks at what came before. Whatever else mixes
tokens (convolutions, state-space layers, windows) would go unseen: `model.load` compares the result with
the plain forward and refuses a model for which they differ.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rollgym.engines.embedded.attention import Rows, attend, store

__all__ = ["ModuleDecoder"]

_NAME = "rollgym_rows"
_KNOWN = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias")
"""What an attention function may be given that ours does not do."""


_current = threading.local()


class ModuleDecoder:
    """Rows in, logits out."""

    def __init__(self, module: Any, context: int) -> None:
        self.module = module
        self.context = context
        module.set_attn_implementation(_NAME)

    def __call__(self, rows: Rows, wanted: Tensor | None) -> Tensor:
        """Logits of the wanted rows (all where ``None``); the arena gets the rows' keys and values."""
        _current.rows = rows
        _current.context = self.context
        try:
            out = self.module(
                input_ids=rows.ids[:, None], position_ids=rows.positions[:, None], use_cache=False
            )
        finally:
            del _current.rows
        logits = cast(Tensor, out.logits)[:, 0]
        return logits if wanted is None else logits[wanted]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: ``[row, head, 1, dim]`` in, ``[row, 1, head, dim]`` out."""
    _refuse(kwargs)
    rows, layer = cast(Rows, _current.rows), cast(int, module.layer_idx)
    store(rows, layer, torch.cat([key, value], 2).transpose(1, 2))
    count, heads, _, dim = query.shape
    per_head = heads // key.shape[1]
    queries = query.view(count, key.shape[1], per_head, dim)
    scale = dim**-0.5 if scaling is None else scaling
    return attend(rows, layer, queries, scale).reshape(count, 1, heads, dim), None


def _refuse(kwargs: dict[str, Any]) -> None:
    for name in _KNOWN:
        value = kwargs.get(name)
        if value is None or (name == "sliding_window" and value >= _current.context):
            continue
        raise NotImplementedError(f"attention with {name} is not supported")


def _no_mask(*_: object, **__: object) -> None:
    """The arena's own mask is used instead."""


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _no_mask)
