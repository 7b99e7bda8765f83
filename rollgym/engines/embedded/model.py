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
from rollgym.engines.embedded.memory import Blocks
from rollgym.engines.embedded.modules import ModuleDecoder
from rollgym.errors import UsageError, one_line
from rollgym.trust import check_model_folder

__all__ = ["Model", "read_module", "read_tensors"]

Decoder = Callable[..., Tensor]
log = logging.getLogger(__name__)


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
        module: Any = copy.deepcopy(source) if isinstance(source, nn.Module) else read_module(source)
        self.module: Any = module.to(device=device, dtype=dtype).eval().requires_grad_(False)
        _own(self.module)
        self.device = device
        self.context = _context(self.module.config, context)
        self.parameters: int = sum(p.numel() for p in self.module.parameters())
        self.vocabulary = len(self.module.get_input_embeddings().weight)
        try:
            self.shape = _kv_shape(self.module.config, dtype, device)
        except AttributeError as error:
            raise UsageError(f"The torch engine cannot run {self._name}: {one_line(error)}") from error
        self.queries = self.module.config.num_attention_heads // self.shape.heads
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
        ids = torch.arange(7, 31) * 7919 % self.vocabulary
        ids = ids[: self.context].to(self.device)
        with torch.inference_mode():
            plain = self.module(input_ids=ids[None], use_cache=False).logits[0]
        if is_lean(self.module, self.module.config):
            lean = LeanDecoder(self.module, self.context)
            if self._agrees(lean, ids, plain):
                self.lean = True
                return lean
            log.warning("the lean decoder disagrees with the %s module; using the module", self._name)
        decoder = ModuleDecoder(self.module, self.context)
        try:
            agrees = self._agrees(decoder, ids, plain)
        except Exception as error:
            raise UsageError(f"The torch engine cannot run {self._name}: {one_line(error)}") from error
        if not agrees:
            raise UsageError(
                f"The torch engine cannot run {self._name}: with keys and values kept, its logits differ."
            )
        return decoder

    @torch.inference_mode()
    def _agrees(self, decoder: Decoder, ids: Tensor, plain: Tensor) -> bool:
        """True where a prefill in two parts and single steps give the plain forward's logits."""
        arena = Arena(self.shape, 1, round_up(len(ids), 64))
        cuts = sorted({0, *(n for n in (9, 16, 17, 18) if n < len(ids)), len(ids)})
        gap = 0.0
        for first, last in zip(cuts, cuts[1:], strict=False):
            spans = [Span(0, first, ids[first:last].tolist())]
            logits = decoder(lay_out(spans, arena, self.rule), None)[0]
            gap = max(gap, float((logits - plain[last - 1]).abs().max()))
        size = max(1.0, float(plain.abs().max()))
        return gap < size * (1e-4 if plain.dtype == torch.float32 else 0.1)

    @property
    def _name(self) -> str:
        return type(self.module).__name__


def _own(module: nn.Module) -> None:
    """Have all weights in memory that can be given up, not in a file that is mapped into it."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights in a folder in HF format."""
    return dict(read_module(path).state_dict())


def read_module(path: str | Path) -> nn.Module:
    """The model in a folder in HF format, or a sentence about why there is none. No code of it is run."""
    from transformers import AutoModelForCausalLM

    if not Path(path).is_dir():
        raise UsageError(f"No model can be read from {path}: there is no such folder.")
    check_model_folder(Path(path))
    try:
        with _no_progress_bar():
            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                path, trust_remote_code=False, local_files_only=True
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
    longest = getattr(config, "max_position_embeddings", None)
    if asked is not None and longest is not None and asked > longest:
        raise UsageError(f"The model's context is {longest} tokens; context_length={asked} is more.")
    return int(asked or longest or 4096)


def _kv_shape(config: Any, dtype: torch.dtype, device: torch.device) -> KVShape:
    heads = config.num_attention_heads
    return KVShape(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        device=device,
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
