"""Does a row's result depend on its company? Asked of the machine at hand, before anything is generated.

What `attention` relies on was measured, not promised: another processor or another library version may
choose its kernels otherwise. So the model itself is run with the same tokens alone, in a batch, and in one
piece, and every bit compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from rollgym.engines.embedded.attention import LENGTH_STEP, Span
from rollgym.engines.embedded.cache import Arena
from rollgym.engines.embedded.model import Model

__all__ = ["make_exact"]

_MULTIPLES = (4, 8, 16, 32)
_TOKENS = 3
log = logging.getLogger(__name__)


def make_exact(model: Model, most_rows: int) -> None:
    """Set the model up so that a row's bits do not depend on the batch, at the least cost that works."""
    model.exact = True
    for model.multiple in _MULTIPLES:
        if _independent(model, most_rows):
            return
    model.multiple = None
    log.warning(
        "on this machine a token's logits depend on what is computed beside it: computing one token at a "
        "time. Pass deterministic=False for speed."
    )


@torch.inference_mode()
def _independent(model: Model, most_rows: int) -> bool:
    length = min(model.context // LENGTH_STEP * LENGTH_STEP, 1088)
    if length < LENGTH_STEP:
        return False
    starts = sorted({min(at, length - _TOKENS) for at in (0, 13, 60, 190, 500, 1000)})
    ids = [[(17 * slot + 5 * n) % model.vocabulary for n in range(_TOKENS)] for slot in range(len(starts))]
    spans = [Span(slot, start, ids[slot]) for slot, start in enumerate(starts)]
    filler = Span(len(spans), 0, [n % model.vocabulary for n in range(min(most_rows, length))])
    generator = torch.Generator().manual_seed(0)
    shape = model.shape
    noise = torch.randn(shape.layers, 2, len(spans) + 1, shape.heads, length, shape.dim, generator=generator)
    alone = _run(model, noise, [[one] for span in spans for one in _single(span)])
    steps = _run(model, noise, [list(step) for step in zip(*map(_single, spans), strict=True)])
    whole = _run(model, noise, [[*spans, filler]])
    return _same(alone, steps) and _same(alone, whole)


def _single(span: Span) -> list[Span]:
    return [Span(span.slot, span.start + n, [token]) for n, token in enumerate(span.ids)]


def _run(model: Model, noise: Tensor, passes: Sequence[Sequence[Span]]) -> tuple[dict[int, Tensor], Tensor]:
    """Logits after each slot's last token, and the keys and values of all slots but the filler's."""
    arena = Arena(model.shape, noise.shape[2], noise.shape[4])
    arena.data.copy_(noise)
    last: dict[int, Tensor] = {}
    for spans in passes:
        logits = model.run(spans, arena, range(len(spans)))
        last.update({span.slot: row for span, row in zip(spans, logits, strict=True)})
    return last, arena.data[:, :, :-1]


def _same(a: tuple[dict[int, Tensor], Tensor], b: tuple[dict[int, Tensor], Tensor]) -> bool:
    return torch.equal(a[1], b[1]) and all(torch.equal(row, b[0][slot]) for slot, row in a[0].items())
