"""Kill random parts of a training run on simulated Ray nodes, and check that no episode is lost or doubled.

    python benchmarks/chaos.py [--minutes 30] [--every 45] [--nodes 3] [--seed 0] [--quick] [--out DIR]

The nodes are processes on this machine with one logical GPU each. A run plays and trains on them while parts
of it are killed with SIGKILL, in random order: a rank of the learner, an engine, an environment actor, a
node (another one comes 20 seconds later) and the driver (started again with ``--resume``). The next kill
comes once two steps are trained after the last one, at least ``--every`` seconds later. At the end the run is
completed, and its files are checked: every step once, every group whole, every episode once, none missing.

The outage of a kill is the longest time without a step until two steps are trained, minus the median step
time. The last line is one JSON object; exit code 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import rollgym

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}
GROUPS, GROUP_SIZE = 8, 4
RUN = (
    "frozen-lake-grpo", "runtime=ray", "warm_start=null", "devices.layout=split", "ray.heartbeat_timeout=30",
    f"rollout.groups={GROUPS}", f"rollout.group_size={GROUP_SIZE}", "rollout.workers=0", "evaluation.every=0",
    "evaluation.episodes=4", "evaluation.on_start=false", "checkpoints.every=5",
)  # fmt: skip
ACTORS = {"learner rank": "LearnerActor", "engine": "EngineActor", "environment actor": "EnvActor"}
VICTIMS = (*ACTORS, "node", "driver")
NODE_RETURNS = 20.0
"""Seconds after which another node replaces a lost one."""
PATIENCE = 600.0
"""Seconds without a step after which the run counts as stuck."""


@dataclass
class Kill:
    """A victim and its consequences."""

    victim: str
    at: float
    steps: list[float] = field(default_factory=list)
    """When the next two steps were trained."""

    @property
    def delays(self) -> list[float]:
        """Seconds from the kill to the next step, and from that to the one after it."""
        times = [self.at, *self.steps]
        return [round(after - before, 1) for before, after in zip(times, times[1:], strict=False)]


class Nodes:
    """A Ray cluster of several nodes on this machine, with a head that has no GPU."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        memory = {"object_store_memory": 200 * 2**20}
        self._size: dict[str, Any] = {"num_cpus": 4, "num_gpus": 1, **memory}
        head: dict[str, Any] = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, **memory}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._others = [self._cluster.add_node(**self._size) for _ in range(count)]

    @property
    def address(self) -> str:
        """Its address."""
        return str(self._cluster.address)

    def lose(self, rng: random.Random) -> None:
        """Kill a node with everything on it."""
        node = self._others.pop(rng.randrange(len(self._others)))
        self._cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        """Start another node."""
        self._others.append(self._cluster.add_node(**self._size))

    def close(self) -> None:
        """Stop all nodes."""
        self._cluster.shutdown()


@dataclass
class Driver:
    """The process of ``rollgym train``."""

    out: Path
    address: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self, *settings: str) -> None:
        """Start, or resume if it was started before."""
        rollgym_command = str(Path(sys.executable).with_name("rollgym"))
        arguments = ["--resume", "--trust-code", *settings] if self.starts else [*RUN, "stop.steps=100000"]
        arguments += [f"ray.address={self.address}", "--out", str(self.out / "run"), "--plain"]
        with (self.out / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                [rollgym_command, "train", *arguments], stdout=log, stderr=log, start_new_session=True
            )
        self.starts += 1

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def check(self) -> None:
        """End with the log's last lines if the process has ended by itself."""
        assert self.process is not None
        if self.process.poll() is not None:
            tail = (self.out / "driver.log").read_text(errors="replace")[-3000:]
            sys.exit(f"The run ended with exit code {self.process.returncode}:\n{tail}")


@dataclass
class Steps:
    """The steps of the run, and when each was first seen."""

    path: Path
    seen: dict[int, float] = field(default_factory=dict)
    """Time by step; a step that is trained again after a resume has its last time."""
    _known: int = 0

    def look(self) -> int:
        """Return the number of lines in the metrics."""
        lines = self.path.read_bytes().count(b"\n") if self.path.exists() else 0
        if lines != self._known:
            now = time.monotonic()
            for step in range(min(lines, self._known) + 1, lines + 1):
                self.seen[step] = now
            self._known = lines
        return lines


def main() -> None:
    """Run the chaos and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=45.0, help="least seconds between two kills")
    parser.add_argument("--nodes", type=int, default=3, help="simulated nodes with a logical GPU each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one kill of each kind")
    parser.add_argument("--out", type=Path, help="folder for the run and its log; default: a temporary one")
    options = parser.parse_args()
    if options.nodes < 2:
        parser.error("--nodes must be at least 2: one trains, one generates.")
    out = options.out or Path(tempfile.mkdtemp(prefix="rollgym-chaos-"))
    out.mkdir(parents=True, exist_ok=True)
    if (out / "run").exists():
        parser.error(f"{out / 'run'} exists: choose another folder.")
    os.environ.update(SETTINGS)
    with cluster(options.nodes) as nodes:
        driver = Driver(out, nodes.address)
        try:
            kills, steps = rampage(nodes, driver, options)
        finally:
            if driver.process is not None and driver.process.poll() is None:
                driver.kill()
    result = report(kills, steps, audit(out / "run"))
    print(json.dumps(result))
    sys.exit(0 if result["lost"] == result["doubled"] == result["missing"] == 0 else 1)


@contextmanager
def cluster(count: int) -> Iterator[Nodes]:
    """Start nodes for the duration of the block."""
    nodes = Nodes(count)
    try:
        yield nodes
    finally:
        nodes.close()


def rampage(nodes: Nodes, driver: Driver, options: argparse.Namespace) -> tuple[list[Kill], Steps]:
    """Kill until the time is up, then complete the run."""
    rng = random.Random(options.seed)
    steps = Steps(driver.out / "run" / "metrics.jsonl")
    kills: list[Kill] = []
    queue: list[str] = []
    driver.start()
    wait_for_steps(driver, steps, 3)
    end = time.monotonic() + 60 * options.minutes
    while len(kills) < len(VICTIMS) if options.quick else time.monotonic() < end:
        if not queue:
            queue = rng.sample(VICTIMS, len(VICTIMS))
        kill = Kill(queue.pop(), time.monotonic())
        print(f"step {steps.look()}: killing: {kill.victim}", file=sys.stderr, flush=True)
        strike(kill.victim, nodes, driver, rng)
        kills.append(kill)
        returns = kill.at + NODE_RETURNS if kill.victim == "node" else None
        while len(kill.steps) < 2 or returns is not None or time.monotonic() < kill.at + options.every:
            time.sleep(0.1)
            steps.look()
            if returns is not None and time.monotonic() >= returns:
                nodes.add()
                returns = None
            kill.steps = sorted({at for at in steps.seen.values() if at > kill.at})[:2]
            if time.monotonic() > max([kill.at, *kill.steps]) + PATIENCE:
                sys.exit(f"No step for {PATIENCE:g} s after a kill ({kill.victim}): see {driver.out}.")
            driver.check()
        print(f"  the next steps after {kill.delays} s", file=sys.stderr, flush=True)
    driver.kill(signal.SIGINT)
    driver.start(f"stop.steps={steps.look() + 3}")
    assert driver.process is not None
    if (code := driver.process.wait(PATIENCE)) != 0:
        sys.exit(f"The last part of the run ended with exit code {code}: see {driver.out}.")
    steps.look()
    return kills, steps


def wait_for_steps(driver: Driver, steps: Steps, count: int) -> None:
    """Wait until this many further steps are trained."""
    target, since = steps.look() + count, time.monotonic()
    while steps.look() < target:
        driver.check()
        if time.monotonic() > since + PATIENCE:
            sys.exit(f"No {count} steps within {PATIENCE:g} s: see {driver.out}.")
        time.sleep(0.1)


def strike(victim: str, nodes: Nodes, driver: Driver, rng: random.Random) -> None:
    """Kill one victim of a kind."""
    if victim == "driver":
        driver.kill()
        driver.start()
    elif victim == "node":
        nodes.lose(rng)
    else:
        found = [process for process in psutil.process_iter(["cmdline"]) if is_actor(process, ACTORS[victim])]
        if not found:
            sys.exit(f"No process of a {victim} was found: the run has none, or its name has changed.")
        rng.choice(sorted(found, key=lambda process: process.pid)).send_signal(signal.SIGKILL)


def is_actor(process: psutil.Process, name: str) -> bool:
    """Return whether a process is an actor of this class."""
    words = process.info["cmdline"] or [""]
    return str(words[0]).startswith(f"ray::{name}")


def audit(folder: Path) -> dict[str, int]:
    """Count what the files of a run say of steps, groups and episodes."""
    results = rollgym.load_run(folder)
    steps = [int(line["step"]) for line in results.metrics]
    ids = Counter(episode.spec.episode_id for episode in results.episodes)
    groups: dict[str, int] = defaultdict(int)
    for episode in results.episodes:
        groups[episode.spec.group_id] += 1
    expected = len(steps) * GROUPS * GROUP_SIZE
    return {
        "steps": len(steps),
        "steps_out_of_order": int(steps != list(range(1, len(steps) + 1))),
        "episodes": len(ids),
        "lost": max(0, expected - len(ids)) + sum(size != GROUP_SIZE for size in groups.values()),
        "doubled": sum(ids.values()) - len(ids),
        "missing": int(sum(line["episodes_missing"] for line in results.metrics)),
        "retried": int(sum(line["infra_retries"] for line in results.metrics)),
    }


def report(kills: list[Kill], steps: Steps, found: dict[str, int]) -> dict[str, Any]:
    """Print the table of outages; returns the figures."""
    times = sorted(steps.seen.values())
    usual = statistics.median(after - before for before, after in zip(times, times[1:], strict=False))
    outages: dict[str, list[float]] = defaultdict(list)
    for kill in kills:
        outages[kill.victim].append(max(0.0, max(kill.delays) - usual))
    print("\n| killed | times | outage, median | longest |\n|---|---|---|---|")
    for victim in VICTIMS:
        if seconds := outages[victim]:
            middle, most = statistics.median(seconds), max(seconds)
            print(f"| {victim} | {len(seconds)} | {middle:.1f} s | {most:.1f} s |")
    print(f"\n{found['steps']} steps, {found['episodes']} episodes, median step {usual:.1f} s")
    rounded = {victim: [round(value, 1) for value in values] for victim, values in outages.items()}
    figures = {"kills": len(kills), "step_seconds": round(usual, 2), "outages": rounded}
    return {"benchmark": "chaos", **found, **figures}


if __name__ == "__main__":
    main()
