"""Settings of direct preference optimization. `rollgym config explain --dpo` prints them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollgym.config.loader import Closed
from rollgym.core.errors import UsageError
from rollgym.trainer.dpo.config_files import PACKAGE
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.losses.preference_settings import DPOSettings, PreferenceLoss
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.sft.config import DataRunConfig, SourceConfig


class PairDataConfig(SourceConfig):
    """Preference pairs to train on, and episodes to build pairs from."""

    files: list[str] = Field(default_factory=list)
    """JSONL or Parquet files of pairs (``{"prompt": ..., "chosen": ..., "rejected": ...}``, as texts or
    messages), files of episodes (``episodes.jsonl``), or run folders, whose episodes are paired."""
    per_task: int = Field(default=4, ge=1)
    """Episodes of each task that ``agent`` plays."""
    pairs: Literal["success", "return"] = "success"
    """Pairs of episodes of the same task: a successful one against an unsuccessful one, or a higher return
    against a lower one."""
    min_difference: float = Field(default=0.0, ge=0)
    """Minimum difference of the returns in a pair; with ``pairs: return`` it is always above 0."""
    pairs_per_task: int = Field(default=1, ge=1)
    """Maximum number of pairs of each task, the largest difference of returns first."""


class DPOConfig(DataRunConfig):
    """A run of direct preference optimization."""

    shipped_in: ClassVar[str] = PACKAGE
    objective: ClassVar[str] = "direct preference optimization"

    data: PairDataConfig = PairDataConfig()
    loss: Closed[DPOSettings] = DPOSettings()
    """The DPO loss: beta, label smoothing, and the weight of a likelihood term."""
    epochs: int = Field(default=1, ge=1)
    """Epochs over the pairs, each in a new random order."""
    learner: Closed[LearnerConfig] = LearnerConfig(learning_rate=5e-6, schedule="linear")

    def check(self) -> None:
        """Check settings against each other."""
        DataRunConfig.check(self)
        if self.data.agent is not None and self.data.per_task < 2:
            raise UsageError("data.per_task must be at least 2: a pair needs two episodes of the same task.")

    def learner_loss(self) -> LossConfig:
        """The loss of the learner."""
        return PreferenceLoss(settings=self.loss)
