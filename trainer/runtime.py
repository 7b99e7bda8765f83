"""The components of a run, made from its config: model, learner, engine, environment pool, agent, scorer.

`LocalRuntime` makes them in this process; `rollgym.trainer.cluster.runtime.RayRuntime` on a cluster.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from rollgym.agents.chat.credentials import find_key
from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.saved_options import model_settings
from rollgym.agents.prompting import load_template
from rollgym.chat import Tokenizer, load_tokenizer
from rollgym.core.errors import RollgymError, RunError, UsageError, boundary
from rollgym.core.roles import TeamAgent
from rollgym.core.seeding import derive_seed
from rollgym.core.types import Group
from rollgym.engines.base import Engine, GenerateRequest, Generation, WeightSource
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.embedded.features import position_limit
from rollgym.engines.embedded.precision import dtype_name, is_fast_at_bfloat16
from rollgym.engines.servers.server_process import BaseServerOptions
from rollgym.engines.servers.weights import Route
from rollgym.models.policy_settings import write_model_settings
from rollgym.models.zoo import check_model
from rollgym.pool.base import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.rewards import CompositeScorer
from rollgym.rewards.routed import RoutedScorer
from rollgym.rewards.settings import RewardSettings, make_scorer
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.events import EventLog
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import TaskSampler
from rollgym.trainer.builtin_policy.model import make_policy
from rollgym.trainer.colocation import Colocation
from rollgym.trainer.config import PAST, TrainConfig, belongs_to
from rollgym.trainer.distillation import Teachers, open_teachers
from rollgym.trainer.learner.config import LearnerOptions
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.objective import GAP_LIMIT
from rollgym.trainer.learner.protocol import LearnerProtocol, Metrics
from rollgym.trainer.learner.weight_export import holds_weights
from rollgym.trainer.rollout_batch import RolloutBatch, make_rollout_batch, zero_variance
from rollgym.trainer.scheduling import scheduler_settings
from rollgym.trainer.self_play import PastPolicy, make_team
from rollgym.trainer.weight_sync import SyncMeter, raise_rank_error, sync_plan, wire_format

T = TypeVar("T")
MODEL, IMITATED = "model", "imitated"
"""Folders of a run: the policy that training starts from, and the policy after the warm start."""
RunPlan = dict[str, Any]
"""Layout, strategy, ranks, engines and devices, as in ``plan.json``."""
OFFLOADS = {
    "optimizer": (("optimizer",), ("kv_cache",)),
    "all": (("optimizer", "weights"), ("kv_cache", "weights")),
}
"""By ``devices.offload``: what the learner offloads and what the engine releases while the other works."""


class Runtime(Protocol):
    """Makes the components of a run, in this process or on Ray, keeps them alive, and closes them."""

    async def start(self) -> Components:
        """Make all components."""

    async def adjust(self) -> None:
        """Between two steps: use nodes that joined the cluster."""

    async def rebuild(self) -> None:
        """After `ActorLost`: restart learner and engines on the devices that are left."""

    async def close(self) -> None:
        """Close whatever was started."""


@dataclass(slots=True)
class Components:
    """The parts of a run that the loop works with."""

    config: TrainConfig
    folder: Path
    engine: Engine
    agent: PolicyAgent
    eval_agent: PolicyAgent
    """Plays evaluations: the same policy, with ``evaluation.temperature``."""
    pool: EnvPool
    learner: LearnerProtocol
    scorer: CompositeScorer | RoutedScorer | None
    thread: Executor
    """Runs all calls of the learner: one thread, so that the event loop stays free."""
    runtime: Runtime | None = None
    plan: RunPlan = field(default_factory=dict)
    """Which component runs on which device."""
    colocation: Colocation | None = None
    """Set if engines share devices with the learner."""
    team: TeamAgent | None = None
    """Plays training episodes in environments with roles: the policy and its opponents."""
    past: PastPolicy | None = None
    """Set if a role has a past version of the policy."""
    sync_metrics: Metrics = field(default_factory=dict)
    """Seconds and bytes of the last weight sync."""
    teachers: Teachers | None = None
    """Set if the policy is distilled from other models."""

    async def compute(self, work: Callable[..., T], *args: object) -> T:
        """Call ``work(*args)`` in the learner's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)

    def training(self) -> AbstractAsyncContextManager[None]:
        """While the learner computes: engines that share its devices sleep."""
        return nullcontext() if self.colocation is None else self.colocation.training()

    async def train_on(
        self, groups: Sequence[Group], kl_coef: float, version: int
    ) -> tuple[RolloutBatch, Metrics]:
        """Make the batch of finished groups and update the learner; returns the batch and the metrics."""
        rollout = await self.compute(make_rollout_batch, groups, self.config, self.learner, kl_coef, version)
        if self.teachers is not None:
            rollout = await self.compute(self.teachers.add, rollout)
        return rollout, await self.compute(self.learner.update, rollout.batch)

    async def sync_weights(self, version: int) -> None:
        """Send the learner's weights to the engine as ``version``."""
        if self.runtime is not None:
            await self.runtime.adjust()
        async with nullcontext() if self.colocation is None else self.colocation.sync_weights():
            meter = SyncMeter()
            wire = wire_format(self.config, self.engine, self.folder, self.plan.get("nodes", 1))
            source = await self.compute(self.learner.weights, wire)
            try:
                await self.engine.update_weights(version, source)
            except RollgymError:
                await raise_rank_error(source)  # a lost rank, rather than what engines made of it
                raise
            self.sync_metrics = meter.metrics(self.engine, source)

    @property
    def colocation_metrics(self) -> Metrics:
        """Bytes moved on shared devices in the last step, and the seconds that took."""
        return {} if self.colocation is None else self.colocation.metrics

    def make_scheduler(self, tasks: TaskSampler, log: EventLog, first_group: int) -> Scheduler:
        """A paused scheduler that plays ``tasks`` with these components."""
        return Scheduler(
            tasks,
            self.pool,
            self.team or self.agent,
            scheduler_config(self.config),
            eval_agent=self.eval_agent,
            log=log,
            scorer=self.scorer,
            first_group=first_group,
            paused=True,
        )

    def start_imitation(self, rate: float, steps: int) -> None:
        """Switch the learner to imitation for ``steps`` optimizer steps."""
        self.learner.start_imitation(rate, steps)

    def end_imitation(self) -> None:
        """Switch the learner back; a separate critic starts from the imitated policy."""
        imitated = None
        if self.config.learner.critic == "separate":
            imitated = self.folder / IMITATED
            self.export(imitated)
        self.learner.end_imitation(imitated)

    def save(self, folder: Path) -> None:
        """Write everything that is not in the run's state into the folder of a checkpoint."""
        self.learner.save(folder)
        if self.past is not None:
            self.past.save(folder)

    def export(self, folder: Path) -> None:
        """Write the current policy as a model folder in Hugging Face format."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in (self.folder / MODEL).iterdir():
            if file.is_file() and file.name != "config.json" and not holds_weights(file):
                shutil.copy2(file, folder / file.name)
        with boundary(RunError, f"The policy could not be written to {folder}"):
            self.learner.export(folder)
            envs = [(env.id, env.kwargs) for env in self.config.envs]
            options = self.config.eval_agent
            write_model_settings(folder, model_settings(options, load_template(options.template), envs))


def prepare_model(config: TrainConfig, folder: Path) -> Path:
    """Make or copy the model that training starts from into the run folder; returns its folder."""
    target = folder / MODEL
    if (target / "config.json").is_file():
        return target
    if config.model.path is None:
        envs = [(env.id, env.kwargs) for env in config.envs]
        make_policy(envs, target, size=config.model.size, seed=config.seed, context=config.model.context)
        return target
    source = check_model(config.model.path)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, ignore=shutil.ignore_patterns("checkpoint*", "optimizer*", ".*"))
    part.rename(target)
    return target


class LocalRuntime:
    """All components in this process; environments here or in worker processes."""

    def __init__(self, config: TrainConfig, folder: Path, model: Path, thread: Executor) -> None:
        self._config, self._folder, self._model, self._thread = config, folder, model, thread
        self._stack = AsyncExitStack()

    async def start(self) -> Components:
        """Load the model, then make the engine, the environment pool and the agent."""
        config, workers = self._config, self._config.rollout.workers
        learner = await asyncio.get_running_loop().run_in_executor(
            self._thread, Learner, self._model, config.learner, config.loss, learner_options(config)
        )
        engine: Engine
        if not config.envs:
            engine = NoEngine()
        elif config.engine.kind != "embedded":
            engine = await open_servers(config, self._model)
        else:
            model = learner.model if config.learner.lora is None else self._model
            engine = EmbeddedEngine(model, **engine_options(config))
        self._stack.push_async_callback(engine.close)
        pool = LocalPool(workers, modules=config.imports) if workers else InlinePool()
        self._stack.push_async_callback(pool.close)
        past = None
        if any(PAST in env.roles.values() for env in config.envs):
            past = PastPolicy(EmbeddedEngine(self._model, **engine_options(config)), self._folder / PAST)
            self._stack.push_async_callback(past.engine.close)
        components = make_components(
            config, self._folder, engine, pool, learner, self._thread, runtime=self, past=past
        )
        components.teachers = await components.compute(open_teachers, config, self._folder, self._model)
        if components.scorer is not None:
            self._stack.push_async_callback(components.scorer.close)
        if components.team is not None:
            self._stack.push_async_callback(components.team.close)
        components.plan = {
            "runtime": "local",
            "layout": "colocated",
            "strategy": "single",
            "ranks": 1,
            "engine": config.engine.kind,
            "engines": engine.num_replicas,
            "environments": f"{workers} worker processes" if workers else "in the trainer's process",
            "weight_sync": sync_plan(config, engine, self._folder),
            "devices": str(next(learner.model.parameters()).device),
            "dtypes": {"learner": dtype_name(learner.dtype)},
            "roles": {},
        }
        if (dtype := getattr(engine, "dtype", None)) is not None:  # servers do not tell theirs
            components.plan["dtypes"]["engine"] = dtype
        if config.devices.offload in OFFLOADS:
            offloads, releases = OFFLOADS[config.devices.offload]
            shared = range(engine.num_replicas)
            components.colocation = Colocation(
                engine, shared, learner, components.compute, offloads=offloads, releases=releases
            )
        return components

    async def adjust(self) -> None:
        """Do nothing: the devices of one process do not change."""

    async def rebuild(self) -> None:
        """Fail: one process cannot lose a part of itself."""
        raise RunError("A run with runtime=local cannot be rebuilt.")

    async def close(self) -> None:
        """Close scorer, pool and engine."""
        await self._stack.aclose()


def make_components(
    config: TrainConfig,
    folder: Path,
    engine: Engine,
    pool: EnvPool,
    learner: LearnerProtocol,
    thread: Executor,
    past: PastPolicy | None = None,
    **more: Any,
) -> Components:
    """The components with their agent and scorer; ``more`` are further fields of `Components`."""
    if config.engine.kind != "embedded" and config.envs:  # the embedded engine enforces the limit itself
        check_context(folder / MODEL, engine)
    tokenizer = load_tokenizer(folder / MODEL)
    scorer = make_run_scorer(config, engine, tokenizer)
    agent = eval_agent = PolicyAgent(engine, tokenizer, config.agent)
    if config.eval_agent != config.agent:
        eval_agent = PolicyAgent(engine, tokenizer, config.eval_agent)
    past_agent = None if past is None else PolicyAgent(past.engine, tokenizer, config.agent)
    team = make_team(config, agent, past_agent)
    more |= {"team": team, "past": past}
    return Components(config, folder, engine, agent, eval_agent, pool, learner, scorer, thread, **more)


def make_run_scorer(
    config: TrainConfig, engine: Engine, tokenizer: Tokenizer
) -> CompositeScorer | RoutedScorer | None:
    """The scorer of a run's rewards; where environments have their own, each gets its scorer."""

    def composite(rewards: Sequence[RewardSettings]) -> CompositeScorer:
        keep = config.keep_environment_reward
        return make_scorer(rewards, keep_environment=keep, engine=engine, tokenizer=tokenizer)

    if not any(env.rewards for env in config.envs):
        return composite(config.all_rewards) if config.all_rewards else None
    routes = [
        (partial(belongs_to, env=env), composite([*config.all_rewards, *env.rewards]))
        for env in config.envs
        if config.all_rewards or env.rewards
    ]
    return RoutedScorer(routes)


class NoEngine(Engine):
    """The engine of a run without environments: it holds no model and generates nothing."""

    version = 0
    context_length = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Fail: no environment asks for a reply."""
        raise UsageError("A run without environments has no engine.")

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Ignore the weights."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Do nothing: there are no requests."""

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def forget(self, session: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


async def open_servers(config: TrainConfig, model: Path) -> Engine:
    """Start SGLang or vLLM servers, or connect to those at ``engine.url``."""
    settings = config.engine
    options: dict[str, Any] = {
        "url": settings.url,
        "replicas": settings.replicas or 1,
        "options": server_options(config),
        "api_key": find_key(settings.api_key_env).reveal(),
        **weight_options(config),
    }
    if settings.kind == "vllm":
        from rollgym.engines.vllm import open_vllm

        return await asyncio.to_thread(partial(open_vllm, model, **options))
    from rollgym.engines.sglang import open_sglang

    return await asyncio.to_thread(partial(open_sglang, model, **options))


def server_options(config: TrainConfig, *, memory_saver: bool = False) -> BaseServerOptions:
    """Options of the servers to start, wherever they run."""
    options: dict[str, Any] = {
        "python": config.engine.python or sys.executable,
        "memory_saver": memory_saver,
        "weight_delta": config.engine.weight_delta is True,
        # Not with auto: a server that cannot report experts of a model does not start.
        "return_routed_experts": config.learner.router_replay == "on",
    }
    if config.engine.kind == "vllm":
        from rollgym.engines.vllm import ServerOptions as VllmOptions

        return VllmOptions(**options)
    from rollgym.engines.sglang import ServerOptions as SglangOptions

    return SglangOptions(**options)


def weight_options(config: TrainConfig) -> dict[str, Any]:
    """Arguments of a `ServerEngine` for how weights reach the servers."""
    settings = config.engine
    route = settings.weight_route
    return {
        "route": None if route in ("auto", "object_store") else cast(Route, route),
        "delta": settings.weight_delta is True,
        "full_update_every": settings.full_update_every,
    }


def engine_options(config: TrainConfig) -> dict[str, Any]:
    """Arguments of an `EmbeddedEngine`, wherever it runs."""
    settings = config.engine
    return {
        "max_batch": settings.max_batch,
        "cache_tokens": settings.cache_tokens,
        "threads": settings.threads,
        "dtype": settings.dtype,
        "return_routed_experts": config.learner.router_replay != "off",
    }


def learner_options(config: TrainConfig) -> LearnerOptions:
    """Arguments of a learner besides its settings and its loss, wherever it runs."""
    steps = config.stop.steps * config.learner.epochs * config.learner.mini_batches
    return LearnerOptions(
        temperature=config.learner_temperature,
        total_steps=max(steps, 1),
        seed=derive_seed("learner", config.seed),
        gap_limit=gap_limit(config),
    )


def gap_limit(config: TrainConfig) -> float:
    """Mean difference of log-probs between engine and learner, in nats, above which a run fails."""
    cuda = bool(config.ray.num_gpus) or torch.cuda.is_available()
    device = config.learner.device or ("cuda" if cuda else "cpu")
    precise = device == "cpu" and config.engine.kind == "embedded"
    if precise:
        dtypes = (config.engine.dtype, config.learner.dtype)
        # The built-in policy is too small for `auto` to choose bfloat16; on Ray each node chooses for itself.
        free = "auto" in dtypes and config.model.path is not None
        fast = free and (config.runtime == "ray" or is_fast_at_bfloat16())
        precise = "bfloat16" not in dtypes and not fast
    return GAP_LIMIT["float32" if precise else "bfloat16"]


def check_context(model: Path, engine: Engine) -> None:
    """Reject an engine whose context is longer than the positions that the model can be trained on."""
    from transformers import AutoConfig

    limit = position_limit(AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True))
    if limit is not None and engine.context_length > limit:
        raise UsageError(
            f"Positions of the model in {model} change beyond {limit} tokens "
            "(original_max_position_embeddings), so longer sequences cannot be trained on: start the servers "
            f"with --context-length {limit}."
        )


def scheduler_config(config: TrainConfig) -> SchedulerConfig:
    """Settings of the scheduler, with the estimator's rule for groups without variance."""
    return replace(scheduler_settings(config), zero_variance=partial(zero_variance, config=config))
