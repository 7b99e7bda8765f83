"""Folders of executions and the session: created, read, written and emptied without following links.

Runs inside. Names come from the host as relative paths; the content comes from untrusted code.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator

from rollgym.sandbox import worker_limits

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_beneath(root: str, name: str, flags: int, make: bool = False) -> int:
    """Open a regular file below a folder; a link in the path is an error."""
    *folders, last = name.split("/")
    here = os.open(root, FOLDER)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o755, dir_fd=here)
            below = os.open(folder, FOLDER, dir_fd=here)
            os.close(here)
            here = below
        file = os.open(last, flags | FILE, 0o644, dir_fd=here)
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(f"{name} is not a regular file")
    return file


def write(root: str, name: str, content: bytes | bytearray | memoryview) -> None:
    """Write a file below a folder and create its parents."""
    file = open_beneath(root, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, make=True)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def read(root: str, name: str, most: int) -> bytearray:
    """Read a file below a folder."""
    file = open_beneath(root, name, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        if size > most:
            raise OSError(f"{name} has {size:,} bytes; at most {most:,} can be read")
        content = bytearray(size)
        done = os.readv(file, [content]) if size else 0
        return content if done == size else content[:done]
    finally:
        os.close(file)


def empty(folder: str, keep: Collection[str] = ()) -> None:
    """Delete the content of a folder except the names kept, with bounded recursion and descriptors.

    Subfolders are first moved to the top under a new name, so that paths and recursion stay short.
    """
    try:
        _unlock(folder)
        top = os.open(folder, FOLDER)
    except OSError:
        return
    try:
        count, before = 0, None
        while (names := [name for name in os.listdir(top) if name not in keep]) and names != before:
            before = names
            for name in names:
                with contextlib.suppress(OSError):
                    count = _remove(top, name, count)
    finally:
        os.close(top)


def _remove(top: int, name: str, count: int) -> int:
    try:
        os.unlink(name, dir_fd=top)
        return count
    except IsADirectoryError:
        pass
    except FileNotFoundError:
        return count
    try:
        os.chmod(name, 0o700, dir_fd=top)
        here = os.open(name, FOLDER, dir_fd=top)
    except OSError:
        return count
    try:
        for entry in os.listdir(here):
            try:
                os.unlink(entry, dir_fd=here)
            except IsADirectoryError:
                count += 1
                os.chmod(entry, 0o700, dir_fd=here)
                os.rename(entry, f".swept-{os.urandom(8).hex()}", src_dir_fd=here, dst_dir_fd=top)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=top)
    return count


def _unlock(folder: str) -> None:
    """Restore the permissions of a folder."""
    mode = stat.S_IMODE(os.lstat(folder).st_mode)
    if mode & 0o700 != 0o700 and stat.S_ISDIR(os.lstat(folder).st_mode):
        os.chmod(folder, 0o1777 if folder in ("/tmp", "/dev/shm", "/work") else 0o700)


def renew(folder: str) -> None:
    """Ensure that a path is a usable folder."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            os.unlink(folder)
    except FileNotFoundError:
        pass
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    _unlock(folder)


def usage(folder: str, most_files: int) -> tuple[int, int]:
    """Count bytes and files below a folder, up to a maximum of files."""
    size = files = 0
    ask = [folder]
    while ask and files <= most_files:
        try:
            with os.scandir(ask.pop()) as entries:
                for entry in entries:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        ask.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:  # Unreadable or too deep for a path: its content is not needed.
            return size, most_files + 1
    return size, files


def unlinked(folder: str, each: int) -> int | None:
    """Return bytes of unnamed files held by descendants; none if a process hides its files.

    A file that is only mapped has no readable size: it counts ``each``.
    """
    blocks: dict[tuple[int, int], int] = {}
    mapped: set[int] = set()
    for pid in worker_limits.family():
        for task in worker_limits.threads(pid):
            try:
                blocks |= _open_files(task)
                mapped |= set(_mapped_files(task, folder))
            except PermissionError:
                # An exiting process has no memory and shows nothing.
                if worker_limits.address_space(pid):
                    return None
            except OSError:
                continue
    opened = {inode for _, inode in blocks}
    return sum(blocks.values()) * 512 + each * len(mapped - opened)


def _open_files(task: str) -> dict[tuple[int, int], int]:
    """Return open unnamed regular files: device, inode and blocks."""
    files = {}
    for name in os.listdir(f"{task}/fd"):
        with contextlib.suppress(FileNotFoundError):
            state = os.stat(f"{task}/fd/{name}")
            if stat.S_ISREG(state.st_mode) and not state.st_nlink:
                files[state.st_dev, state.st_ino] = state.st_blocks
    return files


def _mapped_files(task: str, folder: str) -> Iterator[int]:
    """Return inodes of mapped, deleted files of a folder."""
    with open(f"{task}/maps", "rb") as file:
        maps = file.read()
    if b" (deleted)" in maps:
        for line in maps.splitlines():
            number, _, name = line.partition(b"/")
            if name.endswith(b" (deleted)") and (b"/" + name).startswith(os.fsencode(folder)):
                yield int(number.split()[4])
