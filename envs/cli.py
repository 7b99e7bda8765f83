"""Commands of environments: ``rollgym shop``, whose code is imported on first use."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class ShopGroup(TyperGroup):
    """``rollgym shop``: other commands do not import its module, `rollgym.envs.webshop.cli`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return self._load().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name."""
        return self._load().get_command(ctx, cmd_name)

    def _load(self) -> TyperGroup:
        from rollgym.envs.webshop.cli import app

        group = typer.main.get_command(app)
        assert isinstance(group, TyperGroup)
        return group


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``rollgym``: an entry point of the group ``rollgym.commands``."""
    app.add_typer(
        typer.Typer(cls=ShopGroup),
        name="shop",
        help="Build, import, inspect and serve the shops of WebShop.",
        epilog="Example: rollgym shop info synthetic --verify",
        no_args_is_help=True,
    )
