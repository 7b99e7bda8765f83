"""Opens engines over HTTP: at addresses, or on child processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollgym.core.errors import UsageError
from rollgym.engines.base import Engine
from rollgym.engines.router import RoutedEngine
from rollgym.engines.servers.engine import ServerEngine
from rollgym.engines.servers.server_process import ServerProcess, start_all

E = TypeVar("E", bound=ServerEngine)


def connect_all(
    engine_class: type[E], urls: str | Sequence[str], folder: Path, replicas: int, **engine: Any
) -> Engine:
    """Return an engine for the running servers at ``urls``."""
    addresses = [urls] if isinstance(urls, str) else list(urls)
    if not addresses or replicas not in (1, len(addresses)):
        raise UsageError(f"replicas is {replicas}, but {len(addresses)} addresses are given.")
    return as_one([engine_class(one, folder, **engine) for one in addresses])


def launch_all(
    engine_class: type[E], servers: Sequence[ServerProcess], folder: Path, **engine: Any
) -> list[E]:
    """Start servers and return an engine for each; if one fails, all are closed."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a model folder: it has no readable config.json.")
    start_all(servers)
    try:
        return [engine_class(model_folder=folder, server=one, **engine) for one in servers]
    except BaseException:
        for server in servers:
            server.close()
        raise


def check_replicas(replicas: int, port: int | None) -> None:
    """Raise `UsageError` for a number of servers that cannot be started."""
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, not {replicas}.")
    if replicas > 1 and port is not None:
        raise UsageError("Several replicas cannot share a port: leave port out to use free ones.")


def as_one(engines: Sequence[Engine]) -> Engine:
    """Return the only engine, or all behind a router."""
    return engines[0] if len(engines) == 1 else RoutedEngine(engines)
