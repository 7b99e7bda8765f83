"""``rollgym serve``: an endpoint for OpenAI's and Anthropic's clients that records its conversations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.io.atomic import unused
from rollgym.utils.cli_options import AgentArgs, console, parse_pairs, read_api_key

if TYPE_CHECKING:
    from rollgym.serve import RecordingServer, ServeOptions

EPILOG = "Example: rollgym serve models/lake --port 8000 --out runs/served"

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Model folder in Hugging Face format.", show_default=False)
]


def serve(
    model: Model,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    out: Annotated[
        Path | None, typer.Option(help="Run folder for the episodes.", show_default="runs/served")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Append to the episodes in --out and continue its open sessions.")
    ] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the API key that clients must send.",
            show_default="no key",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients.", show_default="the folder's name")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", help="Environment id to record the episodes under.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; overrides that of clients.", show_default="the client's"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Token limit per reply.", show_default="the rest of the context")
    ] = None,
    idle: Annotated[float, typer.Option(help="Seconds without a request that end a conversation.")] = 600.0,
    auxiliary: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Do not record requests whose last user message or system message matches.",
            show_default=False,
        ),
    ] = None,
    auxiliary_max_tokens: Annotated[
        int, typer.Option(help="Do not record requests whose max_tokens is below this.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Sampling seed for requests without one.")] = 0,
    agent_arg: AgentArgs = None,
) -> None:
    """Serve a model to any OpenAI or Anthropic client, and record its conversations as episodes.

    Episodes contain the sampled token ids and their log-probs: `rollgym imitate` and `rollgym view` read
    them. Ctrl-C ends open conversations as cancelled.
    --agent-arg accepts device, dtype, max_batch and context_length.
    """
    from rollgym.serve.options import UNKNOWN_ENV, ServeOptions
    from rollgym.serve.server import check_installed
    from rollgym.utils.http_server import listening

    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the run folder to append to.")
    options = ServeOptions(
        host=host,
        port=port,
        api_key=read_api_key(api_key_env),
        model=name or model.resolve().name or "policy",
        env_id=env or UNKNOWN_ENV,
        temperature=temperature,
        max_tokens=max_tokens,
        idle_seconds=idle,
        auxiliary=_pattern(auxiliary),
        auxiliary_max_tokens=auxiliary_max_tokens,
        seed=seed,
    )
    check_installed()
    listening(host, port).close()  # fail before the model is loaded, which may take long
    _run(model, options, out or unused(Path("runs/served")), resume, parse_pairs(agent_arg, "--agent-arg"))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UsageError(f"--auxiliary: {text!r} is not a regular expression ({error}).") from None


def _run(model: Path, options: ServeOptions, out: Path, resume: bool, settings: dict[str, Any]) -> None:
    import asyncio

    from rollgym.core.agent import AgentSetup, make_agent
    from rollgym.io.run_dir import RunFolder
    from rollgym.serve.server import RecordingServer, manifest
    from rollgym.utils.signals import when_asked_to_stop

    # The policy agent loads the model folder and reports what is wrong with it.
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
                    _print_usage(server, out)
                    await stop.wait()
        finally:
            folder.close()
            await agent.close()
        return server

    server = asyncio.run(run())
    counts = ", ".join(f"{count} {kind.value}" for kind, count in server.sessions.outcomes.items())
    typer.echo(f"{sum(server.sessions.outcomes.values())} episodes ({counts or 'none'}) are in {out}.")


def _print_usage(server: RecordingServer, out: Path) -> None:
    options = server.options
    key = "the key" if options.api_key else "anything"
    typer.echo(
        f"Serving {options.model!r} at {server.base_url}, recording to {out} (Ctrl-C stops).\n"
        f"  export OPENAI_BASE_URL={server.base_url} OPENAI_API_KEY={key.replace(' ', '-')}\n"
        f"  export ANTHROPIC_BASE_URL={server.url} ANTHROPIC_API_KEY={key.replace(' ', '-')}\n"
        f"Each base URL {server.url}/session/NAME/v1 is one episode; report its reward and end it with\n"
        f"  curl {server.url}/session/NAME/end -H 'content-type: application/json' "
        '-d \'{"reward": 1.0, "success": true}\''
    )
