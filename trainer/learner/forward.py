"""Forward passes over rows: log-probs and entropy of the action tokens, hidden states before them.

Logits are only computed where an action token is predicted, and tokens after the last one are not read. Rows
never see one another: padded, they lie side by side with the padding at the end, which a causal model does
not read; packed, they lie end to end, and attention is computed row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rollgym.core.errors import UsageError, one_line
from rollgym.engines.embedded.features import (
    Unsupported,
    length_dependent_settings,
    local_mask,
    position_limit,
    unknown_layers,
)
from rollgym.trainer.data.packing import Packing, pack
from rollgym.trainer.data.sequences import IntArray, TokenSequence
from rollgym.trainer.learner import chunked_logprobs as chunked
from rollgym.trainer.learner.context_parallel import ContextGroup
from rollgym.trainer.learner.long_rows import MIN_PIECE, exceeds, plan_pieces, states_in_pieces
from rollgym.trainer.learner.packed_attention import PACKED, attend, in_slice, paths_of, spare_last_layer
from rollgym.trainer.learner.router_replay import router_replay_of
from rollgym.trainer.learner.vocabulary_parallel import local_part, split_logprobs, vocabulary_part

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Results of a forward pass, flat over the action tokens of the rows in order."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor
    """[N, width] the model's last hidden state before each token."""
    own: IntArray | None = None
    """Where a context group shares the tokens: indices of these among all action tokens; None: all."""


def states(
    body: Any,
    rows: Sequence[TokenSequence],
    layout: Layout,
    device: torch.device,
    context: ContextGroup | None = None,
    max_tokens: int | None = None,
) -> tuple[Tensor, IntArray | None]:
    """Return [N, width]: the hidden states of a transformer that predict the action tokens.

    With a context group, those of this rank's slice alone, and their indices among all.
    """
    hidden = _in_pieces(body, rows, layout, device, max_tokens)
    if hidden is not None:
        return hidden, None
    given, spots, own = _model_inputs(body, rows, layout, device, context)
    return _select(body(**given, use_cache=False).last_hidden_state, spots), own


def _in_pieces(
    body: Any, rows: Sequence[TokenSequence], layout: Layout, device: torch.device, max_tokens: int | None
) -> Tensor | None:
    """Return the states of rows that are so long that they are computed in pieces, else None."""
    if max_tokens is None or layout != "packed" or router_replay_of(body) is not None:
        return None
    inputs = [row.inputs for row in rows]
    max_tokens = max(max_tokens, MIN_PIECE)
    if sum(map(len, inputs)) <= max_tokens:
        return None
    packing = pack(inputs)
    if not exceeds(packing, max_tokens):
        return None
    check_length(body.config, max(packing.sizes))
    spots = _spots(rows, packing)
    return states_in_pieces(body, plan_pieces(packing, spots, max_tokens, device), len(spots))


def _spots(rows: Sequence[TokenSequence], packing: Packing) -> IntArray:
    """Return the packed tokens that predict the action tokens of rows."""
    pairs = zip(rows, packing.paths, strict=True)
    return np.concatenate([path[row.action_positions - 1] for row, path in pairs])


def _model_inputs(
    body: Any,
    rows: Sequence[TokenSequence],
    layout: Layout,
    device: torch.device,
    context: ContextGroup | None,
) -> tuple[dict[str, Any], Tensor, IntArray | None]:
    """Return a model's arguments for rows, and the positions of the states that predict action tokens."""
    inputs = [row.inputs for row in rows]
    longest = max(map(len, inputs))
    check_length(body.config, longest)
    replay = router_replay_of(body)
    experts = [None if row.experts is None else row.experts[: len(row.inputs)] for row in rows]
    own: IntArray | None = None
    if layout == "packed":
        packing = pack(inputs, None if replay is None else experts)
        spots = _spots(rows, packing)
        ids, positions, paths = packing.ids, packing.positions, paths_of(packing, spots, device)
        if context is not None:
            if replay is not None:
                raise UsageError(
                    "Router replay cannot be combined with learner.parallel.context: set "
                    "learner.router_replay=off or learner.parallel.context=1."
                )
            part = context.slice_of(len(ids))
            own = part.holds(spots)
            ids, positions, spots = part.take(ids), part.take(positions), spots[own] - part.start
            paths = in_slice(paths, part, spots, device)
        given = {
            "input_ids": torch.from_numpy(ids)[None].to(device),
            "position_ids": torch.from_numpy(positions)[None].to(device),
            "cu_seq_lens_q": paths,
        }
        if replay is not None:
            replay.set_experts(experts, packing.paths, len(packing.ids), device)
            replay.set_wanted(paths.wanted)
    else:
        if context is not None:
            raise UsageError("Context parallelism needs packed rows, not padded ones.")
        padded = np.zeros((len(rows), longest), dtype=np.int64)
        for number, row in enumerate(inputs):
            padded[number, : len(row)] = row
        spots = np.concatenate(
            [row.action_positions - 1 + number * longest for number, row in enumerate(rows)]
        )
        given = {"input_ids": torch.from_numpy(padded).to(device)}
        if replay is not None:
            places = [np.arange(len(row)) + number * longest for number, row in enumerate(inputs)]
            replay.set_experts(experts, places, padded.size, device)
    return given, torch.from_numpy(spots).to(device), own


def _select(hidden: Tensor, spots: Tensor) -> Tensor:
    return hidden.flatten(0, 1)[spots]


def check_length(config: Any, length: int) -> None:
    """Reject rows so long that a token's log-prob would depend on the rest of the micro-batch."""
    limit = position_limit(config)
    if limit is not None and length > limit:
        raise UsageError(
            f"A row has {length} tokens, but positions of this model ({config.model_type}) change beyond "
            f"{limit} (original_max_position_embeddings), so its log-probs would be wrong: keep episodes "
            f"within {limit} tokens."
        )


def score(
    model: Any,
    rows: Sequence[TokenSequence],
    *,
    layout: Layout = "padded",
    temperature: float = 1.0,
    chunk_logits: bool = False,
    casts: Callable[[Tensor], Tensor] | None = None,
    context: ContextGroup | None = None,
    max_tokens: int | None = None,
) -> TokenStats:
    """Compute log-probs of the distribution that the engine samples from at this temperature.

    Rows with the same inputs are computed once, even if different tokens were sampled at their end.

    Args:
        model: A causal language model.
        rows: Token sequences with action tokens.
        layout: The layout of rows in a micro-batch.
        temperature: The sampling temperature.
        chunk_logits: Never hold more than `MAX_LOGITS` logits; the model must pass `has_plain_head`.
        casts: Returns a weight in the dtype of autocast.
        context: The ranks that share the tokens; the results are those of this rank's slice.
        max_tokens: Compute packed rows that are longer in pieces of at most so many tokens.
    """
    body, head = parts(model)
    device = head.weight.device
    once, again = distinct(rows)
    predicted = np.concatenate([row.predicted for row in rows])
    num_logits = sum(len(row.action_positions) for row in once) * len(head.weight)
    vocabulary = vocabulary_part(head)
    # With casts, gradients of few logits are also computed without keeping them.
    most = chunked.MAX_LOGITS if casts is None and vocabulary is None else 0
    if chunk_logits and num_logits > most and _computes_inside(head):
        hidden, here = states(body, once, layout, device, context, max_tokens)
        again, own = _among(again, here)
        at = torch.from_numpy(again).to(device)
        targets = torch.from_numpy(predicted if own is None else predicted[own]).to(device)
        cast = None if casts is None else casts(head.weight)

        def compute(hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight = local_part(head.weight)
            bias = None if head.bias is None else local_part(head.bias)
            return chunked.chunked_logprobs(
                hidden, weight, bias, again, targets, temperature, cast, vocabulary
            )

        logprobs, entropy = _through(head, compute, hidden)
        return TokenStats(logprobs, entropy[at], hidden[at], own)
    hidden, logits, here = _states_and_logits(model, once, layout, device, context, max_tokens)
    again, own = _among(again, here)
    targets = torch.from_numpy(predicted if own is None else predicted[own]).to(device)
    if temperature != 1.0:
        logits = logits / temperature
    if vocabulary is not None:  # the model's own logits, such as capped ones, of this rank's tokens
        at = torch.from_numpy(again).to(device)
        logprobs, entropy = split_logprobs(logits, at, targets, vocabulary)
        return TokenStats(logprobs, entropy[at], hidden[at], own)
    everything = F.log_softmax(logits, -1)
    entropy = -(everything.exp() * everything).sum(-1)
    if own is None and len(everything) == len(targets):
        return TokenStats(everything.gather(-1, targets[:, None])[:, 0], entropy, hidden)
    at = torch.from_numpy(again).to(device)
    return TokenStats(everything[at, targets], entropy[at], hidden[at], own)


def _among(again: IntArray, here: IntArray | None) -> tuple[IntArray, IntArray | None]:
    """Return the tokens whose states are among some, as indices among these, and which tokens those are."""
    if here is None:
        return again, None
    own = np.flatnonzero(np.isin(again, here))
    return np.searchsorted(here, again[own]), own


def top_logprobs(
    model: Any, rows: Sequence[TokenSequence], k: int, *, layout: Layout = "padded", temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` highest log-probs before each action token, and their token ids, both [N, k]."""
    once, again = distinct(rows)
    device = parts(model)[1].weight.device
    _, logits, _ = _states_and_logits(model, once, layout, device)
    if temperature != 1.0:
        logits = logits / temperature
    top = F.log_softmax(logits, -1).topk(min(k, logits.shape[-1]))
    at = torch.from_numpy(again).to(device)
    return top.values[at], top.indices[at]


def _computes_inside(head: Any) -> bool:
    """Return whether something else than logits may be computed in a head's forward.

    Not in adapted heads, whose weight is not all, nor under ZeRO 3, which marks parameters.
    """
    return isinstance(head, torch.nn.Linear) and not hasattr(head.weight, "ds_id")


def _through(module: Any, compute: Callable[..., Any], *args: Any) -> Any:
    """Call a module that computes something else than usual; a sharded one is whole meanwhile."""
    replaced = vars(module).get("forward")
    module.forward = compute
    try:
        return module(*args)
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Return whether a model applies nothing to its states but the output layer: no cap and no scale."""
    body, head = parts(model)
    if type(head) is not torch.nn.Linear:
        return False
    weight = head.weight
    # Large states, so that a cap shows; a generator, so that no other random number changes.
    hidden = torch.randn(1, 4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    hidden *= 30 / head(hidden).std().clamp(min=1e-6)

    def replace_states(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = hidden
        return output

    hook = body.register_forward_hook(replace_states)
    try:
        ids = torch.zeros(1, 4, dtype=torch.long, device=weight.device)
        logits = _inner(model)(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return bool(torch.equal(head(hidden), logits))


def _states_and_logits(
    model: Any,
    rows: Sequence[TokenSequence],
    layout: Layout,
    device: torch.device,
    context: ContextGroup | None = None,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, IntArray | None]:
    """Return the model's states that predict the action tokens, and their logits.

    The model computes its logits itself, from these states alone: some cap or scale them after the head.
    """
    inner = _inner(model)
    body = parts(model)[0]
    hidden = _in_pieces(body, rows, layout, device, max_tokens)
    if hidden is None:
        given, spots, own = _model_inputs(body, rows, layout, device, context)
    else:  # a pass over one token, whose state is replaced
        given, own = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}, None
    kept: list[Tensor] = []

    def choose(_: Any, __: Any, found: Any) -> Any:
        kept.append(_select(found.last_hidden_state, spots) if hidden is None else hidden)
        found.last_hidden_state = kept[0][None]
        return found

    hook = body.register_forward_hook(choose)
    try:
        logits: Tensor = inner(**given, use_cache=False).logits
    finally:
        hook.remove()
    return kept[0], logits[0].float(), own


def distinct(rows: Sequence[TokenSequence]) -> tuple[list[TokenSequence], IntArray]:
    """Return the rows with distinct inputs and positions, and the index of each action token among theirs."""
    indices: dict[tuple[bytes, bytes], int] = {}
    once: list[TokenSequence] = []
    starts: list[int] = []
    spots = []
    total = 0
    for row in rows:
        again = None
        if row.targets is not None:  # several targets of one position need its state once
            positions, again = np.unique(row.action_positions, return_inverse=True)
            row = TokenSequence(row.ids, positions, experts=row.experts)
        key = row.key
        if key not in indices:
            indices[key] = len(once)
            once.append(row)
            starts.append(total)
            total += len(row.action_positions)
        spots.append(
            (np.arange(len(row.action_positions)) if again is None else again) + starts[indices[key]]
        )
    return once, np.concatenate(spots)


def _inner(model: Any) -> Any:
    """Return the transformers model without adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def parts(model: Any) -> tuple[Any, Any]:
    """Return the transformer and the output layer of a causal language model."""
    inner = _inner(model)
    body, head = getattr(inner, inner.base_model_prefix, None), inner.get_output_embeddings()
    if body is None:  # the prefix of Llama 4 is that of a model with images around it
        body = getattr(inner, "model", None)
    if body is not None and [name for name, _ in body.named_children()] == ["decoder"]:
        body = body.decoder  # OPT's forward goes past the module around its decoder
    if body is None or head is None or body is inner:
        raise UsageError(
            f"{type(inner).__name__} cannot be trained: its transformer and output layer were not found."
        )
    return body, head


@torch.no_grad()
def allow_packing(model: Any) -> str | None:
    """Enable packed rows in a transformers model; returns the reason if it does not support them."""
    if packs(model):
        return None
    config = parts(model)[0].config
    if strange := unknown_layers(config):
        return f"it has {' and '.join(strange)} layers, which do not keep packed rows apart"
    if beyond := length_dependent_settings(config):
        return f"it changes with the number of tokens ({', '.join(beyond)})"
    usual = model.config._attn_implementation
    try:
        _replace_attention(model)
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
        spare_last_layer(parts(model)[0])
    except Unsupported as error:
        model.set_attn_implementation(usual)
        return f"it has {error}"
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        model.set_attn_implementation(usual)
        return f"its attention is custom ({one_line(error)})"
    return None if packs(model) else "its attention cannot be replaced"


def pack_rows(model: Any) -> None:
    """Enable packed rows in a model that is known to support them."""
    if not packs(model):
        _replace_attention(model)
        spare_last_layer(parts(model)[0])


def _replace_attention(model: Any) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PACKED, attend)
    AttentionMaskInterface.register(PACKED, local_mask)
    model.set_attn_implementation(PACKED)


def packs(model: Any) -> bool:
    """Return whether a model accepts packed rows."""
    return bool(parts(model)[0].config._attn_implementation == PACKED)
