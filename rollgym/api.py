"""Python API of the commands ``rollgym eval``, ``rollgym train`` and ``rollgym sft``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.core.agent import Agent
from rollgym.core.extras import require
from rollgym.core.types import Limits

if TYPE_CHECKING:
    from rollgym.evaluation.run_results import RunResults
    from rollgym.trainer.main import ConfigSource, TrainResult
    from rollgym.trainer.sft.main import SFTResult, SFTSource


def evaluate(
    env: str | Callable[..., Any],
    agent: str | Agent | Callable[..., Any],
    *,
    episodes: int = 100,
    seed: int = 0,
    split: str = "test",
    per_task: int = 1,
    workers: int = 0,
    concurrency: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    agent_options: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    modules: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
) -> RunResults:
    """Play episodes of an agent in an environment and return the results, as ``rollgym eval`` does.

    It also works where an event loop is running, as in a notebook.

    Args:
        env: An id, ``module:Class``, a class, or a function that makes an environment.
        agent: A name, ``module:name``, an `Agent`, a class, or a function of (observation, info).
        episodes: Number of episodes.
        seed: Decides the tasks and all randomness; the same seed plays the same episodes.
        split: Split of the environment's task set.
        per_task: Episodes per task, for pass@k.
        workers: Worker processes; 0 plays in this process.
        concurrency: Episodes in flight; 0 derives it from the agent and the workers.
        env_kwargs: Arguments for the environment.
        agent_options: Options for the agent, such as ``{"model": "runs/demo/final"}``.
        limits: Limits per episode on turns, tokens and seconds.
        modules: Modules to import first, here and in the workers: they register environments.
        out: Results folder; by default ``runs/<time>-<env>-<agent>``.
        resume: Play only the episodes that ``out`` lacks or that failed.

    Returns:
        The results; ``.summary`` holds the rates with confidence intervals, ``.episodes`` every episode.

    Raises:
        UsageError: An argument is wrong.
        RunError: The first ten episodes all failed, or the results cannot be written.

    Example:
        >>> results = rollgym.evaluate("rollgym/FrozenLake-v0", "random", episodes=20)
        >>> results.summary["success_rate"]
        0.05
    """
    from rollgym.evaluation import runner
    from rollgym.evaluation.run_results import load_run
    from rollgym.io.atomic import new_folder

    request = runner.Request(
        env_id=env,
        agent=agent,
        episodes=episodes,
        seed=seed,
        split=split,
        per_task=per_task,
        workers=workers,
        concurrency=concurrency,
        env_kwargs=dict(env_kwargs or {}),
        agent_options=dict(agent_options or {}),
        modules=tuple(modules),
        limits=limits or Limits(),
    )
    names = (request.env_name.removeprefix("rollgym/"), request.agent_name)
    folder = new_folder(*names) if out is None else Path(out)
    runner.evaluate(request, folder, resume=resume)
    return load_run(folder)


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

    Example:
        >>> result = rollgym.train("frozen-lake-grpo", out="runs/lake", stop={"steps": 20})
        >>> rollgym.load_run("runs/lake").metrics_array("return")[-1]
        0.81
    """
    require("Training", "train")
    from rollgym.trainer import main

    return main.train(
        config,
        out=out,
        resume=resume,
        trust_code=trust_code,
        plain=plain,
        modules=modules,
        **overrides,
    )


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
    """Train a policy from a running event loop, such as a notebook's; same arguments and result as `train`.

    Example:
        >>> result = await rollgym.atrain("frozen-lake-grpo", stop={"steps": 20})
    """
    require("Training", "train")
    from rollgym.trainer import main

    return await main.atrain(
        config,
        out=out,
        resume=resume,
        trust_code=trust_code,
        plain=plain,
        modules=modules,
        **overrides,
    )


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
    """Train a model on conversations or episodes, as ``rollgym sft`` does; needs the extra ``train``.

    It blocks until the run ends. In a running event loop, such as a notebook's, use `asft`.

    Args:
        config: A YAML file, the name of a shipped config (`rollgym config list`), an `SFTConfig`, or a
            mapping of settings. Optional with ``data`` or ``resume``.
        data: Files of conversations (JSONL, Parquet) or episodes, or run folders.
        model: Model folder, Hub id or ``smollm2``.
        out: The run folder; by default ``runs/<time>-<name>``.
        resume: Continue the run in ``out`` from its last checkpoint.
        trust_code: With ``resume`` and without ``config``: run the code that the config in ``out`` names.
        plain: Print lines instead of a live panel.
        modules: Modules that every process of the run imports first: they register environments.
        overrides: Settings to change: sections as mappings, or dotted keys.

    Returns:
        The run folder, losses, evaluations, a report on the data, and the trained model.

    Raises:
        UsageError: A setting, an argument or the data are wrong.
        RunError: Training failed; ``resume=True`` continues from the last checkpoint.

    Example:
        >>> result = rollgym.sft(data="chats.jsonl", model="smollm2", out="runs/chats", epochs=2)
        >>> result.loss, result.policy
        (1.27, PosixPath('runs/chats/final'))
    """
    require("Training", "train")
    from rollgym.trainer.sft import main

    return main.sft(
        config,
        data=data,
        model=model,
        out=out,
        resume=resume,
        trust_code=trust_code,
        plain=plain,
        modules=modules,
        **overrides,
    )


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
    """Train a model on data from a running event loop, such as a notebook's; same arguments as `sft`.

    Example:
        >>> result = await rollgym.asft(data="chats.jsonl", model="smollm2")
    """
    require("Training", "train")
    from rollgym.trainer.sft import main

    return await main.asft(
        config,
        data=data,
        model=model,
        out=out,
        resume=resume,
        trust_code=trust_code,
        plain=plain,
        modules=modules,
        **overrides,
    )
