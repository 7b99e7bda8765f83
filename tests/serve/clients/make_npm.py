"""Install the CLI agent from npm that the endpoint is tested with.

    python tests/serve/clients/make_npm.py FOLDER

About 150 MB; needs npm and Node.js. A folder that is complete is left as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "@qwen-code/qwen-code@0.24.4"
DONE = "package.txt"


def make(folder: Path) -> None:
    """Install the package, unless it is there."""
    done = folder / DONE
    if done.is_file() and done.read_text(encoding="utf-8") == PACKAGE:
        print(f"{folder} has {PACKAGE} already")
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is missing: install Node.js to test the endpoint with a CLI agent.")
    folder.mkdir(parents=True, exist_ok=True)
    words = [npm, "install", "--no-fund", "--no-audit", "--loglevel=error", "--prefix", str(folder), PACKAGE]
    subprocess.run(words, check=True)
    done.write_text(PACKAGE, encoding="utf-8")
    print(f"{folder} has {PACKAGE} now")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    make(Path(sys.argv[1]).absolute())
