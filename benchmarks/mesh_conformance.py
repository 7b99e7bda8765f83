"""How near every parallel strategy stays to one process, and what each rank holds.

    python benchmarks/mesh_conformance.py [--quick] [--steps 30]

A Llama of 0.12 million parameters with random weights in float32 learns by GRPO with a KL term from random
episodes (``--quick``: three updates, and fewer strategies). Each strategy runs on real processes with gloo,
two or four, and is compared with ``single`` in the same run:

    loss       worst difference of the policy loss over all updates
    gradient   worst error of a gradient after the first update, relative to the largest of its parameter
    log-probs  worst difference on a batch that is not trained on, after all updates
    MB         megabytes of weights and Adam moments that the fullest rank holds

The gradient is read from Adam's first moment in a checkpoint, which every strategy writes. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Case = tuple[str, int, dict[str, int]]
CASES: dict[str, Case] = {
    "ddp": ("ddp", 2, {}),
    "fsdp2": ("fsdp2", 2, {}),
    "zero1": ("zero1", 2, {}),
    "zero2": ("zero2", 2, {}),
    "zero3": ("zero3", 2, {}),
    "mesh: tensor 2": ("mesh", 2, {"tensor": 2}),
    "mesh: tensor 2 x shard 2": ("mesh", 4, {"tensor": 2}),
    "mesh: replicate 2 x shard 2": ("mesh", 4, {"replicate": 2}),
    "mesh: replicate 2 x tensor 2": ("mesh", 4, {"replicate": 2, "tensor": 2}),
}
QUICK = ("fsdp2", "mesh: tensor 2")


def make_model() -> Any:
    """A small Llama with random weights so large that its distributions are far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    kind: Any = LlamaForCausalLM
    return kind(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()


def make_random_batch(seed: int) -> Any:
    """Eight episodes of different lengths, with random tokens and advantages."""
    from rollgym.trainer.data.batch import make_batch
    from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence

    rng = np.random.default_rng(seed)
    episodes = []
    for number in range(8):
        length = int(rng.integers(12, 40))
        positions = np.arange(length - int(rng.integers(4, 9)), length)
        episodes.append(
            TokenEpisode(
                name=str(number),
                sequences=(TokenSequence(rng.integers(0, 256, length), positions),),
                behavior=rng.normal(-5.0, 0.3, len(positions)),
                tokens_per_turn=np.array([len(positions)]),
                final_ids=None,
            )
        )
    return make_batch(episodes, advantages=[rng.normal(size=one.num_tokens) for one in episodes])


def measure(strategy: str, parallel: dict[str, int], rank: int, world: int, steps: int, folder: Path) -> Any:
    """Train; returns losses, log-probs and bytes held. A checkpoint of the first update is in the folder."""
    from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions, ParallelConfig
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig

    config = LearnerConfig(
        device="cpu", threads=1, learning_rate=1e-3, clip_norm=None, parallel=ParallelConfig(**parallel)
    )
    learner = Learner(
        make_model(),
        config,
        LossConfig("grpo", kl_coef=0.1),
        LearnerOptions(total_steps=steps),
        strategy=strategy,
        rank=rank,
        world=world,
    )
    losses = []
    for step in range(steps):
        batch = make_random_batch(step)
        batch = batch.with_arrays(reference=learner.reference(batch))
        losses.append(learner.update(batch)["policy_loss"])
        if not step:
            learner.save(folder)
    shapes = learner.strategy.shapes() if strategy == "single" else {}
    return losses, learner.logprobs(make_random_batch(10_000)), sum(learner.held().values()), shapes


def gradients(folder: Path, shapes: Any) -> dict[str, Any]:
    """The gradients of the first update, up to a constant, from a checkpoint after it."""
    from rollgym.trainer.learner.sharded_checkpoint import open_checkpoint

    with open_checkpoint(folder, shapes) as saved:
        return {name: saved.read(name, "exp_avg", 0, int(np.prod(shape))) for name, shape in shapes.items()}


def work(rank: int, world: int, port: int, names: list[str], steps: int, root: Path, pipe: Any) -> None:
    """One rank: all cases of its number of ranks."""
    import torch

    from rollgym.trainer.learner.process_group import join_group, leave_group

    torch.set_num_threads(1)
    join_group(rank, world, "127.0.0.1", port)
    for name in names:
        strategy, _, parallel = CASES[name]
        pipe.send(measure(strategy, parallel, rank, world, steps, root / name)[:3])
    leave_group()


def run(world: int, names: list[str], steps: int, root: Path) -> dict[str, list[Any]]:
    """What every rank measured, by case."""
    from rollgym.trainer.learner.process_group import free_port

    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes, processes = [], []
    for name in names:
        (root / name).mkdir()
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(rank, world, port, names, steps, root, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        found = {}
        for name in names:
            print(f"{name} ...", flush=True)
            found[name] = [pipe.recv() for pipe in pipes]
        return found
    except EOFError:
        raise SystemExit("A rank stopped early.") from None
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def main() -> None:
    """Measure everything and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="updates of each strategy")
    parser.add_argument("--quick", action="store_true", help="three updates, two strategies")
    args = parser.parse_args()
    names = list(QUICK if args.quick else CASES)
    steps = 3 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "single").mkdir()
        losses, logprobs, whole, shapes = measure("single", {}, 0, 1, steps, root / "single")
        expected = gradients(root / "single", shapes)
        found: dict[str, list[Any]] = {}
        for world in (2, 4):
            if chosen := [name for name in names if CASES[name][1] == world]:
                found |= run(world, chosen, steps, root)
        report = {}
        for name, ranks in found.items():
            ours = gradients(root / name, shapes)
            errors = [float((ours[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()]
            report[name] = {
                "ranks": CASES[name][1],
                "loss": max(abs(a - b) for a, b in zip(ranks[0][0], losses, strict=True)),
                "gradient": max(errors),
                "logprobs": float(np.abs(ranks[0][1] - logprobs).max()),
                "mb": max(rank[2] for rank in ranks) / 1e6,
            }
    print(f"{'strategy':30}{'ranks':>6}{'loss':>10}{'gradient':>10}{'log-probs':>10}{'MB':>8}{'share':>8}")
    print(f"{'single':30}{1:6}{0.0:10.1e}{0.0:10.1e}{0.0:10.1e}{whole / 1e6:8.2f}{1:8.2f}")
    for name, row in report.items():
        print(
            f"{name:30}{row['ranks']:6}{row['loss']:10.1e}{row['gradient']:10.1e}{row['logprobs']:10.1e}"
            f"{row['mb']:8.2f}{row['mb'] * 1e6 / whole:8.2f}"
        )
    result = {"benchmark": "mesh_conformance", "steps": steps, "single_mb": whole / 1e6}
    print(json.dumps({**result, "strategies": report}))


if __name__ == "__main__":
    main()
