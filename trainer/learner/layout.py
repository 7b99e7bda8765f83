"""The layout of rows in a micro-batch: packed where a check proves it right, else padded.

Before anything is trained, the log-probs of a few rows are computed as the learner will compute them and
compared with those of a plain forward of each row. Packed rows that differ are padded instead; a model whose
padded rows differ too is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rollgym.core.errors import UsageError, boundary, one_line
from rollgym.engines.embedded.features import local_sizes, position_limit
from rollgym.trainer.data.packing import MIN_OVERLAP
from rollgym.trainer.data.sequences import TokenSequence
from rollgym.trainer.learner.forward import Layout, allow_packing, pack_rows, packs, parts, score
from rollgym.trainer.learner.process_group import ProcessGroup

TOLERANCE = 0.01
"""Maximum mean difference of a row's log-probs in nats, in float32; rounding is far below."""
LARGE = 500_000_000
"""Models with more parameters are checked on fewer tokens."""
LONGEST = 1024
"""Tokens of the longest row that is checked."""
LONG = 64
"""Tokens of that row unless an attention window needs more."""
WORK = 50_000_000_000
"""Maximum parameters times tokens of the longest row: about a second on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The layout that a learner uses, and the reason."""

    layout: Layout
    gap: float | None = None
    """Difference from a plain forward in nats: the mean of the worst row; None if not measured."""
    reason: str | None = None
    """The reason for padded rows, if packed ones were allowed."""
    longest: int = 0
    """Tokens of the longest row that was compared."""

    def agree(self, group: ProcessGroup | None) -> LayoutChoice:
        """Return the layout that all ranks use: on unlike machines they may have chosen differently."""
        layouts = [] if group is None else group.gather(self.layout)
        if self.layout == "packed" and "padded" in layouts:
            return LayoutChoice(layout="padded", reason=f"ranks chose {', '.join(layouts)}")
        return self

    def __str__(self) -> str:
        """Return one line for a log."""
        measured = "" if self.gap is None else f" ({self.gap:.1g} nats from a plain forward)"
        because = "" if self.reason is None else f": {self.reason}"
        return f"rows are {self.layout}{because}{measured}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a run's manifest."""
        return asdict(self)


def choose_layout(model: Any, asked: Literal["auto", "packed", "padded"]) -> LayoutChoice:
    """Choose the layout for a model and prepare the model for it.

    Args:
        model: A causal language model in float32, in evaluation mode.
        asked: ``packed`` and ``padded`` are checked as well, but without a fallback.

    Raises:
        UsageError: No layout that was asked for gives the log-probs of a plain forward.
    """
    name = type(model).__name__
    parts(model)
    rows = probe_rows(model)
    longest = max(len(row.inputs) for row in rows)
    with boundary(UsageError, f"{name} cannot be trained: it cannot read plain token ids"):
        expected = _plain(model, rows)
    reason = None
    if asked != "padded":
        usual = model.config._attn_implementation
        gap = None
        reason = allow_packing(model)
        if reason is None:
            gap, reason = _gap(model, rows, expected, "packed")
        if reason is None:
            return LayoutChoice(layout="packed", gap=gap, longest=longest)
        model.set_attn_implementation(usual)
        if asked == "packed":
            raise UsageError(f"{name} cannot be trained on packed rows: {reason}. Set learner.layout=padded.")
    gap, wrong = _gap(model, rows, expected, "padded")
    if wrong is not None:
        raise UsageError(f"{name} cannot be trained: of padded rows, {wrong}. Choose another model.")
    return LayoutChoice(layout="padded", gap=gap, reason=reason, longest=longest)


def known_layout(model: Any, asked: Literal["auto", "packed", "padded"]) -> LayoutChoice:
    """Return the layout of a model that another learner has prepared."""
    packed = asked != "padded" and packs(model)
    return LayoutChoice(layout="packed" if packed else "padded")


def use_layout(model: Any, layout: Layout) -> None:
    """Prepare a model for a layout that was chosen for another one of its architecture."""
    if layout == "packed" and (reason := allow_packing(model)) is not None:
        raise UsageError(f"{type(model).__name__} cannot be trained on packed rows: {reason}.")


def force_layout(model: Any, layout: Layout) -> None:
    """Prepare a model without weights for a layout that was chosen for its first layers."""
    if layout == "packed":
        pack_rows(model)


def probe_rows(model: Any) -> list[TokenSequence]:
    """Make rows of several lengths: some share a prefix, one is short, one exceeds any window if cheap."""
    config = parts(model)[0].config
    size = sum(parameter.numel() for parameter in model.parameters())
    large = size > LARGE
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    bounds = [position_limit(config), getattr(config, "max_position_embeddings", None), LONGEST]
    most = min(bound for bound in bounds if isinstance(bound, int) and bound > 0)
    wanted = [window + 9 for window in local_sizes(config)]
    long = max([20, *(length for length in (LONG, *wanted) if length <= most and length * size <= WORK)])
    long = min(long, most)
    rng = np.random.default_rng(0)
    first = min(3, vocabulary - 1)  # ids below are often padding, which some models number otherwise

    def tokens(count: int) -> Any:
        return rng.integers(first, vocabulary, max(count, 0))

    trunk = tokens(min(MIN_OVERLAP + 2, most - 2))
    ends = (2, 4) if large else (3, 9, max(long - len(trunk), 12))
    tokens_of_rows = [np.concatenate([trunk, tokens(end)])[: most + 1] for end in ends]
    tokens_of_rows += [tokens(3)] if large else [tokens(5), tokens(min(long + 1, most + 1))]
    return [_row(ids, len(trunk)) for ids in tokens_of_rows]


def _row(ids: Any, trunk: int) -> TokenSequence:
    """Make a row with action tokens at the start, around the end of the shared prefix, and at the end."""
    end = len(ids) - 1
    positions = {1, 2, end // 2, trunk - 1, trunk, trunk + 1, trunk + 2, end - 2, end - 1, end}
    return TokenSequence(ids, np.array(sorted(at for at in positions if 1 <= at <= end), dtype=np.int64))


@torch.no_grad()
def _plain(model: Any, rows: Sequence[TokenSequence]) -> list[Tensor]:
    """Compute log-probs of each row's action tokens by a plain forward over that row alone."""
    logprobs = []
    for row in rows:
        ids = torch.from_numpy(row.inputs)[None].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        logs = torch.log_softmax(logits, -1)[torch.from_numpy(row.action_positions - 1).to(logits.device)]
        targets = torch.from_numpy(row.ids[row.action_positions]).to(logits.device)
        logprobs.append(logs.gather(-1, targets[:, None])[:, 0])
    return logprobs


@torch.no_grad()
def _gap(
    model: Any, rows: Sequence[TokenSequence], expected: Sequence[Tensor], layout: Layout
) -> tuple[float | None, str | None]:
    """Return the difference of a layout's log-probs from those expected, and the problem, if any."""
    try:
        together = score(model, rows, layout=layout).logprobs
    except UsageError:
        raise
    except Exception as error:  # whatever a model raises where rows are laid out in a way it does not know
        return None, f"the model fails ({one_line(error)})"
    parted = torch.split(together, [len(row.action_positions) for row in rows])
    gap = max(float((ours - plain).abs().mean()) for ours, plain in zip(parted, expected, strict=True))
    # not `gap > TOLERANCE`: that would let a gap pass which is not a number
    return gap, None if gap <= TOLERANCE else f"log-probs differ from a plain forward by {gap:.2g} nats"
