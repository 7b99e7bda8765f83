"""SGLang server as a child process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgym.engines.servers.server_process import (
    DELTA_PLUGIN,
    BaseServerOptions,
    ServerProcess,
    with_python_path,
    words,
)

PLUGIN = Path(__file__).resolve().parent / "server_plugin"
"""Folder of the module that a server with ``weight_delta`` imports."""
LOADER = "rollgym_sglang.load_packed"
"""Its weight loader, the ``load_format`` of packed buckets."""
_CPU: tuple[str, ...] = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(BaseServerOptions):
    """Options of an SGLang server to start."""

    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; default: as many as fit (on a CPU 65,536)."""

    def command(self, model: Path, port: int, version: int) -> list[str]:
        """Return the command line."""
        cpu = self.on_cpu
        options: dict[str, Any] = {
            "--model-path": model,
            "--host": self.host,
            "--port": port,
            "--weight-version": version,
            "--device": "cpu" if cpu else self.device,
            "--dtype": self.dtype or ("float32" if cpu else None),
            "--tp-size": self.tp if self.tp > 1 else None,
            "--mem-fraction-static": self.memory_fraction or (0.5 if cpu else None),
            "--max-total-tokens": self.max_total_tokens or (65_536 if cpu else None),
            "--max-running-requests": self.max_running or (64 if cpu else None),
            "--context-length": self.context_length,
        }
        more = [*(_CPU if cpu else ()), *(["--enable-memory-saver"] if self.memory_saver and not cpu else [])]
        more += ["--enable-return-routed-experts"] if self.return_routed_experts else []
        more += ["--custom-weight-loader", LOADER] if self.weight_delta else []
        return [self.python, "-m", "sglang.launch_server", *words(options), *more, *self.extra]

    def environment(self) -> dict[str, str]:
        """Return the environment variables."""
        env = BaseServerOptions.environment(self)
        if self.on_cpu:
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        return with_python_path(env | dict(self.env), (PLUGIN, DELTA_PLUGIN) if self.weight_delta else ())


class Server(ServerProcess):
    """One SGLang server and its subprocesses."""

    software = "SGLang"
    package = "sglang"
    alive_path = "/model_info"

    def __init__(self, model: Path, options: ServerOptions | None = None, *, version: int = 0) -> None:
        super().__init__(model, options or ServerOptions(), version=version)

    def pass_key(self) -> tuple[list[str], dict[str, str]]:
        """Write the key into a config file of SGLang."""
        # JSON is YAML: the quotes keep a numeric key a string.
        self.key_file.write_text(f"api-key: {json.dumps(self.api_key)}\n", encoding="utf-8")
        return ["--config", str(self.key_file)], {}
