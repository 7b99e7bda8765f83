"""Finding the rule under which a row's result does not depend on its company, on the machine at hand.

What `attention` relies on is measured, not promised: another processor or library chooses its kernels
otherwise. So rules are tried, cheapest first, and every bit compared: attention alone at many lengths, then
the model itself with the same tokens one by one, in a batch, and in one piece.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollgym.engines.embedded.attention import Rule, Span, attend, lay_out
from rollgym.engines.embedded.cache import Arena, KVShape
from rollgym.engines.embedded.model import Model

__all__ = ["make_exact"]

_GAPS = ((512, 512), (384, 512), (256, 512), (192, 384), (0, 512))
_ROWS = (4, 8, 16, 32)
_LONGEST = 1088
_TOKENS = 3
_found: dict[tuple[object, ...], Rule | None] = {}
log = logging.getLogger(__name__)


def make_exact(model: Model, most_rows: int) -> None:
    """Have the model follow the cheapest rule that works; where none does, compute one row at a time."""
    config = model.module.config.to_json_string()
    key = (config, model.shape, model.context, model.lean, most_rows, torch.get_num_threads())
    if key not in _found:  # the same sizes give the same answer in the same process
        _found[key] = _find_rule(model, most_rows)
    rule = _found[key]
    model.rule, model.exact, model.single = rule or Rule(rows=1, queries=1), True, rule is None
    if rule is None:
        log.warning(
            "on this machine a token's logits depend on what is computed beside it: computing one token at "
            "a time. Pass deterministic=False for speed."
        )


def _find_rule(model: Model, most_rows: int) -> Rule | None:
    gap = next((gap for gap in _GAPS if _attention_holds(model, Rule(gap))), None)
    if gap is None:
        return None
    for rows in _ROWS:
        model.rule = Rule(gap, rows)
        if _model_holds(model, most_rows):
            return model.rule
    return None


@torch.inference_mode()
def _attention_holds(model: Model, rule: Rule) -> bool:
    """True where queries find the same alone, beside longer sequences, and in chunks of a prompt."""
    longest = min(model.context, _LONGEST)
    shape = replace(model.shape, layers=1)
    noise = torch.randn(longest, shape.heads, model.queries, shape.dim, generator=_generator(0))
    queries = noise.to(shape.device, shape.dtype)
    chunks = [(first, first + size) for first in (0, 183, 290, 500, 700) for size in (2, 7, 61, 300)]
    chunks = [(first, last) for first, last in chunks if last <= longest]
    at = sorted({p for first, last in chunks for p in (first, (first + last) // 2, last - 1)})
    arena = _noise(shape, len(at) + 1, rule.length(longest), same=True)
    alone = {p: _look(arena, rule, [Span(0, p, [0])], queries[p : p + 1])[0] for p in at}
    return all(
        torch.equal(row, alone[p])
        for p, row in itertools.chain(
            *(
                _beside(arena, rule, [p for p in at if p <= end], end, queries)
                for end in range(47, longest, 48)
            ),
            *(_chunk(arena, rule, first, last, queries) for first, last in chunks),
        )
        if p in alone
    )


def _beside(
    arena: Arena, rule: Rule, at: Sequence[int], end: int, queries: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """What sequences find in a batch with one that ends later."""
    spans = [Span(slot, p, [0]) for slot, p in enumerate([*at, end])]
    yield from zip(at, _look(arena, rule, spans, queries[[*at, end]]), strict=False)


def _chunk(arena: Arena, rule: Rule, first: int, last: int, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
    """What a chunk of a prompt finds; its last row comes first in a pass."""
    order = [last - 1, *range(first, last - 1)]
    yield from zip(order, _look(arena, rule, [Span(0, first, [0] * len(order))], queries[order]), strict=True)


def _look(arena: Arena, rule: Rule, spans: Sequence[Span], queries: Tensor) -> Tensor:
    return attend(lay_out(spans, arena, replace(rule, rows=1)), 0, queries, queries.shape[-1] ** -0.5)


@torch.inference_mode()
def _model_holds(model: Model, most_rows: int) -> bool:
    """True where the model gives the same logits, keys and values whatever is computed together."""
    longest = min(model.context, _LONGEST)
    starts = sorted({min(at, max(0, longest - _TOKENS)) for at in (0, 13, 60, 300, 1000)})
    ids = [[(17 * slot + 5 * n) % model.vocabulary for n in range(_TOKENS)] for slot in range(len(starts))]
    spans = [Span(slot, start, ids[slot]) for slot, start in enumerate(starts)]
    filler = Span(len(spans), 0, [n % model.vocabulary for n in range(min(most_rows, longest))])
    noise = _noise(model.shape, len(spans) + 1, model.rule.length(longest), same=False)
    alone = _run(model, noise, [[one] for span in spans for one in _single(span)])
    steps = _run(model, noise, [list(step) for step in zip(*map(_single, spans), strict=True)])
    whole = _run(model, noise, [[*spans, filler]])
    return _same(alone, steps) and _same(alone, whole)


def _single(span: Span) -> list[Span]:
    return [Span(span.slot, span.start + n, [token]) for n, token in enumerate(span.ids)]


def _noise(shape: KVShape, slots: int, length: int, *, same: bool) -> Arena:
    arena = Arena(shape, slots, length)
    size = (shape.layers, 2, 1 if same else slots, shape.heads, length, shape.dim)
    arena.data.copy_(torch.randn(size, generator=_generator(1)))
    return arena


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _run(model: Model, noise: Arena, passes: Sequence[Sequence[Span]]) -> tuple[dict[int, Tensor], Tensor]:
    """Logits after each slot's last token, and the keys and values of all slots but the filler's."""
    arena = Arena(model.shape)
    arena.data = noise.data.clone()
    last: dict[int, Tensor] = {}
    for spans in passes:
        logits = model.run(spans, arena, range(len(spans)))
        last.update({span.slot: row for span, row in zip(spans, logits, strict=True)})
    return last, arena.data[:, :, :-1]


def _same(a: tuple[dict[int, Tensor], Tensor], b: tuple[dict[int, Tensor], Tensor]) -> bool:
    return torch.equal(a[1], b[1]) and all(torch.equal(row, b[0][slot]) for slot, row in a[0].items())
