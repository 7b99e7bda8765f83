"""Make the virtual environments with the packages that adapters and integrations are tested with.

    python tests/adapters/real/make_venvs.py FOLDER

Makes FOLDER/gem, FOLDER/miniwob, FOLDER/openenv, FOLDER/trackers, FOLDER/trl and FOLDER/verifiers:
dependencies of most conflict with each other's or with those of the main environment. About 3 GB. A complete
folder is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VENVS = {
    "gem": ("gem-llm==0.1.0", "-e", str(ROOT)),
    "miniwob": ("miniwob==1.1.0", "-e", f"{ROOT}[browser]"),
    "openenv": ("openenv==0.10.0",),
    "trackers": (
        "wandb==0.31.0",
        "mlflow-skinny==3.17.2",
        "trackio==0.43.0",
        "pytest>=8",
        "pytest-timeout",
        "-e",
        str(ROOT),
    ),
    # torch is pinned: a looser version may install several GB of CUDA libraries.
    "trl": ("trl==1.16.0", "torch==2.13.0", "-e", f"{ROOT}[train]"),
    "verifiers": ("verifiers[ta]==0.4.0", "-e", str(ROOT)),
}
DONE = "packages.txt"


def make(folder: Path, packages: tuple[str, ...]) -> None:
    """Make one environment, unless it is there."""
    done, words = folder / DONE, "\n".join(packages)
    if done.is_file() and done.read_text(encoding="utf-8") == words:
        print(f"{folder} is complete")
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)
    done.write_text(words, encoding="utf-8")
    print(f"{folder} is made")


if __name__ == "__main__":
    for name, packages in VENVS.items():
        make(Path(sys.argv[1]).resolve() / name, packages)
