"""``rollgym new``: write a template package for an environment."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from rollgym.core.errors import UsageError, os_reason
from rollgym.utils.cli_options import console

EPILOG = "Example: rollgym new my_env && cd my_env && rollgym play my_env/MyEnv-v0 --env-module my_env"


def new(
    name: Annotated[
        str, typer.Argument(help="Package name: lower-case letters, digits and _.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option("--in", help="Parent folder of the package.")] = Path("."),
) -> None:
    """Write a template package for an environment.

    It contains a working environment, an expert, tests and registration.
    Play it, check it, then replace the game with your own.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"Invalid package name {name!r}: use lower-case letters, digits and _.")
    if name in ("rollgym", "gymnasium", "test", "tests"):
        raise UsageError(f"The package name {name!r} is taken: choose another name.")
    target = folder / name
    if target.exists():
        raise UsageError(f"{target} already exists: choose another name or folder.")
    env_id = write_package(target, name)
    screen = console()
    screen.print(f"Created [bold]{target}[/]. Try:", highlight=False)
    for command in (
        f"cd {target}",
        f"rollgym play {env_id} --env-module {name}",
        f"rollgym check {env_id} --env-module {name}",
        f"rollgym eval {env_id} --env-module {name} --agent expert",
        "pip install -e . && pytest        # once installed, --env-module is not needed",
    ):
        screen.print(f"  {command}", highlight=False, markup=False)


def write_package(target: Path, name: str) -> str:
    """Write the template for a package called ``name`` and return the id of its environment."""
    from importlib.resources import files
    from string import Template

    title = "".join(part.capitalize() for part in name.split("_"))
    env_id = f"{name}/{title}-v0"
    words = {"package": name, "title": title, "env_id": env_id}
    template = files("rollgym") / "templates" / "new_env"
    paths = {
        "pyproject.toml.txt": target / "pyproject.toml",
        "readme.md.txt": target / "README.md",
        "init.py.txt": target / name / "__init__.py",
        "env.py.txt": target / name / "env.py",
        "expert.py.txt": target / name / "expert.py",
        "test_env.py.txt": target / "tests" / "test_env.py",
    }
    try:
        for source, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (template / source).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {os_reason(error)}.") from None
    return env_id
