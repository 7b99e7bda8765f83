"""A run on data in any objective: validate the config, make the folder, prepare the data, train, result.

`Objective` holds what differs: the settings, the reader of the data, the loop and the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
    interruptible,
    override_words,
    refuse_changes,
    run_loop,
    teacher_may_change,
)
from rollgym.trainer.run_files import CONFIG
from rollgym.trainer.run_tasks import held_out
from rollgym.trainer.sft.config import DataRunConfig, RunConfig, code_in
from rollgym.trainer.sft.records import DATA, DataFile, data_files
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.tracking.jsonl import read_metrics
from rollgym.trainer.train_run import TrainRun
from rollgym.trainer.train_state import GracefulStop
from rollgym.trainer.trusted import check_targets, load_with_code, require_trust
from rollgym.utils.async_runner import run_to_end

if TYPE_CHECKING:
    from rollgym.trainer.sft.dataset import RecordReader
    from rollgym.trainer.sft.loop import DataLoop

MAY_CHANGE_TOO = (*MAY_CHANGE, "evaluation.workers", "evaluation.max_in_flight")
"""Settings that a resumed run may change: they do not affect the result of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRunResult(TrainResult):
    """The result of a finished run on data."""

    loss: float | None
    """Training loss of the last step, in nats."""
    validation_loss: float | None
    """Loss of the last validation."""
    examples: int
    """Examples that were trained on."""
    data: dict[str, Any]
    """The content of ``data.json``: files, counts, and records that were not used."""


C = TypeVar("C", bound=DataRunConfig)
R = TypeVar("R", bound=DataRunResult)


@dataclass(frozen=True, slots=True)
class Objective(Generic[C, R]):
    """A command that trains on data."""

    command: str
    """The command, which is the kind of its runs."""
    config: type[C]
    result: type[R]
    find_config: Callable[[str], Path]
    parts: Callable[[], tuple[type[RecordReader], Callable[..., DataLoop]]]
    """Imports the reader of the data and the loop, which import torch."""
    metrics: tuple[str, ...] = ("loss", "validation_loss")
    """Fields of the result that are the last value of a metric."""


def option_words(data: str | Path | Sequence[str | Path] = (), model: str | Path | None = None) -> list[str]:
    """The arguments ``data`` and ``model`` as ``key=value`` words."""
    files = [data] if isinstance(data, str | Path) else list(data)
    words: dict[str, Any] = {"data.files": [str(file) for file in files]} if files else {}
    return override_words(words | ({"model.path": str(model)} if model is not None else {}))


def run_on_data(
    objective: Objective[C, R],
    source: str | Path | Mapping[str, Any] | C | None,
    overrides: Sequence[str],
    out: str | Path | None,
    *,
    resume: bool,
    plain: bool,
    trust_code: bool,
    modules: Sequence[str],
    stop: GracefulStop | None = None,
) -> R:
    """Validate the config, make the run folder, train, and read the result."""
    out = None if out is None else Path(out)
    for module in modules:
        import_module(module)
    if resume:
        config = _resumed_config(objective, source, overrides, out, trust_code, modules)
    else:
        config = _with_modules(_new_config(objective, source, overrides), modules)
    run_config = config.run_config(0)
    refuse_held(run_config)
    files = _check(config, run_config)
    require("Training", "train")
    if config.runtime == "local":
        torch_device(config.learner.device, "learner.device")
    check_targets(run_config)
    folder = out or new_folder(config.name or objective.command)
    console = Console(plain=plain)
    with console, removed_unless(folder, lambda: has_begun(folder)):
        kind = objective.command
        run = TrainRun(run_config, folder, console, resume=resume, stop=stop, kind=kind, settings=config)
        try:
            run_to_end(lambda: _train(objective, config, run, files), run.stop.request)
        finally:
            run.close()
    return _result(objective, config, run_config, folder)


def _result(objective: Objective[C, R], config: C, run_config: RunConfig, folder: Path) -> R:
    summary, lines, data = read_json(folder / SUMMARY), read_metrics(folder), read_json(folder / DATA)
    envs = [env for env in config.envs if not is_local(env.id)]
    fields: dict[str, Any] = {
        name: summary[name] for name in TrainResult.__dataclass_fields__ if name in summary
    }

    def last(name: str) -> float | None:
        return next((line[name] for line in reversed(lines) if name in line), None)

    fields |= {name: last(name) for name in objective.metrics}
    return objective.result(
        folder=folder,
        eval_commands=[command_for(run_config, env, folder) for env in envs],
        examples=data["train"],
        data=data,
        **fields,
    )


def _check(config: DataRunConfig, run_config: RunConfig) -> list[DataFile]:
    """Check environments, the model and the existence of all files before anything is written."""
    for env in config.envs:
        held_out(run_config, env)
    files = data_files(config.data.files)
    data_files(config.validation.files)
    if config.model.path is not None:
        check_model(config.model.path)
    for teacher in config.teachers():
        check_model(teacher.path, "distill.teachers path")
    return files


async def _train(objective: Objective[C, R], config: C, run: TrainRun, files: list[DataFile]) -> None:
    """Prepare the data, then train; a stopped run saves its last finished step and raises `Interrupted`."""
    from rollgym.trainer.sft.prepare import prepare_data

    make_reader, make_loop = objective.parts()
    with interruptible(run, objective.command, trust=bool(code_in(config))):
        data = await prepare_data(config, run, files, make_reader)
        run_config = config.run_config(data.num_steps(config))
        run.console.start(run.folder.name, run_config.stop.steps, done=run.state.step)
        await run_loop(
            run_config, run, lambda components, run: make_loop(components, run, config, data).train()
        )


# --- the config


def _new_config(
    objective: Objective[C, R], source: str | Path | Mapping[str, Any] | C | None, overrides: Sequence[str]
) -> C:
    if source is None and not overrides:
        raise UsageError("No config and no data given: pass --data FILE, a YAML file, or a shipped config.")
    config = _load(objective, source, overrides)
    name = Path(source).stem if isinstance(source, str | Path) else objective.command
    return config if config.name else config.model_copy(update={"name": name})


def _load(
    objective: Objective[C, R], source: str | Path | Mapping[str, Any] | C | None, overrides: Sequence[str]
) -> C:
    settings: Path | Mapping[str, Any] | None
    if source is None or isinstance(source, DataRunConfig):
        settings = None if source is None else values_of(source)
    elif isinstance(source, Mapping):
        settings = named_settings(source)
    else:
        settings = objective.find_config(str(source))
    return load_with_code(lambda: load(objective.config, settings, overrides), code_in)


def _with_modules(config: C, modules: Sequence[str]) -> C:
    names = config.imports
    names = [*names, *(module for module in modules if module not in names)]
    return config.model_copy(update={"imports": names})


def _resumed_config(
    objective: Objective[C, R],
    source: str | Path | Mapping[str, Any] | C | None,
    overrides: Sequence[str],
    out: Path | None,
    trust_code: bool,
    modules: Sequence[str] = (),
) -> C:
    """The config that the run was started with, plus the few settings that may change."""
    out = check_resumable(out)
    recorded = read_bounded(out / CONFIG, MAX_CONFIG_BYTES, out).decode("utf-8", "replace")
    before = load(objective.config, parse(recorded, str(out / CONFIG)))
    if source is None and not trust_code:
        require_trust(code_in(before), out)
    now = _load(objective, out / CONFIG if source is None else source, overrides)
    if source is not None and not now.name:
        now = now.model_copy(update={"name": before.name})
    now = _with_modules(now, modules)
    fixed = () if before.learner.schedule == "constant" else ("stop.steps",)  # rates depend on it
    refuse_changes(out, before, now, lambda key: _may_change(key) and key not in fixed)
    return now


def _may_change(key: str) -> bool:
    """Whether a resumed run may change this setting: it does not affect the result of a step."""
    return key.startswith(MAY_CHANGE_TOO) or teacher_may_change(key)
