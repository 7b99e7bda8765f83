"""What a training run can be told. `rollgym config explain` prints this page.

A section that is a frozen dataclass elsewhere (credit, loss, learner and so on) is described there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from pydantic import Field, field_validator

from rollgym.agents.lm_options import LmOptions
from rollgym.config import Closed, Settings
from rollgym.devices.types import DeviceWishes
from rollgym.errors import UsageError
from rollgym.rewards.settings import RewardSettings
from rollgym.trainer.credit import ESTIMATORS, find_estimator
from rollgym.trainer.credit_types import CreditSettings
from rollgym.trainer.late_names import awaiting, may_be_late
from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.loss_settings import LossSettings
from rollgym.trainer.shaping import ShapingSettings
from rollgym.types import Limits


class EnvChoice(Settings):
    """One environment of the mixture."""

    id: str
    """Its id, or ``module:Class``."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    split: str = "train"
    """The tasks to train on; evaluation uses ``evaluation.split``."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the groups, relative to the others'."""
    limits: Closed[Limits] = Limits(seconds=600)
    """What ends an episode from outside."""


class ModelChoice(Settings):
    """The policy to train."""

    path: str | None = None
    """A folder in Hugging Face format, or an id of the Hugging Face Hub (``OWNER/NAME``), out of the cache or
    fetched. Without one, the built-in policy is made for the environments."""
    size: Literal["tiny", "small", "base"] = "small"
    """Of the built-in policy: 0.1, 0.5 or 2.5 million parameters."""
    context: int = Field(default=2048, ge=32)
    """Of the built-in policy: the longest conversation, in tokens."""


class EngineChoice(Settings):
    """How replies are generated."""

    kind: Literal["torch", "sglang"] = "torch"
    """Our own engine, in the trainer's process or on the cluster; or SGLang servers."""
    url: str | None = None
    """Of an SGLang server or router that runs already; without one, servers are started."""
    api_key_env: str | None = None
    """The environment variable that holds the API key of the server at ``url``. Started servers get a key."""
    replicas: int | None = Field(default=None, ge=1)
    """SGLang servers to start; ``null``: as the plan says, or one."""
    python: str | None = None
    """The Python that has sglang, where it is in another environment than this one."""

    max_batch: int = Field(default=128, ge=1)
    """Replies at once."""
    cache_tokens: int | None = None
    """Bound on the keys and values held; ``null`` chooses."""
    threads: int | None = None
    """Processor threads; ``null`` chooses."""


class WarmStart(Settings):
    """Supervised training on what somebody else played, before reinforcement learning."""

    agent: str = "expert"
    """Who shows how it is done."""
    run: str | None = None
    """A results folder whose successful episodes are imitated; nobody plays then."""
    episodes: int = Field(default=200, ge=1)
    """Demonstrations, on training tasks, over all environments."""
    only_successful: bool = True
    """Whether episodes that did not succeed are left out. Without, a random agent's teach the form alone."""
    mistakes: float = Field(default=0.0, ge=0, lt=1)
    """Share of the turns that are played at random, so that the way back from them is shown too."""
    imitate_mistakes: bool = False
    """Whether those turns are imitated as well: the policy then starts out trying more than one thing."""
    epochs: int = Field(default=10, ge=1)
    """How often they are gone through, at most."""
    batch: int = Field(default=16, ge=1)
    """Episodes for each optimiser step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    until_success: float | None = Field(default=None, gt=0, le=1)
    """Stop once this share of validation episodes succeeds, so that something is left to learn."""
    check_every: int | None = Field(default=None, ge=1)
    """Batches between looks at the validation episodes; ``null``: an epoch."""
    validation_episodes: int = Field(default=100, ge=1)
    """Episodes for ``until_success``, on tasks of the training split that were not shown."""


class Rollout(Settings):
    """How experience is gathered."""

    groups: int = Field(default=16, ge=1)
    """Groups in each training step."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task that are compared with one another."""
    extra: int = Field(default=0, ge=0)
    """Members started beyond the group's size; the slowest are cancelled."""
    refills: int = Field(default=2, ge=0)
    """Failed members of a group that are played again."""
    max_infra_retries_per_group: int = Field(default=64, ge=0)
    """Members of a group that were lost with a worker, engine, server or node and are played again. They use
    up no refills."""
    when_short: Literal["keep", "drop"] = "keep"
    """What becomes of a group that cannot be filled."""
    max_in_flight: int = Field(default=128, ge=1)
    """Episodes played at once."""
    workers: int = Field(default=0, ge=0)
    """Processes for the environments; 0 plays in the trainer's own."""
    staleness: int = Field(default=0, ge=0)
    """How many updates old the weights behind any token that is trained on may be. 0: in turns, nothing new
    starts until the weights that were trained are live. More: episodes play on while the learner trains."""
    under_way: Literal["finish", "restart"] = "finish"
    """What becomes of episodes that play while the weights change: they go on, under both versions, or they
    begin again."""
    skip_equal_returns: bool = False
    """Leave out groups whose members all did equally well, and play others."""
    equal_tolerance: float = Field(default=1e-6, ge=0)
    """How far apart returns may be and still count as equal."""
    max_skipped: int = Field(default=32, ge=0)
    """After this many in a row the next one is taken as it is."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """When nothing has moved for so long, the run ends with a report."""
    modules: list[str] = Field(default_factory=list)
    """Modules that `rollgym train` imports first: they register environments, estimators or losses."""

    @field_validator("modules")
    @classmethod
    def _named(cls, modules: list[str]) -> list[str]:
        # Only the form: reading a config imports nothing (see `rollgym.trainer.trusted`).
        for module in modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"{module!r} is not the name of a module")
        return modules


class Evaluation(Settings):
    """Held-out tasks, always the same, played between training steps."""

    every: int = Field(default=10, ge=0)
    """Training steps between evaluations; 0 evaluates only at the start and at the end."""
    episodes: int = Field(default=100, ge=1)
    """In each environment."""
    split: str = "test"
    seed: int = Field(default=0, ge=0)
    """Chooses the tasks, whatever the run's seed is."""


class Checkpoints(Settings):
    """What is saved to go on from."""

    every: int = Field(default=10, ge=1)
    """Training steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """How many of the last ones stay; the best one always does."""


class Stop(Settings):
    """When training is over: whichever comes first."""

    steps: int = Field(default=100, ge=0)
    minutes: float | None = Field(default=None, gt=0)
    """Of training, evaluations included. With it, how far a run gets depends on the machine."""
    success: float | None = Field(default=None, gt=0, le=1)
    """Held-out success that is enough."""


class Curriculum(Settings):
    """Easy environments first: ``envs`` are taken in their order, one more whenever the last is mastered."""

    advance_at: float = Field(default=0.8, gt=0, le=1)
    """Share of training episodes of the hardest environment so far that must succeed."""
    window: int = Field(default=5, ge=1)
    """Over so many training steps."""


class Tracking(Settings):
    """Where numbers go besides ``metrics.jsonl``."""

    tensorboard: bool = True
    wandb_project: str | None = None
    """A Weights & Biases project (needs ``wandb``)."""
    episodes: Literal["all", "none"] = "all"
    """Whether training episodes are kept in ``episodes.jsonl``."""
    tokens_every: int = Field(default=10, ge=0)
    """Training steps between those whose episodes are kept with advantage and ratio of every token, for
    `rollgym view`; 0 keeps none. Each costs one more pass over the batch."""


class TrainConfig(Settings):
    """A training run."""

    envs: list[EnvChoice] = Field(min_length=1)
    """What is played."""
    name: str = ""
    """Of the run's folder; default: the configuration's own."""
    runtime: Literal["local", "ray"] = "local"
    """Where it runs: in this process (and its environment workers), or on Ray."""
    address: str | None = None
    """Of a Ray cluster, ``auto`` for the one this machine is part of; ``null`` starts a Ray here."""
    gpus: int | None = Field(default=None, ge=0)
    """Of a Ray that is started here: how many it counts, which may be more than there are."""
    heartbeat_timeout: float = Field(default=120.0, gt=0)
    """Seconds without a sign of life after which an actor of a run on Ray counts as hung and is replaced. A
    long step does not count: a separate thread gives the signs."""
    strategy: Literal["auto", "local", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "auto"
    """How learners on several devices share the work: see docs/learners.md. ``auto``: as the plan says."""
    devices: Closed[DeviceWishes] = DeviceWishes()
    """Which role works on which devices; what is left open is planned (`rollgym plan`)."""
    seed: int = Field(default=0, ge=0)
    """Of everything random: the policy's first weights, tasks, sampling, mini-batches."""
    model: ModelChoice = ModelChoice()
    agent: Closed[LmOptions] = LmOptions(max_tokens=32)
    """How the model is asked, and how its replies are read."""
    engine: EngineChoice = EngineChoice()
    program: str | None = None
    """A program of one's own, with its arguments, that plays each episode in place of agent and environment:
    it talks to the policy over an OpenAI-compatible endpoint (docs/serve.md)."""
    warm_start: WarmStart | None = None
    rollout: Rollout = Rollout()
    shaping: Closed[ShapingSettings] = ShapingSettings()
    """What is added to the environment's rewards."""
    rewards: list[Closed[RewardSettings]] = Field(default_factory=list)
    """Rewards beyond the environment's, given as soon as an episode ends."""
    keep_environment_reward: bool = True
    """Whether the environment's own reward counts beside them."""
    estimator: str = "grpo"
    """The way to advantages: grpo, dr_grpo, rloo, grpo_turns, gigpo, reinforce, reinforce_pp or gae."""
    credit: Closed[CreditSettings] = CreditSettings()
    """The estimator's settings."""
    loss: Closed[LossSettings] = LossSettings("grpo")
    weighting: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """What a token weighs in the loss."""
    constant: float | None = Field(default=None, gt=0)
    """Tokens of an episode by which ``weighting: constant`` divides."""
    kl_target: float | None = Field(default=None, gt=0)
    """Adapt ``loss.kl_coef`` so that the KL to the first policy stays near this."""
    learner: Closed[LearnerSettings] = LearnerSettings()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    stop: Stop = Stop()
    curriculum: Curriculum | None = None
    tracking: Tracking = Tracking()

    @classmethod
    def reading(cls, values: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Names that modules of the config would register pass, since reading imports none of them."""
        return awaiting(values)

    def check(self) -> None:
        """What single settings cannot know."""
        late = self.estimator not in ESTIMATORS and may_be_late()
        grouped = not late and find_estimator(self.estimator).centred
        if any(env.split == self.evaluation.split for env in self.envs):
            raise UsageError(
                f"evaluation.split is {self.evaluation.split!r}, and so is an environment's training split: "
                "tasks that are trained on are not held out."
            )
        if not late and (self.estimator == "gae") != (self.learner.critic != "none"):
            raise UsageError(
                "estimator gae needs a critic, and only gae uses one: set learner.critic to head or own, "
                "or choose another estimator."
            )
        if self.agent.temperature <= 0 or self.agent.top_p < 1 or self.agent.top_k or self.agent.min_p:
            raise UsageError(
                "Training needs agent.temperature > 0 and no top_p, top_k or min_p: the trainer could not "
                "give tokens the probability they were drawn with."
            )
        if self.program is not None and self.warm_start is not None:
            raise UsageError(
                "A program cannot be imitated by a warm start: imitate in a run of its own "
                "(`rollgym imitate`), name its folder final as model.path, and set warm_start to null."
            )
        if (self.weighting == "constant") != (self.constant is not None):
            raise UsageError("weighting 'constant' and the setting constant go together.")
        if grouped and self.rollout.group_size < 2:
            raise UsageError(
                f"estimator {self.estimator} compares the members of a group: rollout.group_size must be at "
                "least 2."
            )
        if self.kl_target is not None and not self.loss.kl_coef:
            raise UsageError("kl_target adapts loss.kl_coef, which must start above 0.")
        if not self.keep_environment_reward and not self.rewards:
            raise UsageError("Without rewards of its own, a run needs the environment's.")
        away = (self.address, self.gpus, self.strategy) != (None, None, "auto")
        if self.runtime == "local" and away:
            raise UsageError(
                "address, gpus and strategy are read with runtime=ray: set it, or leave them out."
            )
        if self.engine.kind == "torch" and (self.engine.url or self.engine.replicas or self.engine.python):
            raise UsageError("engine.url, replicas and python are of SGLang: set engine.kind to sglang.")
        if self.engine.api_key_env is not None and self.engine.url is None:
            raise UsageError(
                "engine.api_key_env is for the server at engine.url: give that too, or leave it out. A "
                "server that rollgym starts has a key already."
            )
        if self.rollout.under_way == "restart" and not self.rollout.staleness:
            raise UsageError(
                "rollout.under_way is read where episodes play while the weights change: set "
                "rollout.staleness to 1 or more, or leave it out."
            )
        if self.curriculum is not None and len(self.envs) < 2:
            raise UsageError("A curriculum needs at least two environments in envs, the easiest first.")


def env_labels(config: TrainConfig) -> list[str]:
    """A name for each environment of a run: its id, with its arguments where several have the same id."""
    ids = [env.id for env in config.envs]
    labels: list[str] = []
    for number, env in enumerate(config.envs):
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in env.kwargs.items())
        label = env.id if ids.count(env.id) == 1 else f"{env.id} {words}".strip()
        labels.append(label if label not in labels else f"{label} #{number}")
    return labels
