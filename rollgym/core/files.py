"""Safe access to files of run folders: no links out of a folder, no pipes, no devices.

A run folder may come from an untrusted source. Reading shows only files inside it, and writing changes only
files inside it. Errors are `OSError`, so callers report them like those of any other file.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from rollgym.core.errors import UsageError, os_reason

MOST_JSON = 64_000_000
"""Maximum bytes of a JSON file that is read as a whole (a manifest, a summary)."""


def open_inside(path: Path, folder: Path | None = None) -> IO[bytes]:
    """Open a regular file for reading; with ``folder``, only one inside that folder after resolving links.

    Raises:
        OSError: The file does not exist, is a pipe or a device, or is a link out of ``folder``.
    """
    real = path
    if folder is not None:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise OSError(errno.ELOOP, "it is a link that leads out of the folder", str(path))
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    return _regular(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path, "rb")


def read_bounded(path: Path, most: int = MOST_JSON, folder: Path | None = None) -> bytes:
    """Read a regular file of at most ``most`` bytes (see `open_inside`)."""
    with open_inside(path, folder) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return data


def gunzip(data: bytes, most: int) -> bytes:
    """Decompress gzip data of one or more members to at most ``most`` bytes.

    Raises:
        OSError: The data are not gzip, are cut off, or decompress to more.
    """
    content = bytearray()
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            content += member.decompress(data, most - len(content) + 1)
        except zlib.error as error:
            raise OSError(errno.EINVAL, f"it is not gzip: {error}") from None
        if len(content) > most:
            raise OSError(errno.EFBIG, f"it holds more than {most:,} bytes")
        if not member.eof:
            raise OSError(errno.EINVAL, "the gzip data are cut off")
        data = member.unused_data.lstrip(b"\0")
    return bytes(content)


def open_append(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file for reading and appending, or create it. A link is refused: its target must not change."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a link, and the file it leads to must not change"
            raise OSError(errno.ELOOP, reason, str(path)) from None
        raise
    return _regular(handle, path, "a+b", buffering=buffering)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that atomically replaces ``path`` at the end; a link there is replaced, not followed."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user asked for, atomically; raises `UsageError` where that fails."""
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {os_reason(error)}.") from None


def refuse_links(folder: Path) -> None:
    """Raise `UsageError` where a link in a folder leads out of it: writing would change its target."""
    inside = folder.resolve()
    for parent, folders, names in os.walk(inside):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise UsageError(
                    f"{folder / path.relative_to(inside)} is a link out of the run folder, to "
                    f"{os.readlink(path)}: resuming would write there. Replace the link by its target."
                )


def _regular(handle: int, path: Path, mode: str, **options: Any) -> IO[bytes]:
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        os.set_blocking(handle, True)
        return cast(IO[bytes], open(handle, mode, **options))
    except BaseException:
        os.close(handle)
        raise


def _umask() -> int:
    """The mask of this process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
