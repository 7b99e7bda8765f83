"""``rollgym new``: a working environment package to start from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from rollgym.cli.common import console
from rollgym.errors import UsageError, os_reason

EPILOG = "Example: rollgym new my_env && cd my_env && rollgym play my_env/MyEnv-v0 --env-module my_env"


def new(
    name: Annotated[str, typer.Argument(help="Name of the package: lower_case.", show_default=False)],
    folder: Annotated[Path, typer.Option("--in", help="Where to put it.")] = Path("."),
) -> None:
    """Write a template package for an environment.

    It has an environment, an expert, tests and registration.
    It works as it is: play it, check it, then replace the game by yours.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of a package: use lower-case letters, digits and _.")
    if name in ("rollgym", "gymnasium", "test", "tests"):
        raise UsageError(f"{name!r} is taken: choose another name.")
    target = folder / name
    if target.exists():
        raise UsageError(f"{target} exists already: choose another name or folder.")
    env_id = write_package(target, name)
    screen = console()
    screen.print(f"[bold]{target}[/] is ready. Try:", highlight=False)
    for command in (
        f"cd {target}",
        f"rollgym play {env_id} --env-module {name}",
        f"rollgym check {env_id} --env-module {name}",
        f"rollgym eval {env_id} --env-module {name} --agent expert",
        "pip install -e . && pytest        # then no --env-module is needed",
    ):
        screen.print(f"  {command}", highlight=False, markup=False)


def write_package(target: Path, name: str) -> str:
    """Write the template for a package called ``name`` and return its environment's id."""
    from importlib.resources import files
    from string import Template

    title = "".join(part.capitalize() for part in name.split("_"))
    env_id = f"{name}/{title}-v0"
    words = {"package": name, "title": title, "env_id": env_id}
    template = files("rollgym") / "templates" / "new_env"
    places = {
        "pyproject.toml.txt": target / "pyproject.toml",
        "readme.md.txt": target / "README.md",
        "init.py.txt": target / name / "__init__.py",
        "env.py.txt": target / name / "env.py",
        "expert.py.txt": target / name / "expert.py",
        "test_env.py.txt": target / "tests" / "test_env.py",
    }
    try:
        for source, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            text = (template / source).read_text(encoding="utf-8")
            place.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {os_reason(error)}.") from None
    return env_id
