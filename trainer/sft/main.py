"""Entry points of supervised fine-tuning: `sft` and `asft` from Python, `run_sft` for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.trainer.main import in_thread, override_words
from rollgym.trainer.sft.config import SFTConfig
from rollgym.trainer.sft.config_files import find_config
from rollgym.trainer.sft.run import DataRunResult, Objective, option_words, run_on_data

if TYPE_CHECKING:
    from rollgym.trainer.sft.dataset import RecordReader
    from rollgym.trainer.sft.loop import DataLoop

SFTSource = str | Path | Mapping[str, Any] | SFTConfig
"""A YAML file, the name of a shipped config, settings, or a loaded config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTResult(DataRunResult):
    """The result of a finished run.

    ``loss`` is the mean negative log-likelihood of the learned tokens of the last step.

    Example:
        >>> result = sft("smollm-sft", out="runs/lake")
        >>> result.steps, result.loss, result.last_success
        (14, 0.31, 0.27)
    """

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, as `rollgym sft --json` prints them."""
        return {**DataRunResult.to_json(self), "kind": SFT.command}


def _parts() -> tuple[type[RecordReader], Callable[..., DataLoop]]:
    from rollgym.trainer.sft.dataset import DataReader
    from rollgym.trainer.sft.distillation import make_loop

    return DataReader, make_loop


SFT = Objective("sft", SFTConfig, SFTResult, find_config, _parts)
"""Supervised fine-tuning."""


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
    return run_on_data(
        SFT, config, words, out, resume=resume, trust_code=trust_code, plain=plain, modules=modules
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
    """Fine-tune from a running event loop, such as a notebook's; takes and returns the same as `sft`.

    Training runs in a separate thread. A cancelled call saves the last finished step before it returns.

    Example:
        >>> result = await asft(data="chats.jsonl", model="smollm2")
    """
    words = [*option_words(data, model), *override_words(overrides)]
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return await in_thread(lambda stop: run_on_data(SFT, config, words, out, stop=stop, **options))


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
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return run_on_data(SFT, config, overrides, out, **options).to_json()
