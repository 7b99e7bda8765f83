"""``rollgym check``: check an environment against the rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollgym.core.errors import UsageError
from rollgym.utils import cli_options as cli
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.checks import Report

EPILOG = "Example: rollgym check rollgym/Sokoban-v0"


def check(
    env: cli.EnvName,
    rule: Annotated[
        list[str] | None, typer.Option(help="Check only this rule (repeatable).", show_default="all rules")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Play fewer episodes per rule: 3-12 s instead of 5-20 s.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="With ENV = tokens: a model folder in Hugging Face format.")
    ] = None,
    as_json: cli.AsJson = False,
    env_arg: cli.EnvArgs = None,
    env_module: cli.EnvModules = None,
) -> None:
    """Check an environment against Gymnasium's rules and rollgym's.

    `rollgym check tokens --model DIR` checks a model's chat template instead: whether conversations can be
    continued token by token.
    Exit code 0 if no rule fails, 1 if one fails, 2 for an unknown environment, rule or argument.
    """
    if env == "tokens":
        from rollgym.cli.tokens import check_tokens

        if model is None:
            raise UsageError("rollgym check tokens needs --model DIR, a model folder in Hugging Face format.")
        raise typer.Exit(check_tokens(model, as_json))
    from rollgym.checks import runner

    modules = cli.import_modules(env_module)
    screen = cli.console(stderr=True)
    with screen.status(f"checking {env}") as status:
        report = runner.check(
            env,
            kwargs=cli.parse_pairs(env_arg, "--env-arg"),
            rules=rule or None,
            quick=quick,
            modules=modules,
            progress=lambda rule, result: status.update(f"checking {env}: {rule.title}"),
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    raise typer.Exit(0 if report.ok else 1)


_MARKS = {
    "passed": "[green]✓ passed[/]",
    "failed": "[bold red]✗ failed[/]",
    "warning": "[yellow]! warning[/]",
    "skipped": "[dim]– skipped[/]",
}


def _print(report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rollgym.checks import RULES

    table = Table("rule", "status", "detail", box=None, pad_edge=False)
    for result in report.results:
        table.add_row(f"[bold]{result.rule}[/]", _MARKS[result.status], escape(result.detail))
    screen = cli.console()
    screen.print(table)
    failed = set(report.with_status("failed"))
    if failed:
        screen.print()
        for rule in RULES:
            if rule.name in failed:
                screen.print(f"[bold]{rule.name}[/]: {escape(rule.why)}", highlight=False)
    passed = len(report.with_status("passed"))
    verdict = "passes" if report.ok else f"fails {len(failed)} of {len(report.results)} rules"
    screen.print(
        f"\n{escape(report.env_id)} {verdict} ({passed} passed in {report.seconds:.1f} s).", style="bold"
    )
