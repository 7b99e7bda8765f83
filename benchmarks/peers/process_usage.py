"""CPU time and memory of a training process, measured from outside: for benchmarks against peers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

POLL_SECONDS = 0.1


@dataclass
class Usage:
    """What a contender had used at the end of a step; step 0 is the moment the model is loaded."""

    step: int
    cpu_seconds: float
    wall_seconds: float


class ProcessTree:
    """CPU time and memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._started = time.perf_counter()
        self.peak_bytes = 0

    def usage(self, step: int) -> Usage:
        """User and system time so far; that of ended children is in their parents' figures."""
        total = 0.0
        for process in self._processes():
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return Usage(step, total, time.perf_counter() - self._started)

    def sample_memory(self) -> None:
        """Update the peak of the resident memory."""
        resident = 0
        for process in self._processes():
            try:
                resident += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_bytes = max(self.peak_bytes, resident)

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def run_contender(
    command: list[str],
    environment: dict[str, str],
    output: Path,
    log: Path,
    steps: int,
    step_now: Callable[[], int],
) -> tuple[list[Usage], float]:
    """Run a training process; return its usage at the end of each step, and its peak memory in MB.

    ``step_now`` returns the number of finished steps, -1 until the model is loaded.
    """
    with output.open("w") as out, log.open("w") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=os.environ | environment)
        try:
            tree, marks = ProcessTree(process.pid), list[Usage]()
            while process.poll() is None and len(marks) <= steps:
                tree.sample_memory()
                step = step_now()
                if step >= len(marks):
                    usage = tree.usage(step)
                    marks += [replace(usage, step=number) for number in range(len(marks), step + 1)]
                    minutes = (usage.cpu_seconds - marks[0].cpu_seconds) / 60
                    print(f"  step {step}/{steps}  {minutes:.2f} CPU-minutes", flush=True)
                time.sleep(POLL_SECONDS)
            process.wait()
        finally:
            process.terminate()
            process.wait()
    if process.returncode or len(marks) <= steps:
        tail = (log.read_text() + output.read_text())[-3000:]
        raise SystemExit(f"{command[0]} stopped with code {process.returncode}:\n{tail}")
    return marks, tree.peak_bytes / 2**20


def count_lines(path: Path) -> int:
    """Complete lines of a file that is being written."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
