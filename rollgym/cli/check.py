"""``rollgym check``: does an environment keep the contract?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollgym.cli.common import AsJson, EnvArgs, EnvModules, EnvName, console, import_modules, parse_pairs
from rollgym.cli.output import print_json
from rollgym.errors import UsageError

if TYPE_CHECKING:
    from rollgym.check import Report

EPILOG = "Example: rollgym check rollgym/Sokoban-v0"


def check(
    env: EnvName,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule (repeatable).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer episodes, a few seconds.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="With ENV = tokens: the folder of a model in HF format.")
    ] = None,
    as_json: AsJson = False,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
) -> None:
    """Check that an environment keeps the contract.

    Gymnasium's rules and rollgym's, each named and explained. `rollgym check tokens --model DIR` explains a
    model's chat template instead, and whether conversations can be continued token by token.
    Exit code 0 when every rule holds, 1 when one is broken.
    """
    if env == "tokens":
        raise typer.Exit(_check_tokens(model, as_json))
    from rollgym.check import check_env

    modules = import_modules(env_module)
    screen = console(stderr=True)
    with screen.status(f"checking {env}") as status:
        report = check_env(
            env,
            kwargs=parse_pairs(env_arg, "--env-arg"),
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


def _check_tokens(model: Path | None, as_json: bool) -> int:
    from rollgym.cli.tokens import check_tokens

    if model is None:
        raise UsageError("rollgym check tokens needs --model DIR, the folder of a model in HF format.")
    return check_tokens(model, as_json)


_MARKS = {
    "passed": "[green]✓ passed[/]",
    "failed": "[bold red]✗ failed[/]",
    "warning": "[yellow]! look[/]",
    "skipped": "[dim]– skipped[/]",
}


def _print(report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rollgym.check import RULES

    table = Table("rule", "", "what was seen", box=None, pad_edge=False)
    for result in report.results:
        table.add_row(f"[bold]{result.rule}[/]", _MARKS[result.status], escape(result.detail))
    screen = console()
    screen.print(table)
    broken = {result.rule for result in report.results if result.status == "failed"}
    if broken:
        screen.print()
        for rule in RULES:
            if rule.name in broken:
                screen.print(f"[bold]{rule.name}[/]: {escape(rule.why)}", highlight=False)
    passed = sum(result.status == "passed" for result in report.results)
    verdict = "keeps the contract" if report.ok else f"breaks {len(broken)} of the rules"
    screen.print(
        f"\n{escape(report.env_id)} {verdict} ({passed} passed in {report.seconds:.1f} s).", style="bold"
    )
