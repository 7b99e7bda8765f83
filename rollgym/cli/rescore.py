"""``rollgym rescore``: compute the rewards of stored episodes again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.utils import cli_options as cli
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.rewards.settings import RewardSettings

EPILOG = "Example: rollgym rescore runs/demo --out runs/demo-rescored --reward my_rewards:brevity"


def rescore(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New or empty run folder.", show_default=False)],
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="MODULE:FUNCTION",
            help="Reward function to add, with =WEIGHT for a weight other than 1 (repeatable).",
        ),
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Use the rewards that the run's own config names.")
    ] = False,
    environment_only: Annotated[
        bool,
        typer.Option("--environment-only", help="Leave out the rewards that the run's own config names."),
    ] = False,
    replay: Annotated[
        bool, typer.Option(help="Play the actions again for the environment's rewards, or keep the recorded.")
    ] = True,
    workers: cli.Workers = 0,
    as_json: cli.AsJson = False,
    env_arg: cli.EnvArgs = None,
    env_module: cli.EnvModules = None,
    allow_weak_sandbox: cli.WeakSandbox = False,
) -> None:
    """Compute rewards of stored episodes again and report what changed.

    The recorded actions are played in fresh environments, reward functions are added, and the result is a new
    run folder with changes.jsonl. The run itself is never changed.
    """
    from rollgym.cli.tables import counted
    from rollgym.evaluation.replay import Settings
    from rollgym.evaluation.rescore import rescore as compute
    from rollgym.evaluation.run_results import load_run
    from rollgym.rewards.resolve import resolve_rewards
    from rollgym.rewards.settings import make_scorer

    settings = Settings(
        workers=workers,
        modules=cli.import_modules(env_module),
        env_kwargs=cli.parse_pairs(env_arg, "--env-arg"),
        weak_sandbox=allow_weak_sandbox,
    )
    rewards = [_reward(text) for text in reward or ()]
    keep_environment = True
    config: dict[str, Any] = {} if environment_only else load_run(run).config
    if config.get("rewards") and not trust_code and not rewards:
        raise UsageError(
            f"The config of {run} names rewards, which are code or addresses: pass --trust-code to use them, "
            "--reward to name others, or --environment-only to leave them out."
        )
    if trust_code:
        rewards = [*_configured(config), *rewards]
        keep_environment = bool(config.get("keep_environment_reward", True))
    resolve_rewards(rewards)
    scorer = make_scorer(rewards, keep_environment=keep_environment) if rewards else None
    with counted("rescore", 0) as advance:
        done = compute(run, out, scorer=scorer, replay=replay, settings=settings, on_episode=advance)
    if as_json:
        print_json(done.to_json())
        return
    for change in done.changes:
        if change.changed or change.note:
            typer.echo(str(change))
    skipped = sum(change.skipped for change in done.changes)
    typer.echo(
        f"{len(done.changes)} episodes: {len(done.changed)} changed, {skipped} not rescored; results in {out}"
    )


def _reward(text: str) -> RewardSettings:
    from rollgym.rewards.settings import RewardSettings

    target, equals, weight = text.partition("=")
    try:
        return RewardSettings(kind="function", target=target, weight=float(weight) if equals else 1.0)
    except ValueError:
        raise UsageError(f"--reward {text}: the weight {weight!r} is not a number.") from None


def _configured(config: dict[str, Any]) -> list[RewardSettings]:
    from rollgym.rewards.settings import RewardSettings

    entries = config.get("rewards")
    try:
        return [RewardSettings(**entry) for entry in (entries if isinstance(entries, list) else [])]
    except TypeError as error:
        raise UsageError(f"config.yaml: rewards cannot be read ({error}).") from None
