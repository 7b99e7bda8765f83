"""Planned memory per phase compared with the resident memory of a process that runs it.

    python benchmarks/plan_memory.py [--quick] [--layers 8] [--hidden 512] [--context 512] [--episodes 12]
    python benchmarks/plan_memory.py --simulate 7b:8 72b:256 235b-moe:512 [--every-layer]

With --simulate: the planned peak of each phase beside that of a simulated learner rank, for models on so many
ranks, with and without gradient checkpointing and LoRA; 8192 tokens, of which 2000 are predicted. A case such
as 72b:32x8 has shard 32 and tensor 8; 235b-moe:128x1x4 has shard 128 and 4 copies.

Without --simulate, one process is both engine and learner, as on a single shared slot; what it holds before
any model is made is taken off. The greatest resident memory of each phase is compared with the plan's figure
for that phase, with nothing offloaded and then with everything that can leave. On a CPU what leaves the
learner stays in the same memory: what was moved is taken off, as it would be on a host.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


class Peaks:
    """The greatest resident memory of each phase, beyond what there was before."""

    def __init__(self) -> None:
        self.base = resident()
        self.host = 0
        """Bytes that would be on a host now, if this were a device."""
        self.found: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch while the block lasts."""
        done = threading.Event()
        most = [resident()]

        def watch() -> None:
            while not done.wait(0.002):
                most[0] = max(most[0], resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self.found[name] = max(most[0], resident()) - self.base - self.host


def make_model(args: argparse.Namespace) -> Any:
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 43 // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def planned(config: dict[str, Any], args: argparse.Namespace, offload: Any) -> dict[str, int]:
    """Bytes by phase."""
    from rollgym.devices.inventory import cpu_cluster
    from rollgym.devices.models import read_config
    from rollgym.devices.planner import make_plan
    from rollgym.devices.types import DeviceConfig
    from rollgym.devices.workload import Job, Workload

    half = args.context // 2
    work = Workload(
        episodes=args.episodes,
        in_flight=args.episodes,
        prompt_tokens=half,
        reply_tokens=half,
        context=args.context,
        max_tokens_per_microbatch=args.micro,
    )
    job = Job(actor=read_config(config), precision="float32", workload=work)
    found = make_plan(cpu_cluster(1), job, DeviceConfig(offload=offload))
    return {one.phase: one.used for one in found.memory}


def measure(args: argparse.Namespace, offload: str) -> dict[str, Any]:
    """Do once what a step does, and see what it takes."""
    import numpy as np
    import torch

    from rollgym.engines.base import GenerateRequest, Sampling
    from rollgym.engines.embedded.engine import EmbeddedEngine
    from rollgym.engines.embedded.offload import trim_memory
    from rollgym.trainer.colocation import Colocation
    from rollgym.trainer.data.batch import make_batch
    from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence
    from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig
    from rollgym.trainer.runtime import OFFLOADS

    torch.set_num_threads(1)
    config = make_model(args).config.to_dict()  # also has everything imported that is imported late
    trim_memory(torch.device("cpu"))
    peaks = Peaks()
    half = args.context // 2
    rng = np.random.default_rng(0)
    prompts = [tuple(int(n) for n in rng.integers(0, 8192, half)) for _ in range(args.episodes)]

    async def compute(work: Any, *given: Any) -> Any:
        return await asyncio.to_thread(work, *given)

    async def main() -> None:
        model = make_model(args)
        config = LearnerConfig(
            max_tokens_per_microbatch=args.micro, threads=1, device="cpu", learning_rate=1e-5
        )
        options = LearnerOptions(share_model=True)
        learner = Learner(model, config, LossConfig("reinforce", tis_cap=None), options)
        engine = EmbeddedEngine(model, device="cpu", threads=1, cache_tokens=args.episodes * args.context)
        offloads, releases = OFFLOADS.get(offload, ((), ()))
        colocation = Colocation(engine, [0], learner, compute, offloads=offloads, releases=releases)
        for turn in range(2):  # a learner has its whole state only after its first update
            sampling = [Sampling(max_tokens=half, seed=n) for n in range(args.episodes)]
            asked = [
                GenerateRequest(request_id=str(n), prompt_ids=ids, sampling=sampling[n], session=str(n))
                for n, ids in enumerate(prompts)
            ]
            with peaks.phase("generate"):
                said = await asyncio.gather(*(engine.generate(one) for one in asked))
            episodes = [
                TokenEpisode(
                    name=str(n),
                    sequences=(
                        TokenSequence(
                            np.array(ids + one.token_ids), np.arange(half, half + len(one.token_ids))
                        ),
                    ),
                    behavior=np.array(one.logprobs),
                    tokens_per_turn=np.array([len(one.token_ids)]),
                    final_ids=None,
                )
                for n, (ids, one) in enumerate(zip(prompts, said, strict=True))
            ]
            batch = make_batch(episodes, advantages=[rng.normal(size=one.count) for one in episodes])
            async with colocation.training():
                peaks.host = 0
                trim_memory(torch.device("cpu"))
                with peaks.phase("score actor"):
                    old = await compute(learner.logprobs, batch)
                trim_memory(torch.device("cpu"))
                with peaks.phase("update actor"):
                    await compute(learner.update, batch.with_arrays(old=old))
            async with colocation.sync_weights():
                await engine.update_weights(turn, learner.weights())
            peaks.host = int(colocation.metrics.get("colocation_offloaded_bytes", 0))
            trim_memory(torch.device("cpu"))
        await engine.close()

    asyncio.run(main())
    return {"measured": peaks.found, "planned": planned(config, args, offload)}


CASES = {
    "plain": (False, None),
    "checkpointing": (True, None),
    "lora": (False, 16),
    "lora, checkpointing": (True, 16),
}


def simulated(case: str, kind: str, every_layer: bool) -> dict[str, Any]:
    """Planned and simulated bytes of each phase on one rank, such as of ``7b:8``."""
    from rollgym.devices.models import find_model
    from rollgym.devices.types import TrainMesh
    from rollgym.devices.workload import Job, Workload
    from rollgym.trainer.cluster.simulation import planned_rank, simulate_rank
    from rollgym.trainer.learner.config import LearnerConfig, LoraSettings

    name, _, sizes = case.partition(":")
    shard, tensor, replicate = (list(map(int, sizes.split("x"))) + [1, 1])[:3]
    mesh = TrainMesh(shard=shard, tensor=tensor, replicate=replicate)
    checkpointing, rank = CASES[kind]
    work = Workload(prompt_tokens=6192, reply_tokens=2000, context=8192, checkpointing=checkpointing)
    job = Job(actor=find_model(name), lora_rank=rank, workload=work)
    strategy = "fsdp2" if mesh.plain else "mesh"
    config = LearnerConfig(lora=None if rank is None else LoraSettings(rank=rank))
    found = simulate_rank(job, config, strategy, mesh, every_layer=every_layer)
    return {"planned": planned_rank(job, strategy, mesh), "simulated": found}


def compare(cases: list[str], every_layer: bool, only: str | None) -> None:
    """Print a table, one row for each case and kind, each simulated in a separate process."""
    phases = ("start", "score actor", "first update", "second update")
    print("GiB on each rank: planned, simulated, error\n")
    print("| Model:ranks | | " + " | ".join(phases) + " |\n|---|---|" + "---|" * len(phases))
    worst = 0.0
    for case in cases:
        for kind in [only] if only else CASES:
            words = [sys.executable, __file__, "--one", case, kind] + ["--every-layer"] * every_layer
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{case} {kind}: {done.stderr.strip().splitlines()[-1]}")
            one = json.loads(done.stdout.splitlines()[-1])
            cells = []
            for phase in phases:
                planned, found = one["planned"][phase], one["simulated"][phase]
                error = 100 * (planned / found - 1)
                worst = max(worst, error, -error) if phase.endswith("update") else worst
                cells.append(f"{planned / 2**30:.1f}, {found / 2**30:.1f}, {error:+.0f} %")
            print(f"| {case} | {kind} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "plan_memory", "worst_error": round(worst, 1)}))


def main() -> None:
    """Print a table, one process for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("layers", 8),
        ("hidden", 512),
        ("context", 512),
        ("episodes", 12),
        ("micro", 1024),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=["none", "optimizer", "all"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--simulate", nargs="+", metavar="MODEL:RANKS")
    parser.add_argument("--kind", choices=list(CASES), help="with --simulate: only this kind")
    parser.add_argument("--every-layer", action="store_true", help="simulate all layers (slow)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(simulated(*args.one, every_layer=args.every_layer)))
        return
    if args.simulate:
        compare(args.simulate, args.every_layer, args.kind)
        return
    if args.quick:
        args.layers, args.hidden, args.context, args.episodes = 2, 256, 128, 4
    if args.only:
        print(json.dumps(measure(args, args.only)))
        return
    print("| offload | phase | planned | measured | error |\n|---|---|---|---|---|")
    errors: dict[str, float] = {}
    for offload in ("none", "all"):
        began = time.perf_counter()
        words = [sys.executable, __file__, *sys.argv[1:], "--only", offload]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        for phase, said in found["planned"].items():
            seen = found["measured"][phase]
            error = 100 * (said - seen) / seen
            errors[f"{offload} {phase}"] = round(error, 1)
            print(f"| {offload} | {phase} | {said / MIB:.0f} MiB | {seen / MIB:.0f} MiB | {error:+.0f} % |")
        print(f"{offload}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(
        json.dumps(
            {"benchmark": "plan_memory", "errors": errors, "worst_error": max(map(abs, errors.values()))}
        )
    )


if __name__ == "__main__":
    main()
