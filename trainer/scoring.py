"""What a model makes of rows: log-probs and entropy of the action tokens, values before them.

The vocabulary is only computed where an action token is predicted, and nothing after the last one is read.
Rows never see one another: padded, they lie side by side with the padding after them, where a causal model
cannot look; packed, they lie end to end, and attention is computed row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rollgym.errors import UsageError
from rollgym.trainer.attention import PACKED, UnlikePacked, attend, no_mask, paths_of, spare_last_layer
from rollgym.trainer.packing import pack
from rollgym.trainer.rows import IntArray, Row

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class Scores:
    """Flat, over the action tokens of the rows in order."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor
    """[N, width] the model's last state before each token."""


def states(body: Any, rows: Sequence[Row], layout: Layout, device: torch.device) -> Tensor:
    """[N, width]: the states of a transformer that predict the action tokens."""
    inputs = [row.inputs for row in rows]
    if layout == "packed":
        packing = pack(inputs)
        spots = np.concatenate([path[row.places - 1] for row, path in zip(rows, packing.paths, strict=True)])
        found = body(
            input_ids=torch.from_numpy(packing.ids)[None].to(device),
            position_ids=torch.from_numpy(packing.positions)[None].to(device),
            use_cache=False,
            cu_seq_lens_q=paths_of(packing, spots, device),
        )
    else:
        longest = max(map(len, inputs))
        padded = np.zeros((len(rows), longest), dtype=np.int64)
        for number, row in enumerate(inputs):
            padded[number, : len(row)] = row
        spots = np.concatenate([row.places - 1 + number * longest for number, row in enumerate(rows)])
        found = body(input_ids=torch.from_numpy(padded).to(device), use_cache=False)
    hidden: Tensor = found.last_hidden_state
    return hidden.flatten(0, 1)[torch.from_numpy(spots).to(device)]


def score(model: Any, rows: Sequence[Row], *, layout: Layout = "padded", temperature: float = 1.0) -> Scores:
    """Log-probs of the distribution that the engine draws from at this temperature.

    Rows that the model reads alike are computed once, whatever was sampled at their end.
    """
    body, head = parts(model)
    device = head.weight.device
    once, again = distinct(rows)
    hidden = states(body, once, layout, device)
    targets = torch.from_numpy(np.concatenate([row.ids[row.places] for row in rows])).to(device)
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    everything = F.log_softmax(logits, -1)
    entropy = -(everything.exp() * everything).sum(-1)
    if len(once) == len(rows):
        return Scores(everything.gather(-1, targets[:, None])[:, 0], entropy, hidden)
    at = torch.from_numpy(again).to(device)
    return Scores(everything[at, targets], entropy[at], hidden[at])


def distinct(rows: Sequence[Row]) -> tuple[list[Row], IntArray]:
    """The rows that differ in what the model reads, and for each action token where it is among theirs."""
    known: dict[tuple[bytes, bytes], int] = {}
    once: list[Row] = []
    starts: list[int] = []
    spots = []
    total = 0
    for row in rows:
        key = row.key
        if key not in known:
            known[key] = len(once)
            once.append(row)
            starts.append(total)
            total += len(row.places)
        spots.append(np.arange(len(row.places)) + starts[known[key]])
    return once, np.concatenate(spots)


def parts(model: Any) -> tuple[Any, Any]:
    """The transformer and the layer that makes logits of its states."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body, head = getattr(inner, inner.base_model_prefix, None), inner.get_output_embeddings()
    if body is None or head is None or body is inner:
        raise UsageError(f"The trainer cannot take {type(inner).__name__} apart into body and head.")
    return body, head


@torch.no_grad()
def check_parts(model: Any, vocabulary: int) -> None:
    """Refuse a model that does more to its states than its head: its log-probs would be wrong here."""
    body, head = parts(model)
    ids = torch.arange(3, 11, device=head.weight.device)[None] % vocabulary
    whole = model(input_ids=ids, use_cache=False).logits
    ours = head(body(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole.float(), ours.float(), atol=1e-3, rtol=1e-3):
        name = type(model).__name__
        raise UsageError(f"{name} changes its logits after the head; the trainer cannot use it.")


@torch.no_grad()
def allow_packing(model: Any) -> bool:
    """Have a transformers model attend row by row where it is given packed rows; False where it cannot."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if packs(model):
        return True
    AttentionInterface.register(PACKED, attend)
    AttentionMaskInterface.register(PACKED, no_mask)
    usual = model.config._attn_implementation
    model.set_attn_implementation(PACKED)
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
        spare_last_layer(parts(model)[0])
    except UnlikePacked:
        model.set_attn_implementation(usual)
    return packs(model)


def packs(model: Any) -> bool:
    """Whether a model can be given packed rows."""
    return bool(parts(model)[0].config._attn_implementation == PACKED)
