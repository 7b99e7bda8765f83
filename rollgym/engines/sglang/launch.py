"""Opens SGLang engines: at addresses, or on child processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgym.engines.base import Engine
from rollgym.engines.servers.launch import as_one, check_replicas, connect_all, launch_all
from rollgym.engines.sglang.engine import SglangEngine
from rollgym.engines.sglang.server import Server, ServerOptions


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
    folder = Path(model_folder)
    servers = [Server(folder, options, version=version)]
    return launch_all(SglangEngine, servers, folder, version=version, **engine)[0]


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
    chosen = options or ServerOptions()
    check_replicas(replicas, None if url is not None else chosen.port)
    if url is not None:
        return connect_all(SglangEngine, url, folder, replicas, version=version, api_key=api_key, **engine)
    servers = [Server(folder, chosen, version=version) for _ in range(replicas)]
    return as_one(launch_all(SglangEngine, servers, folder, version=version, **engine))
