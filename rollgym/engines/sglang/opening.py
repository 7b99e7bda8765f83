"""Opening an SGLang engine: at an address, or on servers of our own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgym.engines import Engine
from rollgym.engines.replicas import ReplicaEngine
from rollgym.engines.sglang.engine import SglangEngine
from rollgym.engines.sglang.server import Server, ServerOptions, start_all
from rollgym.errors import UsageError


def launch(
    model_folder: str | Path, options: ServerOptions | None = None, *, version: int = 0, **engine: Any
) -> SglangEngine:
    """Start a server and open an engine on it; this takes a minute or so, and blocks.

    ``engine``: further arguments of `SglangEngine`.
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
    """An engine on the servers at ``url``, or on ``replicas`` of our own. It blocks until they are ready.

    In a running event loop call it by `asyncio.to_thread`. ``api_key``: what the servers at ``url`` ask for.
    ``engine``: further arguments of `SglangEngine`.
    """
    folder = Path(model_folder)
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, not {replicas}.")
    if url is not None:
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or replicas not in (1, len(urls)):
            raise UsageError(f"{replicas} replicas were asked for, but {len(urls)} addresses given.")
        engines = [SglangEngine(one, folder, version=version, api_key=api_key, **engine) for one in urls]
    else:
        chosen = options or ServerOptions()
        if replicas > 1 and chosen.port is not None:
            raise UsageError("Several replicas cannot have one port: leave it out, and free ones are chosen.")
        engines = _launch(folder, [chosen] * replicas, version, engine)
    return engines[0] if len(engines) == 1 else ReplicaEngine(engines)


def _launch(
    folder: Path, options: Sequence[ServerOptions], version: int, engine: dict[str, Any]
) -> list[SglangEngine]:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no model folder: it has no config.json that can be read.")
    servers = [Server(folder, one, version=version) for one in options]
    start_all(servers)
    try:
        return [SglangEngine(model_folder=folder, server=one, version=version, **engine) for one in servers]
    except BaseException:
        for server in servers:
            server.close()
        raise
