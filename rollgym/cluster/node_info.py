"""Hardware and software of a node, queried from every node when a run starts."""

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
class NodeInfo:
    """Hardware and software of one machine."""

    host: str = ""
    python: str = ""
    ray: str = ""
    rollgym: str = ""
    digest: str = ""
    """Hash of rollgym's source files."""
    host_memory: int = 0
    gpu_memory: int = 0
    """Bytes of its smallest GPU; 0 without GPUs."""
    gpu_model: str = ""
    error: str = ""
    """Why the query failed."""


def fetch_node_info() -> NodeInfo:
    """Return `local_node_info`; a plain function that Ray can serialize."""
    return local_node_info()


@functools.cache
def local_node_info() -> NodeInfo:
    """Return the info of this machine and process."""
    gpus = _gpus()
    return NodeInfo(
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
        return "of unknown version"


def _digest() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    # Follows the symbolic links of a source tree: an installed package has none.
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _gpus() -> list[tuple[int, str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in output.splitlines():
        memory, _, name = line.partition(",")
        if memory.strip().isdigit():
            gpus.append((int(memory) * 2**20, name.strip()))
    return gpus
