"""Executions of a tiny program per second, and their cost: bare processes and sandboxes.

    python benchmarks/sandbox.py [--quick] [--seconds 3] [--rounds 5]

All contenders run the same program with the same Python, in turn, several rounds; the median counts, and
every answer is checked. On a machine that others use too, executions per second are as noisy as that work;
CPU time per execution, summed over all processes of a contender (a Docker engine's included), is
steadier. Read the ratios. Docker takes part where an engine answers that has the image of
``rollgym sandbox build-image``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rollgym.core.errors import RollgymError
from rollgym.sandbox import docker, docker_engine
from rollgym.sandbox.factory import OPENERS
from rollgym.sandbox.interpreter import Interpreter, find_python, spare_uid
from rollgym.sandbox.namespaces import command, find_bwrap
from rollgym.sandbox.types import Level, Sandbox, SandboxSettings
from rollgym.sandbox.worker_limits import cpu_seconds, descendants

PROGRAM = "print(sum(i * i for i in range(100)))"
ANSWER = "328350\n"
SETTINGS = SandboxSettings(minimum=Level.NONE, allow_unsafe=True)
ENGINE = ("dockerd", "containerd", "containerd-shim")
"""Process names of a Docker engine."""
LEAST = 20
"""Executions in a round, however slow the machine is."""

Once = Callable[[], str]
"""Runs the program once and returns what it printed."""


class Cost(NamedTuple):
    """What one contender did in one round."""

    per_second: float
    cpu_ms: float


def cpu_now(engine: list[int]) -> float:
    """CPU time of this process, an engine's, and all their descendants, dead or alive."""
    below = [*engine, *(pid for root in (os.getpid(), *engine) for pid in descendants(root))]
    ended = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return ended + cpu_seconds(set(below))


def engine_processes() -> list[int]:
    """The processes of Docker engines on this machine; those of containers are below them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() in ENGINE:
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def process(*flags: str) -> Iterator[Once]:
    """One bare process for each execution."""
    words = [find_python().path, *flags, "-c", PROGRAM]
    yield lambda: subprocess.run(words, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def bubblewrap() -> Iterator[Once]:
    """New namespaces for each execution, without a filter or monitor."""
    bwrap, python, uid = find_bwrap(), find_python(), spare_uid()
    if bwrap is None:
        raise RollgymError("bubblewrap is not installed")
    words = command(bwrap, Interpreter(python.path, python.folders, ""), SETTINGS, counted=True)
    words = [*words[: words.index("--") + 1], python.path, "-I", "-S", "-c", PROGRAM]
    user = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}

    def once() -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=True, env={}, cwd="/", **user)  # type: ignore[call-overload]
        return str(done.stdout)

    yield once


@contextlib.contextmanager
def fresh(backend: str) -> Iterator[Once]:
    """Our worker: a fork, a folder and limits for each execution."""
    with _sandbox(backend) as sandbox:
        yield lambda: sandbox.exec(PROGRAM).stdout


@contextlib.contextmanager
def session(backend: str) -> Iterator[Once]:
    """Our worker: turns of one session."""
    with _sandbox(backend) as sandbox:
        yield lambda: sandbox.run(PROGRAM).stdout


@contextlib.contextmanager
def _sandbox(backend: str) -> Iterator[Sandbox]:
    with contextlib.closing(OPENERS[backend](SETTINGS)) as sandbox:
        yield sandbox


@contextlib.contextmanager
def docker_exec() -> Iterator[Once]:
    """One ``docker exec`` for each execution, in a container that lasts and has the walls of ours."""
    api = docker_engine.connect()
    image = docker_engine.find_image(api, docker_engine.DEFAULT_IMAGE)
    walls = api.create_host_config(**docker.host_config(SETTINGS.limits))
    idle = ["python3", "-c", "import time; time.sleep(86400)"]
    container = api.create_container(
        image["Id"], entrypoint=idle, labels=docker_engine.labels(), host_config=walls
    )["Id"]

    def once() -> str:
        words = ["python3", "-I", "-S", "-c", PROGRAM]
        said: bytes = api.exec_start(api.exec_create(container, words, user="65534")["Id"])
        return said.decode()

    try:
        api.start(container)
        yield once
    finally:
        docker_engine.remove(api, container)
        api.close()


CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager[Once]]] = {
    "process, python -I": lambda: process("-I"),
    "process, python -I -S": lambda: process("-I", "-S"),
    "bubblewrap each time": bubblewrap,
    "namespaces, fresh": lambda: fresh("namespaces"),
    "namespaces, session": lambda: session("namespaces"),
    "landlock, fresh": lambda: fresh("landlock"),
    "landlock, session": lambda: session("landlock"),
    "docker exec": docker_exec,
    "docker, fresh": lambda: fresh("docker"),
    "docker, session": lambda: session("docker"),
}


def measure(once: Once, seconds: float) -> Cost:
    """Run as often as the time allows."""
    once()
    engine = engine_processes()
    count, wall, cpu = 0, time.perf_counter(), cpu_now(engine)
    while count < LEAST or time.perf_counter() - wall < seconds:
        if (said := once()) != ANSWER:
            raise SystemExit(f"The program printed {said!r}.")
        count += 1
    return Cost(count / (time.perf_counter() - wall), 1e3 * (cpu_now(engine) - cpu) / count)


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 0.7, 2
    print(f"{PROGRAM}, {find_python().why}, median of {args.rounds} x {args.seconds:g} s\n")
    costs: dict[str, Cost] = {}
    with contextlib.ExitStack() as stack:
        ready: dict[str, Once] = {}
        for name, contender in CONTENDERS.items():
            try:
                ready[name] = stack.enter_context(contender())
            except RollgymError as error:
                print(f"{name}: left out: {error}")
        rounds: dict[str, list[Cost]] = {name: [] for name in ready}
        for _ in range(args.rounds):
            for name, once in ready.items():
                rounds[name].append(measure(once, args.seconds))
        for name, found in rounds.items():
            costs[name] = Cost(*(statistics.median(values) for values in zip(*found, strict=True)))
    report(costs)


def report(costs: dict[str, Cost]) -> None:
    """Print the table and the last line."""
    bare, barest = costs["process, python -I"], costs["process, python -I -S"]
    print(
        f"{'':24}{'per second':>11}{'CPU ms':>9}{'per CPU-second, of python -I':>31}{'of python -I -S':>17}"
    )
    for name, cost in costs.items():
        ratios = f"{bare.cpu_ms / cost.cpu_ms:30.2f}x{barest.cpu_ms / cost.cpu_ms:16.2f}x"
        print(f"{name:24}{cost.per_second:11,.0f}{cost.cpu_ms:9.2f}{ratios}")
    ours = costs.get("namespaces, fresh")
    result = {
        "benchmark": "sandbox",
        "ratio_to_process": round(bare.cpu_ms / ours.cpu_ms, 2) if ours else None,
        "ratio_to_bare_process": round(barest.cpu_ms / ours.cpu_ms, 2) if ours else None,
        "contenders": {
            name: {"per_second": round(cost.per_second, 1), "cpu_ms": round(cost.cpu_ms, 2)}
            for name, cost in costs.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
