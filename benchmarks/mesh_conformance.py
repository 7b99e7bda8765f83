"""How near every parallel strategy stays to one process, and what each rank holds.

    python benchmarks/mesh_conformance.py [--quick] [--meshes] [--steps 30]

A Llama of 0.12 million parameters with random weights in float32 learns by GRPO with a KL term from random
episodes (``--quick``: three updates, and fewer strategies); where ranks share experts, a Mixtral of 0.30
million. Each strategy runs on real processes with gloo, two or four, and is compared with ``single`` of the
same model in the same run:

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
from typing import Any, Literal, NamedTuple

import numpy as np

Family = Literal["llama", "mixtral"]


class Case(NamedTuple):
    """A strategy, its number of processes and its mesh."""

    strategy: str
    ranks: int
    parallel: dict[str, int]
    family: Family = "llama"


CASES: dict[str, Case] = {
    "ddp": Case("ddp", 2, {}),
    "fsdp2": Case("fsdp2", 2, {}),
    "zero1": Case("zero1", 2, {}),
    "zero2": Case("zero2", 2, {}),
    "zero3": Case("zero3", 2, {}),
    "mesh: tensor 2": Case("mesh", 2, {"tensor": 2}),
    "mesh: context 2": Case("mesh", 2, {"context": 2}),
    "mesh: expert 2": Case("mesh", 2, {"expert": 2}, "mixtral"),
    "mesh: tensor 2 x shard 2": Case("mesh", 4, {"tensor": 2}),
    "mesh: context 2 x shard 2": Case("mesh", 4, {"context": 2}),
    "mesh: expert 2 x shard 2": Case("mesh", 4, {"expert": 2}, "mixtral"),
    "mesh: replicate 2 x shard 2": Case("mesh", 4, {"replicate": 2}),
    "mesh: replicate 2 x tensor 2": Case("mesh", 4, {"replicate": 2, "tensor": 2}),
}
QUICK = ("fsdp2", "mesh: tensor 2", "mesh: context 2", "mesh: expert 2")
MESHES = tuple(name for name in CASES if name.startswith("mesh"))


def make_model(family: Family) -> Any:
    """A small model with random weights so large that its distributions are far from uniform."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    config = AutoConfig.for_model(
        family,
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
        **experts,
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM
    return made.from_config(config, dtype=torch.float32).eval()


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


def measure(case: Case, rank: int, steps: int, folder: Path) -> Any:
    """Train; returns losses, log-probs and bytes held. A checkpoint of the first update is in the folder."""
    from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions, ParallelConfig
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig

    config = LearnerConfig(
        device="cpu", threads=1, learning_rate=1e-3, clip_norm=None, parallel=ParallelConfig(**case.parallel)
    )
    learner = Learner(
        make_model(case.family),
        config,
        LossConfig("grpo", kl_coef=0.1),
        LearnerOptions(total_steps=steps),
        strategy=case.strategy,
        rank=rank,
        world=case.ranks,
    )
    losses = []
    for step in range(steps):
        batch = make_random_batch(step)
        batch = batch.with_arrays(reference=learner.reference(batch))
        losses.append(learner.update(batch)["policy_loss"])
        if not step:
            learner.save(folder)
    shapes = learner.strategy.shapes() if case.strategy == "single" else {}
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
        pipe.send(measure(CASES[name], rank, steps, root / name)[:3])
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


class Single(NamedTuple):
    """What one process measured, with which the ranks of a family are compared."""

    losses: list[float]
    logprobs: Any
    bytes: int
    gradients: dict[str, Any]
    shapes: Any


def measure_single(family: Family, steps: int, root: Path) -> Single:
    """Train a family in this process."""
    folder = root / f"single {family}"
    folder.mkdir()
    losses, logprobs, held, shapes = measure(Case("single", 1, {}, family), 0, steps, folder)
    return Single(losses, logprobs, held, gradients(folder, shapes), shapes)


def compare(case: Case, ranks: list[Any], single: Single, folder: Path) -> dict[str, Any]:
    """One row of the table: worst differences from one process."""
    ours = gradients(folder, single.shapes)
    errors = [float((ours[n] - g).abs().max() / g.abs().max()) for n, g in single.gradients.items()]
    held = max(rank[2] for rank in ranks)
    return {
        "ranks": case.ranks,
        "model": case.family,
        "loss": max(abs(a - b) for a, b in zip(ranks[0][0], single.losses, strict=True)),
        "gradient": max(errors),
        "logprobs": float(np.abs(ranks[0][1] - single.logprobs).max()),
        "mb": held / 1e6,
        "share": held / single.bytes,
    }


def main() -> None:
    """Measure everything and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="updates of each strategy")
    parser.add_argument("--quick", action="store_true", help="three updates, four strategies")
    parser.add_argument("--meshes", action="store_true", help="the strategy mesh only")
    args = parser.parse_args()
    names = list(QUICK if args.quick else MESHES if args.meshes else CASES)
    steps = 3 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        families = dict.fromkeys(CASES[name].family for name in names)
        singles = {family: measure_single(family, steps, root) for family in families}
        found: dict[str, list[Any]] = {}
        for world in (2, 4):
            if chosen := [name for name in names if CASES[name].ranks == world]:
                found |= run(world, chosen, steps, root)
        report = {
            name: compare(CASES[name], ranks, singles[CASES[name].family], root / name)
            for name, ranks in found.items()
        }
    print(
        f"{'strategy':30}{'ranks':>6}{'model':>9}{'loss':>10}{'gradient':>10}{'log-probs':>10}{'MB':>8}{'share':>8}"
    )
    for name, row in report.items():
        print(
            f"{name:30}{row['ranks']:6}{row['model']:>9}{row['loss']:10.1e}{row['gradient']:10.1e}"
            f"{row['logprobs']:10.1e}{row['mb']:8.2f}{row['share']:8.2f}"
        )
    sizes = {family: single.bytes / 1e6 for family, single in singles.items()}
    result = {"benchmark": "mesh_conformance", "steps": steps, "single_mb": sizes}
    print(json.dumps({**result, "strategies": report}))


if __name__ == "__main__":
    main()
