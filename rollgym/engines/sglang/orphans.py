"""Processes of servers, found in /proc by session, so that none outlives whoever started it.

Each server has a guard: a process that waits until its owner is gone, however that ended, and then ends the
server. Besides, every server is noted in a file with its owner, and whoever starts one next ends those whose
owner is gone. A process number may be used again, so a process is known by its number and the moment it was
started.
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


def started(pid: int) -> str:
    """When a process was started, in the kernel's words; empty where there is none (any more)."""
    fields = _stat(pid)
    return "" if fields is None or fields[0] == "Z" else fields[19]


def members(leader: int, began: str) -> list[int]:
    """The processes in the session of a server that began then, the first one included."""
    if started(leader) not in ("", began):
        return []  # the number is another's by now; while a session has members, it is nobody's
    found = []
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None and fields[0] != "Z" and int(fields[3]) == leader:
            found.append(pid)
    return found


def signal_all(leader: int, began: str, number: Signals) -> None:
    """Signal every process of a server."""
    for pid in members(leader, began):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def guard(pid: int, began: str) -> int:
    """Have a server ended when this process is gone; returns what to close once it has been stopped."""
    hears, held = os.pipe()
    try:
        command = [sys.executable, "-E", "-S", __file__, str(pid), began]
        subprocess.run(command, stdin=hears, stdout=subprocess.DEVNULL, check=True, start_new_session=True)
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(hears)
    return held


def _watch(pid: int, began: str) -> None:
    """Be a guard. A child of a child, so that whoever ends an owner's children leaves it alone."""
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    while os.read(0, 1):
        pass
    signal_all(pid, began, SIGKILL)


def note(pid: int, began: str) -> None:
    """Remember a server of ours."""
    me = os.getpid()
    text = json.dumps({"pid": pid, "began": began, "owner": me, "owner_began": started(me)})
    folder = _folder()
    part = folder / f".{pid}.{me}"
    part.write_text(text, encoding="utf-8")
    part.rename(folder / f"{pid}.json")


def forget(pid: int) -> None:
    """It is being stopped."""
    (_folder() / f"{pid}.json").unlink(missing_ok=True)


def clean_up() -> list[int]:
    """End servers whose owner is gone; returns their numbers."""
    ended = []
    for file in _folder().glob("*.json"):
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            pid, began = int(said["pid"]), str(said["began"])
            owner = started(int(said["owner"])) == str(said["owner_began"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if owner:
            continue
        if members(pid, began):
            signal_all(pid, began, SIGKILL)
            ended.append(pid)
        file.unlink(missing_ok=True)
    return ended


def _folder() -> Path:
    """Where servers are noted: a folder that nobody else may write to."""
    folder = Path(tempfile.gettempdir()) / f"rollgym-servers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _stat(pid: int) -> list[str] | None:
    """The fields after the name: state, parent, group, session, ..., and the start at 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
