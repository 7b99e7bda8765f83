"""Settings of a training run. `rollgym config explain` prints them.

A section that is a frozen dataclass elsewhere (advantage, loss, learner and others) is documented there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator

from rollgym.agents.policy.options import PolicyOptions
from rollgym.config.loader import Closed, Renames, Settings, load, parse, renamed_settings
from rollgym.core.errors import UsageError
from rollgym.core.files import read_bounded
from rollgym.core.role_env import ALL_ROLES
from rollgym.core.types import Episode, Limits
from rollgym.devices.types import DeviceConfig
from rollgym.rewards.settings import RewardSettings
from rollgym.serve.program import Program, program_settings
from rollgym.trainer.advantages import ESTIMATORS, AdvantageConfig, find_estimator
from rollgym.trainer.config_files import PACKAGE
from rollgym.trainer.deferred_names import allow_deferred_names, deferred_names_allowed
from rollgym.trainer.distill_config import DistillConfig, check_teachers
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.strategies import check_parallel, find_strategy
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.renamed import RENAMED_KEYS, RENAMED_VALUES, SINCE
from rollgym.trainer.reward_shaping import RewardShapingConfig

POLICY, PAST = "policy", "past"
"""Players of ``envs.roles``: the policy that is trained, and a past version of it."""


class EnvConfig(Settings):
    """One environment of the mixture."""

    id: str
    """Environment id, or ``module:Class``."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    split: str = "train"
    """Task split to train on; must differ from ``evaluation.split``."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the weights of the other environments."""
    domain: str = ""
    """Name of the domain it belongs to; several environments, such as levels of one, may share it. Metrics
    report each domain as ``success/DOMAIN``. Default: none."""
    limits: Closed[Limits] = Limits(seconds=600)
    """Limits that end an episode from outside."""
    rewards: list[Closed[RewardSettings]] = Field(default_factory=list)
    """Additional rewards of this environment's episodes only, beside the run's ``rewards``."""
    roles: dict[str, str] = Field(default_factory=dict)
    """In an environment with roles, the player of each: ``policy`` (also of roles left out), ``past`` (a past
    version of the policy), or an agent. Default: one agent; the environment's scripted players have the other
    roles, as in every evaluation."""
    role_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of the agents in ``roles``, by role."""

    @property
    def train_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the environment in training, where agents may play all roles."""
        return {**self.kwargs, **ALL_ROLES} if self.roles else self.kwargs


class ModelConfig(Settings):
    """The policy to train."""

    path: str | None = None
    """Folder in Hugging Face format, or a Hugging Face Hub id (``OWNER/NAME``), which is read from the cache
    or downloaded. Default: a built-in policy made for the environments."""
    size: Literal["tiny", "small", "base"] = "small"
    """Size of the built-in policy: 0.1, 0.5 or 2.5 million parameters. Not read with ``path``."""
    context: int = Field(default=2048, ge=32)
    """Context length of the built-in policy, in tokens. Not read with ``path``."""


class EngineConfig(Settings):
    """The inference engine that generates replies."""

    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    """``embedded``: rollgym's own engine, in the trainer's process or on Ray. ``sglang``, ``vllm``: servers
    of this software."""
    url: str | None = None
    """URL of a running server (with SGLang: or router). Default: servers are started. Requires kind=sglang or
    vllm."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of the server at ``url``. Servers that rollgym starts get
    a generated key."""
    replicas: int | None = Field(default=None, ge=1)
    """Number of servers to start. Default: as planned, or 1. Requires kind=sglang or vllm."""
    python: str | None = None
    """Python interpreter that has the servers' software installed. Default: this one. Requires kind=sglang or
    vllm."""
    weight_route: Literal["auto", "object_store", "group", "tensor", "disk"] = "auto"
    """Route of new weights. To servers: ``group``: a broadcast group (gloo on CPU, NCCL with CUDA);
    ``tensor``: in HTTP calls; ``disk``: a temporary folder that the servers can read. To embedded engines on
    Ray: ``object_store``, or ``disk``: files in the run's folder, which all nodes must share. ``auto``: by
    engine, placement and size (docs/weight_sync.md); ``plan.json`` records the choice."""
    weight_delta: bool | Literal["auto"] = "auto"
    """Send only what changed since the update before, exactly: to engines on Ray, and, with ``true``, from
    there or from the trainer to servers (``weight_route`` ``tensor`` or ``group``; docs/weight_sync.md).
    ``auto``: to engines on Ray that compute in bfloat16, on a cluster of several nodes. Requires runtime=ray,
    or kind=sglang or vllm."""
    full_update_every: int = Field(default=16, ge=1)
    """With ``weight_delta``: every n-th update has all values. An engine without the version before gets the
    last full update and all deltas after it."""

    max_batch: int = Field(default=128, ge=1)
    """Maximum number of replies generated at once."""
    cache_tokens: int | None = None
    """Maximum size of the KV cache, in tokens. Default: chosen from the available memory."""
    threads: int | None = None
    """CPU threads of the embedded engine. Default: 1 for a tiny model, else all cores."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of the embedded engine. ``auto``: bfloat16 on CUDA, and for a model of at least 20
    million parameters on a CPU that a short measurement finds fast at it. ``plan.json`` records the choice,
    ``train_rollout_logprob_diff`` the gap to the learner, and ``loss.tis_cap`` corrects it."""


def check_engine(engine: EngineConfig, runtime: str = "local") -> None:
    """Raise `UsageError` for settings of servers without servers, or of Ray without Ray."""
    if engine.kind == "embedded":
        if engine.url or engine.replicas or engine.python:
            raise UsageError("engine.url/replicas/python require engine.kind=sglang or vllm.")
        if engine.weight_route in ("group", "tensor"):
            raise UsageError(
                f"engine.weight_route={engine.weight_route} requires engine.kind=sglang or vllm."
            )
        if engine.weight_route != "auto" and runtime != "ray":
            raise UsageError(
                f"engine.weight_route={engine.weight_route} requires runtime=ray, or engine.kind=sglang or "
                "vllm: an engine in the trainer's process copies the weights."
            )
    elif engine.weight_route == "object_store":
        raise UsageError(
            "engine.weight_route=object_store requires engine.kind=embedded: on Ray, weights reach the actor "
            "of a server by the object store in any case; the route from there is group, tensor or disk."
        )
    if engine.weight_delta is True and runtime != "ray" and engine.kind == "embedded":
        raise UsageError(
            "engine.weight_delta=true requires runtime=ray, or engine.kind=sglang or vllm: an engine in the "
            "trainer's process copies the weights."
        )
    if engine.weight_delta is True and runtime != "ray" and engine.weight_route == "disk":
        raise UsageError(
            "engine.weight_delta=true requires engine.weight_route tensor or group: a server reads a folder "
            "as a whole."
        )


class WarmStartConfig(Settings):
    """Supervised training on demonstrations before reinforcement learning."""

    agent: str = "expert"
    """Agent that plays the demonstrations."""
    run: str | None = None
    """Results folder whose successful episodes are imitated instead; no demonstrations are played."""
    episodes: int = Field(default=200, ge=1)
    """Number of demonstrations, on training tasks, over all environments."""
    only_successful: bool = True
    """Leave out episodes that did not succeed. With false, a random agent teaches the reply format."""
    mistakes: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of turns played at random, so that demonstrations show how to recover from mistakes."""
    mistakes_agent: str = "random"
    """Agent that plays these turns."""
    imitate_mistakes: bool = False
    """Also imitate the random turns; the policy then starts with more exploration."""
    epochs: int = Field(default=10, ge=1)
    """Maximum number of epochs over the demonstrations."""
    batch: int = Field(default=16, ge=1)
    """Episodes per optimizer step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the warm start."""
    until_success: float | None = Field(default=None, gt=0, le=1)
    """Stop early at this success rate on validation episodes. With several ``envs.domain``, every domain must
    reach it: one that has is left out of the batches until a validation finds it below again. Default: train
    for all epochs."""
    check_every: int | None = Field(default=None, ge=1)
    """Batches between validations for ``until_success``. Default: one epoch."""
    validation_episodes: int = Field(default=100, ge=1)
    """Episodes per validation, on training tasks that were not demonstrated."""

    def check_mistakes(self, section: str) -> None:
        """Check that settings of random turns are read."""
        if self.mistakes_agent != "random" and not self.mistakes:
            raise UsageError(f"{section}.mistakes_agent requires {section}.mistakes > 0.")


class RolloutConfig(Settings):
    """Collection of training episodes."""

    groups: int = Field(default=16, ge=1)
    """Groups per training step."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per group: they play the same task and are compared with one another."""
    oversample: int = Field(default=0, ge=0)
    """Episodes started per group beyond ``group_size``; the slowest are cancelled."""
    max_retries_per_group: int = Field(default=2, ge=0)
    """Failed episodes of a group that are played again."""
    max_infra_retries_per_group: int = Field(default=64, ge=0)
    """Episodes of a group that are played again after a worker, engine, server or node was lost. They do not
    count towards ``max_retries_per_group``."""
    incomplete_groups: Literal["keep", "drop"] = "keep"
    """Train on a group that could not be completed, or drop it."""
    max_in_flight: int = Field(default=128, ge=1)
    """Maximum number of episodes played at once."""
    workers: int = Field(default=0, ge=0)
    """Worker processes for the environments; 0 runs them in the trainer's process."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum age, in weight updates, of the weights that sampled a trained token. 0: synchronous, no
    episode starts until the new weights are live. 1 or more: episodes continue while the learner trains."""
    on_stale: Literal["wait", "mask", "replay"] = "wait"
    """Groups that outlive ``max_staleness``. ``wait``: the learner waits for a group that its next update
    would make too old. ``mask``: the learner never waits; tokens older than the bound have no gradient, the
    rest of the episode is trained on. ``replay``: the group is stopped and played again, and the learner
    waits for the second attempt. ``mask`` and ``replay`` require max_staleness >= 1."""
    pace_slow_groups: bool = False
    """Start groups that are expected to take more than three times the median (by earlier episodes of the
    same task or environment) together, at most half a batch of them, so that the learner waits for several
    at once. Requires max_staleness >= 1."""
    on_weight_update: Literal["finish", "restart"] = "finish"
    """On a weight update: finish in-flight episodes under mixed versions, or restart them. ``restart``
    requires max_staleness >= 1 and on_stale=replay."""
    filter_zero_variance: bool = False
    """Replace groups whose episodes all have the same return by new groups."""
    equal_tolerance: float = Field(default=1e-6, ge=0)
    """Largest difference between returns that counts as equal."""
    max_skipped: int = Field(default=32, ge=0)
    """Groups filtered in a row after which the next one is trained on as it is."""
    stall_seconds: float = Field(default=600.0, gt=0)
    """Seconds without any progress after which the run ends with a report."""

    @property
    def mask_bound(self) -> int | None:
        """Age from which on tokens have no gradient; ``None``: all tokens have one."""
        return self.max_staleness if self.on_stale == "mask" else None

    @property
    def reports_turns(self) -> bool:
        """Whether batches leave turns out, so that metrics say how many."""
        return self.max_staleness > 0 or self.filter_zero_variance


class EvaluationConfig(Settings):
    """Evaluation on held-out tasks, the same ones each time, between training steps."""

    every: int = Field(default=10, ge=0)
    """Training steps between evaluations; 0 evaluates only at the start and at the end."""
    on_start: bool = True
    """Evaluate the untrained policy first."""
    episodes: int = Field(default=100, ge=1)
    """Episodes per environment."""
    split: str = "test"
    """Task split to evaluate on; must differ from the environments' training splits."""
    seed: int = Field(default=0, ge=0)
    """Seed that selects the tasks; independent of the run's seed."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of evaluations and of the exported policy; 0 takes the most likely token. Default:
    agent.temperature."""


class CheckpointConfig(Settings):
    """Checkpoints to resume from."""

    every: int = Field(default=10, ge=1)
    """Training steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of most recent checkpoints to keep; the best one is always kept as well."""


class StopConfig(Settings):
    """Stop conditions; the first one that is met ends training."""

    steps: int = Field(default=100, ge=0)
    """Number of training steps."""
    minutes: float | None = Field(default=None, gt=0)
    """Training time in minutes, evaluations included. Makes the result depend on the machine's speed."""
    success: float | None = Field(default=None, gt=0, le=1)
    """Success rate on held-out tasks, 0 to 1."""


class CurriculumConfig(Settings):
    """Which environments are played, by the success in training so far."""

    kind: Literal["stages", "pass_rate"] = "stages"
    """``stages``: ``envs`` in their order, the next one is added when the last one is mastered.
    ``pass_rate``: all of them, and inside each domain those get more groups whose pass rate is near one
    half."""
    momentum: float = Field(default=0.3, gt=0, le=1)
    """pass_rate: weight of the newest step in the moving average of an environment's pass rate."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """pass_rate: least factor of an environment's weight; the factor is 1 at a pass rate of one half, or
    where none was measured, and falls to this at 0 and 1."""
    advance_at: float = Field(default=0.8, gt=0, le=1)
    """stages: success rate on training episodes of the hardest environment so far at which the next one is
    added."""
    window: int = Field(default=5, ge=1)
    """stages: training steps over which the success rate is measured."""


class TrackingConfig(Settings):
    """Metrics and records beside ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str | None = None
    """Weights & Biases project to log to (requires the package ``wandb``)."""
    wandb_mode: Literal["online", "offline"] | None = None
    """``offline`` keeps the numbers in the run folder until ``wandb sync`` uploads them. Default: that of the
    variable ``WANDB_MODE``, or online."""
    mlflow_experiment: str | None = None
    """MLflow experiment to log to (requires the package ``mlflow``)."""
    mlflow_uri: str | None = None
    """MLflow tracking URI. Default: files in the run folder. A URI with a password is refused: set MLflow's
    environment variables."""
    trackio_project: str | None = None
    """Trackio project to log to, in its local store (requires the package ``trackio``)."""
    episodes: Literal["all", "none"] = "all"
    """Whether to keep training episodes in ``episodes.blocks``."""
    tokens_every: int = Field(default=10, ge=0)
    """Training steps between those whose episodes are kept with the advantage and ratio of every token, for
    `rollgym view`; 0 keeps none. Each costs one additional forward pass over the batch."""

    def check(self) -> None:
        """Check that settings are read, and that none holds a password, which the run folder would keep."""
        if self.wandb_mode is not None and self.wandb_project is None:
            raise UsageError("wandb_mode requires wandb_project.")
        if self.mlflow_uri is None:
            return
        if self.mlflow_experiment is None:
            raise UsageError("mlflow_uri requires mlflow_experiment.")
        if urlsplit(self.mlflow_uri).password is not None:
            raise UsageError(
                "mlflow_uri contains a password, which the run folder would keep: remove it and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )


class PastConfig(Settings):
    """The past version of the policy that plays the roles given to ``past``."""

    every: int = Field(default=20, ge=1)
    """Training steps after which it gets the current weights. It starts as the policy before step 1."""


class RayConfig(Settings):
    """The Ray cluster; read with runtime=ray."""

    address: str | None = None
    """Address of a Ray cluster, ``auto`` for the cluster this machine belongs to. Default: start Ray here."""
    num_gpus: int | None = Field(default=None, ge=0)
    """Number of logical GPUs of a Ray started here; may exceed the physical ones. Default: detected."""
    heartbeat_timeout: float = Field(default=120.0, gt=0)
    """Seconds without a heartbeat after which an actor counts as hung and is replaced. A long step does not
    count: heartbeats come from a separate thread."""
    keep_engines: float = Field(default=300.0, ge=0)
    """Seconds for which engines on ``ray.address`` keep running, with their devices, after the trainer was
    killed: a run that is resumed meanwhile uses them again instead of loading the model. 0: they end with
    it. Engines that share devices with the learner always do."""


class TrainConfig(Settings):
    """A training run."""

    shipped_in: ClassVar[str] = PACKAGE
    renames: ClassVar[Renames] = Renames(SINCE, RENAMED_KEYS, RENAMED_VALUES)

    envs: list[EnvConfig] = Field(min_length=1)
    """The environments to train in; with several, a mixture."""
    name: str = ""
    """Name of the run's folder. Default: the name of the config."""
    imports: list[str] = Field(default_factory=list)
    """Modules that every process of the run imports first, to register environments, estimators or losses."""
    runtime: Literal["local", "ray"] = "local"
    """Run in this process (with its environment workers), or on Ray."""
    ray: RayConfig = RayConfig()
    devices: Closed[DeviceConfig] = DeviceConfig()
    """Devices of each role; unset ones are planned (see `rollgym plan`)."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, tasks, sampling and mini-batches."""
    model: ModelConfig = ModelConfig()
    agent: Closed[PolicyOptions] = PolicyOptions(max_tokens=32)
    """Prompts, sampling and parsing of replies."""
    engine: EngineConfig = EngineConfig()
    program: Annotated[Closed[Program] | None, BeforeValidator(program_settings)] = None
    """Program that plays each episode in place of the agent; it calls the policy through an endpoint with the
    APIs of OpenAI and Anthropic (docs/blackbox.md). A text is a command, or ``module:function``. Default:
    none."""
    warm_start: WarmStartConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    reward_shaping: Closed[RewardShapingConfig] = RewardShapingConfig()
    """Changes to the environment's rewards before advantages are computed."""
    rewards: list[Closed[RewardSettings]] = Field(default_factory=list)
    """Additional rewards, computed when an episode ends."""
    keep_environment_reward: bool = True
    """Whether the environment's reward counts in addition to ``rewards``."""
    estimator: str = "grpo"
    """Advantage estimator: grpo, dr_grpo, rloo, grpo_turns, gigpo, reinforce, reinforce_pp, gae,
    gae_states, or a registered one."""
    advantage: Closed[AdvantageConfig] = AdvantageConfig()
    """Settings of the advantage estimator."""
    loss: Closed[LossConfig] = LossConfig("grpo")
    learner: Closed[LearnerConfig] = LearnerConfig()
    distill: DistillConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    curriculum: CurriculumConfig | None = None
    past: PastConfig = PastConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def eval_agent(self) -> PolicyOptions:
        """Prompts, sampling and parsing of evaluations and of the exported policy."""
        temperature = self.evaluation.temperature
        return self.agent if temperature is None else replace(self.agent, temperature=temperature)

    @property
    def all_rewards(self) -> list[RewardSettings]:
        """The rewards that are computed when an episode ends, that of a program's function among them."""
        target = None if self.program is None else self.program.reward_function
        own = [] if target is None else [RewardSettings(kind="function", target=target)]
        return [*own, *self.rewards]

    @property
    def learner_temperature(self) -> float:
        """Temperature of the distribution that the learner trains: the one that tokens are sampled from."""
        return self.agent.temperature

    @field_validator("imports")
    @classmethod
    def _check_imports(cls, imports: list[str]) -> list[str]:
        # Checks the form only: reading a config imports nothing (see `rollgym.trainer.trusted`).
        for module in imports:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"{module!r} is not a valid module name.")
        return imports

    @classmethod
    def reading(cls, values: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Accept names that modules in ``imports`` may register, because reading imports none of them."""
        return allow_deferred_names(values)

    def check(self) -> None:
        """Check settings against each other."""
        deferred = self.estimator not in ESTIMATORS and deferred_names_allowed()
        grouped = not deferred and find_estimator(self.estimator).centered
        if any(env.split == self.evaluation.split for env in self.envs):
            raise UsageError(
                f"evaluation.split={self.evaluation.split} is also an environment's training split: "
                "held-out tasks must come from another split."
            )
        if not deferred and (self.estimator == "gae") != (self.learner.critic != "none"):
            raise UsageError(
                "estimator=gae requires a critic, and only gae uses one: set estimator=gae together with "
                "learner.critic=shared or separate, or learner.critic=none."
            )
        if self.agent.temperature <= 0 or self.agent.top_p < 1 or self.agent.top_k or self.agent.min_p:
            raise UsageError(
                "Training requires agent.temperature > 0 and no top_p, top_k or min_p: with them the learner "
                "cannot compute the probability a token was sampled with."
            )
        if self.warm_start is not None:
            self.warm_start.check_mistakes("warm_start")
        if self.program is not None and self.evaluation.temperature is not None:
            raise UsageError(
                "program and evaluation.temperature cannot be combined: the endpoint samples with "
                "agent.temperature for training and evaluation."
            )
        if self.program is not None and self.warm_start is not None:
            raise UsageError(
                "program and warm_start cannot be combined: run `rollgym imitate` first, set model.path to "
                "its folder final, and set warm_start to null."
            )
        if grouped and self.rollout.group_size < 2:
            raise UsageError(
                f"estimator={self.estimator} compares the episodes of a group: rollout.group_size must be at "
                f"least 2, got {self.rollout.group_size}."
            )
        if not self.keep_environment_reward and not (self.rewards or all(env.rewards for env in self.envs)):
            raise UsageError("keep_environment_reward=false requires at least one entry in rewards.")
        if not deferred_names_allowed():
            if self.learner.strategy != "auto":
                find_strategy(self.learner.strategy)
            check_parallel(self.learner)
        ray = (self.ray.address, self.ray.num_gpus, self.learner.strategy)
        if self.runtime == "local" and ray != (None, None, "auto"):
            raise UsageError("ray.address, ray.num_gpus and learner.strategy require runtime=ray.")
        check_engine(self.engine, self.runtime)
        if self.engine.api_key_env is not None and self.engine.url is None:
            raise UsageError(
                "engine.api_key_env requires engine.url: servers that rollgym starts get a generated key."
            )
        _check_staleness(self)
        _check_roles(self)
        if self.distill is not None:
            check_teachers(self.distill.teachers, self.learner_temperature, self.runtime)
        if self.distill is not None and self.rollout.filter_zero_variance:
            raise UsageError(
                "distill and rollout.filter_zero_variance cannot be combined: groups with equal returns "
                "still teach the policy."
            )
        if self.curriculum is not None and len(self.envs) < 2:
            raise UsageError("curriculum requires at least two environments in envs, the easiest first.")
        by_rate = self.curriculum is not None and self.curriculum.kind == "pass_rate"
        if by_rate and self.rollout.filter_zero_variance:
            raise UsageError(
                "curriculum.kind=pass_rate requires rollout.filter_zero_variance=false: filtered groups "
                "would not count in the pass rates."
            )


MAX_CONFIG_BYTES = 1_000_000


def load_recorded(path: Path, root: Path | None = None) -> TrainConfig:
    """Load the config that a run wrote into its folder.

    Args:
        path: The file ``config.yaml``.
        root: Refuse a file outside this folder.

    Raises:
        UsageError: The config is invalid, or an older version with other keys wrote it.
    """
    values = parse(read_bounded(path, MAX_CONFIG_BYTES, root).decode("utf-8", "replace"), str(path))
    renamed = renamed_settings(TrainConfig, values)
    if renamed:
        old = [".".join(map(str, keys)) for keys in renamed]
        more = f" and {len(old) - 5} more" if len(old) > 5 else ""
        raise UsageError(
            f"{path} was written by a version before {SINCE}, which renamed {', '.join(old[:5])}{more} "
            f"(`rollgym config show {path}` lists all). Start a new run; model.path={path.parent / 'final'} "
            "continues from this run's weights."
        )
    return load(TrainConfig, values)


def _check_staleness(config: TrainConfig) -> None:
    """Check the settings of asynchronous training against each other."""
    rollout = config.rollout
    if rollout.on_weight_update == "restart" and not rollout.max_staleness:
        raise UsageError(
            "rollout.on_weight_update=restart requires rollout.max_staleness >= 1: with 0 no episode is in "
            "flight during a weight update."
        )
    if rollout.on_weight_update == "restart" and rollout.on_stale != "replay":
        raise UsageError(
            f"rollout.on_weight_update=restart requires rollout.on_stale=replay, not {rollout.on_stale}: a "
            "restarted episode has no old tokens to wait for or to mask."
        )
    if not rollout.max_staleness and (rollout.on_stale != "wait" or rollout.pace_slow_groups):
        raise UsageError(
            "rollout.on_stale and rollout.pace_slow_groups require rollout.max_staleness >= 1: with 0 the "
            "learner waits for every group."
        )
    if config.loss.rejects and config.learner.old_logprobs != "recompute":
        raise UsageError(
            "loss.reject_tokens and loss.reject_sequences require learner.old_logprobs=recompute: otherwise "
            "every ratio is 1."
        )


def _check_roles(config: TrainConfig) -> None:
    """Check the players of roles against each other and against the other settings."""
    for number, env in enumerate(config.envs):
        for role in env.role_options:
            if env.roles.get(role) in (None, POLICY, PAST):
                raise UsageError(
                    f"envs.{number}.role_options.{role} requires an agent in envs.{number}.roles.{role}."
                )
    players = [player for env in config.envs for player in env.roles.values()]
    if config.program is not None and players:
        raise UsageError(
            "program and envs.roles cannot be combined, because the program plays whole episodes: remove "
            "envs.roles, and scripted players have the other roles."
        )
    if PAST not in players:
        if config.past != PastConfig():
            raise UsageError("past requires a role with the player `past` in envs.roles.")
        return
    if config.runtime != "local" or config.engine.kind != "embedded":
        raise UsageError(
            "The player `past` requires runtime=local and engine.kind=embedded: its engine runs in the "
            "trainer's process."
        )
    if config.rollout.max_staleness:
        raise UsageError(
            "The player `past` requires rollout.max_staleness=0: no episode may see its weights change."
        )


def plays_in(episode: Episode, env: EnvConfig) -> bool:
    """Return whether a training episode belongs to an environment of the mixture."""
    spec = episode.spec
    if spec.env_id != env.id or spec.env_kwargs != env.train_kwargs:
        return False
    # Names of agents in records may have a number.
    return all(spec.players.get(role, "").partition(" #")[0] == player for role, player in env.roles.items())


def belongs_to(episode: Episode, env: EnvConfig) -> bool:
    """Return whether an episode of training or of an evaluation belongs to an environment of the mixture."""
    spec = episode.spec
    return plays_in(episode, env) or (spec.env_id == env.id and spec.env_kwargs == env.kwargs)


def role_players(config: TrainConfig) -> list[dict[str, str]]:
    """Return, for each environment, the name of the player of each role in ``roles``.

    Names of agents are unique over the environments: an agent is made for one role of one environment.
    """
    agents = [p for env in config.envs for p in env.roles.values() if p not in (POLICY, PAST)]
    seen: dict[str, int] = {}
    result = []
    for env in config.envs:
        players = {}
        for role, player in env.roles.items():
            players[role] = player
            if agents.count(player) > 1:
                seen[player] = seen.get(player, 0) + 1
                players[role] = f"{player} #{seen[player]}"
        result.append(players)
    return result


def domains(config: TrainConfig) -> dict[str, list[int]]:
    """Return the indices of the environments of each domain that ``envs.domain`` names."""
    members: dict[str, list[int]] = {}
    for number, env in enumerate(config.envs):
        if env.domain:
            members.setdefault(env.domain, []).append(number)
    return members


def domain_groups(config: TrainConfig) -> dict[str, list[int]]:
    """Return `domains`, and the environments without a domain together under an empty name."""
    alone = [number for number, env in enumerate(config.envs) if not env.domain]
    return {**domains(config), **({"": alone} if alone else {})}


def env_labels(config: TrainConfig) -> list[str]:
    """Return a label for each environment: its id, with its arguments where several have the same id."""
    ids = [env.id for env in config.envs]
    labels: list[str] = []
    for number, env in enumerate(config.envs):
        settings = {**env.kwargs, **env.roles}
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        label = env.id if ids.count(env.id) == 1 else f"{env.id} {words}".strip()
        labels.append(label if label not in labels else f"{label} #{number}")
    return labels
