"""``rollgym shop``: build, look at, import and serve the shops of WebShop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.utils.cli_options import AsJson, console, needs_extra
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(rich_markup_mode=None)

BUILD_EPILOG = "Example: rollgym shop build --size 100000 --seed 7"
INFO_EPILOG = "Example: rollgym shop info synthetic --verify"
IMPORT_EPILOG = "Example: rollgym shop import ~/webshop/data --name webshop-1000"
SERVE_EPILOG = "Example: rollgym shop serve synthetic --port 3000"

Shop = Annotated[
    str,
    typer.Argument(
        metavar="[SHOP]", help="synthetic, synthetic:SIZE:SEED, the name of an import, or a folder."
    ),
]
Seed = Annotated[int, typer.Option(help="Everything that is drawn comes from it.")]


@app.callback()
def _shop() -> None:
    """Build, import and look at WebShop's shops."""


@app.command("build", epilog=BUILD_EPILOG)
def build(
    size: Annotated[int, typer.Option(help="How many products.")] = 1000,
    seed: Seed = 0,
    style: Annotated[str, typer.Option(help="full, or simple: few and short words.")] = "full",
    out: Annotated[Path | None, typer.Option(help="A folder for it.", show_default="in the cache")] = None,
    as_json: AsJson = False,
) -> None:
    """Build a synthetic shop: products, goals and search index.

    It is built once and cached ($ROLLGYM_CACHE or ~/.cache/rollgym). Environments build the shops they need
    themselves.
    """
    with _progress() as progress:
        found = _command().build(size, seed, style, out, progress)
    _show(found, as_json)


@app.command("info", epilog=INFO_EPILOG)
def info(
    shop: Shop = "synthetic",
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its hash.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a shop holds, and whether it is whole."""
    with _progress() as progress:
        found = _command().info(shop, check=verify, progress=progress)
    _show(found, as_json)


@app.command("import", epilog=IMPORT_EPILOG)
def import_(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The original data: items_shuffle*.json and so on.", show_default=False
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call the shop.", show_default="webshop, or webshop-1000")
    ] = None,
    prices: Annotated[Path | None, typer.Option(help="A JSON file {asin: price}.")] = None,
    nouns: Annotated[Path | None, typer.Option(help="A JSON file {asin: [nouns of the title]}.")] = None,
    goals: Annotated[str, typer.Option(help="synthetic, human or both.")] = "both",
    seed: Seed = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a bad record.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a shop of the original WebShop files, in place of an earlier import of that name.

    If a folder has several sets, pass the items_shuffle file.
    """
    with _progress() as progress:
        found = _command().import_files(
            place,
            name=name,
            prices=prices,
            nouns=nouns,
            goals=goals,
            seed=seed,
            strict=strict,
            progress=progress,
        )
    _show(found, as_json)


@app.command("serve", epilog=SERVE_EPILOG)
def serve(
    shop: Shop = "synthetic",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 3000,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    rules: Annotated[str, typer.Option(help="original or clean.")] = "clean",
) -> None:
    """Open a shop in your web browser, to play by hand."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535, not {port}.")
    with _progress() as progress:
        folder = _command().resolve_shop(shop, progress=progress)
    _command().serve(str(folder), host, port, rules)


def _command() -> ModuleType:
    with needs_extra("WebShop", "webshop"):
        from rollgym.envs.webshop import manage

        return manage


@contextmanager
def _progress() -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar for each thing that is made, on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen, tasks = console(stderr=True), dict[str, TaskID]()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:

        def tell(done: int, total: int | None, what: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield tell


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(found):
        table.add_row(*map(escape, row))
    console().print(table)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seed = "" if found["seed"] is None else f", seed {found['seed']}"
    yield "shop", f"{found['name']} ({found['kind']}{seed})"
    yield "folder", f"{found['folder']} ({found['bytes'] / 1e6:,.1f} MB)"
    yield "products", f"{found['products']:,}"
    for kind, goals in found["goals"].items():
        splits = (f"{way} {_sizes(goals[way])}" for way in ("original", "disjoint"))
        yield f"{kind} goals", f"{goals['count']:,} ({'; '.join(splits)})"
    yield "nouns by", found["nouns"]
    if found["prices"]:
        yield "prices", found["prices"]
    left_out = {reason: count for reason, count in (found["left_out"] or {}).items() if count}
    if left_out:
        yield "left out", ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    for sentence in found.get("bad_records", ()):
        yield "bad record", sentence
    yield "fingerprint", found["fingerprint"]
    if found.get("verified") is not None:
        yield "verified", f"all {found['verified']} files have the hash they were built with"


def _sizes(split: dict[str, int]) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in split.items())
