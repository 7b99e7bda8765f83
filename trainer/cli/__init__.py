"""Commands of the trainer: train, imitate, sft, dpo, plan, simulate, config, model."""

from __future__ import annotations

from pathlib import Path

import typer

from rollgym.evaluation.train_replay import TrainReplay, register_train_replay
from rollgym.trainer.cli import config, dpo, model, plan, sft, simulate, train


def add_commands(app: typer.Typer) -> None:
    """Add the trainer's commands to ``rollgym``: an entry point of the group ``rollgym.commands``."""
    app.command("train", epilog=train.EPILOG)(train.train)
    app.command("imitate", epilog=train.IMITATE_EPILOG)(train.imitate)
    app.command("sft", epilog=sft.EPILOG)(sft.sft)
    app.command("dpo", epilog=dpo.EPILOG)(dpo.dpo)
    app.command("plan", epilog=plan.EPILOG)(plan.plan)
    app.command("simulate", epilog=simulate.EPILOG)(simulate.simulate)
    app.add_typer(model.app, name="model", epilog=model.GET_EPILOG)
    app.add_typer(config.app, name="config", epilog=config.LIST_EPILOG)
    register_train_replay(_replay)


def _replay(run: Path, trust_code: bool) -> TrainReplay:
    from rollgym.trainer.replay import replay_run  # imports torch

    return replay_run(run, trust_code=trust_code)
