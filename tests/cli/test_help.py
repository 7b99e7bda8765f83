"""The help of every command: a summary, help for every option, and an example at the end that parses."""

import re
import shlex
import subprocess
import sys

import click
import pytest
import typer
from doc_blocks import parse
from typer.core import TyperGroup

from rollgym.cli import app

ROOT = typer.main.get_command(app)


def walk(command, name="rollgym"):
    yield name, command
    if isinstance(command, TyperGroup):
        context = click.Context(command, info_name=name)
        for sub in command.list_commands(context):
            yield from walk(command.get_command(context, sub), f"{name} {sub}")


COMMANDS = dict(walk(ROOT))


def test_the_commands_are_those_of_every_package():
    assert {"rollgym eval", "rollgym train", "rollgym config show", "rollgym shop build"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_ends_with_an_example(name):
    command = COMMANDS[name]
    context = click.Context(command, info_name=name)
    lines = [line.strip() for line in command.get_help(context).strip().splitlines() if line.strip()]
    assert command.help, name
    first = command.help.strip().split("\n")[0]
    assert first.endswith((".", ":")), first
    assert command.epilog, f"{name} has no example"
    assert command.epilog.startswith(f"Example: {name} ") or command.epilog == f"Example: {name}"
    assert " ".join(lines).endswith(" ".join(command.epilog.split()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_has_help(name):
    for parameter in COMMANDS[name].params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        words = getattr(parameter, "help", None)
        assert words, f"{name}: {parameter.name} has no help"
        assert words.endswith("."), f"{name}: {words}"


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].epilog])
def test_every_example_parses(name):
    example = COMMANDS[name].epilog.removeprefix("Example: ")
    words = shlex.split(re.split(r" \| | && | > ", example)[0])
    assert words[0] == "rollgym"
    parse(words[1:])


@pytest.mark.parametrize("words", [["--help"], ["eval", "--help"], ["train", "-h"], ["config", "--help"]])
def test_help_imports_no_heavy_library(words):
    heavy = {"torch", "ray", "transformers", "deepspeed", "sglang"}
    code = (
        "import sys\n"
        "from rollgym.cli import main\n"
        f"try:\n    main({words!r})\n"
        "except SystemExit:\n    pass\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Usage: " in ran.stdout
    assert ran.stderr == "[]\n"
