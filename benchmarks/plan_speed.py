"""Predicted throughput of plans compared with published figures.

    python benchmarks/plan_speed.py

Nothing is run: the roofline of `rollgym.devices.cost_model` is evaluated for the models, devices and batches
of published measurements. The error is that of the prediction, relative to the published figure.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollgym.devices.candidates import Site
from rollgym.devices.cost_model import generate_rate, speed_of, update_seconds
from rollgym.devices.inventory import find_cluster
from rollgym.devices.models import PRESETS, ModelShape
from rollgym.devices.types import TrainMesh
from rollgym.devices.workload import Job, Workload

FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md (July 2025)"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (December 2024)"
TRT = "TensorRT-LLM 0.6.1, page performance.md (A100, FP16; read as per device, as its H100 table says)"
QWEN = "Qwen2.5, docs/source/benchmark/speed_benchmark.rst (vLLM 0.6.3, BF16)"
STEPS = 64
"""Micro-batches of each rank in a predicted update."""


def _mpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """An MPT model: tied embeddings; its MLP has two matrices, here as three of the same size together."""
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=8 * hidden // 3,
        vocab=50_368,
        tied=True,
    )


def _llama2(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        inner=inner,
        vocab=32_000,
        context=4096,
    )


MODELS = {
    "MPT-7B": _mpt("MPT-7B", 32, 4096, 32),
    "MPT-13B": _mpt("MPT-13B", 40, 5120, 40),
    "MPT-30B": _mpt("MPT-30B", 48, 7168, 56),
    "MPT-70B": _mpt("MPT-70B", 80, 8192, 64),
    "Llama-3.1-8B": PRESETS["8b"],
    "Qwen2.5-0.5B": PRESETS["0.5b"],
    "Qwen2.5-1.5B": PRESETS["1.5b"],
    "Llama-2-7B": _llama2("Llama-2-7B", 32, 4096, 32, 32, 11_008),
    "Llama-2-70B": _llama2("Llama-2-70B", 80, 8192, 64, 8, 28_672),
}


@dataclass(frozen=True)
class Training:
    """Published tokens per second and device of sharded training in bfloat16."""

    model: str
    cluster: str
    length: int
    microbatch: int
    """Tokens of a micro-batch on each device."""
    checkpointing: bool
    published: float
    source: str


@dataclass(frozen=True)
class Generation:
    """Published generated tokens per second and device of an engine in 16 bits, in static batches."""

    model: str
    cluster: str
    tensor_parallel: int
    batch: int
    prompt: int
    reply: int
    published: float
    source: str


TRAINING = [
    Training("MPT-7B", "8xH100", 2048, 6 * 2048, False, 10_643, FOUNDRY),
    Training("MPT-7B", "8xH100", 8192, 8 * 8192, True, 6_935, FOUNDRY),
    Training("MPT-7B", "8xH100", 32_768, 2 * 32_768, True, 3_318, FOUNDRY),
    Training("MPT-7B", "64x8xH100", 2048, 6 * 2048, False, 9_670, FOUNDRY),
    Training("MPT-13B", "8xH100", 4096, 10 * 4096, True, 4_717, FOUNDRY),
    Training("MPT-30B", "8xH100", 2048, 3 * 2048, True, 2_002, FOUNDRY),
    Training("MPT-70B", "8x8xH100", 2048, 8 * 2048, True, 1_039, FOUNDRY),
    Training("MPT-70B", "64x8xH100", 2048, 8 * 2048, True, 1_007, FOUNDRY),
    Training("MPT-7B", "8xA100", 2048, 6 * 2048, False, 4_641, FOUNDRY),
    Training("MPT-13B", "8xA100", 4096, 10 * 4096, True, 2_060, FOUNDRY),
    Training("MPT-30B", "8xA100", 2048, 3 * 2048, True, 916, FOUNDRY),
    Training("MPT-70B", "8x8xA100", 2048, 8 * 2048, True, 410, FOUNDRY),
    Training("Llama-3.1-8B", "8xH100", 8192, 2 * 8192, False, 5_762, TITAN),
    Training("Llama-3.1-8B", "16x8xH100", 8192, 2 * 8192, False, 5_605, TITAN),
]
GENERATION = [
    Generation("Llama-2-7B", "1xA100", 1, 384, 128, 128, 5_586, TRT),
    Generation("Llama-2-7B", "1xA100", 1, 60, 128, 2048, 1_928, TRT),
    Generation("Llama-2-7B", "1xA100", 1, 52, 2048, 128, 591, TRT),
    Generation("Llama-2-7B", "2xA100", 2, 64, 2048, 2048, 782, TRT),
    Generation("Llama-2-70B", "4xA100", 4, 1280, 128, 128, 670, TRT),
    Generation("Llama-2-70B", "4xA100", 4, 240, 128, 2048, 525, TRT),
    Generation("Llama-2-70B", "4xA100", 4, 120, 2048, 128, 79, TRT),
    Generation("Qwen2.5-0.5B", "1xA100", 1, 1, 1, 2048, 311.55, QWEN),
    Generation("Qwen2.5-0.5B", "1xA100", 1, 1, 30_720, 2048, 264.51, QWEN),
    Generation("Qwen2.5-1.5B", "1xA100", 1, 1, 1, 2048, 183.33, QWEN),
    Generation("Qwen2.5-1.5B", "1xA100", 1, 1, 30_720, 2048, 152.04, QWEN),
]


def predict_training(row: Training) -> float:
    """Return the predicted tokens per second and device."""
    site = Site(find_cluster(row.cluster))
    ranks = len(site.devices)
    per_rank = STEPS * max(1, row.microbatch // row.length)
    work = Workload(
        episodes=ranks * per_rank,
        in_flight=1,
        prompt_tokens=row.length // 2,
        reply_tokens=row.length - row.length // 2,
        context=row.length,
        max_tokens_per_microbatch=row.microbatch,
        checkpointing=row.checkpointing,
        optimizer_steps=1,
    )
    shape = MODELS[row.model]
    speed = speed_of(site, tuple(range(ranks)))
    mesh = TrainMesh(shard=ranks)
    job = Job(actor=shape, workload=work)
    seconds = update_seconds(shape, job, speed, "weights", mesh, host_step=False, trained=shape.parameters)
    return work.tokens / seconds / ranks


def predict_generation(row: Generation) -> float:
    """Return the predicted generated tokens per second and device."""
    site = Site(find_cluster(row.cluster))
    devices = len(site.devices)
    work = Workload(
        episodes=row.batch,
        in_flight=row.batch,
        prompt_tokens=row.prompt,
        reply_tokens=row.reply,
        context=row.prompt + row.reply,
    )
    speed = speed_of(site, tuple(range(devices)))
    rate = generate_rate(
        Job(actor=MODELS[row.model], workload=work), speed, row.tensor_parallel, float("inf")
    )
    return rate * row.reply / devices


def main() -> None:
    """Print both tables and the errors."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: python benchmarks/plan_speed.py")
    parser.add_argument("--quick", action="store_true", help="the same: nothing is run")
    parser.parse_args()
    training: dict[str, list[float]] = {}
    print("Training, tokens/s/device\n")
    _head("Model", "Devices", "Row", "Checkpointing", "Published", "Predicted", "Error")
    for row in TRAINING:
        tokens, error = _error(predict_training(row), row.published)
        training.setdefault(f"{row.source.split(',')[0]} {row.cluster[-4:]}", []).append(error)
        again = "yes" if row.checkpointing else "no"
        _row(row.model, row.cluster, f"{row.length:,}", again, f"{row.published:,}", tokens, error)
    print("\nGeneration, tokens/s/device\n")
    _head("Model", "Devices", "Batch", "Prompt, reply", "Published", "Predicted", "Error")
    generation: dict[str, list[float]] = {}
    for case in GENERATION:
        tokens, error = _error(predict_generation(case), case.published)
        generation.setdefault(case.source.split(",")[0], []).append(error)
        sizes = f"{case.prompt:,}, {case.reply:,}"
        _row(case.model, case.cluster, str(case.batch), sizes, f"{case.published:,}", tokens, error)
    print("\nSources: " + "; ".join(sorted({case.source for case in [*TRAINING, *GENERATION]})))
    result: dict[str, Any] = {"benchmark": "plan_speed"}
    for name, groups in (("training", training), ("generation", generation)):
        result[name] = {source: _summary(errors) for source, errors in groups.items()}
    print(json.dumps(result))


def _head(*names: str) -> None:
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))


def _row(*cells: Any) -> None:
    print("| " + " | ".join(map(str, cells[:-1])) + f" | {cells[-1]:+.0f} % |")


def _error(predicted: float, published: float) -> tuple[str, float]:
    return f"{predicted:,.0f}", 100 * (predicted / published - 1)


def _summary(errors: list[float]) -> dict[str, Any]:
    ratios = [1 + error / 100 for error in errors]
    bias = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {
        "rows": len(errors),
        "mean_ratio": round(bias, 3),
        "largest_error": round(max(errors, key=abs), 1),
    }


if __name__ == "__main__":
    main()
