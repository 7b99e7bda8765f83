"""WebShop in a real browser: how browsers start, end, die and make way for others."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from rollgym.browser.find import find_chromium
from rollgym.browser.host import BrowserLost
from rollgym.core.errors import RunError, UsageError
from rollgym.core.failures import outcome_of
from rollgym.core.types import Outcome
from rollgym.envs.webshop.browser import WebShopBrowserEnv

try:
    find_chromium()
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)


def chromium_processes(of: int | None = None) -> set[int]:
    """The process ids of Chromium among the descendants of a process (this one)."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                names[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found = {of or os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {
        pid for pid in found if b"--headless" in names.get(pid, b"") or b"chrom" in names.get(pid, b"")[:60]
    }


def command_line(pid: int) -> bytes:
    """Empty for a process that is gone meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def browsers() -> set[int]:
    """The browsers themselves: not their children, nor the script that some systems start them by."""
    lines = {pid: command_line(pid) for pid in chromium_processes()}
    return {
        pid
        for pid, line in lines.items()
        if b"--remote-debugging-pipe" in line and b"--type=" not in line and not line.startswith(b"/bin/sh")
    }


def wait_until_gone(pids: set[int]) -> None:
    for _ in range(2000):  # a busy machine takes its time
        if not pids & chromium_processes(1):
            return
        time.sleep(0.1)
    raise AssertionError(f"{pids & chromium_processes(1)} are still there")


def test_a_page_that_is_not_the_shops_is_a_lost_browser(synthetic_folder: str) -> None:
    env = WebShopBrowserEnv(synthetic_folder)
    try:
        env.reset(seed=0)
        with pytest.raises(BrowserLost, match="is not a page of the session"):
            env._arrive(env._tree, "/elsewhere/x/0")
        assert env.reset(seed=0)[1]["page"] == "search"
    finally:
        env.close()


def test_a_killed_browser_is_a_typed_outcome_and_the_next_episode_has_a_new_one(
    synthetic_folder: str,
) -> None:
    one, other = WebShopBrowserEnv(synthetic_folder), WebShopBrowserEnv(synthetic_folder)
    try:
        first, _ = one.reset(seed=0)
        other.reset(seed=1)
        before = browsers()
        assert before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrowserLost, match="the browser was lost") as lost:
            one.step("type[e1][shirt]")
        assert outcome_of(lost.value) is Outcome.WORKER_LOST
        with pytest.raises(BrowserLost):
            one.step("type[e1][shirt]")
        assert one.reset(seed=0)[0] == first
        assert one.step("type[e1][shirt]")[4]["page"] == "results"
        with pytest.raises(BrowserLost):
            other.step("type[e1][shirt]")
        other.reset(seed=1)
        after = browsers()
        assert len(after) == 1  # one browser for both again
        assert not after & before
    finally:
        one.close()
        other.close()


@pytest.mark.slow
def test_a_browser_that_does_not_answer_is_lost_and_ended(synthetic_folder: str) -> None:
    env = WebShopBrowserEnv(synthetic_folder)
    try:
        env.reset(seed=0)
        stopped = chromium_processes()
        for pid in browsers():
            os.kill(pid, signal.SIGSTOP)
        env._seat.require_tab().page.set_default_timeout(3000)
        with pytest.raises(BrowserLost, match="Timeout"):
            env.step("type[e1][shirt]")
        assert env.reset(seed=0)[1]["page"] == "search"
        wait_until_gone(stopped)
    finally:
        env.close()


@pytest.mark.slow
def test_a_browser_makes_way_for_a_new_one_after_many_episodes(
    synthetic_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package also has a function of that name, which is what an import would give.
    module = import_module("rollgym.browser.host")
    monkeypatch.setattr(module, "LINGER", 0.0)
    one, other = WebShopBrowserEnv(synthetic_folder), WebShopBrowserEnv(synthetic_folder)
    try:
        one.reset(seed=0)
        other.reset(seed=0)
        first = browsers()
        monkeypatch.setattr(module, "MAX_TABS", 2)
        one.reset(seed=1)
        second = browsers() - first
        assert len(second) == 1
        assert other.step("type[e1][shirt]")[4]["page"] == "results"  # its episode goes on
        other.reset(seed=1)
        wait_until_gone(first)
        assert browsers() == second
    finally:
        one.close()
        other.close()


def test_closing_leaves_no_process(synthetic_folder: str) -> None:
    code = f"""
import sys
from rollgym.envs.webshop.browser import WebShopBrowserEnv
envs = [WebShopBrowserEnv({synthetic_folder!r}) for _ in range(2)]
for env in envs:
    env.reset(seed=0)
    env.step("type[e1][shirt]")
print("open", flush=True)
sys.stdin.readline()
envs[0].close()
envs[0].close()
del envs, env
print("closed", flush=True)
sys.stdin.readline()
env = WebShopBrowserEnv({synthetic_folder!r})
env.reset(seed=0)
print("again", flush=True)
sys.stdin.readline()
"""
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "open\n"
        running = chromium_processes(child.pid)
        assert running
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "closed\n"
        wait_until_gone(running)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "again\n"
        running = chromium_processes(child.pid)
        assert running
        out, err = child.communicate("\n")
        assert (child.returncode, out, err) == (0, "", "")
        wait_until_gone(running)
    finally:
        child.kill()
        child.communicate()


def test_it_works_in_the_threads_of_a_pool(synthetic_folder: str) -> None:
    from rollgym.core.types import EpisodeSpec
    from rollgym.pool.local import LocalPool

    mine = chromium_processes()

    async def play() -> tuple[list[str], set[int]]:
        pool = LocalPool(workers=1)
        try:
            specs = [
                EpisodeSpec(
                    episode_id=f"e{number}",
                    env_id="rollgym/WebShopBrowser-v0",
                    env_kwargs={"shop": synthetic_folder},
                    task=number,
                )
                for number in range(2)
            ]
            sessions = [await pool.open(spec) for spec in specs]
            await asyncio.gather(*(session.reset() for session in sessions))
            steps = await asyncio.gather(*(session.step("type[e1][shirt]") for session in sessions))
            running = chromium_processes() - mine
            for session in sessions:
                await session.close()
        finally:
            await pool.close()
        return [step.info["page"] for step in steps], running

    pages, running = asyncio.run(play())
    assert pages == ["results", "results"]
    assert running
    wait_until_gone(running)


def test_what_does_not_start_is_said(synthetic_folder: str, tmp_path: Path) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    env = WebShopBrowserEnv(synthetic_folder, chromium=str(broken))
    with pytest.raises(
        RunError, match=r"chromium\) does not start: .*\(no such luck\).*apt install chromium-headless-shell"
    ):
        env.reset(seed=0)
    env.close()
