"""Settings of supervised fine-tuning. `rollgym config explain --sft` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from pydantic import Field

from rollgym.agents.policy.options import PolicyOptions
from rollgym.config.loader import Closed, Settings
from rollgym.core.errors import UsageError
from rollgym.devices.types import DeviceConfig
from rollgym.trainer.config import (
    CheckpointConfig,
    EngineConfig,
    EnvConfig,
    EvaluationConfig,
    ModelConfig,
    RayConfig,
    RolloutConfig,
    StopConfig,
    TrackingConfig,
    TrainConfig,
    WarmStartConfig,
    check_engine,
)
from rollgym.trainer.deferred_names import allow_deferred_names, deferred_names_allowed
from rollgym.trainer.distill_config import OfflineDistillConfig, TeacherConfig, check_teachers
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.strategies import check_parallel, find_strategy
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.sft.config_files import PACKAGE
from rollgym.trainer.trusted import code_of, urls_of_teachers

POLICY = "policy"
"""``data.agent``: the policy itself, before training."""


class SourceConfig(Settings):
    """Files and played episodes to train on, in any objective."""

    files: list[str] = Field(default_factory=list)
    """Data files, files of episodes, or run folders, whose episodes are taken."""
    agent: str | None = None
    """Agent that plays demonstrations on the training split of ``envs``; ``policy`` is the policy itself
    before training. Default: none are played."""
    agent_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that agent, such as ``{model: FOLDER}`` of ``lm``."""
    episodes: int = Field(default=200, ge=1)
    """Number of demonstrations to play, over all environments."""
    per_task: int = Field(default=1, ge=1)
    """Demonstrations of each task."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Maximum tokens of a training sequence. Default: the model's context."""
    strict: bool = False
    """Stop at the first line that cannot be used, instead of skipping it."""
    max_broken: int = Field(default=100, ge=0)
    """Number of unusable lines to skip; with more the run stops."""


class DataConfig(SourceConfig):
    """Conversations and episodes to train on."""

    files: list[str] = Field(default_factory=list)
    """JSONL or Parquet files of conversations (``{"messages": [{"role": ..., "content": ...}, ...]}``),
    files of episodes (``episodes.jsonl``), or run folders, whose episodes are taken."""
    per_task: int = Field(default=1, ge=1)
    """Demonstrations of each task, from which ``keep`` selects."""
    mistakes: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of demonstrated turns played at random, so that demonstrations show how to recover."""
    mistakes_agent: str = "random"
    """Agent that plays these turns."""
    imitate_mistakes: bool = False
    """Also learn the random turns."""
    keep: Literal["all", "successful", "best"] = "all"
    """Episodes to train on (rejection sampling): all that ended without an error, the successful ones, or the
    best one of each task, which is the one with the highest return (then the shortest) among the successful
    ones. Where an environment defines no success, ``best`` selects among all. Conversations are all kept."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Conversations with longer sequences: drop them, or train on the turns before the first that does not
    fit. A conversation whose first turn does not fit is dropped."""


class ValidationConfig(Settings):
    """Conversations whose loss is measured and that are not trained on."""

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the conversations to hold out. Episodes of the same task stay together."""
    files: list[str] = Field(default_factory=list)
    """Files or run folders to validate on, as in ``data.files``."""
    every: int = Field(default=10, ge=1)
    """Optimizer steps between validations; the first is before training, another after the last step."""


class SFTEvaluationConfig(EvaluationConfig):
    """Evaluation of the policy in ``envs``, on the same tasks each time."""

    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 evaluates only at the start and at the end."""
    split: str = "dev"
    """Task split to evaluate on; recorded episodes of its tasks are not trained on."""
    workers: int = Field(default=0, ge=0)
    """Worker processes for the environments; 0 runs them in the trainer's process."""
    max_in_flight: int = Field(default=64, ge=1)
    """Maximum number of episodes played at once."""


class SFTStopConfig(Settings):
    """Stop conditions besides ``epochs``; the first one that is met ends training."""

    steps: int | None = Field(default=None, ge=0)
    """Maximum number of optimizer steps. Default: all epochs."""
    minutes: float | None = Field(default=None, gt=0)
    """Training time in minutes, evaluations included. Makes the result depend on the machine's speed."""
    success: float | None = Field(default=None, gt=0, le=1)
    """Success rate in ``envs``, 0 to 1."""
    patience: int | None = Field(default=None, ge=1)
    """Validations in a row without a lower validation loss. Default: no early stop."""


class DataRunConfig(Settings):
    """A run that trains on files or played episodes, in any objective."""

    objective: ClassVar[str]
    """The objective as the subject of a sentence."""

    data: SourceConfig = SourceConfig()
    validation: ValidationConfig = ValidationConfig()
    epochs: int = Field(default=3, ge=1)
    """Epochs over the data, each in a new random order."""
    batch_size: int = Field(default=16, ge=1)
    """Examples per optimizer step: conversations, episodes or pairs."""
    envs: list[EnvConfig] = Field(default_factory=list)
    """Environments to evaluate in, and to play demonstrations in (on their ``split``). Default: none."""
    name: str = ""
    """Name of the run's folder. Default: the name of the config."""
    imports: list[str] = Field(default_factory=list)
    """Modules that every process of the run imports first, to register environments or agents."""
    runtime: Literal["local", "ray"] = "local"
    """Run in this process (with its environment workers), or on Ray."""
    ray: RayConfig = RayConfig()
    devices: Closed[DeviceConfig] = DeviceConfig()
    """Devices of each role; unset ones are planned."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of examples, the validation split, demonstrations and a built-in policy."""
    model: ModelConfig = ModelConfig()
    agent: Closed[PolicyOptions] = PolicyOptions(max_tokens=32)
    """Prompts of episodes, and sampling and parsing of replies in evaluations."""
    engine: EngineConfig = EngineConfig()
    learner: Closed[LearnerConfig] = LearnerConfig(learning_rate=1e-4, schedule="linear")
    evaluation: SFTEvaluationConfig = SFTEvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    stop: SFTStopConfig = SFTStopConfig()
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def reading(cls, values: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Accept names that modules in ``imports`` may register, because reading imports none of them."""
        return allow_deferred_names(values)

    def check(self) -> None:
        """Check settings against each other."""
        for module in self.imports:
            if not all(part.isidentifier() for part in module.split(".")):
                raise UsageError(f"imports: {module!r} is not a valid module name.")
        if not self.data.files and self.data.agent is None:
            raise UsageError(
                "No data given: pass --data FILE (data.files), or an agent that plays demonstrations "
                "(data.agent)."
            )
        if self.data.agent is not None and not self.envs:
            raise UsageError("data.agent requires envs: the agent plays demonstrations in them.")
        if any(env.roles for env in self.envs):
            raise UsageError(
                f"envs.roles is a setting of reinforcement learning: {self.objective} plays the form of an "
                "environment with one agent."
            )
        if self.data.agent is None and self.data.agent_options:
            raise UsageError("data.agent_options requires data.agent.")
        if self.model.path is None and not self.envs:
            raise UsageError(
                "No model given: pass --model (model.path), or envs for which a built-in policy is made."
            )
        if any(env.split == self.evaluation.split for env in self.envs):
            raise UsageError(
                f"evaluation.split={self.evaluation.split} is also an environment's training split: "
                "held-out tasks must come from another split."
            )
        if self.validation.fraction and self.validation.files:
            raise UsageError("validation.fraction and validation.files cannot be combined.")
        if self.stop.patience is not None and not self.validates:
            raise UsageError("stop.patience requires validation.fraction or validation.files.")
        if self.stop.success is not None and not self.envs:
            raise UsageError("stop.success requires envs.")
        if (self.learner.epochs, self.learner.mini_batches) != (1, 1):
            raise UsageError(
                "learner.epochs and learner.mini_batches are settings of reinforcement learning: set epochs "
                "and batch_size instead."
            )
        if self.learner.critic != "none":
            raise UsageError(f"learner.critic must be none: {self.objective} has no critic.")
        if not deferred_names_allowed():
            if self.learner.strategy != "auto":
                find_strategy(self.learner.strategy)
            check_parallel(self.learner)
        ray = (self.ray.address, self.ray.num_gpus, self.learner.strategy)
        if self.runtime == "local" and ray != (None, None, "auto"):
            raise UsageError("ray.address, ray.num_gpus and learner.strategy require runtime=ray.")
        if self.runtime == "ray" and not self.envs:
            raise UsageError("runtime=ray requires envs: the plan of devices depends on their episodes.")
        check_engine(self.engine, self.runtime)

    @property
    def validates(self) -> bool:
        """Whether a validation loss is measured."""
        return bool(self.validation.fraction or self.validation.files)

    def run_config(self, steps: int) -> RunConfig:
        """The settings of the components, for a run of so many optimizer steps."""
        evaluation, stop = self.evaluation, self.stop
        return RunConfig.model_construct(
            envs=self.envs,
            name=self.name,
            imports=self.imports,
            runtime=self.runtime,
            ray=self.ray,
            devices=self.devices,
            seed=self.seed,
            model=self.model,
            agent=self.agent,
            engine=self.engine,
            rollout=RolloutConfig(
                groups=1, group_size=1, workers=evaluation.workers, max_in_flight=evaluation.max_in_flight
            ),
            loss=self.learner_loss(),
            learner=self.learner,
            evaluation=evaluation,
            checkpoints=self.checkpoints,
            stop=StopConfig(steps=steps, minutes=stop.minutes, success=stop.success),
            tracking=self.tracking,
        )

    def learner_loss(self) -> LossConfig:
        """The loss of the learner."""
        return LossConfig("reinforce", tis_cap=None)

    def demonstrations(self) -> WarmStartConfig:
        """The episodes to play, in the settings of a warm start."""
        return WarmStartConfig(agent=self.data.agent or "", episodes=self.data.episodes)

    def agents(self) -> dict[str, str]:
        """The agents that play, by the key of their setting."""
        return {"data.agent": self.data.agent or ""}

    def teachers(self) -> list[TeacherConfig]:
        """The models that the policy is distilled from."""
        return []


class SFTConfig(DataRunConfig):
    """A supervised fine-tuning run."""

    shipped_in: ClassVar[str] = PACKAGE
    objective: ClassVar[str] = "supervised fine-tuning"

    data: DataConfig = DataConfig()
    distill: OfflineDistillConfig | None = None
    """Learn the distribution of teachers at every learned token, in place of the token itself."""

    def check(self) -> None:
        """Check settings against each other."""
        DataRunConfig.check(self)
        check_teachers(self.teachers(), temperature=1.0, runtime=self.runtime)
        if self.data.agent is None and self.data.mistakes:
            raise UsageError("data.mistakes requires data.agent.")
        self.demonstrations().check_mistakes("data")
        if self.data.imitate_mistakes and not self.data.mistakes:
            raise UsageError("data.imitate_mistakes requires data.mistakes > 0.")

    def demonstrations(self) -> WarmStartConfig:
        """The demonstrations to play, in the settings of a warm start."""
        data = self.data
        return WarmStartConfig(
            agent=data.agent or "",
            episodes=data.episodes,
            mistakes=data.mistakes,
            mistakes_agent=data.mistakes_agent,
            imitate_mistakes=data.imitate_mistakes,
        )

    def agents(self) -> dict[str, str]:
        """The agents that play, by the key of their setting."""
        return {**DataRunConfig.agents(self), "data.mistakes_agent": self.data.mistakes_agent}

    def teachers(self) -> list[TeacherConfig]:
        """The models that the policy is distilled from."""
        return [] if self.distill is None else self.distill.teachers


class RunConfig(TrainConfig):
    """The settings of a run on data that its components read; `DataRunConfig.run_config` makes it.

    Unlike a `TrainConfig`, it may have no environments, and any sampling in evaluations.
    """

    @property
    def learner_temperature(self) -> float:
        """The likelihood of data is that of the model as it is, however evaluations sample."""
        return 1.0


def code_in(config: DataRunConfig) -> list[str]:
    """All settings that run external code or send data to other hosts, as ``key value``."""
    named = [f"{key} {agent}" for key, agent in config.agents().items() if ":" in agent]
    return code_of(config.run_config(0)) + named + urls_of_teachers(config.teachers())
