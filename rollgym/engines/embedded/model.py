"""The engine's model: a copy of its own of a transformers model, run over rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgym.engines.embedded.attention import Rule, Span, lay_out
from rollgym.engines.embedded.cache import Arena, KVShape, round_up
from rollgym.engines.embedded.decoder import LeanDecoder, is_lean
from rollgym.engines.embedded.features import (
    Unsupported,
    local_sizes,
    position_limit,
    unknown_beyond,
    unknown_layers,
)
from rollgym.engines.embedded.memory import Blocks
from rollgym.engines.embedded.modules import Heads, ModuleDecoder
from rollgym.errors import UsageError, boundary, one_line
from rollgym.trust import check_model_folder

__all__ = ["Model", "read_module", "read_tensors"]

Decoder = Callable[..., Tensor]
log = logging.getLogger(__name__)
_TOLERANCE = {True: 0.001, False: 0.1}
"""Nats by which log-probs may differ from a plain forward, mean over the vocabulary; True: in float32."""
_COUNTED = "floor_scale"
"""Llama 4 counts positions from the start of a pass, and they matter to it from this one on."""
_PROBE_WORK = 50_000_000_000
"""Parameters times tokens that a check beyond a window may cost: about a second on a CPU."""


class Model:
    """Weights, and a pass through them. Nothing is shared with the model it was made from."""

    def __init__(
        self,
        source: nn.Module | str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context: int | None = None,
    ) -> None:
        module: Any = copy.deepcopy(source) if isinstance(source, nn.Module) else read_module(source, dtype)
        self.module: Any = module.to(device=device, dtype=dtype).eval().requires_grad_(False)
        _own(self.module)
        self.device, self._dtype = device, dtype
        self.context = _context(self.module.config, context)
        self.parameters: int = sum(p.numel() for p in self.module.parameters())
        self.vocabulary = len(self.module.get_input_embeddings().weight)
        self.shape: KVShape
        self.queries: int
        """How many query heads share a head of keys."""
        self.rule = Rule(rows=1, queries=1)
        self.exact = False
        self.single = False
        """True where one row is computed at a time."""
        self.lean = False
        self._decoder = self._choose()
        self.blocks = Blocks(self.module.parameters())
        """Where the weights are."""

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], arena: Arena, wanted: Sequence[int]) -> Tensor:
        """Compute spans of consecutive slots; logits after those spans that are wanted."""
        if self.single:
            return self._one_by_one(spans, arena, set(wanted))
        rows = lay_out(spans, arena, self.rule)
        size = round_up(len(wanted), self.rule.rows)
        index = None
        if len(wanted) != len(spans) or len(rows.ids) != size:
            index = torch.tensor([*wanted, *[0] * (size - len(wanted))], dtype=torch.long, device=self.device)
        return self._decoder(rows, index)[: len(wanted)]

    def _one_by_one(self, spans: Sequence[Span], arena: Arena, wanted: set[int]) -> Tensor:
        found = []
        for number, span in enumerate(spans):
            for offset, token in enumerate(span.ids):
                one = Span(span.slot, span.start + offset, [token])
                logits = self._decoder(lay_out([one], arena, self.rule), None)
            if number in wanted:
                found.append(logits[:1])
        return torch.cat(found) if found else torch.empty(0, self.vocabulary, device=self.device)

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Raise where these are not weights of this model."""
        known: dict[str, Tensor] = self.module.state_dict()
        needed = dict(self.module.named_parameters())
        if unknown := sorted(tensors.keys() - known.keys()):
            raise UsageError(f"The engine's model has no weights called {_some(unknown)}.")
        if missing := sorted(needed.keys() - tensors.keys()):
            raise UsageError(f"The new weights lack {_some(missing)}.")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != tuple(known[name].shape):
                shapes = f"{tuple(tensor.shape)}, not {tuple(known[name].shape)}"
                raise UsageError(f"The new weights' {name} has the shape {shapes}.")

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Any]) -> None:
        """Overwrite the weights in place. A second name of tied weights is not needed, and not read."""
        if self.blocks.given_up:
            self.blocks.take_back()
        for name, own in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if name in tensors:
                own.copy_(tensors[name])

    def _choose(self) -> Decoder:
        if strange := unknown_layers(self.module.config):
            raise self._refusal(f"it has {' and '.join(strange)} layers, whose state it does not keep")
        beyond = [name for name in unknown_beyond(self.module.config) if name != _COUNTED]
        if beyond:
            raise self._refusal(f"what it attends to depends on {' and '.join(beyond)}")
        rows = self._probe()
        with boundary(UsageError, f"The torch engine cannot run {self._name}"), torch.inference_mode():
            plain = [self.module(input_ids=ids[None], use_cache=False).logits[0] for ids in rows]
        if is_lean(self.module, self.module.config):
            self._shape(_heads(self.module.config))
            lean = LeanDecoder(self.module, self.context)
            if self._gap(lean, rows, plain) is None:
                self.lean = True
                return lean
            log.warning("the lean decoder disagrees with the %s module; using the module", self._name)
        try:
            decoder = ModuleDecoder(self.module)
            self._shape(decoder.heads)
            gap = self._gap(decoder, rows, plain)
        except Unsupported as error:
            raise self._refusal(f"it has {error}") from None
        except Exception as error:
            raise self._refusal(one_line(error)) from error
        if gap is not None:
            raise self._refusal(
                f"with keys and values kept, its log-probs differ from a plain forward by {gap:.2g} nats"
            )
        return decoder

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(f"The torch engine cannot run {self._name}: {reason}. Set engine.kind=sglang.")

    def _shape(self, heads: Heads) -> None:
        self.queries = heads.queries
        self.shape = KVShape(
            layers=heads.layers, heads=heads.heads, dim=heads.dim, dtype=self._dtype, device=self.device
        )

    def _probe(self) -> list[Tensor]:
        """Ids to compare with the plain forward: two rows, the first beyond any window where it is cheap."""
        long = [size + 9 for size in local_sizes(self.module.config)]
        size = max([24, *(n for n in long if n <= self.context and n * self.parameters <= _PROBE_WORK)])
        ids = torch.arange(7, 7 + size) * 7919 % self.vocabulary
        return [ids[: self.context].to(self.device), ids.flip(0)[: min(self.context, 11)].to(self.device)]

    @torch.inference_mode()
    def _gap(self, decoder: Decoder, rows: Sequence[Tensor], plain: Sequence[Tensor]) -> float | None:
        """How far log-probs are from the plain forward's, if that is more than rounding.

        The rows share passes: each is prefilled in parts and then goes on by single steps.
        """
        arena = Arena(self.shape, len(rows), round_up(max(map(len, rows)), 64))
        at = [0] * len(rows)
        gaps = []
        for wanted in (9, 7, 1, 1, *[1] * 4, max(map(len, rows)), 1, 1):
            # The last two tokens of a row are steps, whatever it took to get there.
            sizes = [
                min(wanted, max(len(ids) - 2 - begun, 1), len(ids) - begun)
                for ids, begun in zip(rows, at, strict=True)
            ]
            spans = [
                Span(slot, at[slot], rows[slot][at[slot] : at[slot] + size].tolist())
                for slot, size in enumerate(sizes)
                if size > 0
            ]
            # Slots of a pass are consecutive: rows that have ended are the last.
            if not spans:
                break
            logits = decoder(lay_out(spans, arena, self.rule), None)
            for span, row in zip(spans, logits, strict=False):
                at[span.slot] += len(span.ids)
                expected = plain[span.slot][at[span.slot] - 1]
                gaps.append((_logs(row) - _logs(expected)).abs().mean())
        gap = float(torch.stack(gaps).max())
        bound = _TOLERANCE[self._dtype == torch.float32]
        return None if gap <= bound else gap

    @property
    def _name(self) -> str:
        return type(self.module).__name__


def _own(module: nn.Module) -> None:
    """Have all weights in memory that can be given up, not in a file that is mapped into it."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def read_tensors(path: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The weights in a folder in HF format."""
    return dict(read_module(path, dtype).state_dict())


def read_module(path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a folder in HF format, or a sentence about why there is none. No code of it is run.

    Without a ``dtype``, weights are read in the precision that config.json names, which may be less than
    that of the files: an export of float32 weights keeps the configuration of its bfloat16 base.
    """
    from transformers import AutoModelForCausalLM

    if not Path(path).is_dir():
        raise UsageError(f"No model can be read from {path}: there is no such folder.")
    check_model_folder(Path(path))
    try:
        with _no_progress_bar():
            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype or "auto", trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError) as error:
        raise UsageError(f"No model can be read from {path}: {one_line(error)}") from error
    return module


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without transformers' bar on the terminal, which would cut through ours."""
    from transformers.utils import logging

    settings: Any = logging
    shown = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            settings.enable_progress_bar()


def _context(config: Any, asked: int | None) -> int:
    """The longest conversation: what positions allow where each token is computed by itself."""
    longest = getattr(config, "max_position_embeddings", None)
    if (limit := position_limit(config)) is not None:
        longest = min(longest or limit, limit)
    if _COUNTED in (beyond := unknown_beyond(config)):
        longest = min(longest or beyond[_COUNTED] - 1, beyond[_COUNTED] - 1)
    if asked is not None and longest is not None and asked > longest:
        raise UsageError(f"The model's context is {longest} tokens; context_length={asked} is more.")
    return int(asked or longest or 4096)


def _heads(config: Any) -> Heads:
    """Of a model that the lean decoder knows."""
    heads = config.num_attention_heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Heads(config.num_hidden_layers, kept, dim, heads // kept)


def _logs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
