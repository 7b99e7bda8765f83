"""Make a virtual environment with a real SGLang server that runs on a CPU, for the tests of it.

    python tests/engines/sglang/make_venv.py FOLDER [VERSION]

Three gigabytes, a few minutes. A folder that is complete is left as it is. SGLang itself is unmodified; its
compiled kernels, which need a GPU, are stood in for by stand_in/sgl_kernel.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# fmt: off
NEWER = [
    "torch==2.13.0", "transformers==5.12.1", "xgrammar==0.2.1", "triton==3.9.0", "llguidance>=1.7.6,<2",
    "openai==2.6.1", "openai-harmony==0.0.4", "soundfile==0.13.1", "numpy", "aiohttp", "requests",
    "fastapi", "uvicorn", "uvloop", "orjson", "msgspec", "pyzmq", "pydantic", "python-multipart", "psutil",
    "pillow", "packaging", "partial_json_parser", "prometheus-client", "pybase64", "einops",
    "sentencepiece", "tiktoken", "scipy", "gguf", "anthropic", "zstandard", "watchfiles", "distro",
    "IPython", "setproctitle", "tqdm", "compressed-tensors", "dill", "setuptools", "loguru", "interegular",
    "jsonschema",
]
# fmt: on
OLDER = {
    "transformers": ["transformers==4.57.1", "huggingface_hub<1.0"],
    "xgrammar": ["xgrammar==0.1.27"],
    "llguidance": ["llguidance>=0.7.11,<0.8", "outlines==0.1.11"],
}
"""What 0.5.9 wants instead."""
ROUTER = "sglang-router==0.3.2"
DONE = "sglang-version.txt"


def requirements(version: str) -> list[str]:
    """What to install before SGLang."""
    if version != "0.5.9":
        return NEWER
    return [one for word in NEWER for one in OLDER.get(word.partition("=")[0].partition(">")[0], [word])]


def make(folder: Path, version: str) -> None:
    """Make the environment, unless it is there."""
    done = folder / DONE
    if done.is_file() and done.read_text(encoding="utf-8") == f"{version} {ROUTER}":
        print(f"{folder} has SGLang {version} already")
        return
    # Not compiled now, everything would be compiled again by every process that starts.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, env=env)
    subprocess.run([*pip, *requirements(version)], check=True, env=env)
    # The newest torchvision that can be imported without its compiled part.
    words = [f"sglang=={version}", "torchvision==0.16.2", ROUTER]
    subprocess.run([*pip, "--no-deps", *words], check=True, env=env)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    shutil.copy2(Path(__file__).parent / "stand_in" / "sgl_kernel.py", found.stdout.strip())
    done.write_text(f"{version} {ROUTER}", encoding="utf-8")
    print(f"{folder} has SGLang {version} now")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER [VERSION]")
    make(Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) == 3 else "0.5.18")
