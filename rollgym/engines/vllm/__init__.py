"""vLLM as an engine: `VllmEngine` at an address, `launch` and `open_vllm` (docs/vllm.md)."""

from rollgym.engines.vllm.engine import VllmEngine
from rollgym.engines.vllm.launch import launch, open_vllm
from rollgym.engines.vllm.server import Server, ServerOptions

__all__ = ["Server", "ServerOptions", "VllmEngine", "launch", "open_vllm"]
