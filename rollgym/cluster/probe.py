"""What one machine says of itself, asked of every node when a run begins."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine and its software."""

    host: str = ""
    python: str = ""
    ray: str = ""
    rollgym: str = ""
    digest: str = ""
    """Of all of rollgym's own source files."""
    host_memory: int = 0
    gpu_memory: int = 0
    """Bytes of its smallest GPU; 0 where there is none."""
    gpu_model: str = ""
    trouble: str = ""
    """Why it could not be asked."""


def ask_facts() -> Facts:
    """The same as `facts_here`, as a function that can be sent."""
    return facts_here()


@functools.cache
def facts_here() -> Facts:
    """Of the machine and process that calls."""
    gpus = _gpus()
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        ray=_version("ray"),
        rollgym=_version("rollgym"),
        digest=_digest(),
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_memory=min((memory for memory, _ in gpus), default=0),
        gpu_model=gpus[0][1] if gpus else "",
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "without a version"


def _digest() -> str:
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    # Symbolic links to the other rooms are followed, as an installed package has no links.
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def _gpus() -> list[tuple[int, str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    ask = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in said.splitlines():
        memory, _, name = line.partition(",")
        if memory.strip().isdigit():
            found.append((int(memory) * 2**20, name.strip()))
    return found
