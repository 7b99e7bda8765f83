"""Memory and time of one update on a long row: whole, in pieces, and shared by two ranks.

    python benchmarks/long_rows.py [--quick] [--tokens 4096,8192,16384] [--piece 2048] [--ways whole,pieces]
    python benchmarks/long_rows.py --partition

A Llama of 0.9 million parameters with random weights, in float32 on one thread, is trained on one row of so
many tokens, of which every eighth is an action. ``whole`` has ``learner.max_tokens_per_microbatch`` at the
length of the row, ``pieces`` at ``--piece`` tokens, ``context`` at the length of the row with two ranks
(``strategy: mesh``, ``parallel.context: 2``, gloo). Each is a separate process, or two. ``memory`` is how
much the update added to the peak of the resident set, of the larger rank; ``seconds`` is the CPU time of the
update in one process. ``gap`` is the greatest difference of a gradient from that of the whole row, relative
to the largest gradient of the same parameter. ``--quick``: 1024 and 2048 tokens, pieces of 512.

``--partition`` measures instead how long it takes to split sequences of 1 to 8192 tokens into micro-batches,
and sequences of which no two fit into one: it should grow with their number. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

WAYS = ("whole", "pieces", "context")
VOCABULARY = 400


def make_learner(way: str, tokens: int, piece: int, rank: int) -> Any:
    """Make one rank's learner, whose optimizer steps have length 0."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollgym.trainer.learner.config import LearnerConfig, ParallelConfig
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * tokens,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    given: dict[str, Any] = {"parallel": ParallelConfig(context=2)} if way == "context" else {}
    config = LearnerConfig(
        device="cpu",
        dtype="float32",
        threads=1,
        learning_rate=0.0,
        clip_norm=None,
        old_logprobs="rollout",
        max_tokens_per_microbatch=piece if way == "pieces" else tokens,
        **given,
    )
    strategy, world = ("mesh", 2) if way == "context" else ("single", 1)
    return Learner(model.eval(), config, LossConfig("grpo"), strategy=strategy, rank=rank, world=world)


def make_batch(tokens: int) -> Any:
    """One episode of one row."""
    import numpy as np

    from rollgym.core.seeding import derive_rng
    from rollgym.trainer.data.batch import make_batch
    from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence

    rng = derive_rng("long rows benchmark", tokens)
    ids = rng.integers(0, VOCABULARY, tokens + 1)
    positions = np.arange(8, tokens + 1, 8)
    behavior = np.full(len(positions), -np.log(VOCABULARY))
    row = TokenSequence(ids, positions)
    episode = TokenEpisode("long", (row,), behavior, np.array([len(positions)]))
    return make_batch([episode], advantages=[rng.normal(size=len(positions))])


def work(way: str, tokens: int, piece: int, rank: int, port: int, pipe: Any) -> None:
    """One rank: an update on a short row, then on the long one."""
    import torch
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    if way == "context":
        from rollgym.trainer.learner.process_group import join_group, leave_group

        join_group(rank, 2, "127.0.0.1", port)
    learner = make_learner(way, tokens, piece, rank)
    learner.update(make_batch(64))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    learner.update(make_batch(tokens))
    seconds = time.process_time() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grads = {}
    for name, parameter in learner.modules.trained().items():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        grads[name] = grad.numpy()
    pipe.send(((after - before) / 1024, seconds, grads))
    pipe.close()
    if way == "context":
        leave_group()


def measure(way: str, tokens: int, piece: int) -> tuple[float, float, dict[str, Any]]:
    """Megabytes of the larger rank, seconds of the slower one, and the gradient."""
    from rollgym.trainer.learner.process_group import free_port

    context = multiprocessing.get_context("spawn")
    port, pipes, processes = free_port(), [], []
    for rank in range(2 if way == "context" else 1):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(way, tokens, piece, rank, port, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        results = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SystemExit(f"{way} stopped early.") from None
    finally:
        for process in processes:
            process.join()
    return max(one[0] for one in results), max(one[1] for one in results), results[0][2]


def gap(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The greatest difference of a gradient, relative to the largest one of its parameter."""
    return max(float(abs(found[name] - whole).max() / abs(whole).max()) for name, whole in expected.items())


def rows(args: argparse.Namespace) -> dict[str, Any]:
    """Every length in every way."""
    print(
        f"{'tokens':>8}{'way':>10}{'memory MB':>12}{'of whole':>10}{'seconds':>9}{'of whole':>10}{'gap':>10}"
    )
    found: dict[str, Any] = {}
    for tokens in args.tokens:
        whole: tuple[float, float, dict[str, Any]] | None = None
        for way in args.ways:
            memory, seconds, grads = measure(way, tokens, args.piece)
            whole = (memory, seconds, grads) if way == "whole" else whole
            line = {"memory_mb": round(memory, 1), "seconds": round(seconds, 2)}
            shown = ["", "", ""]
            if whole is not None:
                line |= {
                    "memory_ratio": round(memory / whole[0], 3),
                    "seconds_ratio": round(seconds / whole[1], 2),
                    "gap": float(f"{gap(grads, whole[2]):.2g}"),
                }
                shown = [str(line[name]) for name in ("memory_ratio", "seconds_ratio", "gap")]
            found[f"{way} {tokens}"] = line
            print(
                f"{tokens:8}{way:>10}{memory:12.1f}{shown[0]:>10}{seconds:9.2f}{shown[1]:>10}{shown[2]:>10}",
                flush=True,
            )
    return {"rows": found}


def partition(args: argparse.Namespace) -> dict[str, Any]:
    """Split more and more sequences into micro-batches."""
    from rollgym.core.seeding import derive_rng
    from rollgym.trainer.data.batch import micro_batches

    rng = derive_rng("partition benchmark")
    found: dict[str, Any] = {}
    print(f"{'sequences':>10}{'mixed, s':>10}{'alone, s':>10}")
    for count in (10_000, 20_000) if args.quick else (40_000, 160_000, 640_000):
        mixed, alone = rng.integers(1, 8193, count).tolist(), rng.integers(4097, 6000, count).tolist()
        seconds = []
        for lengths in (mixed, [*alone, 1]):
            started = time.process_time()
            micro_batches(lengths, 8192, padded=False)
            seconds.append(round(time.process_time() - started, 3))
        found[str(count)] = seconds
        print(f"{count:10}{seconds[0]:10.3f}{seconds[1]:10.3f}", flush=True)
    return {"partition_seconds": found}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter rows")
    parser.add_argument("--tokens", default=None, help="lengths of the rows")
    parser.add_argument("--piece", type=int, default=None, help="tokens of a piece")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of whole, pieces and context")
    parser.add_argument(
        "--partition", action="store_true", help="measure the split into micro-batches instead"
    )
    args = parser.parse_args()
    args.tokens = [
        int(one) for one in (args.tokens or ("1024,2048" if args.quick else "4096,8192,16384")).split(",")
    ]
    args.piece = args.piece or (512 if args.quick else 2048)
    args.ways = args.ways.split(",")
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways has {', '.join(sorted(unknown))}: choose from {', '.join(WAYS)}.")
    result = partition(args) if args.partition else rows(args)
    print(json.dumps({"benchmark": "long_rows", **result}))


if __name__ == "__main__":
    main()
