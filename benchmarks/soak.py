"""Memory of a long run: 200,000 synthetic episodes through the scheduler, the storage and the tracking.

    python benchmarks/soak.py [--episodes 200000] [--svg docs/images/soak.svg] [--quick]

Everything but the model is real: the scheduler with its groups, staleness and event log, the tokens and
batches of the trainer, episodes written in blocks, metrics, and a step log. Environments and agent answer at
once, and the learner takes means. The memory of the process is read from /proc after every step; the slope is
that of a line through the second half of the run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from controller import InstantPool, InstantSession

from rollgym.core.agent import AgentAction, Briefing
from rollgym.core.types import EpisodeSpec, Group
from rollgym.io.episode_blocks import read_blocks
from rollgym.io.run_dir import BLOCKS, EVENTS
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.trainer.data.batch import make_batch
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.step_log import batch_digest, step_fields
from rollgym.trainer.tracking.jsonl import RunLogger
from rollgym.trainer.train_state import TrainState
from rollgym.utils import svg

TOKENS = 24
"""Tokens read and sampled per turn, each."""


class ShortPool(InstantPool):
    """Environments that answer at once, after one to three turns for the last time."""

    async def open(self, spec: EpisodeSpec) -> InstantSession:
        """Return an environment whose number of turns depends on the episode."""
        return InstantSession(1 + spec.sampling_seed % 3)


class TokenAgent:
    """Answers at once with token ids and log-probs."""

    def __init__(self) -> None:
        rng = random.Random(0)
        self._ids = tuple(rng.randrange(50_000) for _ in range(4096))
        self._logprobs = tuple(float(np.float32(-rng.random())) for _ in range(4096))
        self._turn = 0
        self.version = 0

    def player(self, briefing: Briefing) -> TokenAgent:
        """One player serves all."""
        return self

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Return other tokens each time."""
        await asyncio.sleep(0)
        self._turn += 1
        at = (self._turn * 31) % (4096 - 2 * TOKENS)
        return AgentAction(
            action="go",
            response="go " * 8,
            prompt_ids=self._ids[at : at + TOKENS],
            action_ids=self._ids[at + TOKENS : at + 2 * TOKENS],
            logprobs=self._logprobs[at : at + TOKENS],
            version_spans=((self.version, TOKENS),),
            policy_version=self.version,
        )

    async def close(self) -> None:
        """There is nothing to close."""


async def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run; returns what was measured after each step."""
    groups, size = args.groups, args.group_size
    config = SchedulerConfig(
        max_in_flight=2 * groups * size, groups=GroupPolicy(size=size), max_ahead=3 * groups, max_staleness=2
    )
    state, agent = TrainState(), TokenAgent()
    episodes: list[int] = []
    memory: list[float] = []
    started = time.process_time()
    events = EventLog(folder / EVENTS, segment_bytes=args.segment_bytes, max_bytes=8 * args.segment_bytes)
    with RunLogger(folder, tensorboard=False) as logger, events:
        sampler = TaskSampler([EnvSource(env_id="none")])
        async with Scheduler(sampler, ShortPool(), agent, config, log=events) as scheduler:
            while state.step * groups * size < args.episodes:
                taken = await scheduler.take(groups, release=False)
                await step(taken, state, logger, events)
                async with scheduler.updating(state.version + 1):
                    state.version += 1
                    agent.version = state.version
                scheduler.release(len(taken))
                episodes.append(state.step * groups * size)
                memory.append(resident())
    return {"episodes": episodes, "mb": memory, "cpu_seconds": round(time.process_time() - started, 1)}


async def step(taken: list[Group], state: TrainState, logger: RunLogger, events: EventLog) -> None:
    """One training step, with a learner that takes means."""
    played = [episode for group in taken for episode in group.episodes]
    logger.prepare_episodes(state.step + 1, played)
    batch = make_batch([token_episode(episode) for episode in played])
    batch = batch.with_arrays(advantages=np.ones(batch.num_tokens))
    metrics = {name: float(array.mean()) for name, array in batch.arrays.items()}
    state.step += 1
    logger.log_metrics(state.step, metrics)
    logger.log_episodes(state.step, played)
    await logger.written()
    marks = logger.sizes() | {EVENTS: events.size}
    logger.log_step(step_fields(state, taken, batch_digest(batch), marks, 0))


def resident() -> float:
    """Megabytes of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return 0.0


def picture(episodes: list[int], memory: list[float]) -> str:
    """Memory over episodes as a picture."""
    width, height, left, top = 760, 300, 60, 30
    most = 50 * (int(max(memory) / 50) + 1)
    parts = []
    for value in range(0, most + 1, 50):
        y = top + height - height * value / most
        parts += [svg.rect(left, y, width, 1, "#8884"), svg.text(left - 8, y + 4, f"{value}", anchor="end")]
    for at, mb in zip(episodes, memory, strict=True):
        x, y = left + width * at / episodes[-1], top + height - height * mb / most
        parts.append(svg.rect(x - 1.5, y - 1.5, 3, 3, "#3b6fb6", f"{at:,} episodes: {mb:.0f} MB"))
    parts.append(svg.text(left, 18, "Memory of the process, MB"))
    parts.append(svg.text(left + width, top + height + 22, f"{episodes[-1]:,} episodes", anchor="end"))
    return svg.document(left + width + 20, top + height + 34, parts)


def main() -> None:
    """Run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200_000)
    parser.add_argument("--groups", type=int, default=64, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--segment-bytes", type=int, default=4 * 2**20, help="of the event log")
    parser.add_argument("--svg", type=Path, help="write the memory over the run as a picture")
    parser.add_argument("--quick", action="store_true", help="6,000 episodes")
    args = parser.parse_args()
    if args.quick:
        args.episodes, args.groups = 6_000, 16
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = asyncio.run(soak(folder, args))
        stored = sum(len(block.ids) for block in read_blocks(folder / BLOCKS))
        disk = {path.name: path.stat().st_size for path in folder.iterdir()}
    episodes, memory = found["episodes"], found["mb"]
    half = len(memory) // 2
    slope = float(np.polyfit(episodes[half:], memory[half:], 1)[0])
    if args.svg:
        args.svg.write_text(picture(episodes, memory), encoding="utf-8")
    at = {
        f"{share:.0%}": round(memory[int(share * (len(memory) - 1))], 1)
        for share in (0.1, 0.25, 0.5, 0.75, 1)
    }
    print(f"memory in MB at {at}; {1000 * slope:+.4f} MB per 1,000 episodes over the second half")
    print(
        json.dumps(
            {
                "benchmark": "soak",
                "episodes": episodes[-1],
                "stored_episodes": stored,
                "steps": len(memory),
                "mb_at": at,
                "mb_per_1000_episodes": round(1000 * slope, 5),
                "cpu_seconds": found["cpu_seconds"],
                "events_mb": round(sum(size for n, size in disk.items() if n.startswith("events")) / 1e6, 2),
                "episodes_mb": round(disk[BLOCKS] / 1e6, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
