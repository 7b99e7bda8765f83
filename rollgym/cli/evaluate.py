"""``rollgym eval``: measure an agent on an environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.cli.common import (
    AgentArgs,
    AgentModules,
    AgentName,
    AsJson,
    EnvArgs,
    EnvModules,
    EnvName,
    KeepFailed,
    console,
    import_modules,
    model_options,
    new_folder,
    parse_pairs,
    say_notes,
)
from rollgym.cli.output import print_json
from rollgym.errors import UsageError

if TYPE_CHECKING:
    from rollgym.evaluate import Evaluation

EPILOG = "Example: rollgym eval rollgym/Sokoban-v0 --agent expert --episodes 200 --seed 1 --workers 2"


def evaluate(
    env: EnvName,
    agent: AgentName = "random",
    model: Annotated[str | None, typer.Option(help="For agents that play with a model: which one.")] = None,
    base_url: Annotated[str | None, typer.Option(help="For chat: the endpoint's address, up to /v1.")] = None,
    episodes: Annotated[int, typer.Option(help="How many episodes.")] = 100,
    seed: Annotated[int, typer.Option(help="Chooses tasks and all randomness.")] = 0,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "test",
    per_task: Annotated[int, typer.Option(help="Episodes per task, for pass@k.")] = 1,
    workers: Annotated[int, typer.Option(help="Worker processes; 0 plays in this one.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Episodes in flight; 0 chooses.")] = 0,
    max_turns: Annotated[int | None, typer.Option(help="End an episode after this many turns.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="End an episode after this many tokens.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="End an episode after this many seconds.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="runs/<time>-<env>-<agent>")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Play what is missing in --out, or has failed.")
    ] = False,
    keep_failed: KeepFailed = False,
    as_json: AsJson = False,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
    agent_arg: AgentArgs = None,
    agent_module: AgentModules = None,
) -> None:
    """Measure an agent on an environment.

    Plays episodes and reports success, return, length and time, with intervals.
    Every episode is written as it ends. Ctrl-C keeps what is done; --resume plays the rest, and what failed.
    The same seed plays the same tasks with the same randomness, whatever the number of workers.
    """
    from rollgym.cli.progress import play
    from rollgym.evaluate import Evaluation, Request, check_agent, open_folder, plan
    from rollgym.types import Limits

    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the folder to finish.")
    import_modules(agent_module, "--agent-module")
    try:
        limits = Limits(turns=max_turns, tokens=max_tokens, seconds=max_seconds)
    except ValueError as error:
        raise UsageError(f"--max-turns, --max-tokens and --max-seconds: {error}.") from None
    request = Request(
        env_id=env,
        agent=agent,
        episodes=episodes,
        seed=seed,
        split=split,
        per_task=per_task,
        workers=workers,
        concurrency=1 if agent == "human" else concurrency,
        env_kwargs=parse_pairs(env_arg, "--env-arg"),
        agent_options=parse_pairs(agent_arg, "--agent-arg") | model_options(model, base_url),
        modules=import_modules(env_module),
        limits=limits,
    )
    todo = plan(request)
    say_notes(check_agent(request))
    folder = open_folder(
        todo, out or new_folder(env.removeprefix("rollgym/"), agent), resume, keep_failed=keep_failed
    )
    evaluation = Evaluation(todo, folder)
    try:
        play(evaluation, evaluation.stop, quiet=agent == "human")
    finally:
        summary = evaluation.close()
    _report(evaluation, summary, as_json)


def _report(evaluation: Evaluation, summary: dict[str, Any], as_json: bool) -> None:
    from rollgym.cli.tables import print_summary
    from rollgym.evaluate import first_error
    from rollgym.summary import exclusion_note

    if as_json:
        print_json(summary)
    else:
        print_summary(console(), summary)
    if note := exclusion_note(summary):
        typer.echo(f"rollgym: WARNING: {note}", err=True)
    for warning in summary["warnings"]:
        if warning["name"] not in evaluation.warned:  # said while it ran
            typer.echo(f"rollgym: warning: {warning['sentence']}", err=True)
    done, wanted = summary["episodes"], summary["requested"]
    if done < wanted:
        typer.echo(
            f"rollgym: Stopped with {done} of {wanted} episodes, kept in {evaluation.folder.path}; the same "
            f"command with --out {evaluation.folder.path} --resume plays the rest.",
            err=True,
        )
        raise typer.Exit(evaluation.exit_code or 130)
    if summary["failed"]:
        sentence = first_error(evaluation.folder.done)
        typer.echo(f"rollgym: {summary['failed']} of {done} episodes failed: {sentence}", err=True)
        raise typer.Exit(1)
