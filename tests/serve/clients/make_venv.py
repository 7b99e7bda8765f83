"""Make a virtual environment with the clients and agent frameworks that the endpoint is tested with.

    python tests/serve/clients/make_venv.py FOLDER

About 700 MB. A folder that is complete is left as it is. Where the Python of this process cannot be read by
other users, such as one below /root, the environment is made with the system's Python, because sandboxed
programs run as an unprivileged user.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollgym.sandbox.interpreter import find_python

PACKAGES = (
    "openai==3.51.0",
    "anthropic==2.9.0",
    "openai-agents==0.24.0",
    "smolagents[openai]==1.26.0",
    "mini-swe-agent==2.4.6",
)
DONE = "clients.txt"


def make(folder: Path) -> None:
    """Make the environment, unless it is there."""
    python = usable_python()
    done, words = folder / DONE, "\n".join([*PACKAGES, python])
    if done.is_file() and done.read_text(encoding="utf-8") == words:
        print(f"{folder} has the clients already")
        return
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES], check=True)
    done.write_text(words, encoding="utf-8")
    print(f"{folder} has the clients now")


def usable_python() -> str:
    """Return the Python of sandboxed programs where it can make an environment, else that of this process."""
    python = find_python().path
    check = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"
    works = subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
    return python if works else sys.executable


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    make(Path(sys.argv[1]).absolute())
