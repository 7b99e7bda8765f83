"""Entry points of training: `train` and `atrain` from Python, `run_training` for the command line.

Importing this module does not import torch: a mistake in a config is reported before anything heavy loads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from rollgym.config.loader import Settings, diff, values_of
from rollgym.core.errors import Interrupted, UsageError
from rollgym.core.extras import require
from rollgym.core.files import refuse_links
from rollgym.core.local_objects import is_local
from rollgym.core.registry import import_module
from rollgym.core.types import SCHEMA_VERSION
from rollgym.devices.torch_device import torch_device
from rollgym.io.atomic import new_folder, removed_unless
from rollgym.io.run_dir import MANIFEST, SUMMARY, read_json
from rollgym.models.policy_settings import eval_command
from rollgym.models.zoo import check_model
from rollgym.trainer.config import EnvConfig, TrainConfig, load_recorded
from rollgym.trainer.config_files import find_config
from rollgym.trainer.config_objects import named_settings, refuse_held
from rollgym.trainer.run_files import CONFIG
from rollgym.trainer.run_tasks import held_out, make_task_sampler
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.tracking.jsonl import EVALUATIONS, METRICS
from rollgym.trainer.train_run import FINAL, TrainRun
from rollgym.trainer.train_state import GracefulStop
from rollgym.trainer.trusted import TRUST_CODE, check_targets, code_of, load_to_run, require_trust
from rollgym.utils.async_runner import run_to_end

if TYPE_CHECKING:
    from rollgym.trainer.runtime import Components

MAY_CHANGE = (
    "stop.", "checkpoints.", "tracking.", "name", "ray.heartbeat_timeout", "ray.address",
    "ray.keep_engines",
    "engine.url", "engine.api_key_env", "engine.python",
    "rollout.workers", "rollout.max_in_flight", "rollout.stall_seconds",
    "rollout.max_infra_retries_per_group",
)  # fmt: skip
"""Settings that a resumed run may change: they do not affect the result of a step."""
OPPONENT_MAY_CHANGE = (
    "base_url", "api_key_env", "timeout", "retries", "requests_per_minute", "tokens_per_minute", "price_in",
    "price_out",
)  # fmt: skip
"""Likewise, in ``envs.role_options``."""

T = TypeVar("T")
ConfigSource = str | Path | Mapping[str, Any] | TrainConfig
"""A YAML file, the name of a shipped config, settings, or a loaded config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a finished run.

    Example:
        >>> result = train("frozen-lake-grpo", **{"stop.steps": 20})
        >>> result.steps, result.last_success
        (20, 0.61)
    """

    folder: Path
    """The run folder."""
    ended: str
    """The stop condition that ended the run."""
    steps: int
    """Training steps done."""
    seconds: float
    """Training time, over all resumptions."""
    evaluations: list[dict[str, Any]]
    """Held-out results in order: step, phase, env, success_rate, success_ci, mean_return."""
    last_success: float | None
    """Held-out success of the last evaluation, averaged over the environments."""
    best_success: float | None
    best_step: int
    warnings: list[dict[str, Any]]
    """Problems found before the first step."""
    eval_commands: list[str]
    """Commands that repeat the last evaluation."""

    @property
    def policy(self) -> Path:
        """The trained policy, a model folder in Hugging Face format."""
        return self.folder / FINAL

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, as `rollgym train --json` prints them."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "folder"}
        return {
            "schema": SCHEMA_VERSION,
            "kind": "train",
            "run": str(self.folder),
            "policy": str(self.policy),
            **fields,
        }


def train(
    config: ConfigSource | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    plain: bool = False,
    modules: Sequence[str] = (),
    **overrides: Any,
) -> TrainResult:
    """Train a policy with reinforcement learning, as ``rollgym train`` does; needs the extra ``train``.

    It blocks until the run ends. In a running event loop, such as a notebook's, use `atrain`.

    Args:
        config: A YAML file, the name of a shipped config (`rollgym config list`), a `TrainConfig`, or a
            mapping of settings in which classes and functions may replace names. Optional with ``resume``.
        out: The run folder; by default ``runs/<time>-<name>``.
        resume: Continue the run in ``out`` from its last checkpoint.
        trust_code: With ``resume`` and without ``config``: run the code that the config in ``out`` names.
        plain: Print lines instead of a live panel.
        modules: Modules that every process of the run imports first: they register environments.
        overrides: Settings to change: sections as mappings, or dotted keys.

    Returns:
        The run folder, the number of steps, the evaluations and the trained policy.

    Raises:
        UsageError: A setting or argument is wrong; nothing was written.
        RunError: Training failed; ``resume=True`` continues from the last checkpoint.
        Interrupted: Ctrl-C or SIGTERM; the last finished step is saved.

    Example:
        >>> result = rollgym.train("frozen-lake-grpo", out="runs/lake", stop={"steps": 20})
        >>> rollgym.load_run("runs/lake").metrics_array("return")[-1]
        0.81
        >>> rollgym.train("frozen-lake-grpo", **{"stop.steps": 20, "rollout.groups": 8})
    """
    settings = override_words(overrides)
    return _run(config, settings, out, resume=resume, trust_code=trust_code, plain=plain, modules=modules)


async def atrain(
    config: ConfigSource | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    plain: bool = False,
    modules: Sequence[str] = (),
    **overrides: Any,
) -> TrainResult:
    """Train a policy from a running event loop, such as a notebook's; takes and returns the same as `train`.

    Training runs in a separate thread. A cancelled call saves the last finished step before it returns.

    Example:
        >>> result = await rollgym.atrain("frozen-lake-grpo", stop={"steps": 20})
    """
    settings = override_words(overrides)
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return await in_thread(lambda stop: _run(config, settings, out, stop=stop, **options))


async def in_thread(run: Callable[[GracefulStop], T]) -> T:
    """Call ``run`` in a thread; cancelled, request its stop and wait until it has saved."""
    stop = GracefulStop()
    training = asyncio.ensure_future(asyncio.to_thread(run, stop))
    try:
        return await asyncio.shield(training)
    except asyncio.CancelledError:
        stop.request_threadsafe()
        with suppress(Interrupted):
            await training
        raise


def run_training(
    name: ConfigSource | None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    resume: bool = False,
    imitate_only: bool = False,
    plain: bool = False,
    trust_code: bool = False,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Train as `train` does, with overrides as ``key=value`` words; returns `TrainResult.to_json`.

    ``imitate_only`` stops after the warm start.
    """
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return _run(name, overrides, out, imitate_only=imitate_only, **options).to_json()


def _run(
    source: ConfigSource | None,
    overrides: Sequence[str],
    out: str | Path | None,
    *,
    resume: bool,
    plain: bool,
    trust_code: bool,
    modules: Sequence[str],
    imitate_only: bool = False,
    stop: GracefulStop | None = None,
) -> TrainResult:
    """Validate the config, make the run folder, train, and read the result."""
    out = None if out is None else Path(out)
    for module in modules:
        import_module(module)
    if resume:
        config = _resumed_config(source, overrides, out, trust_code, modules)
    else:
        config = _with_modules(_new_config(source, overrides), modules)
    if imitate_only:
        if config.warm_start is None:
            raise UsageError("Nothing to imitate: the config has no warm_start section.")
        config = config.model_copy(update={"stop": config.stop.model_copy(update={"steps": 0})})
    refuse_held(config)
    _check(config)
    require("Training", "train")
    if config.runtime == "local":
        torch_device(config.learner.device, "learner.device")
    check_targets(config)
    folder = out or new_folder(config.name or "run")
    console = Console(plain=plain)
    with console, removed_unless(folder, lambda: has_begun(folder)):
        run = TrainRun(config, folder, console, resume=resume, stop=stop)
        try:
            console.start(folder.name, config.stop.steps, done=run.state.step)
            run_to_end(lambda: _train(config, run), run.stop.request)
        finally:
            run.close()
    summary = read_json(folder / SUMMARY)
    envs = config.envs if config.program is None else []
    commands = [command_for(config, env, folder) for env in envs if not is_local(env.id)]
    fields = {name: summary[name] for name in TrainResult.__dataclass_fields__ if name in summary}
    return TrainResult(folder=folder, eval_commands=commands, **fields)


def command_for(config: TrainConfig, env: EnvConfig, folder: Path) -> str:
    """The command that repeats the run's last evaluation in one of its environments."""
    evaluation = config.evaluation
    return eval_command(
        env.id,
        str(folder / FINAL),
        env_kwargs=env.kwargs,
        modules=config.imports,
        episodes=evaluation.episodes,
        seed=evaluation.seed,
        split=evaluation.split,
        limits=env.limits,
    )


def has_begun(folder: Path) -> bool:
    """Whether a run has written anything worth keeping."""
    files = (folder / METRICS, folder / EVALUATIONS)
    return any(file.is_file() and file.stat().st_size for file in files)


def _check(config: TrainConfig) -> None:
    """Check environments, splits and the model before anything is written."""
    make_task_sampler(config, config.envs, 0)
    for env in config.envs:
        held_out(config, env)
    if config.model.path is not None:
        check_model(config.model.path)
    for teacher in config.distill.teachers if config.distill is not None else ():
        check_model(teacher.path, "distill.teachers path")


async def _train(config: TrainConfig, run: TrainRun) -> None:
    """Train; a stopped run saves its last finished step and raises `Interrupted`."""
    from rollgym.trainer.loop import train as train_until_done

    with interruptible(run, "train", trust=bool(code_of(config))):
        await run_loop(config, run, train_until_done)


async def run_loop(
    config: TrainConfig, run: TrainRun, loop: Callable[[Components, TrainRun], Awaitable[object]]
) -> None:
    """Run a loop with the components of ``config``; a stopped run saves its last finished step."""
    async with open_components(config, run.folder) as components:
        try:
            await loop(components, run)
        except asyncio.CancelledError:
            if run.stop.requested:
                await run.save_stopped()
            raise


@contextmanager
def interruptible(run: TrainRun, command: str, *, trust: bool) -> Iterator[None]:
    """Raise `Interrupted`, with the command that resumes the run, after a request to stop."""
    with run.stop.cancels_current_task():
        try:
            run.stop.check()
            yield
        except asyncio.CancelledError:
            if not run.stop.requested:
                raise
            raise _interrupted(run, command, trust) from None


@asynccontextmanager
async def open_components(config: TrainConfig, folder: Path) -> AsyncIterator[Components]:
    """Make the components of a run with the runtime that the config names; close them afterwards."""
    from rollgym.trainer.learner.thread import LearnerThread
    from rollgym.trainer.runtime import LocalRuntime, Runtime, prepare_model

    make_runtime: Callable[..., Runtime] = LocalRuntime
    if config.runtime == "ray":
        from rollgym.trainer.cluster.runtime import RayRuntime

        make_runtime = RayRuntime
    with LearnerThread() as thread:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(thread, prepare_model, config, folder)
        runtime = make_runtime(config, folder, model, thread)
        try:
            async with AsyncExitStack() as stack:
                components = await runtime.start()
                if config.program is not None:
                    from rollgym.trainer.blackbox import blackbox_agent

                    await stack.enter_async_context(blackbox_agent(components, config.program))
                yield components
        finally:
            await runtime.close()


def _interrupted(run: TrainRun, command: str, trust: bool) -> Interrupted:
    saved = run.checkpoints.steps()
    kept = f"checkpoint of step {saved[-1]} saved" if saved else "no checkpoint saved yet"
    return Interrupted(
        f"Stopped after step {run.state.step}; {kept}. "
        f"Resume with `rollgym {command} --resume --out {run.folder}{f' {TRUST_CODE}' if trust else ''}`."
    )


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides from Python as ``key=value`` words.

    Example:
        >>> override_words({"learner": {"learning_rate": 0.1}, "stop.steps": 5})
        ['learner.learning_rate=0.1', 'stop.steps=5']
    """
    return _words(named_settings(overrides), "")


def _words(settings: Mapping[str, Any], prefix: str) -> list[str]:
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            words += _words(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={json.dumps(value, default=_as_text, ensure_ascii=False)}")
    return words


def _as_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise UsageError(
        f"Settings cannot hold a value of type {type(value).__name__}: pass text, a number, a list or a "
        "mapping."
    )


def _new_config(source: ConfigSource | None, overrides: Sequence[str]) -> TrainConfig:
    if source is None:
        raise UsageError("No config given: pass a YAML file or a name from `rollgym config list`.")
    config = load_to_run(_settings(source), overrides)
    name = Path(source).stem if isinstance(source, str | Path) else "run"
    return config if config.name else config.model_copy(update={"name": name})


def _settings(source: ConfigSource) -> Path | dict[str, Any]:
    """What `load` reads the settings from."""
    if isinstance(source, TrainConfig):
        return values_of(source)
    return named_settings(source) if isinstance(source, Mapping) else find_config(str(source))


def _with_modules(config: TrainConfig, modules: Sequence[str]) -> TrainConfig:
    """Add modules to those that every process of the run imports."""
    names = config.imports
    names = [*names, *(module for module in modules if module not in names)]
    return config.model_copy(update={"imports": names})


def _resumed_config(
    source: ConfigSource | None,
    overrides: Sequence[str],
    out: Path | None,
    trust_code: bool,
    modules: Sequence[str] = (),
) -> TrainConfig:
    """The config that the run was started with, plus the few settings that may change."""
    out = check_resumable(out)
    before = load_recorded(out / CONFIG)
    if source is None and not trust_code:
        require_trust(code_of(before), out)
    now = load_to_run(out / CONFIG if source is None else _settings(source), overrides)
    if source is not None and not now.name:
        now = now.model_copy(update={"name": before.name})
    now = _with_modules(now, modules)
    fixed = () if before.learner.schedule == "constant" else ("stop.steps",)  # rates depend on it
    refuse_changes(out, before, now, lambda key: _may_change(key) and key not in fixed)
    return now


def check_resumable(out: Path | None) -> Path:
    """Return the run folder to resume; raises `UsageError` if it is not one."""
    if out is None:
        raise UsageError("No run given to resume: add --out, as in --resume --out runs/NAME.")
    for name in (MANIFEST, CONFIG):
        if not (out / name).is_file():
            raise UsageError(f"Nothing to resume in {out}: it has no {name}.")
    refuse_links(out)
    return out


def refuse_changes(out: Path, before: Settings, now: Settings, may_change: Callable[[str], bool]) -> None:
    """Raise `UsageError` if a resumed run has other settings than before, except those that may change."""
    changed = [change for change in diff(before, now) if not may_change(change.key)]
    if changed:
        lines = "\n".join(f"  {change}" for change in changed)
        raise UsageError(
            f"{out} was started with other settings (then / now):\n{lines}\n"
            "Resume with the same settings, or start another run with another --out."
        )


REWARD_MAY_CHANGE = ("timeout", "retries", "concurrency", "workers", "url", "header_env")
"""Settings of a reward that a resumed run may change."""


def teacher_may_change(key: str) -> bool:
    """Whether this is the address or key of a teacher's server, which a resumed run may change."""
    return key.startswith("distill.teachers.") and key.endswith((".url", ".api_key_env"))


def _may_change(key: str) -> bool:
    """Whether a resumed run may change this setting: it does not affect the result of a step."""
    section, _, rest = key.partition(".")
    last = rest.rpartition(".")[2]
    if section == "rewards":
        return last in REWARD_MAY_CHANGE
    if section == "distill":
        return teacher_may_change(key)
    if section == "envs":
        setting = rest.partition(".")[2]
        if setting.startswith("rewards."):
            return last in REWARD_MAY_CHANGE
        return setting == "limits.seconds" or (
            setting.startswith("role_options.") and last in OPPONENT_MAY_CHANGE
        )
    return key.startswith(MAY_CHANGE)
