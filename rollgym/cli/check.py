"""``rollgym check``: does an environment keep the contract?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollgym.cli.common import AsJson, EnvArgs, EnvModules, EnvName, console, import_modules, parse_pairs

EPILOG = "Example: rollgym check rollgym/Sokoban-v0"


def check(
    env: EnvName,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule (repeatable).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer episodes, a few seconds.")] = False,
    as_json: AsJson = False,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
) -> None:
    """Check that an environment keeps the contract.

    Gymnasium's rules and rollgym's, each named and explained.
    Exit code 0 when every rule holds, 1 when one is broken.
    """
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
            progress=lambda name: status.update(f"checking {env}: {name}"),
        )
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    raise typer.Exit(0 if report.ok else 1)
