"""Sizes of a model, from its Hugging Face ``config.json`` or a preset such as ``7b``.

Presets have the sizes of the published configurations that they are named after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgym.core.errors import UnknownName, UsageError

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of ``model_type`` whose parameters are counted exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer with gated MLPs and RMS norms."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of a dense MLP."""
    vocab: int
    tied: bool = False
    """Whether the output layer shares the weights of the embedding."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Experts per MoE layer; 0: a dense model."""
    experts_used: int = 0
    """Experts per token."""
    expert_inner: int = 0
    shared_inner: int = 0
    """Width of the shared expert; 0: none."""
    dense_layers: int = 0
    """Layers without experts in an MoE model."""
    context: int = 32_768
    """Maximum context in tokens."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """Parameters used by one token."""
        return self._count(self.experts_used)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return (self.layers - self.dense_layers) * 3 * self.experts * self.hidden * self.expert_inner

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block that sharded training gathers at once."""
        mlp = self._experts(self.experts) if self.experts else self._dense_mlp()
        return max(self._attention() + mlp, self.vocab * self.hidden)

    def kv_bytes(self, bytes_each: int = 2) -> int:
        """Return the bytes of the KV cache of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters on linear layers but the output layer, and on experts."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.inner if not self.experts else self.shared_inner
        pairs = 2 * (self.hidden + q) + 2 * (self.hidden + kv) + (3 * (self.hidden + inner) if inner else 0)
        experts = (self.layers - self.dense_layers) * self.experts * (2 * self.hidden + 3 * self.expert_inner)
        return rank * (self.layers * pairs + experts)

    def _count(self, experts: int) -> int:
        """Parameters with this many experts per layer."""
        moe = self.layers - self.dense_layers if self.experts else 0
        blocks = self.layers * self._attention() + (self.layers - moe) * self._dense_mlp()
        return blocks + moe * self._experts(experts) + self._ends()

    def _attention(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden * (q + kv) + 2 * self.hidden
        weights += (q + 2 * kv) * self.qkv_bias + self.hidden * self.out_bias
        return weights + 2 * self.head_dim * self.qk_norm

    def _dense_mlp(self) -> int:
        return 3 * self.hidden * self.inner + (2 * self.inner + self.hidden) * self.mlp_bias

    def _experts(self, count: int) -> int:
        shared = 3 * self.hidden * self.shared_inner + self.hidden if self.shared_inner else 0
        return count * 3 * self.hidden * self.expert_inner + self.hidden * self.experts + shared

    def _ends(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden


def find_model(words: str) -> ModelShape:
    """Find a model by a preset such as ``7b`` or ``200b-moe``, or by its folder or ``config.json``."""
    if words.lower() in PRESETS:
        return PRESETS[words.lower()]
    path = Path(words)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if any(mark in words for mark in "/\\."):
            raise UsageError(f"The model {words} is neither a folder with a config.json nor a preset.")
        raise UnknownName("model", words, PRESETS, f"Presets: {', '.join(PRESETS)}; or pass a folder.")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read {path} as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a JSON object.")
    return read_config(values, path.parent.name)


def read_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Read the sizes from a Hugging Face configuration."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UsageError(
            f"Unsupported model_type {family!r} in config.json; supported: {', '.join(FAMILIES)}."
        )
    try:
        shape = _dense(config, str(family), name)
        return _with_experts(shape, config, str(family)) if _experts(config) else shape
    except KeyError as error:
        raise UsageError(f"The model's config.json has no {error.args[0]}.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"The model's config.json has an invalid value: {error}.") from None


def _dense(config: Mapping[str, Any], family: str, name: str) -> ModelShape:
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        name=name or family,
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads
        if config.get("num_key_value_heads") is None
        else _count(config, "num_key_value_heads"),
        head_dim=hidden // heads if config.get("head_dim") is None else _count(config, "head_dim"),
        inner=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("qkv_bias", True)) if family.startswith("qwen2") else bias,
        out_bias=bias and not family.startswith("qwen2"),
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family.startswith("qwen3"),
        context=int(config.get("max_position_embeddings") or 32_768),
    )


def _with_experts(shape: ModelShape, config: Mapping[str, Any], family: str) -> ModelShape:
    step = int(config.get("decoder_sparse_step") or 1)
    only = set(config.get("mlp_only_layers") or ())
    dense = sum(1 for at in range(shape.layers) if at in only or (at + 1) % step)
    return replace(
        shape,
        experts=_experts(config),
        experts_used=_count(config, "num_experts_per_tok"),
        expert_inner=shape.inner if family == "mixtral" else _count(config, "moe_intermediate_size"),
        shared_inner=_count(config, "shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
        dense_layers=dense,
    )


def _experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}")
    return value


def _shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any
) -> ModelShape:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "inner": inner}
    return ModelShape(**{"name": name, "head_dim": hidden // heads, "vocab": vocab, **sizes, **more})


def _qwen(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, tied: bool = False
) -> ModelShape:
    vocab = 151_936 if tied else 152_064
    return _shape(f"Qwen2.5-{name}", layers, hidden, heads, kv_heads, inner, vocab, tied=tied, qkv_bias=True)


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int) -> ModelShape:
    return _shape(f"Llama-3.1-{name}", layers, hidden, heads, 8, inner, 128_256, context=131_072)


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, inner: int, expert: int) -> ModelShape:
    experts = {"experts": 128, "experts_used": 8, "expert_inner": expert}
    more = {"head_dim": 128, "qk_norm": True, "context": 40_960, **experts}
    return _shape(name, layers, hidden, heads, 4, inner, 151_936, **more)


_MIXTRAL = _shape(
    "Mixtral-8x7B", 32, 4096, 32, 8, 14_336, 32_000, experts=8, experts_used=2, expert_inner=14_336
)
_BIG = _qwen3_moe("Qwen3-235B-A22B", 94, 4096, 64, 12_288, 1536)

PRESETS: Mapping[str, ModelShape] = {
    "0.5b": _qwen("0.5B", 24, 896, 14, 2, 4864, tied=True),
    "1.5b": _qwen("1.5B", 28, 1536, 12, 2, 8960, tied=True),
    "3b": _qwen("3B", 36, 2048, 16, 2, 11_008, tied=True),
    "7b": _qwen("7B", 28, 3584, 28, 4, 18_944),
    "8b": _llama("8B", 32, 4096, 32, 14_336),
    "14b": _qwen("14B", 48, 5120, 40, 8, 13_824),
    "32b": _qwen("32B", 64, 5120, 40, 8, 27_648),
    "70b": _llama("70B", 80, 8192, 64, 28_672),
    "72b": _qwen("72B", 80, 8192, 64, 8, 29_568),
    "405b": _llama("405B", 126, 16_384, 128, 53_248),
    "8x7b": _MIXTRAL,
    "30b-moe": _qwen3_moe("Qwen3-30B-A3B", 48, 2048, 32, 6144, 768),
    # Not a published model: the layers of the next preset, but fewer.
    "200b-moe": replace(_BIG, name="200B MoE (80 layers of Qwen3-235B-A22B)", layers=80),
    "235b-moe": _BIG,
}
