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
Seed = Annotated[int, typer.Option(help="Seed of the products, goals and prices.")]


@app.callback()
def _shop() -> None:
    """Build, import and look at WebShop's shops."""


@app.command("build", epilog=BUILD_EPILOG)
def build(
    size: Annotated[int, typer.Option(help="Number of products.")] = 1000,
    seed: Seed = 0,
    style: Annotated[
        str, typer.Option(help="Vocabulary of titles and goals: full, or simple (few, short words).")
    ] = "full",
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="in the cache")] = None,
    as_json: AsJson = False,
) -> None:
    """Build a synthetic shop: products, goals and search index.

    It is built once and cached ($ROLLGYM_CACHE or ~/.cache/rollgym). Environments build the shops they need
    themselves.
    """
    with _progress() as progress:
        shop_info = _command().build(size, seed, style, out, progress)
    _show(shop_info, as_json)


@app.command("info", epilog=INFO_EPILOG)
def info(
    shop: Shop = "synthetic",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every file with the hash it was built with.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the products, goals and splits of a shop."""
    with _progress() as progress:
        shop_info = _command().info(shop, check=verify, progress=progress)
    _show(shop_info, as_json)


@app.command("import", epilog=IMPORT_EPILOG)
def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder with the original data: items_shuffle*.json, items_ins*.json.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the shop.", show_default="webshop, or webshop-1000")
    ] = None,
    prices: Annotated[Path | None, typer.Option(help="JSON file with prices: {asin: price}.")] = None,
    nouns: Annotated[
        Path | None, typer.Option(help="JSON file with nouns of titles: {asin: [noun, ...]}.")
    ] = None,
    goals: Annotated[str, typer.Option(help="Goals to import: synthetic, human or both.")] = "both",
    seed: Seed = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first bad record instead of leaving it out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import the original WebShop files; replaces an earlier import with the same name.

    If a folder has several sets, pass the items_shuffle file.
    """
    with _progress() as progress:
        shop_info = _command().import_files(
            folder,
            name=name,
            prices=prices,
            nouns=nouns,
            goals=goals,
            seed=seed,
            strict=strict,
            progress=progress,
        )
    _show(shop_info, as_json)


@app.command("serve", epilog=SERVE_EPILOG)
def serve(
    shop: Shop = "synthetic",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 3000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    rules: Annotated[str, typer.Option(help="Reward rules: original or clean.")] = "clean",
) -> None:
    """Serve a shop to a web browser, to play by hand."""
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
    """Show a progress bar per stage on a terminal; elsewhere, nothing."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen, tasks = console(stderr=True), dict[str, TaskID]()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:

        def update(done: int, total: int | None, stage: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield update


def _show(shop_info: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(shop_info)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(shop_info):
        table.add_row(*map(escape, row))
    console().print(table)


def _rows(shop_info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seed = "" if shop_info["seed"] is None else f", seed {shop_info['seed']}"
    yield "shop", f"{shop_info['name']} ({shop_info['kind']}{seed})"
    yield "folder", f"{shop_info['folder']} ({shop_info['bytes'] / 1e6:,.1f} MB)"
    yield "products", f"{shop_info['products']:,}"
    for kind, goals in shop_info["goals"].items():
        splits = (f"{way} {_sizes(goals[way])}" for way in ("original", "disjoint"))
        yield f"{kind} goals", f"{goals['count']:,} ({'; '.join(splits)})"
    yield "nouns by", shop_info["nouns"]
    if shop_info["prices"]:
        yield "prices", shop_info["prices"]
    left_out = {reason: count for reason, count in (shop_info["left_out"] or {}).items() if count}
    if left_out:
        yield "left out", ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    for sentence in shop_info.get("bad_records", ()):
        yield "bad record", sentence
    yield "fingerprint", shop_info["fingerprint"]
    if shop_info.get("verified") is not None:
        yield "verified", f"all {shop_info['verified']} files have the hash they were built with"


def _sizes(split: dict[str, int]) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in split.items())
