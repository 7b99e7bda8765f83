"""Opens SGLang engines: at addresses, or on child processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.engines.base import Engine
from rollgym.engines.router import RoutedEngine
from rollgym.engines.sglang.engine import SglangEngine
from rollgym.engines.sglang.server import Server, ServerOptions, start_all


def launch(
    model_folder: str | Path, options: ServerOptions | None = None, *, version: int = 0, **engine: Any
) -> SglangEngine:
    """Start a server and return an engine for it. Blocks for about a minute.

    Args:
        model_folder: The model, in Hugging Face format.
        options: Options of the server.
        version: Version of the model's weights.
        engine: Further arguments of `SglangEngine`.
    """
    return _launch(Path(model_folder), [options or ServerOptions()], version, engine)[0]


def open_sglang(
    model_folder: str | Path,
    *,
    url: str | Sequence[str] | None = None,
    replicas: int = 1,
    options: ServerOptions | None = None,
    version: int = 0,
    api_key: str | None = None,
    **engine: Any,
) -> Engine:
    """Return an engine for the servers at ``url``, or start ``replicas`` servers. Blocks until ready.

    In a running event loop, call it with `asyncio.to_thread`.

    Args:
        model_folder: The model, in Hugging Face format.
        url: Addresses of running servers.
        replicas: Number of servers.
        options: Options of the servers to start.
        version: Version of the model's weights.
        api_key: Key of the servers at ``url``.
        engine: Further arguments of `SglangEngine`.
    """
    folder = Path(model_folder)
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, not {replicas}.")
    if url is not None:
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or replicas not in (1, len(urls)):
            raise UsageError(f"replicas is {replicas}, but {len(urls)} addresses are given.")
        engines = [SglangEngine(one, folder, version=version, api_key=api_key, **engine) for one in urls]
    else:
        chosen = options or ServerOptions()
        if replicas > 1 and chosen.port is not None:
            raise UsageError("Several replicas cannot share a port: leave port out to use free ones.")
        engines = _launch(folder, [chosen] * replicas, version, engine)
    return engines[0] if len(engines) == 1 else RoutedEngine(engines)


def _launch(
    folder: Path, options: Sequence[ServerOptions], version: int, engine: dict[str, Any]
) -> list[SglangEngine]:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a model folder: it has no readable config.json.")
    servers = [Server(folder, one, version=version) for one in options]
    start_all(servers)
    try:
        return [SglangEngine(model_folder=folder, server=one, version=version, **engine) for one in servers]
    except BaseException:
        for server in servers:
            server.close()
        raise
