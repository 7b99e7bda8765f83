"""Entry points of supervised fine-tuning: `sft` and `asft` from Python, `run_sft` for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgym.config.loader import load, parse, values_of
from rollgym.core.errors import UsageError
from rollgym.core.extras import require
from rollgym.core.files import read_bounded
from rollgym.core.local_objects import is_local
from rollgym.core.registry import import_module
from rollgym.devices.torch_device import torch_device
from rollgym.io.atomic import new_folder, removed_unless
from rollgym.io.run_dir import SUMMARY, read_json
from rollgym.models.zoo import check_model
from rollgym.trainer.config import MAX_CONFIG_BYTES
from rollgym.trainer.config_objects import named_settings, refuse_held
from rollgym.trainer.main import (
    MAY_CHANGE,
    TrainResult,
    check_resumable,
    command_for,
    has_begun,
    in_thread,
    interruptible,
    override_words,
    refuse_changes,
    run_loop,
)
from rollgym.trainer.sft.config import RunConfig, SFTConfig, code_in
from rollgym.trainer.sft.config_files import find_config
from rollgym.trainer.sft.records import DATA, DataFile, data_files
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.tracking.jsonl import read_metrics
from rollgym.trainer.train_run import CONFIG, TrainRun, held_out
from rollgym.trainer.train_state import GracefulStop
from rollgym.trainer.trusted import check_targets, load_with_code, require_trust
from rollgym.utils.async_runner import run_to_end

SFTSource = str | Path | Mapping[str, Any] | SFTConfig
"""A YAML file, the name of a shipped config, settings, or a loaded config."""

MAY_CHANGE_TOO = (*MAY_CHANGE, "evaluation.workers", "evaluation.max_in_flight")
"""Settings that a resumed run may change: they do not affect the result of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTResult(TrainResult):
    """The result of a finished run.

    Example:
        >>> result = sft("smollm-sft", out="runs/lake")
        >>> result.steps, result.loss, result.last_success
        (14, 0.31, 0.27)
    """

    loss: float | None
    """Training loss of the last step: mean negative log-likelihood of its learned tokens, in nats."""
    validation_loss: float | None
    """Loss of the last validation."""
    examples: int
    """Conversations and episodes that were trained on."""
    data: dict[str, Any]
    """The content of ``data.json``: files, counts, and records that were not used."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, as `rollgym sft --json` prints them."""
        return {**TrainResult.to_json(self), "kind": "sft"}


def sft(
    config: SFTSource | None = None,
    *,
    data: str | Path | Sequence[str | Path] = (),
    model: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    plain: bool = False,
    modules: Sequence[str] = (),
    **overrides: Any,
) -> SFTResult:
    """Fine-tune a model; blocks until the run ends. Inside a running event loop use `asft`.

    Args:
        config: A YAML file, the name of a shipped config, an `SFTConfig`, or a mapping of settings. Optional
            with ``data`` or ``resume``.
        data: Files or run folders to train on, in place of ``data.files``.
        model: The model to train, in place of ``model.path``.
        out: The run folder; default: ``runs/<time>-<name>``.
        resume: Continue the run in ``out`` from its last checkpoint.
        trust_code: With ``resume`` and without ``config``: run the code that the config in ``out`` names.
        plain: Print lines instead of a live panel.
        modules: Imported first by every process of the run, such as one that registers environments.
        overrides: Settings to change: sections as mappings, or dotted keys.

    Returns:
        The run folder, losses, evaluations, the report on the data and the trained model.

    Raises:
        UsageError: The config or the data are wrong, or the folder cannot be used.
        Interrupted: Ctrl-C or SIGTERM; the last finished step is saved.

    Example:
        >>> sft(data="chats.jsonl", model="smollm2", out="runs/chats", epochs=2)
        >>> sft("smollm-sft", **{"data.keep": "successful", "learner.learning_rate": 5e-5})
    """
    words = [*option_words(data, model), *override_words(overrides)]
    return _run(config, words, out, resume=resume, trust_code=trust_code, plain=plain, modules=modules)


async def asft(
    config: SFTSource | None = None,
    *,
    data: str | Path | Sequence[str | Path] = (),
    model: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    plain: bool = False,
    modules: Sequence[str] = (),
    **overrides: Any,
) -> SFTResult:
    """Fine-tune from a running event loop, such as a notebook's; takes and returns the same as `sft`.

    Training runs in a separate thread. A cancelled call saves the last finished step before it returns.

    Example:
        >>> result = await asft(data="chats.jsonl", model="smollm2")
    """
    words = [*option_words(data, model), *override_words(overrides)]
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return await in_thread(lambda stop: _run(config, words, out, stop=stop, **options))


def run_sft(
    config: SFTSource | None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    resume: bool = False,
    plain: bool = False,
    trust_code: bool = False,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Fine-tune as `sft` does, with overrides as ``key=value`` words; returns `SFTResult.to_json`."""
    result = _run(config, overrides, out, resume=resume, plain=plain, trust_code=trust_code, modules=modules)
    return result.to_json()


def option_words(data: str | Path | Sequence[str | Path] = (), model: str | Path | None = None) -> list[str]:
    """The arguments ``data`` and ``model`` as ``key=value`` words."""
    files = [data] if isinstance(data, str | Path) else list(data)
    words: dict[str, Any] = {"data.files": [str(file) for file in files]} if files else {}
    return override_words(words | ({"model.path": str(model)} if model is not None else {}))


def _run(
    source: SFTSource | None,
    overrides: Sequence[str],
    out: str | Path | None,
    *,
    resume: bool,
    plain: bool,
    trust_code: bool,
    modules: Sequence[str],
    stop: GracefulStop | None = None,
) -> SFTResult:
    """Validate the config, make the run folder, train, and read the result."""
    out = None if out is None else Path(out)
    for module in modules:
        import_module(module)
    if resume:
        config = _resumed_config(source, overrides, out, trust_code, modules)
    else:
        config = _with_modules(_new_config(source, overrides), modules)
    run_config = config.run_config(0)
    refuse_held(run_config)
    files = _check(config, run_config)
    require("Training", "train")
    if config.runtime == "local":
        torch_device(config.learner.device, "learner.device")
    check_targets(run_config)
    folder = out or new_folder(config.name or "sft")
    console = Console(plain=plain)
    with console, removed_unless(folder, lambda: has_begun(folder)):
        run = TrainRun(run_config, folder, console, resume=resume, stop=stop, kind="sft", settings=config)
        try:
            run_to_end(lambda: _train(config, run, files), run.stop.request)
        finally:
            run.close()
    return _result(config, run_config, folder)


def _result(config: SFTConfig, run_config: RunConfig, folder: Path) -> SFTResult:
    summary, lines, data = read_json(folder / SUMMARY), read_metrics(folder), read_json(folder / DATA)
    envs = [env for env in config.envs if not is_local(env.id)]
    fields = {name: summary[name] for name in TrainResult.__dataclass_fields__ if name in summary}

    def last(name: str) -> float | None:
        return next((line[name] for line in reversed(lines) if name in line), None)

    return SFTResult(
        folder=folder,
        eval_commands=[command_for(run_config, env, folder) for env in envs],
        loss=last("loss"),
        validation_loss=last("validation_loss"),
        examples=data["train"],
        data=data,
        **fields,
    )


def _check(config: SFTConfig, run_config: RunConfig) -> list[DataFile]:
    """Check environments, the model and the existence of all files before anything is written."""
    for env in config.envs:
        held_out(run_config, env)
    files = data_files(config.data.files)
    data_files(config.validation.files)
    if config.model.path is not None:
        check_model(config.model.path)
    return files


async def _train(config: SFTConfig, run: TrainRun, files: list[DataFile]) -> None:
    """Prepare the data, then train; a stopped run saves its last finished step and raises `Interrupted`."""
    from rollgym.trainer.sft.loop import SFTLoop
    from rollgym.trainer.sft.prepare import prepare_data

    with interruptible(run, "sft", trust=bool(code_in(config))):
        data = await prepare_data(config, run, files)
        run_config = config.run_config(data.num_steps(config))
        run.console.start(run.folder.name, run_config.stop.steps, done=run.state.step)
        await run_loop(
            run_config, run, lambda components, run: SFTLoop(components, run, config, data).train()
        )


# --- the config


def _new_config(source: SFTSource | None, overrides: Sequence[str]) -> SFTConfig:
    if source is None and not overrides:
        raise UsageError("No config and no data given: pass --data FILE, a YAML file, or a shipped config.")
    config = _load(source, overrides)
    name = Path(source).stem if isinstance(source, str | Path) else "sft"
    return config if config.name else config.model_copy(update={"name": name})


def _load(source: SFTSource | None, overrides: Sequence[str]) -> SFTConfig:
    settings: Path | Mapping[str, Any] | None
    if source is None or isinstance(source, SFTConfig):
        settings = None if source is None else values_of(source)
    elif isinstance(source, Mapping):
        settings = named_settings(source)
    else:
        settings = find_config(str(source))
    return load_with_code(lambda: load(SFTConfig, settings, overrides), code_in)


def _with_modules(config: SFTConfig, modules: Sequence[str]) -> SFTConfig:
    names = config.imports
    names = [*names, *(module for module in modules if module not in names)]
    return config.model_copy(update={"imports": names})


def _resumed_config(
    source: SFTSource | None,
    overrides: Sequence[str],
    out: Path | None,
    trust_code: bool,
    modules: Sequence[str] = (),
) -> SFTConfig:
    """The config that the run was started with, plus the few settings that may change."""
    out = check_resumable(out)
    recorded = read_bounded(out / CONFIG, MAX_CONFIG_BYTES, out).decode("utf-8", "replace")
    before = load(SFTConfig, parse(recorded, str(out / CONFIG)))
    if source is None and not trust_code:
        require_trust(code_in(before), out)
    now = _load(out / CONFIG if source is None else source, overrides)
    if source is not None and not now.name:
        now = now.model_copy(update={"name": before.name})
    now = _with_modules(now, modules)
    fixed = () if before.learner.schedule == "constant" else ("stop.steps",)  # rates depend on it
    refuse_changes(out, before, now, lambda key: key.startswith(MAY_CHANGE_TOO) and key not in fixed)
    return now
