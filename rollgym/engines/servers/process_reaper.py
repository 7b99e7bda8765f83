"""Kills server processes whose owner is gone; finds processes in /proc by session.

Each server has a guard: a process that waits until the server's owner has exited, for whatever reason, and
then kills the server. In addition, every server is registered in a file with its owner, and the next start
kills those whose owner is gone. Process ids are reused, so a process is identified by id and start time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, Signals


def start_time(pid: int) -> str:
    """Return the start time of a process as the kernel reports it; empty if it does not run."""
    fields = _stat(pid)
    return "" if fields is None or fields[0] == "Z" else fields[19]


def session_pids(leader: int, began: str) -> list[int]:
    """Return the processes of a server's session, the leader included."""
    if start_time(leader) not in ("", began):
        return []  # the id was reused, which cannot happen while the session has processes
    found = []
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z" and int(fields[3]) == leader:
            found.append(pid)
    return found


def signal_all(leader: int, began: str, number: Signals) -> None:
    """Signal every process of a server."""
    for pid in session_pids(leader, began):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def guard(pid: int, began: str) -> int:
    """Start a guard that kills a server when this process exits; returns a descriptor that ends the guard."""
    read_end, write_end = os.pipe()
    try:
        command = [sys.executable, "-E", "-S", __file__, str(pid), began]
        subprocess.run(command, stdin=read_end, stdout=subprocess.DEVNULL, check=True, start_new_session=True)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return write_end


def _watch(pid: int, began: str) -> None:
    """Run as a guard. A grandchild, so that killing the owner's children does not kill it."""
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    while os.read(0, 1):
        pass
    signal_all(pid, began, SIGKILL)


def register(pid: int, began: str) -> None:
    """Register a server with this process as its owner."""
    me = os.getpid()
    text = json.dumps({"pid": pid, "began": began, "owner": me, "owner_began": start_time(me)})
    folder = _folder()
    part = folder / f".{pid}.{me}"
    part.write_text(text, encoding="utf-8")
    part.rename(folder / f"{pid}.json")


def unregister(pid: int) -> None:
    """Remove the registration of a server that is being stopped."""
    (_folder() / f"{pid}.json").unlink(missing_ok=True)


def reap_orphans() -> list[int]:
    """Kill servers whose owner is gone; returns their process ids."""
    killed = []
    for file in _folder().glob("*.json"):
        try:
            entry = json.loads(file.read_text(encoding="utf-8"))
            pid, began = int(entry["pid"]), str(entry["began"])
            owner_alive = start_time(int(entry["owner"])) == str(entry["owner_began"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if owner_alive:
            continue
        if session_pids(pid, began):
            signal_all(pid, began, SIGKILL)
            killed.append(pid)
        file.unlink(missing_ok=True)
    return killed


def _folder() -> Path:
    """Return the folder of registrations, which only this user may write to."""
    folder = Path(tempfile.gettempdir()) / f"rollgym-servers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent, group, session, ..., start (19)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
