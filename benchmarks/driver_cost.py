"""What a step of 4,096 episodes of 16k tokens costs the driver, before and after tokens took other ways.

    python benchmarks/driver_cost.py [--episodes 64] [--ranks 1000] [--quick]

Synthetic episodes of 16 turns, each reading 512 tokens and writing 512. A share of the 4,096 is measured, and
seconds and bytes are multiplied by the rest: everything here is linear in the number of episodes. What goes
through the object store or to an actor is measured as its pickle, which is what Ray sends.

"Before" is what versions up to 0.2 did: whole prompts at every turn, the whole batch to every node for each
of three passes (reference, values, update), log-probs added up over ranks as float64, and episodes as lines
of JSON written on the event loop. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollgym.cluster.engine_actor import EngineCall
from rollgym.cluster.prompts import PromptSender
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.engines.base import GenerateRequest, Generation
from rollgym.io.run_dir import BLOCKS
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.data.sharding import cut, cut_arrays
from rollgym.trainer.tracking.jsonl import RunLogger

EPISODES, TURNS, READ, WROTE = 4096, 16, 512, 512
GROUP, PASSES, PER_NODE = 8, 3, 8
"""Episodes of a group, passes over a batch, and ranks of a node."""
ROOM = 8192


def make_episodes(count: int) -> list[Episode]:
    """Episodes with tokens drawn as in text: few ids are frequent; a group shares its first prompt."""
    rng = np.random.default_rng(0)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(np.minimum(rng.zipf(1.2, size), 150_000).tolist())

    episodes, first = [], ids(READ)
    for number in range(count):
        first = ids(READ) if number % GROUP == 0 else first
        turns = tuple(
            Turn(
                observation="",
                action="a",
                prompt_ids=first if turn == 0 else ids(READ),
                action_ids=ids(WROTE),
                logprobs=tuple((-rng.exponential(0.5, WROTE)).astype(np.float32).astype(float).tolist()),
                version_spans=((3, WROTE),),
                policy_version=3,
                terminated=turn == TURNS - 1,
            )
            for turn in range(TURNS)
        )
        group = f"g{number // GROUP:06d}"
        spec = EpisodeSpec(
            episode_id=f"{group}-{number % GROUP}", env_id="x", group_id=group, member=number % GROUP
        )
        episodes.append(Episode(spec=spec, outcome=Outcome.TERMINATED, turns=turns, success=True))
    return episodes


def cpu(work: Callable[[], int]) -> tuple[float, int]:
    """CPU seconds of this thread, and the bytes that ``work`` returns."""
    started = time.thread_time()
    size = work()
    return time.thread_time() - started, size


def requests(episodes: list[Episode]) -> list[tuple[GenerateRequest, Generation]]:
    """The requests of all turns, and the replies."""
    found = []
    for episode in episodes:
        ids: tuple[int, ...] = ()
        for turn in episode.turns:
            ids += turn.prompt_ids
            name = episode.spec.episode_id
            reply = Generation(
                token_ids=turn.action_ids,
                logprobs=turn.logprobs,
                finish_reason="stop",
                version_spans=turn.version_spans,
            )
            found.append((GenerateRequest(request_id=name, prompt_ids=ids, session=name), reply))
            ids += turn.action_ids
    return found


def whole_prompts(calls: list[tuple[GenerateRequest, Generation]]) -> int:
    """Send every prompt as a whole."""
    return sum(len(pickle.dumps(EngineCall("generate", (request,)), protocol=5)) for request, _ in calls)


def new_ids(calls: list[tuple[GenerateRequest, Generation]]) -> int:
    """Send what the actor does not have."""
    sender, size = PromptSender(), 0
    for request, reply in calls:
        delta = sender.delta(request)
        assert delta is not None
        size += len(pickle.dumps(EngineCall("generate_delta", (delta,)), protocol=5))
        sender.replied(request, delta.serial, reply)
    return size


def whole_batch(batch: Batch) -> int:
    """Store the whole batch for each pass, and once more for every node that reads it."""
    return sum(len(pickle.dumps(Batch(batch.episodes, batch.arrays), protocol=5)) for _ in range(PASSES))


def shards(batch: Batch, ranks: int) -> int:
    """Store shards of tokens and arrays once."""
    outline, tokens = cut(batch, ranks, room=ROOM, padded=False)
    shape, arrays = cut_arrays(batch, outline)
    parts = [outline, *tokens, shape, *arrays]
    return sum(len(pickle.dumps(part, protocol=5)) for part in parts)


def lines(folder: Path, episodes: list[Episode]) -> int:
    """Write episodes as lines of JSON."""
    data = b"".join(b'{"step":1,' + encode_episode(episode)[1:] + b"\n" for episode in episodes)
    return (folder / "episodes.jsonl").write_bytes(data)


def blocks(folder: Path, episodes: list[Episode]) -> tuple[float, float, int]:
    """Write episodes in blocks; CPU seconds of the event loop and of the whole process, and bytes."""

    async def write() -> float:
        with RunLogger(folder, tensorboard=False) as logger:
            started = time.thread_time()
            logger.prepare_episodes(1, episodes)
            logger.log_episodes(1, episodes)
            await logger.written()
            return time.thread_time() - started

    started = time.process_time()
    on_loop = asyncio.run(write())
    return on_loop, time.process_time() - started, (folder / BLOCKS).stat().st_size


def measure(count: int, ranks: int) -> dict[str, Any]:
    """Seconds and gigabytes of a step of 4,096 episodes, before and now."""
    factor = EPISODES / count
    episodes = make_episodes(count)
    calls = requests(episodes)
    tokens = EPISODES * TURNS * (READ + WROTE)
    actions = EPISODES * TURNS * WROTE
    found: dict[str, Any] = {"factor": factor, "rows": {}}

    def add(name: str, before: tuple[float, float], now: tuple[float, float]) -> None:
        pairs = (("before", before), ("now", now))
        found["rows"][name] = {
            f"{word}_{unit}": round(value, 3)
            for word, pair in pairs
            for unit, value in zip(("s", "gb"), pair, strict=True)
        }

    def scaled(pair: tuple[float, int], copies: float = 1) -> tuple[float, float]:
        return pair[0] * factor, pair[1] * factor * copies / 1e9

    add("prompts to engines", scaled(cpu(lambda: whole_prompts(calls))), scaled(cpu(lambda: new_ids(calls))))
    started = time.thread_time()
    batch = make_batch([token_episode(episode) for episode in episodes])
    batch = batch.with_arrays(advantages=np.random.default_rng(1).normal(size=batch.num_tokens))
    made = (time.thread_time() - started) * factor
    add("tokens to arrays", (made, 0.0), (made, 0.0))
    nodes = max(1, ranks // PER_NODE)
    # As many rows per rank as with all episodes, so that the shards have their size.
    share = max(1, round(ranks / factor))
    add(
        "batch to ranks",
        scaled(cpu(lambda: whole_batch(batch)), nodes),
        scaled(cpu(lambda: shards(batch, share))),
    )
    add("log-probs between ranks, each", (0.0, 2 * 8 * actions / 1e9), (0.0, 4 * actions / 1e9))
    with tempfile.TemporaryDirectory() as name:
        before = scaled(cpu(lambda: lines(Path(name), episodes)))
        on_loop, process, size = blocks(Path(name), episodes)
        add("episodes to disk, event loop", before, (on_loop * factor, size * factor / 1e9))
        found["block_thread_s"] = round((process - on_loop) * factor, 1)
    found["bytes_per_token"] = [round(value * 1e9 / tokens, 2) for value in (before[1], size * factor / 1e9)]
    rows = found["rows"]
    for word in ("before", "now"):
        found[f"{word}_s"] = round(sum(row[f"{word}_s"] for row in rows.values()), 1)
        found[f"{word}_gb"] = round(
            sum(row[f"{word}_gb"] for title, row in rows.items() if "each" not in title), 2
        )
    return found


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="measured; the rest is extrapolated")
    parser.add_argument("--ranks", type=int, default=1000, help="ranks of the learner, 8 on a node")
    parser.add_argument("--quick", action="store_true", help="8 episodes")
    args = parser.parse_args()
    found = measure(8 if args.quick else args.episodes, args.ranks)
    print(f"a step of {EPISODES:,} episodes; measured times {found['factor']:g}; {args.ranks} ranks\n")
    print(f"{'':34}{'before, s':>12}{'now, s':>10}{'before, GB':>13}{'now, GB':>10}")
    for name, row in found["rows"].items():
        print(
            f"{name:34}{row['before_s']:12.1f}{row['now_s']:10.1f}{row['before_gb']:13.2f}{row['now_gb']:10.2f}"
        )
    print(json.dumps({"benchmark": "driver_cost", "episodes": EPISODES, "ranks": args.ranks, **found}))


if __name__ == "__main__":
    main()
