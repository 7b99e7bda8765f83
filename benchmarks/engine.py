"""Tokens per second: the embedded engine against transformers' `generate`, on the same model.

    python benchmarks/engine.py [--quick] [--hidden 128] [--threads 2] [--rounds 5]
    python benchmarks/engine.py --model smollm2 [--quick] [--dtype float32] [--sglang WHERE] [--vllm WHERE]

The first command runs a small model with random weights. Two workloads. One turn: 1, 16 and 64 prompts of 64
tokens, 64 new tokens each; `generate` gets them as one batch, the engine as that many requests. Many turns:
16 conversations of 8 turns in which observations and replies have different lengths; `generate` runs each
turn as a left-padded batch and computes the whole conversation again, the engine keeps its KV cache and no
conversation waits for another. The engine also reports log-probs and samples by seed; `generate` does not.

`generate` runs with as many threads as asked for and with one; the engine with its own default (one, for a
model this small). ``ratio_*`` compares with `generate` on ``--threads``, ``best_*`` with the faster one.
Contenders take turns in one run; a ratio is the median of the rounds' ratios. Machines are shared and noisy:
read the ratios. The last line is one JSON object.

The second command runs a real model, by name as in `rollgym model` or a folder, with one thread each. It
counts CPU-seconds, so a busy machine disturbs it less. Group rollouts: 4 groups of 8 siblings with prompts of
350 tokens (150 shared by all, 200 by a group) and 16 new tokens, for one turn, and for five with 40 tokens of
observation each. Separate prompts: 16 of the same length that share nothing. Every round has other prompts,
so nothing is cached from the round before. ``total_tokens`` are the tokens of all prompts and replies, turn
by turn; ``unique_tokens`` are those left if each prefix is counted once. Decode: CPU-seconds per step at
batch 1, 16 and 64, against the bound, measured in the same run: the time to read the weights once, or the
time of the products at the best rate of a large product of the same shape, by torch's BLAS or by oneDNN,
whichever is longer. ``--sglang`` and ``--vllm`` add a server on this machine: a virtual environment to start
it from, or the URL of a running one, which has to compute in the same dtype. vLLM shares prefixes in blocks
of 128 tokens on a CPU, and runs without its packed kernels (docs/vllm.md).

All contenders compute in the same dtype: ``--dtype auto``, the default, is bfloat16 where a measurement finds
the CPU fast at it. Several dtypes are measured one after the other (``by_dtype`` in the report); the ratios
at the top of the report are those of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from transformers.generation import ContinuousBatchingConfig

from rollgym.core.seeding import derive_rng
from rollgym.engines import sglang, vllm
from rollgym.engines.base import Engine, GenerateRequest, Sampling
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.embedded.model import read_module
from rollgym.engines.embedded.precision import choose_dtype, dtype_name
from rollgym.engines.embedded.prefix_cache import common_prefix
from rollgym.engines.servers.engine import ServerEngine
from rollgym.models.zoo import model_folder

VOCABULARY = 1_000
PROMPT, REPLY = 64, 64
TURNS, CONVERSATIONS = 8, 16
BATCHES = (1, 16, 64)
SERVERS = ("sglang", "vllm")
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


# A real model: group rollouts, separate prompts and decode, per CPU-second.

GROUPS, SIBLINGS = 4, 8
SHARED, OWN, OBSERVATION, NEW = 150, 200, 40, 16
SEPARATE = 16
STEPS = 24
"""Decode steps to measure."""
Conversations = list[list[int]]


@dataclass(slots=True)
class Work:
    """CPU-seconds of a contender, by round, and the tokens of one round."""

    cpu: list[float] = field(default_factory=list)
    total_tokens: int = 0
    unique_tokens: int = 0

    def report(self) -> dict[str, float]:
        """Figures for the table."""
        seconds = statistics.median(self.cpu)
        return {
            "cpu_seconds": round(seconds, 2),
            "total_tokens_per_cpu_second": round(self.total_tokens / seconds, 1),
            "unique_tokens_per_cpu_second": round(self.unique_tokens / seconds, 1),
        }


class Peer:
    """One contender: continues conversations by some tokens each."""

    def __init__(self, extend: Callable[[Conversations, int, int], Conversations], cpu: Callable[[], float]):
        self.extend, self.cpu = extend, cpu


def random_ids(vocabulary: int, count: int, *key: object) -> list[int]:
    """Ids that depend on the key only, none of them a special token of common tokenizers."""
    ids: list[int] = derive_rng("engine benchmark", *map(str, key)).integers(100, vocabulary, count).tolist()
    return ids


def group_prompts(vocabulary: int, number: int, groups: int = GROUPS) -> Conversations:
    """Prompts of all siblings of all groups."""
    shared = random_ids(vocabulary, SHARED, "shared", number)
    return [
        shared + random_ids(vocabulary, OWN, "group", number, group)
        for group in range(groups)
        for _ in range(SIBLINGS)
    ]


def separate_prompts(vocabulary: int, number: int, count: int) -> Conversations:
    """Prompts of the same length that share nothing."""
    return [random_ids(vocabulary, SHARED + OWN, "separate", number, n) for n in range(count)]


def unique(conversations: Conversations) -> int:
    """Number of tokens if each prefix is counted once."""
    ordered = sorted(conversations)
    repeated = sum(common_prefix(a, b) for a, b in zip(ordered, ordered[1:], strict=False))
    return sum(map(len, ordered)) - repeated


def converse(peer: Peer, conversations: Conversations, turns: int, vocabulary: int, number: int) -> Work:
    """Play a round and measure it."""
    total, before = 0, peer.cpu()
    for turn in range(turns):
        if turn:
            for n, ids in enumerate(conversations):
                ids.extend(random_ids(vocabulary, OBSERVATION, "observation", number, turn, n))
        conversations = peer.extend(conversations, NEW, turn)
        total += sum(map(len, conversations))
    return Work([peer.cpu() - before], total, unique(conversations))


def engine_peer(engine: Engine, loop: asyncio.AbstractEventLoop, cpu: Callable[[], float]) -> Peer:
    """An engine: one request per conversation, all at once."""
    played = 0

    def extend(conversations: Conversations, new: int, turn: int) -> Conversations:
        nonlocal played
        played += turn == 0  # other conversations: other sessions
        name = str(played)

        async def ask(n: int, ids: list[int]) -> list[int]:
            sampling = Sampling(max_tokens=new, seed=n)
            request = GenerateRequest(
                request_id=f"{name}-{turn}-{n}",
                prompt_ids=tuple(ids),
                sampling=sampling,
                session=f"{name}-{n}",
            )
            return [*ids, *(await engine.generate(request)).token_ids]

        async def main() -> Conversations:
            return list(await asyncio.gather(*(ask(n, ids) for n, ids in enumerate(conversations))))

        return loop.run_until_complete(main())

    return Peer(extend, cpu)


def generate_peer(model: Any) -> Peer:
    """`generate` of transformers: one batch per turn."""

    def extend(conversations: Conversations, new: int, turn: int) -> Conversations:
        replies = hf_generate(model, conversations, new)
        return [[*ids, *reply] for ids, reply in zip(conversations, replies, strict=True)]

    return Peer(extend, time.process_time)


def tree_cpu(process: psutil.Process) -> float:
    """CPU-seconds of a process and those below it."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def server_peer(
    kind: str, where: str, folder: Path, dtype: torch.dtype, loop: asyncio.AbstractEventLoop
) -> tuple[Peer, Engine]:
    """A server at a URL of this machine, or one that is started from a virtual environment."""
    software: Any = {"sglang": sglang, "vllm": vllm}[kind]
    open_engine = sglang.open_sglang if kind == "sglang" else vllm.open_vllm
    if where.startswith("http"):
        port = urlsplit(where).port
        listening = [
            one.pid for one in psutil.net_connections() if one.laddr and one.laddr.port == port and one.pid
        ]
        if not listening:
            raise SystemExit(f"no process of this machine listens on port {port}: its CPU time is unknown")
        engine, root = open_engine(folder, url=where), psutil.Process(listening[0])
        return engine_peer(engine, loop, partial(tree_cpu, root)), engine
    options = software.ServerOptions(
        python=str(Path(where) / "bin" / "python"),
        env={"OMP_NUM_THREADS": "1"},
        dtype=dtype_name(dtype),
    )
    engine = open_engine(folder, options=options)
    assert isinstance(engine, ServerEngine)
    assert engine.server is not None
    process = psutil.Process(engine.server.pid)
    return engine_peer(engine, loop, partial(tree_cpu, process)), engine


def cpu_seconds(work: Callable[[], Any], times: int = 3) -> float:
    """CPU-seconds of a call: the least of a few."""
    found = []
    for _ in range(1 + times):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return min(found[1:])


def decode_bounds(model: Any) -> dict[int, float]:
    """Least CPU-seconds of a decode step by batch size: reading the weights, or computing with them."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    bytes_ = sum(p.nbytes for p in weights)
    flat = torch.ones(bytes_ // 4)
    reading = cpu_seconds(flat.sum)
    large = max((p for n, p in model.named_parameters() if "layers" in n and p.dim() == 2), key=torch.numel)
    x = torch.randn(512, large.shape[1], dtype=large.dtype)
    products: list[Callable[[], Any]] = [lambda: torch.mm(x, large.t())]
    with torch.inference_mode():
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            packed = torch.ops.mkldnn._reorder_linear_weight(large.detach().clone(), 512)
            products.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
        per_number = min(map(cpu_seconds, products)) / (512 * large.numel())
    count = sum(p.numel() for p in weights)
    return {batch: max(reading, batch * count * per_number) for batch in BATCHES}


def decode_seconds(peer: Peer, vocabulary: int, batch: int, steps: int) -> float:
    """CPU-seconds of one decode step."""

    def play(new: int) -> float:
        ids = [random_ids(vocabulary, 8, "decode", batch, new, n) for n in range(batch)]
        before = peer.cpu()
        peer.extend(ids, new, 0)
        return peer.cpu() - before

    play(2)
    return (play(steps + 2) - play(2)) / steps


def measure_model(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a real model in each dtype; returns the report."""
    torch.set_num_threads(1)
    folder = Path(args.model) if Path(args.model).is_dir() else model_folder(args.model)
    module: Any = read_module(folder, torch.float32)
    parameters = sum(p.numel() for p in module.parameters())
    del module
    chosen = [choose_dtype(name, torch.device("cpu"), parameters) for name in args.dtype]
    by_dtype = {dtype_name(dtype): measure_dtype(args, folder, dtype) for dtype in dict.fromkeys(chosen)}
    first = next(iter(by_dtype))
    report = {"benchmark": "engine", "model": args.model, "dtype": first, **by_dtype[first]}
    return report if len(by_dtype) == 1 else {**report, "by_dtype": by_dtype}


def measure_dtype(args: argparse.Namespace, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Measure a real model with all contenders in one dtype; returns the report."""
    model: Any = read_module(folder, dtype).eval()
    vocabulary = len(model.get_input_embeddings().weight)
    loop = asyncio.new_event_loop()
    engine = EmbeddedEngine(folder, threads=1, dtype=dtype)
    peers = {"engine": engine_peer(engine, loop, time.process_time), "generate": generate_peer(model)}
    servers: list[Engine] = []
    for kind in SERVERS:
        if where := getattr(args, kind):
            peers[kind], server = server_peer(kind, where, folder, dtype, loop)
            servers.append(server)
    for peer in peers.values():  # warm up
        peer.extend(separate_prompts(vocabulary, -1, 2), 2, 0)
    workloads: dict[str, tuple[Callable[[int], Conversations], int]] = {
        "group rollouts, one turn": (partial(group_prompts, vocabulary), 1),
        "group rollouts, five turns": (
            partial(group_prompts, vocabulary, groups=1 if args.quick else GROUPS),
            5,
        ),
        "separate prompts": (partial(separate_prompts, vocabulary, count=SEPARATE), 1),
    }
    rounds = 1 if args.quick else args.rounds or 3
    report: dict[str, Any] = {"rounds": rounds, "workloads": {}}
    report |= {f"{name}_dtype": dtype_name(dtype) for name in peers}
    medians: dict[str, dict[str, float]] = {}
    print(f"{args.model}, {dtype_name(dtype)}, one thread; tokens per CPU-second, all / unique\n", flush=True)
    for workload, (prompts_of, turns_) in workloads.items():
        found = {name: Work() for name in peers}
        for number in range(rounds):
            for name, peer in peers.items():
                done = converse(peer, prompts_of(number + 100 * turns_), turns_, vocabulary, number)
                found[name].cpu += done.cpu
                found[name].total_tokens, found[name].unique_tokens = done.total_tokens, done.unique_tokens
        report["workloads"][workload] = {name: work.report() for name, work in found.items()}
        medians[workload] = {
            name: statistics.median(
                theirs / ours for theirs, ours in zip(work.cpu, found["engine"].cpu, strict=True)
            )
            for name, work in found.items()
        }
        for name, figures in report["workloads"][workload].items():
            all_, once = figures["total_tokens_per_cpu_second"], figures["unique_tokens_per_cpu_second"]
            times = f"{medians[workload][name]:8.2f} x the engine's CPU time"
            seconds = f"{figures['cpu_seconds']:9.2f} s"
            row = f"{name} {dtype_name(dtype)}"
            print(f"{workload:28}{row:20}{seconds}{all_:9.1f} /{once:8.1f}{times}", flush=True)
    bounds = decode_bounds(model)
    report["decode"] = {}
    for batch in BATCHES:
        line = {"bound_ms": round(1000 * bounds[batch], 1)}
        for name, peer in peers.items():
            step = decode_seconds(peer, vocabulary, batch, 8 if args.quick else STEPS)
            line[f"{name}_ms"] = round(1000 * step, 1)
            line[f"{name}_to_bound"] = round(step / bounds[batch], 2)
        report["decode"][str(batch)] = line
        print(f"decode at batch {batch}: {line}", flush=True)
    stats = loop.run_until_complete(engine.stats())
    report["prefix_hit_tokens"], report["computed_tokens"] = stats.prefix_hit_tokens, stats.computed_tokens
    for one in (engine, *servers):
        loop.run_until_complete(one.close())
    one_turn, five_turns, separate = (medians[workload] for workload in workloads)
    ratios = {"one_turn": one_turn, "five_turns": five_turns, "separate": separate}
    for other in ("generate", *(kind for kind in SERVERS if kind in peers)):
        report |= {f"{key}_ratio_to_{other}": round(ratio_[other], 2) for key, ratio_ in ratios.items()}
    report["group_rollout_ratio_to_generate"] = round(one_turn["generate"], 2)
    for kind in SERVERS:
        report[f"group_rollout_ratio_to_{kind}"] = round(one_turn[kind], 2) if kind in peers else None
    return report


def main() -> None:
    """Measure all contenders in turn and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 64")
    parser.add_argument("--threads", type=int, default=2, help="of `generate`")
    parser.add_argument("--engine-threads", type=int, default=None)
    parser.add_argument(
        "--continuous", action="store_true", help="measure transformers' continuous batching, too (slow)"
    )
    parser.add_argument("--rounds", type=int, default=None, help="default 5, or 3 with --model")
    parser.add_argument(
        "--quick", action="store_true", help="one round; with --model, one group for five turns"
    )
    parser.add_argument("--model", help="a real model: its name, or a folder")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "float32", "bfloat16"),
        help="with --model: of all contenders, one or several",
    )
    for kind in SERVERS:
        text = f"with --model: URL of a server of {kind}, or a virtual environment"
        parser.add_argument(f"--{kind}", help=text)
    args = parser.parse_args()
    if args.model:
        print(json.dumps(measure_model(args)))
        return
    args.rounds = args.rounds or 5
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
