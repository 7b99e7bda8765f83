"""Make a virtual environment with the clients and agent frameworks that the endpoint is tested with.

    python tests/serve/clients/make_venv.py FOLDER

About 500 MB, a minute. A folder that is complete is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    done, words = folder / DONE, "\n".join(PACKAGES)
    if done.is_file() and done.read_text(encoding="utf-8") == words:
        print(f"{folder} has the clients already")
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES], check=True)
    done.write_text(words, encoding="utf-8")
    print(f"{folder} has the clients now")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    make(Path(sys.argv[1]).absolute())
