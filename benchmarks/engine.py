"""Tokens per second: the embedded engine against transformers' `generate`, on the same small model.

    python benchmarks/engine.py [--quick] [--hidden 128] [--threads 2] [--rounds 5]

Two workloads. One turn: 1, 16 and 64 prompts of 64 tokens, 64 new tokens each; `generate` gets them as one
batch, the engine as that many requests. Many turns: 16 conversations of 8 turns in which observations and
replies have different lengths; `generate` runs each turn as a left-padded batch and computes the whole
conversation again, the engine keeps its KV cache and no conversation waits for another. The engine also
reports log-probs and samples by seed; `generate` does not.

`generate` runs with as many threads as asked for and with one; the engine with its own default (one, for a
model this small). ``ratio_*`` compares with `generate` on ``--threads``, ``best_*`` with the faster one.
Contenders take turns in one run; a ratio is the median of the rounds' ratios. Machines are shared and noisy:
read the ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from transformers.generation import ContinuousBatchingConfig

from rollgym.core.seeding import derive_rng
from rollgym.engines.base import GenerateRequest, Sampling
from rollgym.engines.embedded.engine import EmbeddedEngine

VOCABULARY = 1_000
PROMPT, REPLY = 64, 64
TURNS, CONVERSATIONS = 8, 16
BATCHES = (1, 16, 64)
Entrants = dict[str, Callable[[], int]]


def make_model(hidden: int) -> Any:
    """A model of the built-in policy's size, with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 16 * 16,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(count: int) -> list[list[int]]:
    """Random prompts, the same in every run."""
    rng = derive_rng("engine benchmark", count)
    return [rng.integers(0, VOCABULARY, PROMPT).tolist() for _ in range(count)]


def turns(conversation: int) -> list[tuple[list[int], int]]:
    """(observation, how many tokens to reply) of each turn of a conversation."""
    rng = derive_rng("engine benchmark conversation", conversation)
    return [
        (rng.integers(0, VOCABULARY, int(rng.integers(20, 80))).tolist(), int(rng.integers(4, 40)))
        for _ in range(TURNS)
    ]


def hf_generate(model: Any, ids: list[list[int]], new: int) -> list[list[int]]:
    """One left-padded batch through transformers' own loop."""
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [row[longest:].tolist() for row in out]


def hf_continuous(model: Any, ids: list[list[int]], new: int) -> int:
    """One batch through transformers' continuous batching with paged attention."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    out = model.generate_batch(
        ids,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=32, num_blocks=512, max_batch_tokens=512, return_logprobs=True
        ),
        progress_bar=False,
    )
    return sum(len(reply.generated_tokens) for reply in out.values())


def hf_turns(model: Any) -> int:
    """Conversations that are recomputed every turn; returns the tokens sampled."""
    history: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    plan = [turns(c) for c in range(CONVERSATIONS)]
    sampled = 0
    for turn in range(TURNS):
        for row, its in zip(history, plan, strict=True):
            row.extend(its[turn][0])
        replies = hf_generate(model, history, max(its[turn][1] for its in plan))
        for row, its, reply in zip(history, plan, replies, strict=True):
            row.extend(reply[: its[turn][1]])
            sampled += its[turn][1]
    return sampled


async def engine_batch(engine: EmbeddedEngine, count: int) -> int:
    """As many requests at once as the batch has rows."""
    replies = await asyncio.gather(
        *(_ask(engine, ids, REPLY, str(n)) for n, ids in enumerate(prompts(count)))
    )
    return sum(map(len, replies))


async def engine_turns(engine: EmbeddedEngine) -> int:
    """Independent conversations; returns the tokens sampled."""

    async def converse(number: int) -> int:
        history: list[int] = []
        sampled = 0
        for observation, new in turns(number):
            history.extend(observation)
            reply = await _ask(engine, history, new, str(number), session=f"conversation {number}")
            history.extend(reply)
            sampled += len(reply)
        await engine.forget(f"conversation {number}")
        return sampled

    return sum(await asyncio.gather(*(converse(n) for n in range(CONVERSATIONS))))


async def _ask(engine: EmbeddedEngine, ids: list[int], new: int, name: str, session: str = "") -> list[int]:
    sampling = Sampling(max_tokens=new, seed=int(name))
    request = GenerateRequest(request_id=name, prompt_ids=tuple(ids), sampling=sampling, session=session)
    return list((await engine.generate(request)).token_ids)


def rate(work: Callable[[], int]) -> float:
    """Measure tokens per second."""
    started = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - started)


def contenders(args: argparse.Namespace) -> dict[str, Entrants]:
    """Workload -> contender -> the work."""
    model = make_model(args.hidden)
    engines = {
        "engine": EmbeddedEngine(model, threads=args.engine_threads),
        "engine, free": EmbeddedEngine(model, threads=args.engine_threads, deterministic=False),
    }

    def entrants(
        hf: Callable[[], int], ours: Callable[[EmbeddedEngine], Coroutine[Any, Any, int]]
    ) -> Entrants:
        return {
            **{f"generate x{n}": partial(on_threads, n, hf) for n in sorted({1, args.threads})},
            **{name: partial(run, ours, engine) for name, engine in engines.items()},
        }

    def batch(count: int) -> int:
        return sum(map(len, hf_generate(model, prompts(count), REPLY)))

    found = {f"{n} at once": entrants(partial(batch, n), partial(engine_batch, count=n)) for n in BATCHES}
    if args.continuous:
        for n in BATCHES:
            paged = partial(hf_continuous, model, prompts(n), REPLY)
            found[f"{n} at once"]["continuous"] = partial(on_threads, 1, paged)
    return {**found, "many turns": entrants(partial(hf_turns, model), engine_turns)}


def on_threads(count: int, work: Callable[[], int]) -> int:
    """Run with this many torch threads."""
    torch.set_num_threads(count)
    return work()


def run(work: Callable[[EmbeddedEngine], Coroutine[Any, Any, int]], engine: EmbeddedEngine) -> int:
    """Run an engine in its own event loop."""
    return asyncio.run(work(engine))


def measure(entrants: Entrants, rounds: int) -> dict[str, list[float]]:
    """Rates of each contender in each round, after one to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in entrants}
    for _ in range(1 + rounds):
        for name, work in entrants.items():
            rates[name].append(rate(work))
    return {name: values[1:] for name, values in rates.items()}


def ratio(found: dict[str, list[float]], *names: str) -> float:
    """The engine to the fastest of these, round by round: a machine busy now and then disturbs it less."""
    theirs = [max(values) for values in zip(*(found[name] for name in names), strict=True)]
    return round(statistics.median(a / b for a, b in zip(found["engine"], theirs, strict=True)), 2)


def main() -> None:
    """Measure all contenders in turn and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 64")
    parser.add_argument("--threads", type=int, default=2, help="of `generate`")
    parser.add_argument("--engine-threads", type=int, default=None)
    parser.add_argument(
        "--continuous", action="store_true", help="measure transformers' continuous batching, too (slow)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round after the warm-up")
    args = parser.parse_args()
    rounds = {
        name: measure(entrants, 1 if args.quick else args.rounds)
        for name, entrants in contenders(args).items()
    }
    names = list(rounds["1 at once"])
    theirs = [name for name in names if name.startswith("generate")]
    asked = f"generate x{args.threads}"
    print(f"hidden {args.hidden}, tokens/s (median of rounds)\n")
    print(f"{'':12}" + "".join(f"{name:>14}" for name in names) + f"{'ratio':>10}{'to best':>10}")
    for workload, found in rounds.items():
        line = "".join(
            f"{statistics.median(found[name]):14,.0f}" if name in found else f"{'-':>14}" for name in names
        )
        print(f"{workload:12}{line}{ratio(found, asked):10.2f}{ratio(found, *theirs):10.2f}")
    keys = {**{f"{n} at once": str(n) for n in BATCHES}, "many turns": "multiturn"}
    report = {
        "benchmark": "engine",
        "hidden": args.hidden,
        "threads": args.threads,
        "tokens_per_second": {
            workload: {name: round(statistics.median(values)) for name, values in found.items()}
            for workload, found in rounds.items()
        },
        **{f"ratio_{key}": ratio(rounds[workload], asked) for workload, key in keys.items()},
        **{f"best_{key}": ratio(rounds[workload], *theirs) for workload, key in keys.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
