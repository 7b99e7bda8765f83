"""``rollgym serve-env``: an environment as a server that other programs play."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.utils.cli_options import EnvArgs, EnvModules, console, import_modules, parse_pairs, read_api_key
from rollgym.utils.urls import is_loopback_host

if TYPE_CHECKING:
    from rollgym.io.run_dir import RunFolder
    from rollgym.serve.env_mcp import EnvMCPServer
    from rollgym.serve.env_player import ServedEnv

EPILOG = "Example: rollgym serve-env rollgym/Sokoban-v0 --mcp --port 8001"


def serve_env(
    env: Annotated[str, typer.Argument(metavar="ENV", help="Environment id.", show_default=False)],
    mcp: Annotated[bool, typer.Option("--mcp", help="Speak MCP (Model Context Protocol).")] = False,
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
    """Serve an environment to other programs, which play it. They never see rewards.

    With --mcp, the environment's tools are MCP tools (an environment without tools has one, `act`), and
    `start_episode` starts an episode. Clients play at /mcp, or each at its own path, /NAME/mcp. Ctrl-C
    ends running episodes as cancelled.
    """
    if not mcp:
        raise UsageError("Choose a protocol: --mcp.")
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
        idle,
    )


def _run(
    served: ServedEnv, address: tuple[str, int] | None, key: str | None, out: Path | None, idle: float
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

    server = EnvMCPServer(served, record, idle_seconds=idle)
    if out is not None:
        folder = RunFolder.create(out, manifest(served))
    try:
        asyncio.run(server.run_stdio() if address is None else _serve(server, address, key))
    finally:
        if folder is not None:
            folder.finish({"kind": "serve-env", "episodes": sum(counts.values()), "outcomes": counts})
            folder.close()
    console(stderr=True).print(f"{sum(counts.values())} episodes were played.")


async def _serve(server: EnvMCPServer, address: tuple[str, int], key: str | None) -> None:
    import asyncio

    from rollgym.utils.http_server import listening, web_server
    from rollgym.utils.signals import when_asked_to_stop

    host, port = address
    with listening(host, port) as socket:
        port = socket.getsockname()[1]
        async with server.http_app(host=host, api_key=key) as app:
            web = web_server(app, signals=False)

            def stop() -> None:
                web.should_exit = True

            with when_asked_to_stop(stop):
                shown = f"[{host}]" if ":" in host else host
                console(stderr=True).print(f"MCP server: http://{shown}:{port}/mcp (Ctrl-C stops it)")
                await asyncio.ensure_future(web.serve([socket]))
