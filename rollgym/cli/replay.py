"""``rollgym replay``: replay recorded actions in fresh environments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import ResultsError, UsageError
from rollgym.utils import cli_options as cli
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.core.types import Episode
    from rollgym.evaluation.replay import Replayed

EPILOG = "Example: rollgym replay runs/expert --episode test-7-0"

Run = Annotated[
    Path, typer.Argument(help="A run folder of `rollgym eval`, `train` or `bench run`.", show_default=False)
]


def replay(
    run: Run,
    episode: Annotated[
        str | None, typer.Option("--episode", metavar="ID", help="Replay only the episode with this id.")
    ] = None,
    sample: Annotated[
        int, typer.Option(help="Number of episodes to replay, sampled with --seed; 0 replays all.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    workers: cli.Workers = 0,
    as_json: cli.AsJson = False,
    env_arg: cli.EnvArgs = None,
    env_module: cli.EnvModules = None,
    allow_weak_sandbox: cli.WeakSandbox = False,
    train: Annotated[
        bool,
        typer.Option("--train", help="Repeat the updates of a training run and compare its weights."),
    ] = False,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="With --train: import the modules that the config names."),
    ] = False,
) -> None:
    """Replay recorded episodes and report differences.

    The actions of every episode are played in a fresh environment with the recorded task and seed; the first
    difference of each is reported. Exit code 1 if anything differs. Recorded environments must be registered,
    or defined in a module passed with --env-module: a recording alone never imports code.

    With --train, the learner trains again on the recorded batches, in the order of the event log. Batches,
    metrics and the weights of every kept checkpoint must be bit for bit the same.
    """
    if train:
        others = (episode, sample, seed, workers, env_arg, env_module, allow_weak_sandbox)
        if any(others):
            raise UsageError("--train replays whole runs and takes only --trust-code and --json.")
        _replay_training(run, trust_code, as_json)
        return
    from rollgym.bench.results import parts
    from rollgym.cli.tables import counted
    from rollgym.evaluation.replay import Settings, changed_versions, choose
    from rollgym.evaluation.replay import replay as play_again

    modules = cli.import_modules(env_module)
    notes: list[str] = []
    results: list[tuple[str, Replayed]] = []
    selected = _selected(parts(run), episode, notes)
    if not any(episodes for _, _, episodes in selected):
        if episode is not None:
            raise UsageError(f"{run} has no episode {episode!r}: `rollgym view` lists them.")
        raise ResultsError(f"{run} contains no episodes yet: nothing to replay.")
    for name, manifest, recorded in ((name, m, choose(e, sample, seed)) for name, m, e in selected):
        settings = Settings(
            workers=workers,
            modules=modules,
            env_kwargs=cli.parse_pairs(env_arg, "--env-arg"),
            scored=manifest.get("kind") == "train",
            weak_sandbox=allow_weak_sandbox,
        )
        with counted(f"replay {name}".strip(), len(recorded)) as advance:
            results += [(name, done) for done in play_again(recorded, settings, advance)]
        notes += changed_versions(recorded, manifest.get("versions"))
    _report(run, results, list(dict.fromkeys(notes)), as_json)


def _replay_training(run: Path, trust_code: bool, as_json: bool) -> None:
    from rollgym.evaluation.train_replay import replay_training

    result = replay_training(run, trust_code=trust_code)
    if as_json:
        print_json(result.to_json())
    else:
        screen = cli.console()
        for line in result.lines():
            screen.print(line, markup=False, highlight=False)
    if not result.same:
        raise typer.Exit(1)


def _selected(
    folders: dict[str, Path], wanted: str | None, notes: list[str]
) -> list[tuple[str, dict[str, Any], list[Episode]]]:
    """(name, manifest, episodes) of every part of the run: the entries of a suite, or the run itself."""
    from rollgym.evaluation.replay import finished_episodes
    from rollgym.io.run_dir import read_manifest

    selected = []
    for name, folder in folders.items():
        episodes, cut = finished_episodes(folder)
        if cut:
            notes.append(f"the last line of {folder / 'episodes.jsonl'} is incomplete and was skipped")
        if wanted is not None:
            episodes = [e for e in episodes if wanted in (e.spec.episode_id, f"{name}/{e.spec.episode_id}")]
        selected.append((name, read_manifest(folder), episodes))
    return selected


def _report(run: Path, results: list[tuple[str, Replayed]], notes: list[str], as_json: bool) -> None:
    different = [(name, done) for name, done in results if not done.same]
    if as_json:
        answer = {
            "run": str(run),
            "episodes": len(results),
            "turns": sum(done.turns for _, done in results),
            "same": len(results) - len(different),
            "different": [{"part": name, **done.to_json()} for name, done in different],
            "notes": notes,
        }
        print_json(answer)
    else:
        screen = cli.console()
        for name, done in different:
            label = f"{name}/{done.episode_id}" if name else done.episode_id
            screen.print(f"{label} ({done.env_id}) {done.difference}", markup=False, highlight=False)
        for note in notes:
            screen.print(f"note: {note}", style="yellow", markup=False, highlight=False)
        screen.print(
            f"{len(results)} episodes replayed: {len(results) - len(different)} identical, "
            f"{len(different)} different",
            highlight=False,
        )
    if different:
        raise typer.Exit(1)
