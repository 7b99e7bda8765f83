"""``rollgym serve``: a model behind an OpenAI-compatible endpoint that records what is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.cli.common import AgentArgs, console, parse_pairs
from rollgym.errors import UsageError

if TYPE_CHECKING:
    from rollgym.serve import RecordingServer, ServeOptions

EPILOG = (
    "Example: rollgym serve models/lake --port 8000, then OPENAI_BASE_URL=http://127.0.0.1:8000/v1 my_agent"
)

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A folder in Hugging Face format.", show_default=False)
]


def serve(
    model: Model,
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    out: Annotated[
        Path | None, typer.Option(help="The folder for the episodes.", show_default="runs/served")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Add to what is in --out.")] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable with the key that clients must show."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="the folder's name")
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="ENV", help="What the episodes are recorded as.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="In place of what clients ask for.", show_default=False)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of one reply.", show_default="what fits")] = None,
    idle: Annotated[float, typer.Option(help="Seconds of silence that end a conversation.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn where clients give none.")] = 0,
    agent_arg: AgentArgs = None,
) -> None:
    """Serve a model to any OpenAI client, and record its conversations as episodes.

    They hold the token ids that were sampled, with their log-probs: `rollgym imitate` and viewers read the
    folder, and a program can be trained in the place that it runs in. Ctrl-C ends open conversations as
    cancelled. --agent-arg takes device, dtype, max_batch and context_length.
    """
    from rollgym.serve.options import UNKNOWN_ENV, ServeOptions
    from rollgym.serve.server import check_installed
    from rollgym.web import listening

    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the folder to add to.")
    options = ServeOptions(
        host=host,
        port=port,
        api_key=_key(api_key_env),
        model=name or model.resolve().name or "policy",
        env_id=env or UNKNOWN_ENV,
        temperature=temperature,
        max_tokens=max_tokens,
        idle_seconds=idle,
        seed=seed,
    )
    check_installed()
    listening(host, port).close()  # before the model is loaded, which may take long
    _run(model, options, out or _default_folder(), resume, parse_pairs(agent_arg, "--agent-arg"))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise UsageError(f"--api-key-env: the variable {variable} is empty or not set.")
    return key


def _default_folder() -> Path:
    path, number = Path("runs/served"), 1
    while path.exists():
        number += 1
        path = path.with_name(f"served-{number}")
    return path


def _run(model: Path, options: ServeOptions, out: Path, resume: bool, settings: dict[str, Any]) -> None:
    import asyncio

    from rollgym.agent import AgentSetup, make_agent
    from rollgym.serve.server import RecordingServer, manifest
    from rollgym.signals import when_asked_to_stop
    from rollgym.store import RunFolder

    # The agent that plays with such folders loads them, and says what is wrong with one.
    agent: Any = make_agent("lm", AgentSetup(env_id=options.env_id), model=str(model), **settings)
    with console(stderr=True).status("loading the model"):
        engine = agent.engine
    about = manifest(str(model), options)
    folder = RunFolder.resume(out, about, ("kind", "agent")) if resume else RunFolder.create(out, about)

    async def run() -> RecordingServer:
        stop = asyncio.Event()
        try:
            with when_asked_to_stop(stop.set):
                async with RecordingServer(engine, agent.chat, options, folder=folder) as server:
                    _tell(server, out)
                    await stop.wait()
        finally:
            folder.close()
            await agent.close()
        return server

    server = asyncio.run(run())
    counts = ", ".join(f"{count} {kind.value}" for kind, count in server.sessions.outcomes.items())
    typer.echo(f"{sum(server.sessions.outcomes.values())} episodes ({counts or 'none'}) are in {out}.")


def _tell(server: RecordingServer, out: Path) -> None:
    options = server.options
    key = "the key" if options.api_key else "anything"
    typer.echo(
        f"The model {options.model!r} is at {server.base_url}, episodes go to {out} (Ctrl-C ends).\n"
        f"  export OPENAI_BASE_URL={server.base_url} OPENAI_API_KEY={key.replace(' ', '-')}\n"
        f"One episode for each base URL {server.url}/session/NAME/v1; tell its reward and end it with\n"
        f"  curl {server.url}/session/NAME/end -H 'content-type: application/json' "
        '-d \'{"reward": 1.0, "success": true}\''
    )
