"""``rollgym eval`` and ``rollgym compare``: evaluate an agent, and compare two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.io.atomic import new_folder
from rollgym.utils import cli_options as cli

if TYPE_CHECKING:
    from rollgym.evaluation.runner import Evaluation

EPILOG = "Example: rollgym eval rollgym/Sokoban-v0 --agent expert --episodes 200 --seed 1 --workers 2"
COMPARE_EPILOG = "Example: rollgym compare runs/random runs/expert"

Folder = Annotated[Path, typer.Argument(help="A results folder of `rollgym eval`.", show_default=False)]


def evaluate(
    env: cli.EnvName,
    agent: cli.AgentName = "random",
    model: cli.ModelName = None,
    base_url: cli.BaseUrl = None,
    episodes: Annotated[int, typer.Option(help="Number of episodes.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and all randomness.")] = 0,
    split: Annotated[str, typer.Option(help="Split of the environment's task set.")] = "test",
    per_task: Annotated[int, typer.Option(help="Episodes per task, for pass@k.")] = 1,
    workers: cli.Workers = 0,
    concurrency: cli.Concurrency = 0,
    max_turns: Annotated[
        int | None,
        typer.Option(help="Turn limit per episode.", show_default="the environment's limit, else 2000"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Limit on sampled tokens per episode.", show_default="none")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Time limit per episode in seconds.", show_default="none")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder.", show_default="runs/<time>-<env>-<agent>")
    ] = None,
    resume: cli.Resume = False,
    keep_failed: cli.KeepFailed = False,
    as_json: cli.AsJson = False,
    env_arg: cli.EnvArgs = None,
    env_module: cli.EnvModules = None,
    agent_arg: cli.AgentArgs = None,
    agent_module: cli.AgentModules = None,
    role: cli.Roles = None,
    role_arg: cli.RoleArgs = None,
) -> None:
    """Evaluate an agent on an environment.

    Plays episodes and reports success, return, length and time, with confidence intervals.
    Every episode is written when it ends. Ctrl-C keeps finished episodes; --resume plays the rest.
    The same seed plays the same tasks with the same randomness, for any number of workers.
    In an environment with roles, --role gives roles to other agents: the results are those of --agent.
    """
    from rollgym.cli.tables import play
    from rollgym.core.types import Limits
    from rollgym.evaluation.plan import RoleAgent
    from rollgym.evaluation.runner import Evaluation, Request, check_agent, open_folder, plan

    cli.check_resume(resume, out)
    cli.import_modules(agent_module, "--agent-module")
    try:
        limits = Limits(turns=max_turns, tokens=max_tokens, seconds=max_seconds)
    except ValueError as error:
        raise UsageError(f"--max-turns, --max-tokens and --max-seconds: {error}.") from None
    roles = {
        name: RoleAgent(agent=player, options=options)
        for name, (player, options) in cli.parse_roles(role, role_arg).items()
    }
    human = "human" in (agent, *(player.agent for player in roles.values()))
    request = Request(
        env_id=env,
        agent=agent,
        episodes=episodes,
        seed=seed,
        split=split,
        per_task=per_task,
        workers=workers,
        concurrency=1 if human else concurrency,
        env_kwargs=cli.parse_pairs(env_arg, "--env-arg"),
        agent_options=cli.parse_pairs(agent_arg, "--agent-arg") | cli.model_options(model, base_url),
        modules=cli.import_modules(env_module),
        limits=limits,
        roles=roles,
    )
    todo = plan(request)
    cli.say_notes(check_agent(request))
    folder = open_folder(
        todo, out or new_folder(env.removeprefix("rollgym/"), agent), resume, keep_failed=keep_failed
    )
    evaluation = Evaluation(todo, folder)
    try:
        play(evaluation, evaluation.stop, quiet=human)
    finally:
        summary = evaluation.close()
    _report(evaluation, summary, as_json)


def _report(evaluation: Evaluation, summary: dict[str, Any], as_json: bool) -> None:
    from rollgym.cli.tables import print_summary
    from rollgym.evaluation.metrics import exclusion_note
    from rollgym.evaluation.runner import first_error

    cli.print_result(summary, as_json, print_summary)
    if note := exclusion_note(summary):
        typer.echo(f"rollgym: WARNING: {note}", err=True)
    for warning in summary["warnings"]:
        if warning["name"] not in evaluation.warned:  # already shown while it ran
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


def compare(a: Folder, b: Folder, as_json: cli.AsJson = False) -> None:
    """Compare two evaluations task by task.

    Shows the difference with its 95% confidence interval and p-value.
    Only tasks that both played from the same seed count, so task difficulty cancels out.
    """
    from rollgym.cli.tables import print_comparison
    from rollgym.evaluation.compare import compare_runs

    cli.print_result(compare_runs(a, b), as_json, print_comparison)
