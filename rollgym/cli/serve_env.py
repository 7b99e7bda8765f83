"""``rollgym serve-env``: an environment as a server that other programs play."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rollgym.core.errors import UsageError
from rollgym.utils.cli_options import EnvArgs, EnvModules, console, import_modules, parse_pairs, read_api_key
from rollgym.utils.urls import is_loopback_host

if TYPE_CHECKING:
    from rollgym.core.types import Episode
    from rollgym.io.run_dir import RunFolder
    from rollgym.serve.env_mcp import EnvMCPServer
    from rollgym.serve.env_openenv import EnvOpenEnvServer
    from rollgym.serve.env_player import ServedEnv

EPILOG = "Example: rollgym serve-env rollgym/Sokoban-v0 --mcp --port 8001"


def serve_env(
    env: Annotated[str, typer.Argument(metavar="ENV", help="Environment id.", show_default=False)],
    mcp: Annotated[bool, typer.Option("--mcp", help="Speak MCP (Model Context Protocol).")] = False,
    openenv: Annotated[
        bool, typer.Option("--openenv", help="Speak OpenEnv: sessions at /ws, rewards included.")
    ] = False,
    max_sessions: Annotated[int, typer.Option(help="Clients at once.")] = 64,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Serve one client over stdin and stdout instead of HTTP.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the bearer token that clients must send.",
            show_default="no token",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split whose tasks are played.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the order of tasks.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder for the episodes, rewards included.", show_default="not recorded"),
    ] = None,
    idle: Annotated[
        float, typer.Option(help="Seconds without a request that end a client's episode.")
    ] = 600.0,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
) -> None:
    """Serve an environment to other programs, which play it.

    With --openenv, clients of OpenEnv reset and step it, one session per connection, and see rewards.
    With --mcp, clients see no rewards: the environment's tools are MCP tools (an environment without tools
    has one, `act`), and `start_episode` starts an episode. Clients play at /mcp, or each at its own path,
    /NAME/mcp. Ctrl-C ends running episodes as cancelled.
    """
    if mcp == openenv:
        raise UsageError("Choose one protocol: --mcp or --openenv.")
    if openenv and stdio:
        raise UsageError("--stdio requires --mcp: OpenEnv is served over HTTP.")
    if max_sessions < 1:
        raise UsageError(f"--max-sessions must be at least 1, not {max_sessions}.")
    key = read_api_key(api_key_env)
    if not is_loopback_host(host) and key is None and not stdio:
        raise UsageError(f"--host {host} is open to other machines: give --api-key-env NAME with a token.")
    import_modules(env_module)
    from rollgym.serve.env_player import ServedEnv

    _run(
        ServedEnv(env_id=env, kwargs=parse_pairs(env_arg, "--env-arg"), split=split, seed=seed),
        None if stdio else (host, port),
        key,
        out,
        _Protocol("openenv" if openenv else "mcp", max_sessions, idle),
    )


class _Protocol(NamedTuple):
    """The protocol of a server and its limits."""

    name: str
    max_sessions: int
    idle_seconds: float

    def server(self, served: ServedEnv, record: Callable[[Episode], None]) -> EnvMCPServer | EnvOpenEnvServer:
        if self.name == "openenv":
            from rollgym.serve.env_openenv import EnvOpenEnvServer

            return EnvOpenEnvServer(
                served, record, max_sessions=self.max_sessions, idle_seconds=self.idle_seconds
            )
        from rollgym.serve.env_mcp import EnvMCPServer

        return EnvMCPServer(served, record, max_players=self.max_sessions, idle_seconds=self.idle_seconds)


def _run(
    served: ServedEnv,
    address: tuple[str, int] | None,
    key: str | None,
    out: Path | None,
    protocol: _Protocol,
) -> None:
    import asyncio

    from rollgym.io.run_dir import RunFolder
    from rollgym.serve.env_mcp import EnvMCPServer
    from rollgym.serve.env_player import manifest

    counts: dict[str, int] = {}
    folder: RunFolder | None = None

    def record(episode: Any) -> None:
        counts[episode.outcome] = counts.get(episode.outcome, 0) + 1
        if folder is not None:
            folder.append(episode)
            folder.done.clear()  # a server may run for weeks

    server = protocol.server(served, record)
    if out is not None:
        folder = RunFolder.create(out, manifest(served))
    try:
        if address is None:
            assert isinstance(server, EnvMCPServer)
            asyncio.run(server.run_stdio())
        else:
            asyncio.run(_serve(server, address, key, protocol.name))
    finally:
        if folder is not None:
            folder.finish({"kind": "serve-env", "episodes": sum(counts.values()), "outcomes": counts})
            folder.close()
    console(stderr=True).print(f"{sum(counts.values())} episodes were played.")


async def _serve(
    server: EnvMCPServer | EnvOpenEnvServer, address: tuple[str, int], key: str | None, protocol: str
) -> None:
    import asyncio

    from rollgym.utils.http_server import listening, web_server
    from rollgym.utils.signals import when_asked_to_stop

    host, port = address
    with listening(host, port) as socket:
        port = socket.getsockname()[1]
        async with server.http_app(host=host, api_key=key) as app:
            web = web_server(app, signals=False, websockets=protocol == "openenv")

            def stop() -> None:
                web.should_exit = True

            with when_asked_to_stop(stop):
                shown = f"[{host}]" if ":" in host else host
                kind, path = ("OpenEnv", "") if protocol == "openenv" else ("MCP", "/mcp")
                console(stderr=True).print(f"{kind} server: http://{shown}:{port}{path} (Ctrl-C stops it)")
                await asyncio.ensure_future(web.serve([socket]))
