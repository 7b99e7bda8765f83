"""Model presets, with the sizes of the published configurations they are named after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollgym.devices.models import ModelShape


def _qwen(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, *, tied: bool = False
) -> ModelShape:
    return ModelShape(
        name=f"Qwen2.5-{name}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        inner=inner,
        vocab=151_936 if tied else 152_064,
        tied=tied,
        qkv_bias=True,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int) -> ModelShape:
    return ModelShape(
        name=f"Llama-3.1-{name}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=hidden // heads,
        inner=inner,
        vocab=128_256,
        context=131_072,
    )


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, inner: int, expert: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=4,
        head_dim=128,
        inner=inner,
        vocab=151_936,
        qk_norm=True,
        experts=128,
        experts_used=8,
        expert_inner=expert,
        context=40_960,
    )


_MIXTRAL = ModelShape(
    name="Mixtral-8x7B",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inner=14_336,
    vocab=32_000,
    experts=8,
    experts_used=2,
    expert_inner=14_336,
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
