"""How long new weights take from a learner into an engine, against the size of the model.

    python benchmarks/weight_sync.py [--quick] [--world 2] [--rounds 5] [--strategies single,ddp,fsdp2,zero3]
    python benchmarks/weight_sync.py --ray [--sizes 1M,30M,135M,0.5B] [--rounds 3]
    python benchmarks/weight_sync.py --stages [--sizes 1M,30M,135M,0.5B] [--rounds 3]
    python benchmarks/weight_sync.py --delta MODEL [--rates 1e-6,1e-5]
    python benchmarks/weight_sync.py --vllm VENV [--sglang VENV] [--quick] [--sizes 1M,30M,135M,0.5B]

Llamas of 0.1 to 30 million parameters with random weights in float32 (``--quick``: 0.1 and 1 million, two
rounds). ``single`` is a `Learner` in the engine's process, whose tensors are copied. The others are
``--world`` processes, gloo between them, with the engine in that of rank 0: weights are gathered in buckets
of ``--bucket-mb`` megabytes and copied as they come, while the other ranks take part. Measured is
``engine.update_weights(version, learner.weights())`` from call to return: the median of the rounds after one
to warm up. ``peak`` is how much memory the updates added to rank 0's process at the most, beyond learner and
engine.

``--ray``: from a learner on Ray (one rank, and two with FSDP2) to an engine in an actor that computes in
bfloat16: float32 and bfloat16 on the wire, through the object store and through files, each in full and as a
delta. Between two updates each weight moves by 1e-6 (``--step``), up or down, as in a first step of Adam with
that learning rate. ``wait``: a full update whose buckets are all stored before the engine fetches one.

``--stages``: CPU seconds of each stage of the same in one process: cast, compare, encode and checksum on the
learner's side; decode and checksum on the engine's; the engine's copy. On a busy machine these are more
telling than seconds.

``--delta``: real updates of a model in a folder, one after another: the fraction of bfloat16 values that
change, and the bytes of encodings of them.

With ``--vllm`` or ``--sglang``, a virtual environment, the routes into a real server on this CPU are
measured instead: seconds from the call of ``update_weights`` to its return, CPU seconds of this process and
the server's, and bytes, of whole updates and of deltas. Weights move by ``--step`` before each update;
``--server-dtype`` is that of the server and of the wire.

The last line is one JSON object.
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
from functools import partial
from pathlib import Path
from typing import Any

SIZES = {  # millions of parameters: width, layers
    "0.1M": (64, 2),
    "1M": (128, 5),
    "3M": (256, 4),
    "10M": (384, 6),
    "30M": (640, 6),
    "135M": (1024, 10),
    "0.5B": (2048, 9),
}
IN_ONE_PROCESS = ("0.1M", "1M", "3M", "10M", "30M")
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


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process, those below it, and this one."""
    import psutil

    server = psutil.Process(pid)
    times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
    return time.process_time() + sum(one.user + one.system for one in times)


def shift(parameter: Any, step: float) -> None:
    """Move each value by ``step``, up or down."""
    import torch

    with torch.no_grad():
        for part in parameter.view(-1).split(1 << 22):
            part.add_(torch.randint(0, 2, part.shape, dtype=torch.int8).mul_(2).sub_(1), alpha=step)


async def measure_routes(kind: str, venv: str, size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Update a real server by each of its routes, whole and by deltas."""
    from rollgym.engines import sglang, vllm
    from rollgym.engines.base import WeightSource
    from rollgym.engines.servers.weight_delta import DeltaEncoder
    from rollgym.engines.weight_sync.wire import wire_bytes

    software: Any = {"sglang": sglang, "vllm": vllm}[kind]
    model = make_model(size)
    tensors = dict(model.named_parameters())
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in tensors.values())}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        python = str(Path(venv).absolute() / "bin" / "python")
        options = software.ServerOptions(
            python=python,
            device="cpu",
            dtype=args.server_dtype,
            weight_delta=True,
            start_seconds=3600.0,
            extra=("--skip-tokenizer-init",),
        )
        engine = await asyncio.to_thread(software.launch, folder, options)
        pid, sender = engine.server.pid, engine.sender_class
        routes = [(route, delta) for route in sender.routes for delta in (False, True) if route != "disk"]
        for route, delta in [*routes, ("disk", False)]:
            deltas = DeltaEncoder(1000) if delta else None
            engine._sender = sender(
                engine.model, route, bucket=256 << 20, host=None, timeout=3000.0, deltas=deltas
            )
            seconds, cpu = [], []
            for _ in range(args.rounds + 1):
                for one in tensors.values():
                    shift(one, args.step)
                started, before = time.perf_counter(), tree_cpu(pid)
                await engine.update_weights(engine.version + 1, WeightSource(tensors=tensors))
                seconds.append(time.perf_counter() - started)
                cpu.append(tree_cpu(pid) - before)
            await engine._sender.close(engine._servers)
            sent = engine.weight_bytes_sent or wire_bytes(list(tensors.values()), engine.weight_dtype)
            found[f"{route} delta" if delta else route] = {
                "seconds": round(statistics.median(seconds[1:]), 4),
                "cpu_seconds": round(statistics.median(cpu[1:]), 4),
                "bytes": sent,
            }
        await engine.close()
    print(f"{kind:8}{size:>6} {json.dumps(found)}", flush=True)
    return found


def move(learner: Any, step: float) -> None:
    """Move each weight of a rank by ``step``, up or down."""
    for parameter in learner.modules.trained().values():
        shift(getattr(parameter, "_local_tensor", parameter), step)


async def measure_ray(sizes: list[str], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Update engines of all sizes in actors by each route; the ranks' processes are started once."""
    from rollgym.cluster.engine import RemoteEngine
    from rollgym.trainer.learner.config import LearnerConfig
    from rollgym.trainer.learner.ray_learner import RayLearner
    from rollgym.trainer.losses.settings import LossConfig

    config = LearnerConfig(threads=1, device="cpu", dtype="float32")
    learners: dict[str, RayLearner] = {}
    report: dict[str, Any] = {}
    for size in sizes:
        make_model(size).save_pretrained(folder / size)
        engine = await RemoteEngine.start(
            folder / size, dtype="bfloat16", threads=1, cache_tokens=2048, deterministic=False
        )
        report[size] = {}
        for strategy, ranks in (("single", 1), ("fsdp2", args.world)):
            label = f"{strategy} x{ranks}"
            if label in learners:
                await asyncio.to_thread(learners[label].reset, folder / size)
            else:
                slots = [{"num_cpus": 0.5}] * ranks
                more: dict[str, Any] = {"strategy": strategy, "actor_options": slots}
                learners[label] = await asyncio.to_thread(
                    partial(RayLearner, folder / size, config, LossConfig("grpo"), **more)
                )
            report[size] |= await measure_wires(f"{size:>6} {label}", learners[label], engine, args, folder)
        await engine.close()
    for learner in learners.values():
        learner.close()
    return report


async def measure_wires(
    label: str, learner: Any, engine: Any, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Update one engine from one learner by each route."""
    from rollgym.engines.weight_sync.wire import WireFormat

    half: dict[str, Any] = {"dtype": "bfloat16"}
    delta = {**half, "delta": True, "full_every": 1000}
    wires = {
        "float32": WireFormat(),
        "bfloat16": WireFormat(**half),
        "bfloat16 wait": WireFormat(**half),
        "delta": WireFormat(**delta),
        "disk bfloat16": WireFormat(**half, folder=folder / "parts"),
        "disk delta": WireFormat(**delta, folder=folder / "parts"),
    }
    found: dict[str, Any] = {}
    for name, wire in wires.items():
        seconds = []
        for _ in range(args.rounds + 1):
            await asyncio.to_thread(learner._run_each, move, args.step)
            started = time.perf_counter()
            source = await asyncio.to_thread(learner.weights, wire)
            if name.endswith("wait"):
                await asyncio.to_thread(source.tensors.last.wait)
            await engine.update_weights(engine.version + 1, source)
            seconds.append(time.perf_counter() - started)
        sent = source.tensors.sent
        found[f"{label.split(maxsplit=1)[1]} {name}"] = {
            "seconds": round(statistics.median(seconds[1:]), 4),
            "bytes": sent.nbytes,
            "changed": round(sent.changed / sent.values, 5),
        }
        print(f"{label} {name:16} {json.dumps([*found.values()][-1])}", flush=True)
    return found


def run_ray(args: argparse.Namespace) -> dict[str, Any]:
    """All sizes on a Ray of this machine."""
    from rollgym.cluster.connect import connect

    with tempfile.TemporaryDirectory() as folder, connect(cpus=4):
        return asyncio.run(measure_ray(args.sizes, args, Path(folder)))


def measure_stages(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of each stage of an update on one core, from a learner's weights to an engine's copy."""
    import torch

    from rollgym.engines.weight_sync.chain import KeptPart, Link, WeightChain
    from rollgym.engines.weight_sync.receiver import WeightReceiver
    from rollgym.engines.weight_sync.wire import LocalShard, Sent, ShardEncoder, WireFormat

    torch.set_num_threads(1)
    model = make_model(size)
    model.tie_weights()
    weights = dict(model.named_parameters())
    engine = {name: torch.empty_like(one, dtype=torch.bfloat16) for name, one in weights.items()}
    encoder = ShardEncoder(WireFormat(dtype="bfloat16", delta=True))
    receiver = WeightReceiver()
    links: list[Link] = []
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in weights.values())}
    for number in range(args.rounds + 1):
        full = not number
        link = Link(None if full else links[-1].stamp)
        links.append(link)
        parts, total, clock = [], Sent(), time.process_time()
        for name, one in weights.items():
            shape = tuple(one.shape)
            chunk, sent = encoder.encode(name, shape, LocalShard(one, shape, (0,) * one.dim()), full=full)
            parts.append(chunk)
            total = total.plus(sent)
        encoded = time.process_time()
        link.publish([KeptPart(parts)], total)
        link.end()
        tensors = receiver.complete(WeightChain(links, delta=True))
        received = time.process_time()
        with torch.no_grad():
            for name, copy in engine.items():
                copy.copy_(tensors[name])
        kind = "full" if full else "delta"
        found |= {
            f"{kind}_bytes": total.nbytes,
            f"{kind}_encode": round(encoded - clock, 4),
            f"{kind}_receive": round(received - encoded, 4),
            "engine_copy": round(time.process_time() - received, 4),
            "changed": round(total.changed / total.values, 5),
        }
        for one in weights.values():
            shift(one, args.step)
    print(f"{size:>6} {json.dumps(found)}", flush=True)
    return found


def encodings(new: Any, old: Any) -> dict[str, int]:
    """Bytes of what changed between two versions of bfloat16 words, by encoding."""
    import zlib

    import numpy as np

    from rollgym.engines.weight_sync.delta import changed, make_delta

    indices = changed(new, old)
    delta = make_delta(new, old, indices)
    packed = b"".join(array.tobytes() for array in delta)
    sizes = {
        "index and value": 6 * len(indices),
        "bit mask and value": len(new) // 8 + 2 * len(indices),
        "gap and step": delta.nbytes,
        "gap and step, zlib 1": len(zlib.compress(packed, 1)),
    }
    for words in (32, 2048):
        blocks = len(np.unique(indices // words))
        sizes[f"blocks of {2 * words} bytes"] = blocks * (2 * words + 4)
    try:
        import pyarrow

        sizes["gap and step, zstd 1"] = len(pyarrow.Codec("zstd", 1).compress(packed, asbytes=True))
    except ImportError:
        pass
    return {"values": len(new), "changed": len(indices), **sizes}


async def sampled_batch(engine: Any, tokens: int, seed: int) -> Any:
    """A group of four replies to a prompt, with advantages that sum to 0."""
    import numpy as np

    from rollgym.engines.base import GenerateRequest, Sampling
    from rollgym.trainer.data.batch import make_batch
    from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence

    rng = np.random.default_rng(seed)
    prompt = tuple(rng.integers(100, engine.vocabulary - 100, 16).tolist())
    asked = [
        GenerateRequest(
            request_id=f"{seed}-{number}",
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=tokens, seed=seed * 4 + number),
        )
        for number in range(4)
    ]
    episodes = []
    for request, reply in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        ids = np.array([*request.prompt_ids, *reply.token_ids])
        count = len(reply.token_ids)
        row = TokenSequence(ids, np.arange(len(ids) - count, len(ids)))
        name, logprobs = request.request_id, np.array(reply.logprobs)
        episodes.append(TokenEpisode(name, (row,), logprobs, np.array([count])))
    values = rng.normal(size=4)
    values = (values - values.mean()) / values.std()
    advantages = [np.full(one.num_tokens, value) for one, value in zip(episodes, values, strict=True)]
    return make_batch(episodes, advantages=advantages)


async def measure_delta(args: argparse.Namespace, rate: float) -> list[dict[str, int]]:
    """Train with one learning rate; what each update changed."""
    from rollgym.engines.embedded.engine import EmbeddedEngine
    from rollgym.engines.weight_sync.wire import to_wire, words_of
    from rollgym.trainer.learner.config import LearnerConfig
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig

    config = LearnerConfig(learning_rate=rate, threads=args.threads, device="cpu", dtype="float32")
    learner = Learner(Path(args.delta), config, LossConfig("grpo"))
    engine = EmbeddedEngine(Path(args.delta), dtype="float32", cache_tokens=8192, threads=args.threads)
    last: dict[str, Any] = {}
    rounds = []
    for number in range(args.rounds + 1):
        tensors = learner.weights().tensors or {}
        matrices = {name: one for name, one in tensors.items() if one.dim() > 1}
        now = {name: words_of(to_wire(one, "bfloat16")) for name, one in matrices.items()}
        if number:
            total: dict[str, int] = {}
            for name, words in now.items():
                for key, value in encodings(words, last[name]).items():
                    total[key] = total.get(key, 0) + value
            rounds.append(total)
            share = total["changed"] / total["values"]
            print(f"rate {rate:g} update {number}: {share:.3%} changed {json.dumps(total)}", flush=True)
        last = now
        if number < args.rounds:
            batch = await sampled_batch(engine, args.tokens, number)
            learner.update(batch)
            await engine.update_weights(number + 1, learner.weights())
    await engine.close()
    return rounds


def run_delta(args: argparse.Namespace) -> dict[str, Any]:
    """Real updates of a model with each learning rate."""
    return {rate: asyncio.run(measure_delta(args, float(rate))) for rate in args.rates.split(",")}


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
    parser.add_argument("--server-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--ray", action="store_true", help="measure the routes to an engine on Ray")
    parser.add_argument("--stages", action="store_true", help="CPU seconds of each stage of an update")
    parser.add_argument("--sizes", help="separated by commas; default: those up to 30M")
    parser.add_argument("--step", type=float, default=1e-6, help="how far a weight moves between updates")
    parser.add_argument("--delta", help="measure real updates of the model in this folder")
    parser.add_argument("--rates", default="1e-6,1e-5", help="learning rates for --delta")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a reply for --delta")
    parser.add_argument("--threads", type=int, default=1, help="threads for --delta")
    args = parser.parse_args()
    args.sizes = args.sizes.split(",") if args.sizes else list(IN_ONE_PROCESS)
    if unknown := set(args.sizes) - set(SIZES):
        parser.error(f"no size {', '.join(sorted(unknown))}: choose from {', '.join(SIZES)}")
    if args.ray or args.delta or args.stages:
        kind = "ray" if args.ray else "delta" if args.delta else "stages"
        result = (
            run_ray(args)
            if args.ray
            else run_delta(args)
            if args.delta
            else {size: measure_stages(size, args) for size in args.sizes}
        )
        options = {"rounds": args.rounds, "world": args.world, "step": args.step}
        print(json.dumps({"benchmark": "weight_sync", **options, kind: result}))
        return
    if args.quick:
        args.sizes, args.rounds, args.strategies = ["0.1M", "1M"], 2, "single,fsdp2"
    servers = {kind: venv for kind in ("vllm", "sglang") if (venv := getattr(args, kind))}
    if servers:
        routes = {
            kind: {size: asyncio.run(measure_routes(kind, venv, size, args)) for size in args.sizes}
            for kind, venv in servers.items()
        }
        options = {"rounds": args.rounds, "step": args.step, "dtype": args.server_dtype}
        print(json.dumps({"benchmark": "weight_sync", **options, "servers": routes}))
        return
    print(f"{'':8}{'size':>6}{'parameters':>14}{'ms':>12}{'MB/s':>12}{'peak MB':>10}")
    report = {strategy: run(strategy, args) for strategy in args.strategies.split(",")}
    options = {"world": args.world, "rounds": args.rounds, "bucket_mb": args.bucket_mb}
    print(json.dumps({"benchmark": "weight_sync", **options, "strategies": report}))


if __name__ == "__main__":
    main()
