"""What ``rollgym train`` and ``rollgym imitate`` do.

Importing this module imports no torch: a mistake is found, and said, before anything heavy is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.config import diff, find_config, load
from rollgym.devices.choose import torch_device
from rollgym.errors import Interrupted, UsageError
from rollgym.extras import require
from rollgym.files import refuse_links
from rollgym.folders import new_folder, removed_unless
from rollgym.given import is_held
from rollgym.model_settings import eval_command
from rollgym.pretrained import check_model
from rollgym.registry import import_module
from rollgym.running import run_to_end
from rollgym.store import MANIFEST, SUMMARY, read_json
from rollgym.trainer.config import EnvChoice, TrainConfig
from rollgym.trainer.console import Console
from rollgym.trainer.given import named_settings, refuse_held
from rollgym.trainer.journal import EVALUATIONS, METRICS
from rollgym.trainer.run import CONFIG, FINAL, Run, held_out
from rollgym.trainer.streams import make_stream
from rollgym.trainer.trusted import TRUST_CODE, check_targets, code_of, load_to_run, require_trust

if TYPE_CHECKING:
    from rollgym.trainer.setup import Parts

MAY_CHANGE = (
    "stop.", "checkpoints.", "tracking.", "name", "heartbeat_timeout", "address",
    "engine.url", "engine.api_key_env", "engine.python",
    "rollout.workers", "rollout.max_in_flight", "rollout.stall_seconds",
    "rollout.max_infra_retries_per_group",
)  # fmt: skip
"""Settings that a resumed run may have changed: they leave every step as it was."""


def run_training(
    name: str | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    resume: bool = False,
    imitate_only: bool = False,
    plain: bool = False,
    trust_code: bool = False,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Train as a configuration says; returns the summary, with the folder as ``run``.

    ``name`` is a YAML file, the name of a shipped config, or a mapping of settings in which classes and
    functions may stand in place of names (see `named_settings`). ``trust_code`` lets a resumed run use the
    code that the config in its own folder names; without it, such a config must be given as ``name``.
    ``modules`` are imported by every process of the run, beside those in ``rollout.modules``.
    """
    for module in modules:
        import_module(module)
    if resume:
        config = _resumed(name, overrides, out, trust_code, modules)
    else:
        config = _with_modules(_fresh(name, overrides), modules)
    if imitate_only:
        if config.warm_start is None:
            raise UsageError("There is nothing to imitate: the configuration has no warm_start section.")
        config = config.model_copy(update={"stop": config.stop.model_copy(update={"steps": 0})})
    refuse_held(config)
    _check(config)
    require("Training", "train")
    if config.runtime == "local":
        torch_device(config.learner.device, "learner.device")
    check_targets(config)
    folder = out or new_folder(config.name or "run")
    console = Console(plain=plain)
    with console, removed_unless(folder, lambda: _has_begun(folder)):
        run = Run(config, folder, console, resume=resume)
        try:
            console.start(folder.name, config.stop.steps, done=run.progress.step)
            run_to_end(lambda: _train(config, run), run.ask_to_stop)
        finally:
            run.close()
    named = [] if config.program is not None else [env for env in config.envs if not is_held(env.id)]
    commands = [command_for(config, env, folder) for env in named]
    return {**read_json(folder / SUMMARY), "run": str(folder), "eval_commands": commands}


def command_for(config: TrainConfig, env: EnvChoice, folder: Path) -> str:
    """The command that evaluates a run's policy as the run did, in one of its environments."""
    wanted = config.evaluation
    return eval_command(
        env.id,
        str(folder / FINAL),
        env_kwargs=env.kwargs,
        modules=config.rollout.modules,
        episodes=wanted.episodes,
        seed=wanted.seed,
        split=wanted.split,
        limits=env.limits,
    )


def _has_begun(folder: Path) -> bool:
    """Whether a run has anything that is worth keeping: a number or a checkpoint."""
    files = (folder / METRICS, folder / EVALUATIONS)
    return any(file.is_file() and file.stat().st_size for file in files)


def _check(config: TrainConfig) -> None:
    """Find out before anything is written that an environment, a split or a size is not to be had."""
    make_stream(config, config.envs, 0)
    for env in config.envs:
        held_out(config, env)
    if config.model.path is not None:
        check_model(config.model.path)


async def _train(config: TrainConfig, run: Run) -> None:
    """Train; a run that is asked to stop saves its last finished step and raises `Interrupted`."""
    from rollgym.trainer.loop import train

    with run.stoppable():
        try:
            async with _parts(config, run.folder) as parts:
                try:
                    await train(parts, run)
                except asyncio.CancelledError:
                    if run.stop_asked:
                        await run.save_stopped(parts)
                    raise
        except asyncio.CancelledError:
            if not run.stop_asked:
                raise
            raise _interrupted(config, run) from None


def _interrupted(config: TrainConfig, run: Run) -> Interrupted:
    saved = run.checkpoints.steps()
    kept = f"the checkpoint of step {saved[-1]} is kept" if saved else "there is no checkpoint yet"
    trust = f" {TRUST_CODE}" if code_of(config) else ""
    return Interrupted(
        f"Stopped after step {run.progress.step}; {kept}. "
        f"`rollgym train --resume --out {run.folder}{trust}` goes on."
    )


@asynccontextmanager
async def _parts(config: TrainConfig, folder: Path) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        if config.runtime == "local":
            from rollgym.trainer.setup import open_parts

            parts = await stack.enter_async_context(open_parts(config, folder))
        else:
            from rollgym.trainer.setup_ray import open_ray_parts

            parts = await stack.enter_async_context(open_ray_parts(config, folder))
        if config.program is not None:
            from rollgym.trainer.program import playing

            parts = await stack.enter_async_context(playing(parts, config.program))
        yield parts


def _fresh(name: str | Mapping[str, Any] | None, overrides: Sequence[str]) -> TrainConfig:
    if name is None:
        raise UsageError(
            "Say which configuration to train: a YAML file, or a name from `rollgym config list`."
        )
    config = load_to_run(_source(name), overrides)
    called = "run" if isinstance(name, Mapping) else Path(name).stem
    return config if config.name else config.model_copy(update={"name": called})


def _source(name: str | Mapping[str, Any]) -> Path | dict[str, Any]:
    """Where settings are read from."""
    return named_settings(name) if isinstance(name, Mapping) else find_config(name)


def _with_modules(config: TrainConfig, modules: Sequence[str]) -> TrainConfig:
    """The same settings with more modules to import."""
    known = config.rollout.modules
    every = [*known, *(module for module in modules if module not in known)]
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"modules": every})})


def _resumed(
    name: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    out: Path | None,
    trust_code: bool,
    modules: Sequence[str] = (),
) -> TrainConfig:
    """The settings the run was begun with, and the few that may change."""
    if out is None:
        raise UsageError("Say which run to go on with: --resume --out runs/NAME.")
    if not (out / MANIFEST).is_file():
        raise UsageError(f"There is nothing to resume in {out}: it has no {MANIFEST}.")
    refuse_links(out)
    before = load(TrainConfig, out / CONFIG)
    if name is None and not trust_code:
        require_trust(before, out)
    now = load_to_run(out / CONFIG if name is None else _source(name), overrides)
    if name is not None and not now.name:
        now = now.model_copy(update={"name": before.name})
    now = _with_modules(now, modules)
    fixed = () if before.learner.schedule == "constant" else ("stop.steps",)  # rates depend on it
    changed = [found for found in diff(before, now) if not _may_change(found.key) or found.key in fixed]
    if changed:
        lines = "\n".join(f"  {found}" for found in changed)
        raise UsageError(
            f"{out} was begun with other settings (then / now):\n{lines}\n"
            "Resume with the same ones, or begin another run with another --out."
        )
    return now


def _may_change(key: str) -> bool:
    """Whether a setting leaves every step as it was: how long, how often, how many at once, and where."""
    section, _, rest = key.partition(".")
    last = rest.rpartition(".")[2]
    if section == "rewards":
        return last in ("timeout", "retries", "concurrency", "workers", "url", "header_env")
    if section == "envs":
        return rest.partition(".")[2] == "limits.seconds"
    return key.startswith(MAY_CHANGE)
