"""``rollgym bench``: benchmark suites with verifiable results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.io.atomic import new_folder
from rollgym.utils import cli_options as cli
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.bench.run import SuiteRun

app = typer.Typer(
    help="Play benchmark suites, and compare and verify their results.",
    epilog="Example: rollgym bench run smoke --agent random",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SuiteName = Annotated[
    str,
    typer.Argument(
        metavar="SUITE", help="A name from `rollgym bench list`, or a TOML file.", show_default=False
    ),
]
Results = Annotated[Path, typer.Argument(help="A results folder of `rollgym bench run`.", show_default=False)]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="ENTRY=VALUE", help="Your own data for an entry (repeatable)."),
]


@app.command("list", epilog="Example: rollgym bench list")
def names(as_json: cli.AsJson = False) -> None:
    """List the benchmark suites of rollgym."""
    from rich.table import Table

    from rollgym.bench.suite import known_suites, read_suite

    suites = [read_suite(path) for path in known_suites().values()]
    if as_json:
        rows = [{"name": s.name, "version": s.version, "summary": s.summary} for s in suites]
        print_json(rows)
        return
    table = Table("suite", "version", "entries", "episodes", "summary", box=None)
    for suite in suites:
        episodes = sum(entry.tasks * entry.samples for entry in suite.entries if not entry.data)
        table.add_row(suite.name, str(suite.version), str(len(suite.entries)), str(episodes), suite.summary)
    cli.console().print(table)


@app.command("run", epilog="Example: rollgym bench run smoke --agent random --workers 2")
def run(
    suite: SuiteName,
    agent: cli.AgentName = "random",
    model: cli.ModelName = None,
    base_url: cli.BaseUrl = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Play only this entry (repeatable).", show_default="all entries")
    ] = None,
    data: Data = None,
    workers: cli.Workers = 0,
    concurrency: cli.Concurrency = 0,
    out: Annotated[
        Path | None, typer.Option(help="Results folder.", show_default="runs/<time>-<suite>-<agent>")
    ] = None,
    resume: cli.Resume = False,
    keep_failed: cli.KeepFailed = False,
    as_json: cli.AsJson = False,
    env_module: cli.EnvModules = None,
    agent_arg: cli.AgentArgs = None,
    agent_module: cli.AgentModules = None,
    allow_weak_sandbox: cli.WeakSandbox = False,
) -> None:
    """Play a benchmark suite.

    Every episode is written when it ends; after each entry summary.json and report.md are updated.
    Exit code 1 if a golden score was missed, tasks differ from the suite's, or episodes failed.
    """
    from rollgym.bench.run import SuiteRun
    from rollgym.bench.suite import AgentSpec, find_suite
    from rollgym.cli.tables import play

    cli.check_resume(resume, out)
    cli.import_modules(agent_module, "--agent-module")
    agent_spec = AgentSpec(
        agent=agent,
        options=cli.parse_pairs(agent_arg, "--agent-arg") | cli.model_options(model, base_url),
        workers=workers,
        concurrency=1 if agent == "human" else concurrency,
        modules=cli.import_modules(env_module),
        data=entry_data(data),
        weak_sandbox=allow_weak_sandbox,
    )
    loaded = find_suite(suite)
    suite_run = SuiteRun(
        loaded,
        agent_spec,
        out or new_folder(loaded.name, agent),
        only=only or (),
        resume=resume,
        keep_failed=keep_failed,
    )
    quiet = agent == "human"
    summary = suite_run.run(lambda evaluation: play(evaluation, suite_run.stop, quiet=quiet))
    _report(suite_run, summary, as_json)


def entry_data(pairs: list[str] | None) -> dict[str, Any]:
    """Parse ``entry=value`` words into a dict."""
    values = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"--data {pair!r}: expected entry=value.")
        values[name] = value
    return values


def _report(suite_run: SuiteRun, summary: dict[str, Any], as_json: bool) -> None:
    from rollgym.cli.tables import print_results

    cli.print_result(summary, as_json, print_results)
    for row in summary["entries"]:
        if row["many_excluded"]:
            typer.echo(
                f"rollgym: WARNING: {row['name']}: {row['excluded']} of {row['episodes']} episodes ended "
                "with infrastructure errors and are excluded from the score.",
                err=True,
            )
    problems = list(suite_run.trouble)
    done, wanted = summary["episodes"], sum(len(plan.specs) for plan in suite_run.plans.values())
    again = f"the same command with --out {suite_run.out} --resume plays"
    if done < wanted:
        problems.append(
            f"Stopped with {done} of {wanted} episodes, {summary['failed']} of them failed, kept in "
            f"{suite_run.out}; {again} the rest."
        )
    elif summary["failed"]:
        first = next(row["errors"][0]["message"] for row in summary["entries"] if row["errors"])
        problems.append(f"{summary['failed']} of {done} episodes failed: {first} ({again} them again)")
    if done == wanted and summary["golden"]["missed"]:
        problems.append(f"Golden score missed in: {', '.join(summary['golden']['missed'])}.")
    if summary["other_tasks"]:
        problems.append(f"Tasks differ from those of the suite in: {', '.join(summary['other_tasks'])}.")
    for sentence in problems:
        typer.echo(f"rollgym: {sentence}", err=True)
    if problems:
        raise typer.Exit(130 if done < wanted and not suite_run.trouble else 1)


@app.command("show", epilog="Example: rollgym bench show smoke")
def show(
    what: Annotated[
        str, typer.Argument(metavar="SUITE|RESULTS", help="A suite, or a results folder.", show_default=False)
    ],
    as_json: cli.AsJson = False,
) -> None:
    """Show the entries and golden scores of a suite, or the results in a folder."""
    from rollgym.bench.results import read_results_manifest, read_results_summary
    from rollgym.bench.suite import find_suite
    from rollgym.cli.tables import print_results, print_suite

    if Path(what).is_dir():
        read_results_manifest(Path(what))
        summary = {**read_results_summary(Path(what)), "out": what}
        cli.print_result(summary, as_json, print_results)
        return
    suite = find_suite(what)
    if as_json:
        print_json({**suite.to_json(), "hash": suite.fingerprint})
        return
    print_suite(cli.console(), suite)


@app.command("compare", epilog="Example: rollgym bench compare runs/a runs/b")
def compare(a: Results, b: Results, as_json: cli.AsJson = False) -> None:
    """Compare two results of a suite task by task, with confidence intervals and p-values."""
    from rollgym.bench.results import compare_results
    from rollgym.cli.tables import print_comparison

    cli.print_result(compare_results(a, b), as_json, print_comparison)


@app.command("verify", epilog="Example: rollgym bench verify runs/a --sample 50 --seed 7")
def verify(
    results: Results,
    sample: Annotated[int, typer.Option(help="Number of episodes to replay; 0 replays all.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the sample; choose your own.")] = 0,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite that the results must belong to.", show_default="rollgym's suite of that name"
        ),
    ] = None,
    data: Data = None,
    workers: cli.Workers = 0,
    as_json: cli.AsJson = False,
    env_module: cli.EnvModules = None,
    allow_weak_sandbox: cli.WeakSandbox = False,
) -> None:
    """Verify the results of a suite.

    The scores must follow from the episodes, the episodes must be those of the suite, and a sample of them
    must replay identically. Exit code 1, with the differences, if one of these fails.
    """
    from rollgym.bench.suite import find_suite
    from rollgym.bench.verify import verify as check
    from rollgym.cli.tables import counted

    with counted("replay", sample) as advance:
        verdict = check(
            results,
            sample=sample,
            seed=seed,
            workers=workers,
            modules=cli.import_modules(env_module),
            data=entry_data(data),
            weak_sandbox=allow_weak_sandbox,
            suite=None if suite is None else find_suite(suite),
            on_episode=advance,
        )
    if as_json:
        print_json({**verdict.to_json(), "out": str(results)})
    else:
        screen = cli.console()
        for problem in verdict.problems:
            screen.print(f"{problem.where}: {problem.what}", style="red", markup=False, highlight=False)
        for note in verdict.notes:
            screen.print(f"note: {note}", style="yellow", markup=False, highlight=False)
        count = len(verdict.problems)
        result = f"not verified: {count} problem{'s' * (count > 1)}" if count else "verified"
        screen.print(
            f"{verdict.suite} by {verdict.agent}: {result} ({verdict.episodes} episodes, {verdict.replayed} "
            "replayed)",
            highlight=False,
            markup=False,
        )
    if not verdict.holds:
        raise typer.Exit(1)
