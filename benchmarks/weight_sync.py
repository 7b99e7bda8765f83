"""How long new weights take from a learner into the embedded engine, against the size of the model.

    python benchmarks/weight_sync.py [--quick] [--world 2] [--rounds 5] [--strategies single,ddp,fsdp2,zero3]
    python benchmarks/weight_sync.py --vllm VENV [--sglang VENV] [--quick]

Llamas of 0.1 to 30 million parameters with random weights in float32 (``--quick``: 0.1 and 1 million, two
rounds). ``single`` is a `Learner` in the engine's process, whose tensors are copied. The others are
``--world`` processes, gloo between them, with the engine in that of rank 0: weights are gathered in buckets
of ``--bucket-mb`` megabytes and copied as they come, while the other ranks take part. Measured is
``engine.update_weights(version, learner.weights())`` from call to return: the median of the rounds after one
to warm up. ``peak`` is how much memory the updates added to rank 0's process at the most, beyond learner and
engine. The last line is one JSON object.

With ``--vllm`` or ``--sglang``, a virtual environment, only the routes into a real server on this CPU are
measured instead: seconds from the call of ``update_weights`` to its return, and bytes of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {  # millions of parameters: width, layers
    "0.1M": (64, 2),
    "1M": (128, 5),
    "3M": (256, 4),
    "10M": (384, 6),
    "30M": (640, 6),
}
VOCABULARY = 400


def make_model(size: str) -> Any:
    """A model of the built-in policy's kind, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def make_learner(strategy: str, size: str, rank: int, args: argparse.Namespace) -> Any:
    """Make one rank's learner."""
    from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig

    config, loss = LearnerConfig(device="cpu", threads=1), LossConfig("grpo")
    options = LearnerOptions(bucket_bytes=args.bucket_mb * 2**20)
    world = 1 if strategy == "single" else args.world
    return Learner(make_model(size), config, loss, options, strategy=strategy, rank=rank, world=world)


def follow(learner: Any, times: int) -> None:
    """Body of the other ranks."""
    for _ in range(times):
        for _ in learner.weights().buckets():
            pass


async def measure(learner: Any, size: str, times: int) -> dict[str, Any]:
    """Update an engine, again and again."""
    from rollgym.engines.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine(make_model(size), device="cpu", threads=1)
    seconds = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for version in range(1, times + 1):
        started = time.perf_counter()
        await engine.update_weights(version, learner.weights())
        seconds.append(time.perf_counter() - started)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await engine.close()
    count = sum(p.numel() for p in make_model(size).parameters())
    return {
        "parameters": count,
        "seconds": round(statistics.median(seconds[1:]), 5),
        "peak_mb": round((after - before) / 1024, 1),
    }


def work(rank: int, strategy: str, port: int, args: argparse.Namespace, pipe: Any) -> None:
    """One rank: all sizes, the smallest first."""
    import torch

    torch.set_num_threads(1)
    if strategy != "single":
        from rollgym.trainer.learner.process_group import join_group

        join_group(rank, args.world, "127.0.0.1", port)
    for size in args.sizes:
        learner = make_learner(strategy, size, rank, args)
        if rank:
            follow(learner, args.rounds + 1)
        else:
            pipe.send((size, asyncio.run(measure(learner, size, args.rounds + 1))))
    if strategy != "single":
        from rollgym.trainer.learner.process_group import leave_group

        leave_group()


def run(strategy: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All sizes with one strategy."""
    from rollgym.trainer.learner.process_group import free_port

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    port, found = free_port(), {}
    ranks = range(1 if strategy == "single" else args.world)
    processes = [context.Process(target=work, args=(rank, strategy, port, args, there)) for rank in ranks]
    for process in processes:
        process.start()
    there.close()
    for _ in args.sizes:
        try:
            size, figures = here.recv()
        except EOFError:
            raise SystemExit(f"{strategy} stopped early.") from None
        found[size] = figures
        rate = figures["parameters"] * 4 / figures["seconds"] / 2**20
        print(
            f"{strategy:8}{size:>6}{figures['parameters']:14,}{1000 * figures['seconds']:12.1f}"
            f"{rate:12,.0f}{figures['peak_mb']:10.1f}",
            flush=True,
        )
    for process in processes:
        process.join()
    return found


async def measure_routes(kind: str, venv: str, size: str, rounds: int) -> dict[str, Any]:
    """Update a real server by each of its routes."""
    from rollgym.engines import sglang, vllm
    from rollgym.engines.base import WeightSource

    software: Any = {"sglang": sglang, "vllm": vllm}[kind]
    model = make_model(size)
    tensors = dict(model.named_parameters())
    sent = sum(one.numel() * one.element_size() for one in tensors.values())
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in tensors.values()), "bytes": sent}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        python = str(Path(venv).absolute() / "bin" / "python")
        options = software.ServerOptions(python=python, device="cpu", extra=("--skip-tokenizer-init",))
        engine = await asyncio.to_thread(software.launch, folder, options)
        sender = engine.sender_class
        for route in sender.routes:
            engine._sender = sender(engine.model, route, bucket=256 << 20, host=None, timeout=300.0)
            seconds = []
            for _ in range(rounds + 1):
                started = time.perf_counter()
                await engine.update_weights(engine.version + 1, WeightSource(tensors=tensors))
                seconds.append(time.perf_counter() - started)
            await engine._sender.close(engine._servers)
            found[f"{route}_seconds"] = round(statistics.median(seconds[1:]), 4)
        await engine.close()
    print(f"{kind:8}{size:>6} {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    """Measure everything and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="processes of the strategies other than single")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--strategies", default="single,ddp,fsdp2,zero3")
    parser.add_argument("--quick", action="store_true", help="two sizes, two rounds, single and fsdp2")
    parser.add_argument("--vllm", help="measure the routes into a vLLM server of this virtual environment")
    parser.add_argument("--sglang", help="the same for SGLang")
    args = parser.parse_args()
    args.sizes = list(SIZES)
    if args.quick:
        args.sizes, args.rounds, args.strategies = ["0.1M", "1M"], 2, "single,fsdp2"
    servers = {kind: venv for kind in ("vllm", "sglang") if (venv := getattr(args, kind))}
    if servers:
        routes = {
            kind: {size: asyncio.run(measure_routes(kind, venv, size, args.rounds)) for size in args.sizes}
            for kind, venv in servers.items()
        }
        print(json.dumps({"benchmark": "weight_sync", "rounds": args.rounds, "servers": routes}))
        return
    print(f"{'':8}{'size':>6}{'parameters':>14}{'ms':>12}{'MB/s':>12}{'peak MB':>10}")
    report = {strategy: run(strategy, args) for strategy in args.strategies.split(",")}
    options = {"world": args.world, "rounds": args.rounds, "bucket_mb": args.bucket_mb}
    print(json.dumps({"benchmark": "weight_sync", **options, "strategies": report}))


if __name__ == "__main__":
    main()
