"""Trying attacks on a sandbox, and looking at the host afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollgym.core.errors import UsageError, WorkerLost
from rollgym.sandbox.types import Limits, Ran, Sandbox, SandboxSettings

from .model import Attack, Evidence, Finding, Step, Verdict
from .prelude import program
from .stage import Stage

PATIENCE = 20.0
"""Seconds that a call may take over its limit before the host counts as hung: machines are busy."""
SLACK_MB = 350
"""Memory over its limit that an attack must hold to have won: samples are late, interpreters weigh."""


def _meminfo() -> float:
    """Megabytes that no process owns: files in memory, and what the kernel keeps for sockets and names."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("Shmem", "SUnreclaim")) / 1024


class Watch(threading.Thread):
    """Measures what the processes of an attack use, a few times in a hundred milliseconds."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(daemon=True)
        self.stage = stage
        self.peak_mb = 0.0
        self.peak_processes = 0
        self._before = _meminfo()
        self._done = threading.Event()

    def _owned(self, pid: int) -> float:
        """Megabytes of a process: its share of pages that forks have in common, where the kernel shows it."""
        for file, name in (("smaps_rollup", "Pss_Anon:"), ("status", "RssAnon:")):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                    if line.startswith(name):
                        return int(line.split()[1]) / 1024
        return 0.0

    def run(self) -> None:
        """Look until told to stop."""
        while not self._done.wait(0.03):
            pids = self.stage.processes()
            used = sum(map(self._owned, pids)) + max(0.0, _meminfo() - self._before)
            self.peak_mb = max(self.peak_mb, used)
            self.peak_processes = max(self.peak_processes, len(pids))

    def stop(self) -> None:
        """Stop looking."""
        self._done.set()
        self.join()


@dataclass
class Trial:
    """One backend under attack, by one thread: a sandbox may die with the thread that opened it."""

    stage: Stage
    settings: SandboxSettings
    sandbox: Sandbox | None = None
    _calls: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def _await(self, future: Future[Any], seconds: float) -> Any:
        try:
            return future.result(timeout=seconds + PATIENCE)
        except Late:
            self._calls = ThreadPoolExecutor(1)
            self.sandbox = None
            raise

    def open(self) -> Sandbox:
        """The sandbox under attack: a new one where the last was lost."""
        from rollgym.sandbox.factory import open_sandbox

        if self.sandbox is None:
            self.sandbox = self._await(self._calls.submit(open_sandbox, self.settings), 10)
        return self.sandbox

    def ask(self, code: str) -> Ran:
        """Run a harmless program."""
        ran: Ran = self._await(self._calls.submit(self.open().exec, code), 10)
        return ran

    def close(self) -> None:
        """Close what is open."""
        if self.sandbox is not None:
            self._await(self._calls.submit(self.sandbox.close), 10)
            self.sandbox = None

    def _call(self, sandbox: Sandbox, step: Step, limits: Limits, evidence: Evidence) -> None:
        """Make one call and note what it gave."""
        code = program(step.text, self.stage.facts())
        if step.call == "exec":
            evidence.ran.append(sandbox.exec(code, stdin=step.stdin, files=dict(step.files), limits=limits))
        elif step.call == "run":
            evidence.ran.append(sandbox.run(code, limits=limits))
        elif step.call == "reset":
            sandbox.reset()
        elif step.call == "pause":
            time.sleep(float(step.text))
        else:
            name = step.text.replace("FOLDER", str(self.stage.folder))
            try:
                if step.call == "read":
                    evidence.fetched.append(sandbox.read(name))
                else:
                    sandbox.write(name, b"overwritten")
            except (OSError, UsageError) as error:
                evidence.refused.append(f"{type(error).__name__}: {error}")

    def _health(self, sandbox: Sandbox) -> str | None:
        """What is wrong with the sandbox after the attack."""
        sandbox.reset()
        for call in (sandbox.exec, sandbox.run):
            ran = call("open('well', 'w').write('x'); print(6 * 7)")
            if ran.stdout != "42\n" or not ran.ok:
                return f"afterwards {call.__name__} does not work: {ran}"
        sandbox.reset()
        return None

    def _play(self, attack: Attack, evidence: Evidence) -> Finding | None:
        """Make the calls; a finding where they alone decide."""
        start, sandbox, limits = time.monotonic(), self.open(), attack.limits
        try:
            for step in attack.steps:
                call = self._calls.submit(self._call, sandbox, step, limits, evidence)
                self._await(call, limits.seconds)
            wrong = self._await(self._calls.submit(self._health, sandbox), 10)
        except Late:
            return Verdict.SUCCEEDED, f"the host waited {time.monotonic() - start:.0f} s in vain"
        except WorkerLost as error:
            self.close()
            return Verdict.SUCCEEDED, f"the sandbox was lost: {error}"
        except Exception as error:
            self.close()
            return Verdict.SUCCEEDED, f"the host's call failed: {type(error).__name__}: {error}"
        return (Verdict.SUCCEEDED, wrong) if wrong else None

    def _aftermath(self, attack: Attack, evidence: Evidence) -> str | None:
        """What the host sees, whatever the program says."""
        spilled = [evidence.output, *(b.decode("latin-1") for b in evidence.fetched)]
        if any(self.stage.secret in text for text in spilled):
            return "a secret of the host is in the output"
        if seen := self.stage.reached() or self.stage.harmed():
            return seen
        if evidence.peak_mb > attack.limits.memory_mb + SLACK_MB:
            return f"{evidence.peak_mb:.0f} MB were used of {attack.limits.memory_mb} MB allowed"
        if evidence.peak_processes > 3 * attack.limits.processes:
            return f"{evidence.peak_processes} processes of {attack.limits.processes} allowed"
        if left := self.stage.survivors():
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
            return f"{len(left)} processes outlived it"
        return None

    def attack(self, attack: Attack) -> Finding:
        """Try one attack, and judge it by what it says and by what the host sees."""
        if self.open().level < attack.needs:
            return Verdict.NOT_TRIED, "it could harm the host"
        finding, too_much = self._attempt(attack)
        # Files in memory and the kernel's share are counted for the whole machine, other tests included:
        # what an attack holds, it holds a second time.
        return self._attempt(attack)[0] if too_much else finding

    def _attempt(self, attack: Attack) -> tuple[Finding, bool]:
        """One attempt, and whether it used too much memory."""
        evidence = Evidence(self.stage, attack.limits)
        watch = Watch(self.stage)
        watch.start()
        try:
            finding = self._play(attack, evidence)
        finally:
            watch.stop()
        evidence.peak_mb, evidence.peak_processes = watch.peak_mb, watch.peak_processes
        too_much = evidence.peak_mb > attack.limits.memory_mb + SLACK_MB
        if seen := self._aftermath(attack, evidence):
            return (Verdict.SUCCEEDED, seen), too_much
        return finding or attack.judge(evidence), too_much
