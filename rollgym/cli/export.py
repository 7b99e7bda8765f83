"""``rollgym export`` and ``rollgym import``: recorded episodes as training data, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgym.utils.cli_options import AsJson, parse_pairs
from rollgym.utils.cli_output import print_json

EPILOG = "Example: rollgym export messages runs/expert --out expert.jsonl --keep successful"
PARQUET_EPILOG = "Example: rollgym export parquet runs/demo --out tokens.parquet --form tokens"
DATASETS_EPILOG = "Example: rollgym export datasets runs/a runs/b --out pairs --form preference"
EPISODES_EPILOG = "Example: rollgym export episodes runs/lake --out episodes.jsonl"
IMPORT_EPILOG = "Example: rollgym import chats.jsonl --out runs/chats --column messages=conversation"

app = typer.Typer(
    help="Write recorded episodes, or tasks, in the forms of other projects.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders of any command.", show_default=False)
]
Out = Annotated[Path, typer.Option(help="What to write; it must not exist yet.", show_default=False)]
Form = Annotated[
    str,
    typer.Option(
        help="sft: conversations. preference: best and worst episode of each task. tokens: ids, mask and "
        "log-probs as recorded."
    ),
]
Keep = Annotated[str, typer.Option(help="Episodes to write: all without an error, or the successful ones.")]


@app.command("messages", epilog=EPILOG)
def messages(runs: Runs, out: Out, form: Form = "sft", keep: Keep = "all", as_json: AsJson = False) -> None:
    """Write episodes as JSON lines with messages in OpenAI's form, tools included."""
    _export(runs, out, "messages", form, keep, as_json)


@app.command("parquet", epilog=PARQUET_EPILOG)
def parquet(runs: Runs, out: Out, form: Form = "sft", keep: Keep = "all", as_json: AsJson = False) -> None:
    """Write episodes as a Parquet file."""
    _export(runs, out, "parquet", form, keep, as_json)


@app.command("datasets", epilog=DATASETS_EPILOG)
def datasets(runs: Runs, out: Out, form: Form = "sft", keep: Keep = "all", as_json: AsJson = False) -> None:
    """Write episodes as a folder that datasets.load_from_disk reads; the package is not needed."""
    _export(runs, out, "datasets", form, keep, as_json)


@app.command("episodes", epilog=EPISODES_EPILOG)
def episodes(
    run: Annotated[Path, typer.Argument(help="Run folder of any command.", show_default=False)],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Write complete episodes as JSON lines, with tokens and log-probs (training runs store blocks)."""
    from rollgym.evaluation.trajectory_export import export_episodes

    done = export_episodes(run, out)
    if as_json:
        print_json(done.to_json())
    else:
        typer.echo(f"{done.path}: {done.rows} episodes")


def _export(runs: list[Path], out: Path, format: str, form: str, keep: str, as_json: bool) -> None:
    from rollgym.evaluation.trajectory_export import export_run

    done = export_run(runs, out, format=format, form=form, keep=keep)
    if as_json:
        print_json(done.to_json())
        return
    typer.echo(f"{done.path}: {done.rows} rows of {done.episodes} episodes")
    for reason, count in done.left_out.items():
        if count:
            typer.echo(f"left out: {count} {reason}")


def import_(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA...",
            help="JSONL, Parquet or Arrow files, or a folder of datasets.save_to_disk.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="New or empty run folder.", show_default=False)],
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="NAME=COLUMN", help="Column of the data for a name (repeatable)."),
    ] = None,
    env_id: Annotated[
        str, typer.Option("--env", help="Environment of conversations that name none.")
    ] = "imported/conversations",
    as_json: AsJson = False,
) -> None:
    """Write recorded conversations as a run folder, for view, sft and load_run.

    Rows are those of `rollgym export` (forms sft and tokens), or any with a column messages in OpenAI's form.
    """
    from rollgym.evaluation.trajectory_import import import_conversations

    columns = parse_pairs(column, "--column") or None
    done = import_conversations(data, out, columns=columns, env_id=env_id)
    if as_json:
        print_json(done.to_json())
    else:
        typer.echo(f"{done.path}: {done.episodes} episodes, {done.tokens} recorded tokens")
