"""``rollgym bench``: suites that everybody plays alike, and results that anybody can check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.cli.common import (
    AgentArgs,
    AgentModules,
    AgentName,
    AsJson,
    EnvModules,
    KeepFailed,
    WeakSandbox,
    console,
    import_modules,
    model_options,
    new_folder,
    parse_pairs,
)
from rollgym.cli.output import print_json
from rollgym.errors import UsageError

if TYPE_CHECKING:
    from rollgym.bench.run import SuiteRun

app = typer.Typer(
    help="Play benchmark suites and check results.", no_args_is_help=True, rich_markup_mode=None
)

SuiteName = Annotated[
    str, typer.Argument(metavar="SUITE", help="A name from `bench list`, or a file.", show_default=False)
]
Results = Annotated[Path, typer.Argument(help="A results folder of `bench run`.", show_default=False)]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="ENTRY=VALUE", help="Data of one's own for an entry (repeatable)."),
]
Workers = Annotated[int, typer.Option(help="Worker processes; 0 plays in this one.")]


@app.callback()
def _bench() -> None:
    """Play benchmark suites and check results."""


@app.command("list", epilog="Example: rollgym bench list")
def names(as_json: AsJson = False) -> None:
    """List the suites that come with rollgym."""
    from rich.table import Table

    from rollgym.bench.suite import known_suites, read_suite

    suites = [read_suite(path) for path in known_suites().values()]
    if as_json:
        rows = [{"name": s.name, "version": s.version, "summary": s.summary} for s in suites]
        print_json(rows)
        return
    table = Table("suite", "version", "entries", "episodes", "what it is", box=None)
    for suite in suites:
        episodes = sum(entry.tasks * entry.samples for entry in suite.entries if not entry.data)
        table.add_row(suite.name, str(suite.version), str(len(suite.entries)), str(episodes), suite.summary)
    console().print(table)


@app.command("run", epilog="Example: rollgym bench run smoke --agent random --workers 2")
def run(
    suite: SuiteName,
    agent: AgentName = "random",
    model: Annotated[str | None, typer.Option(help="For agents that play with a model: which one.")] = None,
    base_url: Annotated[str | None, typer.Option(help="For chat: the endpoint's address, up to /v1.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this entry (repeatable).")] = None,
    data: Data = None,
    workers: Workers = 0,
    concurrency: Annotated[int, typer.Option(help="Episodes in flight; 0 chooses.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="runs/<time>-<suite>-<agent>")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Play what is missing in --out, or has failed.")
    ] = False,
    keep_failed: KeepFailed = False,
    as_json: AsJson = False,
    env_module: EnvModules = None,
    agent_arg: AgentArgs = None,
    agent_module: AgentModules = None,
    allow_weak_sandbox: WeakSandbox = False,
) -> None:
    """Play a suite.

    Every episode is written as it ends; after each entry the numbers are in summary.json and report.md.
    Exit code 1 where a golden score was missed, tasks were not the suite's, or episodes failed.
    """
    from rollgym.bench.run import SuiteRun
    from rollgym.bench.suite import Who, find_suite
    from rollgym.cli.progress import play

    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the folder to finish.")
    import_modules(agent_module, "--agent-module")
    who = Who(
        agent=agent,
        options=parse_pairs(agent_arg, "--agent-arg") | model_options(model, base_url),
        workers=workers,
        concurrency=1 if agent == "human" else concurrency,
        modules=import_modules(env_module),
        data=entry_data(data),
        weak_sandbox=allow_weak_sandbox,
    )
    found = find_suite(suite)
    playing = SuiteRun(
        found,
        who,
        out or new_folder(found.name, agent),
        only=only or (),
        resume=resume,
        keep_failed=keep_failed,
    )
    quiet = agent == "human"
    _report(playing, playing.run(lambda one: play(one, playing.stop, quiet=quiet)), as_json)


def entry_data(pairs: list[str] | None) -> dict[str, Any]:
    """``entry=value`` words as a dict."""
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"--data {pair!r} is not of the form entry=value.")
        found[name] = value
    return found


def _report(playing: SuiteRun, summary: dict[str, Any], as_json: bool) -> None:
    from rollgym.cli.bench_tables import print_results

    if as_json:
        print_json(summary)
    else:
        print_results(console(), summary)
    for row in summary["entries"]:
        if row["many_excluded"]:
            typer.echo(
                f"rollgym: WARNING: {row['name']}: {row['excluded']} of {row['episodes']} episodes ended by "
                "errors of the infrastructure and are excluded from the score.",
                err=True,
            )
    troubles = list(playing.trouble)
    done, wanted = summary["episodes"], sum(len(plan.specs) for plan in playing.plans.values())
    again = f"the same command with --out {playing.out} --resume plays"
    if done < wanted:
        troubles.append(
            f"Ended with {done} of {wanted} episodes, {summary['failed']} of them failed, kept in "
            f"{playing.out}; {again} the rest."
        )
    elif summary["failed"]:
        first = next(row["errors"][0]["message"] for row in summary["entries"] if row["errors"])
        troubles.append(f"{summary['failed']} of {done} episodes failed: {first} ({again} them again)")
    if done == wanted and summary["golden"]["missed"]:
        troubles.append(f"The golden score was missed in: {', '.join(summary['golden']['missed'])}.")
    if summary["other_tasks"]:
        troubles.append(f"The tasks were not those of the suite in: {', '.join(summary['other_tasks'])}.")
    for sentence in troubles:
        typer.echo(f"rollgym: {sentence}", err=True)
    if troubles:
        raise typer.Exit(130 if done < wanted and not playing.trouble else 1)


@app.command("show", epilog="Example: rollgym bench show smoke")
def show(
    what: Annotated[
        str, typer.Argument(metavar="SUITE|RESULTS", help="A suite, or a results folder.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Show a suite's entries and golden scores, or the numbers of a results folder."""
    from rollgym.bench.folder import read_results_manifest, read_results_summary
    from rollgym.bench.suite import find_suite
    from rollgym.cli.bench_tables import print_results, print_suite

    if Path(what).is_dir():
        read_results_manifest(Path(what))
        summary = {**read_results_summary(Path(what)), "out": what}
        print_json(summary) if as_json else print_results(console(), summary)
        return
    suite = find_suite(what)
    if as_json:
        print_json({**suite.to_json(), "hash": suite.fingerprint})
        return
    print_suite(console(), suite)


@app.command("compare", epilog="Example: rollgym bench compare runs/a runs/b")
def compare(a: Results, b: Results, as_json: AsJson = False) -> None:
    """Compare two results of a suite task by task, with intervals and p-values."""
    from rollgym.bench.compare import compare_results

    result = compare_results(a, b)
    if as_json:
        print_json(result)
        return
    from rollgym.cli.bench_tables import print_comparison

    print_comparison(console(), result)


@app.command("verify", epilog="Example: rollgym bench verify runs/a --sample 50 --seed 7")
def verify(
    results: Results,
    sample: Annotated[int, typer.Option(help="How many episodes to play again; 0 plays all.")] = 20,
    seed: Annotated[int, typer.Option(help="Chooses the sample: take one of your own.")] = 0,
    suite: Annotated[
        str | None, typer.Option(help="The suite it must be of, where it is not rollgym's own.")
    ] = None,
    data: Data = None,
    workers: Workers = 0,
    as_json: AsJson = False,
    env_module: EnvModules = None,
    allow_weak_sandbox: WeakSandbox = False,
) -> None:
    """Check that a result holds.

    Its numbers must follow from its episodes, its episodes must be the suite's, and a sample of them must be
    the same when it is played again. Exit code 1, and what differs, where they are not.
    """
    from rollgym.bench.suite import find_suite
    from rollgym.bench.verify import verify as check
    from rollgym.cli.bench_tables import counted

    with counted("play again", sample) as advance:
        verdict = check(
            results,
            sample=sample,
            seed=seed,
            workers=workers,
            modules=import_modules(env_module),
            data=entry_data(data),
            weak_sandbox=allow_weak_sandbox,
            suite=None if suite is None else find_suite(suite),
            on_episode=advance,
        )
    if as_json:
        print_json({**verdict.to_json(), "out": str(results)})
    else:
        screen = console()
        for problem in verdict.problems:
            screen.print(f"{problem.where}: {problem.what}", style="red", markup=False, highlight=False)
        for note in verdict.notes:
            screen.print(f"note: {note}", style="yellow", markup=False, highlight=False)
        count = len(verdict.problems)
        found = f"does not hold: {count} problem{'s' * (count > 1)}" if count else "holds"
        screen.print(
            f"{verdict.suite} by {verdict.agent} {found} ({verdict.episodes} episodes, {verdict.replayed} "
            "played again)",
            highlight=False,
            markup=False,
        )
    if not verdict.holds:
        raise typer.Exit(1)
