"""SGLang as an engine: `SglangEngine` at an address, `launch` and `open_sglang` (docs/sglang.md)."""

from rollgym.engines.sglang.engine import SglangEngine
from rollgym.engines.sglang.launch import launch, open_sglang
from rollgym.engines.sglang.server import Server, ServerOptions

__all__ = ["Server", "ServerOptions", "SglangEngine", "launch", "open_sglang"]
