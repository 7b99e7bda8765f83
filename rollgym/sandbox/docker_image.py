"""Builds an image for the docker backend from a local Python, without a registry."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from rollgym.core.errors import RunError, UsageError
from rollgym.sandbox import docker_engine
from rollgym.sandbox.hidden import OURS

SKIPPED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
PROGRAMS = ("/bin/sh",)
"""Files besides Python that the image contains (``os.system`` needs a shell)."""
FOLDERS = ("dev", "etc", "proc", "sys", "usr/bin", "usr/lib", "usr/local/bin", "work")
HIDDEN = ("/tmp/", "/work/", "/dev/", "/proc/", "/sys/")
"""Folders that a container mounts itself: image content there is hidden."""
TEXTS = {
    "etc/passwd": "root:x:0:0::/:/bin/sh\nsandbox:x:65534:65534::/work:/bin/sh\n",
    "etc/group": "root:x:0:\nsandbox:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
ASK = """\
import json, os, sys, sysconfig
paths = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
paths |= {path for path in sys.path if path.endswith("lib-dynload")}
print(json.dumps([sys._base_executable or sys.executable, sorted(paths), sys.version.split()[0],
                  sys.implementation.cache_tag]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A built image."""

    tag: str
    python: str
    """Python version."""
    files: int
    megabytes: float


def build_image(
    tag: str = docker_engine.DEFAULT_IMAGE, python: str | None = None, programs: Sequence[str] = PROGRAMS
) -> Built:
    """Build an image from a local Python and load it into the engine.

    Args:
        tag: Name of the image.
        python: The Python; default: the running one.
        programs: Paths of further programs of this machine that the image contains.
    """
    repository, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
    with docker_engine.connected() as api, tempfile.TemporaryFile() as file:
        built, count = write_tar(file, python or sys.executable, programs)
        size = file.tell()
        file.seek(0)
        changes = [f"LABEL {docker_engine.LABEL}.python={built}", 'CMD ["python3"]']
        try:
            answer = api.import_image_from_data(file, repository, version, changes)
        except docker_engine.failures() as error:
            raise RunError(f"The engine did not accept the image: {docker_engine.explain(error)}") from None
        if '"error"' in answer:
            raise RunError(f"The engine did not accept the image: {answer.strip()}")
    return Built(tag=tag, python=built, files=count, megabytes=size / 1e6)


def write_tar(file: IO[bytes], python: str, programs: Sequence[str] = PROGRAMS) -> tuple[str, int]:
    """Write a Python installation as a tar; return its version and number of files."""
    program, folders, version, cache = _ask(python)
    program = os.path.realpath(program)
    files = {program, *programs, *_library(folders, cache)}
    if hidden := next((path for path in (program, *folders) if path.startswith(HIDDEN)), None):
        raise UsageError(
            f"{hidden} would be hidden in a container, which mounts its own {hidden.split('/')[1]}."
        )
    files |= _shared_libraries(path for path in files if path in (program, *programs) or ".so" in path)
    with tarfile.open(fileobj=file, mode="w") as tar:
        writer = _Writer(tar)
        for name in FOLDERS:
            writer.folder(name)
        writer.folder("tmp", 0o1777)
        for path in ("/lib", "/lib32", "/lib64", "/bin"):
            if os.path.islink(path):
                writer.link(path, os.readlink(path))
        for path in sorted(files):
            writer.file(path)
        writer.link("/usr/local/bin/python3", program)
        for name, text in TEXTS.items():
            writer.text(name, text)
    return version, len(files)


def _ask(python: str) -> tuple[str, list[str], str, str]:
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "An image can be built only from a Python for Linux; use an existing image with python3: "
            "docker pull python:3.12-slim, and image='python:3.12-slim' in the settings."
        )
    try:
        done = subprocess.run([python, "-I", "-S", "-c", ASK], capture_output=True, text=True, check=True)
        program, folders, version, cache = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise UsageError(f"{python} is not a Python that can be started: {error}") from None
    return program, folders, version, cache


def _library(folders: list[str], cache: str) -> Iterable[str]:
    """Return the standard library with compiled files, since the image is read-only."""
    for top in folders:
        for folder, below, names in os.walk(top):
            below[:] = [name for name in below if name not in SKIPPED and not name.startswith("config-")]
            below[:] = [name for name in below if not OURS.fullmatch(name)]
            for name in names:
                if OURS.fullmatch(name):
                    continue
                path = os.path.join(folder, name)
                if os.path.isfile(path) and (not name.endswith(".pyc") or name.endswith(f".{cache}.pyc")):
                    yield path


def _shared_libraries(programs: Iterable[str]) -> set[str]:
    """Return the shared libraries of these files and the dynamic linker."""
    done = subprocess.run(["ldd", *sorted(programs)], capture_output=True, text=True, check=False)
    paths = set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", done.stdout, re.MULTILINE))
    if missing := sorted(set(re.findall(r"lib(?:c|m|pthread|python)\S* => not found", done.stdout))):
        raise RunError(f"ldd does not find what Python needs: {', '.join(missing)}")
    cache = "/etc/ld.so.cache"
    return paths | ({cache} if os.path.isfile(cache) else set())


class _Writer:
    """Adds local files to a tar, world-readable and owned by root."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar, self._seen = tar, set[str]()

    def folder(self, name: str, mode: int = 0o755) -> None:
        if name and name not in self._seen:
            self.folder(os.path.dirname(name))
            self._add(name, tarfile.DIRTYPE, mode)

    def link(self, path: str, target: str) -> None:
        if (name := path.lstrip("/")) not in self._seen:
            self.folder(os.path.dirname(name))
            self._add(name, tarfile.SYMTYPE, 0o777, target)

    def file(self, path: str) -> None:
        # Folders (/lib) and files (libx.so.1) may be links here; inside they are regular.
        folder = os.path.realpath(os.path.dirname(path))
        name = os.path.join(folder, os.path.basename(path)).lstrip("/")
        if name in self._seen:
            return
        self.folder(os.path.dirname(name))
        with open(path, "rb") as content:
            state = os.fstat(content.fileno())
            # Keep the mtime: compiled files record that of their source.
            mode = 0o755 if state.st_mode & 0o111 else 0o644
            self._add(name, tarfile.REGTYPE, mode, content=content, size=state.st_size, time=state.st_mtime)

    def text(self, name: str, text: str) -> None:
        self._add(name, tarfile.REGTYPE, 0o644, content=io.BytesIO(text.encode()), size=len(text))

    def _add(
        self,
        name: str,
        kind: bytes,
        mode: int,
        target: str = "",
        *,
        content: IO[bytes] | None = None,
        size: int = 0,
        time: float = 0,
    ) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.linkname, entry.size, entry.mtime = kind, mode, target, size, int(time)
        entry.uname = entry.gname = "root"
        self._seen.add(name)
        self._tar.addfile(entry, content)
