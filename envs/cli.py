"""Commands of environments: ``rollgym shop``, whose code is imported on first use, and ``export harbor``."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup


class LazyGroup(TyperGroup):
    """A group of commands in a module that other commands do not import."""

    module = ""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return self._load().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name."""
        return self._load().get_command(ctx, cmd_name)

    def _load(self) -> TyperGroup:
        group = typer.main.get_command(importlib.import_module(self.module).app)
        assert isinstance(group, TyperGroup)
        return group


class ShopGroup(LazyGroup):
    """``rollgym shop``."""

    module = "rollgym.envs.webshop.cli"


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``rollgym``: an entry point of the group ``rollgym.commands``."""
    app.add_typer(
        typer.Typer(cls=ShopGroup),
        name="shop",
        help="Build, import, inspect and serve the shops of WebShop.",
        epilog="Example: rollgym shop info synthetic --verify",
        no_args_is_help=True,
    )
    from rollgym.envs.terminal.cli import HARBOR_EPILOG, harbor

    export = next(group.typer_instance for group in app.registered_groups if group.name == "export")
    assert export is not None
    export.command("harbor", epilog=HARBOR_EPILOG)(harbor)
