"""The engine's model: a private copy of a transformers model, run over packed tokens."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgym.core.errors import UsageError, boundary, one_line
from rollgym.core.trust import check_model_folder
from rollgym.engines.embedded.attention import ReductionRule, Span, make_forward_batch
from rollgym.engines.embedded.features import (
    Unsupported,
    length_dependent_settings,
    local_sizes,
    position_limit,
    unknown_layers,
)
from rollgym.engines.embedded.hf_decoder import Heads, HFDecoder
from rollgym.engines.embedded.kv_cache import KVCache, KVShape, round_up
from rollgym.engines.embedded.llama import FusedDecoder, supports_fused
from rollgym.engines.embedded.offload import WeightStorage
from rollgym.engines.embedded.precision import SMALLEST, choose_dtype
from rollgym.engines.embedded.routing import ExpertRecorder, find_routers, routing_shape

__all__ = ["Model", "read_module", "read_tensors"]

Decoder = Callable[..., Tensor]
log = logging.getLogger(__name__)
_TOLERANCE = {True: 0.001, False: 0.1}
"""Allowed difference of log-probs from a plain forward in nats, mean over the vocabulary; True: float32.
Elsewhere, twice the module's own difference from float32 is allowed if that is more."""
_FLOOR_SCALE = "floor_scale"
"""Llama 4 scales attention by positions counted from the start of a pass, from this position on."""
_PACK = SMALLEST
"""Models with at least so many parameters run with packed weights on CPU, if `FusedDecoder` supports them."""
_PROBE_IN_FLOAT32 = 2_000_000_000
"""Models with fewer parameters are checked against their float32 forward: it needs twice the memory once."""
SPLIT = 128
"""`ReductionRule.split` of models with packed weights."""
_PROBE_WORK = 50_000_000_000
"""Limit on parameters times tokens of a check beyond an attention window: about a second on a CPU."""


class Model:
    """Weights and the forward pass. Shares no memory with the model it was created from."""

    def __init__(
        self,
        source: nn.Module | str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype | str | None,
        context: int | None = None,
    ) -> None:
        read_as = torch.float32 if device.type == "cpu" else choose_dtype(dtype, device, 0)
        module: Any = copy.deepcopy(source) if isinstance(source, nn.Module) else read_module(source, read_as)
        self.parameters: int = sum(p.numel() for p in module.parameters())
        dtype = choose_dtype(dtype, device, self.parameters)
        self.context = _context(module.config, context)
        self.vocabulary = len(module.get_input_embeddings().weight)
        self.device, self._dtype = device, dtype
        self.module: Any = module.eval().requires_grad_(False)
        exact: list[Tensor] = []
        if dtype != torch.float32 and module.dtype == torch.float32 and self.parameters < _PROBE_IN_FLOAT32:
            self.module = module.to(device=device)
            exact = self._plain_logits()
        self.module = self.module.to(device=device, dtype=dtype)
        _unmap(self.module)
        self.shape: KVShape
        self.queries: int
        """Number of query heads per key head."""
        self.rule = ReductionRule(rows=1, queries=1)
        self.batch_invariant = False
        self.one_token_at_a_time = False
        """True if no `ReductionRule` makes this model batch invariant on this machine."""
        self.fused = False
        with boundary(UsageError, f"The embedded engine cannot run {self._name}"):
            self._routers = find_routers(self.module)
        self._decoder = self._choose_decoder(exact)
        self.weight_storage = WeightStorage(self.module.parameters())
        self._packed: Mapping[int, Any] = {}
        if self.parameters >= _PACK and device.type == "cpu" and isinstance(self._decoder, FusedDecoder):
            self._pack(self._decoder)

    def _pack(self, decoder: FusedDecoder) -> None:
        """Store the weights in the order of oneDNN's kernels, where torch has them."""
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return
        try:
            self._packed = decoder.pack()
            self.rule = ReductionRule(rows=1, queries=1, split=SPLIT)
        except RuntimeError as error:  # this CPU or build of torch does not support it
            log.warning("cannot pack the weights for oneDNN: %s", one_line(error))
            decoder.unpack()

    def unpack(self) -> None:
        """Use the BLAS of torch instead of oneDNN."""
        if self._packed and isinstance(self._decoder, FusedDecoder):
            self._decoder.unpack()
            self._packed = {}
            self.rule = ReductionRule(rows=1, queries=1)

    @property
    def packed(self) -> bool:
        """Whether the weights are packed for oneDNN."""
        return bool(self._packed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights; 0 while they are released."""
        packed = self._decoder.packed_bytes if isinstance(self._decoder, FusedDecoder) else 0
        return self.weight_storage.nbytes + packed

    def release_weights(self) -> None:
        """Free the memory of the weights until they are loaded again."""
        self.weight_storage.release()
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.release_packed()

    def record_experts(self) -> None:
        """Record the experts that routers choose for every token, beside its keys and values.

        Does nothing for a model without experts.
        """
        if self._routers and isinstance(self._decoder, HFDecoder):
            self._decoder.recorder = ExpertRecorder(self._routers)
            self.shape = replace(self.shape, routing=routing_shape(self._routers))

    def forward(self, spans: Sequence[Span], kv_cache: KVCache, wanted: Sequence[int]) -> Tensor:
        """Compute spans of consecutive slots; returns the logits after the wanted spans."""
        return self.logits(self.states(spans, kv_cache, wanted))[: len(wanted)]

    @property
    def has_states(self) -> bool:
        """Whether `states` are small and can be kept to compute `logits` from them again later."""
        return isinstance(self._decoder, FusedDecoder) and not self.one_token_at_a_time

    @torch.inference_mode()
    def states(self, spans: Sequence[Span], kv_cache: KVCache, wanted: Sequence[int]) -> Tensor:
        """Compute spans of consecutive slots; returns the last hidden states after the wanted spans.

        Rows of padding may follow.
        """
        if self.one_token_at_a_time:
            return self._one_by_one(spans, kv_cache, set(wanted))
        batch = make_forward_batch(spans, kv_cache, self.rule)
        size = round_up(len(wanted), self.rule.rows)
        index = None
        if len(wanted) != len(spans) or len(batch.ids) != size:
            index = torch.tensor([*wanted, *[0] * (size - len(wanted))], dtype=torch.long, device=self.device)
        compute = self._decoder.states if isinstance(self._decoder, FusedDecoder) else self._decoder
        return compute(batch, index)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of `states`. The states of decoders other than `FusedDecoder` are logits."""
        if not isinstance(self._decoder, FusedDecoder) or self.one_token_at_a_time:
            return states
        if more := -len(states) % self.rule.rows:
            states = torch.cat([states, states[:1].expand(more, -1)])
        return self._decoder.head(states)

    def _one_by_one(self, spans: Sequence[Span], kv_cache: KVCache, wanted: set[int]) -> Tensor:
        results = []
        for number, span in enumerate(spans):
            for offset, token in enumerate(span.ids):
                single = Span(span.slot, span.start + offset, [token])
                logits = self._decoder(make_forward_batch([single], kv_cache, self.rule), None)
            if number in wanted:
                results.append(logits[:1])
        return torch.cat(results) if results else torch.empty(0, self.vocabulary, device=self.device)

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Raise `UsageError` if these are not the weights of this model."""
        known: dict[str, Tensor] = self.module.state_dict()
        needed = dict(self.module.named_parameters())
        if unknown := sorted(tensors.keys() - known.keys()):
            raise UsageError(f"The engine's model has no weights called {_first_names(unknown)}.")
        if missing := sorted(needed.keys() - tensors.keys()):
            raise UsageError(f"The new weights lack {_first_names(missing)}.")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != tuple(known[name].shape):
                shapes = f"{tuple(tensor.shape)}, not {tuple(known[name].shape)}"
                raise UsageError(f"The new weights' {name} has the shape {shapes}.")

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Any]) -> None:
        """Overwrite the weights in place. The second name of tied weights is optional and ignored."""
        if self.weight_storage.released:
            self.weight_storage.reallocate()
        for name, parameter in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if name in tensors:
                linear = self._packed.get(id(parameter))
                if linear is not None:
                    linear.open()
                parameter.copy_(tensors[name])
                if linear is not None:
                    linear.loaded(parameter)

    def _plain_logits(self) -> list[Tensor]:
        """Return the logits of the probe prompts by the module's own forward, without a KV cache."""
        with boundary(UsageError, f"The embedded engine cannot run {self._name}"), torch.inference_mode():
            return [
                self.module(input_ids=ids[None], use_cache=False).logits[0] for ids in self._probe_prompts()
            ]

    def _choose_decoder(self, exact: Sequence[Tensor]) -> Decoder:
        """Return the fastest decoder whose log-probs are those of the module's plain forward.

        Args:
            exact: Logits of the probe prompts in float32, if the module is checked in another precision. Its
                own error is then the measure: rounding alone moves some models by 0.2 nats.
        """
        if unknown := unknown_layers(self.module.config):
            raise self._unsupported(f"it has {' and '.join(unknown)} layers, whose state it does not keep")
        beyond = [name for name in length_dependent_settings(self.module.config) if name != _FLOOR_SCALE]
        if beyond:
            raise self._unsupported(f"its attention depends on {' and '.join(beyond)}")
        prompts, expected = self._probe_prompts(), self._plain_logits()
        limit = _TOLERANCE[self._dtype == torch.float32]
        if exact:
            limit = max(limit, 2 * max(map(_max_diff, expected, exact)))
            expected = list(exact)
        if supports_fused(self.module, self.module.config):
            self._set_shape(_heads(self.module.config))
            fused = FusedDecoder(self.module, self.context)
            if self._logprob_diff(fused, prompts, expected) <= limit:
                self.fused = True
                return fused
            log.warning("the fused decoder disagrees with the %s module; using the module", self._name)
        try:
            decoder = HFDecoder(self.module)
            self._set_shape(decoder.heads)
            diff = self._logprob_diff(decoder, prompts, expected)
        except Unsupported as error:
            raise self._unsupported(f"it has {error}") from None
        except Exception as error:
            raise self._unsupported(one_line(error)) from error
        if not diff <= limit:  # NaN is not
            raise self._unsupported(
                f"with a KV cache, its log-probs differ from a plain forward by {diff:.2g} nats"
            )
        return decoder

    def _unsupported(self, reason: str) -> UsageError:
        return UsageError(
            f"The embedded engine cannot run {self._name}: {reason}. Set engine.kind=sglang or vllm."
        )

    def _set_shape(self, heads: Heads) -> None:
        self.queries = heads.queries
        self.shape = KVShape(
            layers=heads.layers, heads=heads.heads, dim=heads.dim, dtype=self._dtype, device=self.device
        )

    def _probe_prompts(self) -> list[Tensor]:
        """Return two prompts for the check; the first exceeds any attention window if that is cheap."""
        long = [size + 9 for size in local_sizes(self.module.config)]
        size = max([24, *(n for n in long if n <= self.context and n * self.parameters <= _PROBE_WORK)])
        ids = torch.arange(7, 7 + size) * 7919 % self.vocabulary
        return [ids[: self.context].to(self.device), ids.flip(0)[: min(self.context, 11)].to(self.device)]

    @torch.inference_mode()
    def _logprob_diff(self, decoder: Decoder, prompts: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """Return the largest difference of log-probs from those of a plain forward.

        The prompts share passes: each is prefilled in chunks, then decoded token by token.
        """
        kv_cache = KVCache(self.shape, len(prompts), round_up(max(map(len, prompts)), 64))
        at = [0] * len(prompts)
        diffs = []
        for wanted in (9, 7, 1, 1, *[1] * 4, max(map(len, prompts)), 1, 1):
            # The last two tokens of each prompt are always decoded one by one.
            sizes = [
                min(wanted, max(len(ids) - 2 - begun, 1), len(ids) - begun)
                for ids, begun in zip(prompts, at, strict=True)
            ]
            spans = [
                Span(slot, at[slot], prompts[slot][at[slot] : at[slot] + size].tolist())
                for slot, size in enumerate(sizes)
                if size > 0
            ]
            # Slots of a pass are consecutive: finished prompts are the last ones.
            if not spans:
                break
            logits = decoder(make_forward_batch(spans, kv_cache, self.rule), None)
            for span, row in zip(spans, logits, strict=False):
                at[span.slot] += len(span.ids)
                plain = expected[span.slot][at[span.slot] - 1]
                diffs.append(_max_diff(row[None], plain[None]))
        return max(diffs, key=lambda diff: (diff != diff, diff))

    @property
    def _name(self) -> str:
        return type(self.module).__name__


def _unmap(module: nn.Module) -> None:
    """Copy memory-mapped weights into memory that can be released."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def read_tensors(path: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Read the weights of a folder in Hugging Face format."""
    return dict(read_module(path, dtype).state_dict())


def read_module(path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load the model of a folder in Hugging Face format, without running code from it.

    Without ``dtype``, weights are read in the precision of config.json, which may be lower than that of the
    files: an export of float32 weights keeps the configuration of its bfloat16 base.

    Raises:
        UsageError: The folder does not exist or holds no model that can be loaded.
    """
    from transformers import AutoModelForCausalLM

    if not Path(path).is_dir():
        raise UsageError(f"Cannot load a model from {path}: the folder does not exist.")
    check_model_folder(Path(path))
    try:
        with no_progress_bar():
            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype or "auto", trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot load a model from {path}: {one_line(error)}") from error
    return module


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable the progress bar of transformers, which would break ours."""
    from transformers.utils import logging

    settings: Any = logging
    shown = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            settings.enable_progress_bar()


def _context(config: Any, requested: int | None) -> int:
    """Return the context length: limited by position embeddings that depend on the length of a pass."""
    longest = getattr(config, "max_position_embeddings", None)
    if (limit := position_limit(config)) is not None:
        longest = min(longest or limit, limit)
    if _FLOOR_SCALE in (beyond := length_dependent_settings(config)):
        longest = min(longest or beyond[_FLOOR_SCALE] - 1, beyond[_FLOOR_SCALE] - 1)
    if requested is not None and longest is not None and requested > longest:
        raise UsageError(f"context_length={requested} exceeds the model's context of {longest} tokens.")
    return int(requested or longest or 4096)


def _heads(config: Any) -> Heads:
    """Attention heads of a model that the fused decoder supports."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Heads(config.num_hidden_layers, kv_heads, dim, heads // kv_heads)


def _max_diff(logits: Tensor, plain: Tensor) -> float:
    """Return the difference of log-probs, mean over the vocabulary, of the position where it is largest."""
    logprobs, expected = (torch.log_softmax(each.float(), -1) for each in (logits, plain))
    return float((logprobs - expected).abs().mean(-1).max())


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
