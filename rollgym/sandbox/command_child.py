"""Confines itself as its argument says and becomes bubblewrap: what `SandboxedCommand.argv` starts.

A script that uses the standard library only: it runs outside of the package, before anything that is not
trusted.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Join the cgroup, set limits, drop root, and execute."""
    for path in spec["cgroup"]:
        with open(path, "w", encoding="ascii") as file:
            file.write("0")
    for name, value in spec["rlimits"].items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    words = list(spec["bwrap"])
    words += ["--seccomp", str(_memory(bytes.fromhex(spec["filter"])))]
    for path, text in spec["files"].items():
        words += ["--file", str(_memory(text.encode("utf-8", "surrogatepass"))), path]
    if spec["uid"] is not None:
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])
    os.chdir("/")
    os.execv(words[0], [*words, "--chdir", "/work", "--", *spec["command"]])


def _memory(data: bytes) -> int:
    """Return a descriptor that the next program inherits and reads data from."""
    descriptor = os.memfd_create("rollgym", 0)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
