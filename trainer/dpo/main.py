"""Entry points of direct preference optimization: `dpo` and `adpo` from Python, `run_dpo` for the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.trainer.dpo.config import DPOConfig
from rollgym.trainer.dpo.config_files import find_config
from rollgym.trainer.main import in_thread, override_words
from rollgym.trainer.sft.run import DataRunResult, Objective, option_words, run_on_data

if TYPE_CHECKING:
    from rollgym.trainer.sft.dataset import RecordReader
    from rollgym.trainer.sft.loop import DataLoop

DPOSource = str | Path | Mapping[str, Any] | DPOConfig
"""A YAML file, the name of a shipped config, settings, or a loaded config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOResult(DataRunResult):
    """The result of a finished run.

    ``loss`` is the mean loss of the pairs of the last step.

    Example:
        >>> result = dpo(data="pairs.jsonl", model="smollm2", out="runs/pairs")
        >>> result.steps, result.loss, result.preference_accuracy
        (60, 0.42, 0.88)
    """

    preference_accuracy: float | None
    """Share of the last step's pairs whose chosen reply has the higher reward, before that step's update."""
    reward_margin: float | None
    """Mean difference of their rewards."""
    validation_preference_accuracy: float | None
    """The accuracy of the last validation."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, as `rollgym dpo --json` prints them."""
        return {**DataRunResult.to_json(self), "kind": DPO.command}


def _parts() -> tuple[type[RecordReader], Callable[..., DataLoop]]:
    from rollgym.trainer.dpo.loop import DPOLoop
    from rollgym.trainer.dpo.pairs import PairReader

    return PairReader, DPOLoop


MEASURED = (
    "loss",
    "validation_loss",
    "preference_accuracy",
    "reward_margin",
    "validation_preference_accuracy",
)
"""Fields of the result that are the last value of a metric."""
DPO = Objective("dpo", DPOConfig, DPOResult, find_config, _parts, MEASURED)
"""Direct preference optimization."""


def dpo(
    config: DPOSource | None = None,
    *,
    data: str | Path | Sequence[str | Path] = (),
    model: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    plain: bool = False,
    modules: Sequence[str] = (),
    **overrides: Any,
) -> DPOResult:
    """Train a model on preference pairs; blocks until the run ends. Inside a running event loop use `adpo`.

    Args:
        config: A YAML file, the name of a shipped config, an `DPOConfig`, or a mapping of settings. Optional
            with ``data`` or ``resume``.
        data: Files of pairs, or run folders whose episodes are paired, in place of ``data.files``.
        model: The model to train, in place of ``model.path``; it is also the reference.
        out: The run folder; default: ``runs/<time>-<name>``.
        resume: Continue the run in ``out`` from its last checkpoint.
        trust_code: With ``resume`` and without ``config``: run the code that the config in ``out`` names.
        plain: Print lines instead of a live panel.
        modules: Imported first by every process of the run, such as one that registers environments.
        overrides: Settings to change: sections as mappings, or dotted keys.

    Returns:
        The run folder, losses, accuracy, evaluations, the report on the data and the trained model.

    Raises:
        UsageError: The config or the data are wrong, or the folder cannot be used.
        Interrupted: Ctrl-C or SIGTERM; the last finished step is saved.

    Example:
        >>> dpo(data="pairs.jsonl", model="smollm2", out="runs/pairs", loss={"beta": 0.05})
        >>> dpo("frozen-lake-dpo", **{"loss.beta": 0.05})
    """
    words = [*option_words(data, model), *override_words(overrides)]
    return run_on_data(
        DPO, config, words, out, resume=resume, trust_code=trust_code, plain=plain, modules=modules
    )


async def adpo(
    config: DPOSource | None = None,
    *,
    data: str | Path | Sequence[str | Path] = (),
    model: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    plain: bool = False,
    modules: Sequence[str] = (),
    **overrides: Any,
) -> DPOResult:
    """Train on pairs from a running event loop, such as a notebook's; takes and returns the same as `dpo`.

    Training runs in a separate thread. A cancelled call saves the last finished step before it returns.

    Example:
        >>> result = await adpo(data="pairs.jsonl", model="smollm2")
    """
    words = [*option_words(data, model), *override_words(overrides)]
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return await in_thread(lambda stop: run_on_data(DPO, config, words, out, stop=stop, **options))


def run_dpo(
    config: DPOSource | None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    *,
    resume: bool = False,
    plain: bool = False,
    trust_code: bool = False,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Train as `dpo` does, with overrides as ``key=value`` words; returns `DPOResult.to_json`."""
    options: dict[str, Any] = {"resume": resume, "trust_code": trust_code, "plain": plain, "modules": modules}
    return run_on_data(DPO, config, overrides, out, **options).to_json()
