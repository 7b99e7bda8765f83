"""The parts of a run, made from its configuration: model, engine, agent, pool, learner, task stream."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollgym.agents.credentials import find_key
from rollgym.agents.lm import LmAgent
from rollgym.agents.lm_carried import model_settings
from rollgym.agents.prompting import load_template
from rollgym.chat import load_tokenizer
from rollgym.engines import Engine
from rollgym.engines.embedded.features import position_limit
from rollgym.engines.replicas import ReplicaEngine
from rollgym.engines.torch import TorchEngine
from rollgym.errors import RunError, UsageError, boundary
from rollgym.model_settings import write_model_settings
from rollgym.pool import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.pretrained import check_model
from rollgym.rewards import Weighted
from rollgym.rewards.settings import make_scorer
from rollgym.scheduler.config import SchedulerConfig
from rollgym.scheduler.groups import GroupPolicy
from rollgym.seeding import derive_seed
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.experience import zero_variance
from rollgym.trainer.handover import Handover
from rollgym.trainer.learner import Learner, Metrics
from rollgym.trainer.learner.local import LocalLearner
from rollgym.trainer.learner.objective import GAP_LIMIT
from rollgym.trainer.learner_thread import LearnerThread
from rollgym.trainer.model import make_policy
from rollgym.trainer.plan_record import RunPlan, local_plan
from rollgym.trainer.weights import holds_weights

T = TypeVar("T")
MODEL, IMITATED = "model", "imitated"
"""The run's own copies of the policy that training starts from, and of the one that a warm start taught."""

LEAVES = {
    "optimiser": (("optimiser",), ("kv_cache",)),
    "all": (("optimiser", "weights"), ("kv_cache", "weights")),
}
"""What of the learner and of the engine leaves their device while the other works, by ``devices.offload``."""


@dataclass(slots=True)
class Parts:
    """What the loop works with."""

    config: TrainConfig
    folder: Path
    engine: Engine
    agent: LmAgent
    pool: EnvPool
    learner: Learner
    scorer: Weighted | None
    thread: Executor
    """Where the learner computes: one thread, so that the event loop stays free."""
    plan: RunPlan = field(default_factory=dict)
    """Which part works where."""
    turns: Handover | None = None
    """Where engines share the learner's devices: who has them."""
    adjust: Callable[[], Awaitable[None]] | None = None
    """Between two steps: take up what has come to the cluster."""
    rebuild: Callable[[], Awaitable[None]] | None = None
    """After a part was lost: make it anew on the devices that are left."""

    async def compute(self, work: Callable[..., T], *args: object) -> T:
        """Have the learner's thread do something."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)

    def handover(self) -> AbstractAsyncContextManager[None]:
        """While the learner works: engines that share its devices make room."""
        return nullcontext() if self.turns is None else self.turns.training()

    async def renew(self, version: int) -> None:
        """Give the engine the learner's weights."""
        if self.adjust is not None:
            await self.adjust()
        async with nullcontext() if self.turns is None else self.turns.renewing():
            await self.engine.update_weights(version, await self.compute(self.learner.weights))

    @property
    def moved(self) -> Metrics:
        """What was moved in the last hand-over, and how long that took."""
        return {} if self.turns is None else self.turns.moved

    def start_imitation(self, rate: float, steps: int) -> None:
        """Have the learner make what it is shown likely."""
        self.learner.start_imitation(rate, steps)

    def end_imitation(self) -> None:
        """Have the learner go on as usual from what it was taught; so does a separate critic."""
        taught = None
        if self.config.learner.critic == "own":
            taught = self.folder / IMITATED
            self.export(taught)
        self.learner.end_imitation(taught)

    def export(self, folder: Path) -> None:
        """Write the policy as it is now as a model folder that any tool can load."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in (self.folder / MODEL).iterdir():
            if file.is_file() and file.name != "config.json" and not holds_weights(file):
                shutil.copy2(file, folder / file.name)
        with boundary(RunError, f"The policy could not be written to {folder}"):
            self.learner.export(folder)
            envs = [(env.id, env.kwargs) for env in self.config.envs]
            asked = self.config.agent
            write_model_settings(folder, model_settings(asked, load_template(asked.template), envs))


def prepare_model(config: TrainConfig, folder: Path) -> Path:
    """The model folder that training starts from, made or copied into the run."""
    place = folder / MODEL
    if (place / "config.json").is_file():
        return place
    if config.model.path is None:
        envs = [(env.id, env.kwargs) for env in config.envs]
        make_policy(envs, place, size=config.model.size, seed=config.seed, context=config.model.context)
        return place
    source = check_model(config.model.path)
    part = place.with_name(f".{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, ignore=shutil.ignore_patterns("checkpoint*", "optimizer*", ".*"))
    part.rename(place)
    return place


@asynccontextmanager
async def open_parts(config: TrainConfig, folder: Path) -> AsyncIterator[Parts]:
    """Everything, ready to use; closed again whatever happens."""
    with LearnerThread() as thread:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(thread, prepare_model, config, folder)
        learner = await loop.run_in_executor(thread, make_learner, config, model)
        engine = await open_engine(config, learner, model)
        workers = config.rollout.workers
        pool = LocalPool(workers, modules=config.rollout.modules) if workers else InlinePool()
        engines = len(engine.engines) if isinstance(engine, ReplicaEngine) else 1
        device = str(next(learner.model.parameters()).device)
        parts = make_parts(
            config, folder, engine, pool, learner, thread, plan=local_plan(config, engines, device)
        )
        if config.devices.offload in LEAVES:
            leaves, releases = LEAVES[config.devices.offload]
            parts.turns = Handover(
                engine, range(engines), learner, parts.compute, leaves=leaves, releases=releases
            )
        try:
            yield parts
        finally:
            if parts.scorer is not None:
                await parts.scorer.close()
            await pool.close()
            await engine.close()


def make_parts(
    config: TrainConfig,
    folder: Path,
    engine: Engine,
    pool: EnvPool,
    learner: Learner,
    thread: Executor,
    **more: Any,
) -> Parts:
    """The parts, with an agent and a scorer over them; ``more`` are further fields."""
    if config.engine.kind == "sglang":  # the embedded engine keeps to it by itself
        check_context(folder / MODEL, engine)
    tokenizer = load_tokenizer(folder / MODEL)
    scorer = None
    if config.rewards:
        scorer = make_scorer(
            config.rewards,
            keep_environment=config.keep_environment_reward,
            engine=engine,
            tokenizer=tokenizer,
        )
    agent = LmAgent(engine, tokenizer, config.agent)
    return Parts(config, folder, engine, agent, pool, learner, scorer, thread, **more)


async def open_engine(config: TrainConfig, learner: LocalLearner, model: Path) -> Engine:
    """The engine in this process, or one on SGLang servers."""
    if config.engine.kind == "sglang":
        return await open_servers(config, model)
    return TorchEngine(learner.model if config.learner.lora is None else model, **engine_options(config))


async def open_servers(config: TrainConfig, model: Path) -> Engine:
    """The engine on SGLang servers."""
    from rollgym.engines.sglang import ServerOptions, open_sglang

    choice = config.engine
    options = ServerOptions(python=choice.python or sys.executable)
    return await asyncio.to_thread(
        open_sglang,
        model,
        url=choice.url,
        replicas=choice.replicas or 1,
        options=options,
        api_key=find_key(choice.api_key_env).reveal(),
    )


def engine_options(config: TrainConfig) -> dict[str, Any]:
    """What a `TorchEngine` is told, wherever it runs."""
    choice = config.engine
    return {
        "max_batch": choice.max_batch,
        "cache_tokens": choice.cache_tokens,
        "threads": choice.threads,
    }


def make_learner(config: TrainConfig, model: Path) -> LocalLearner:
    """The learner of the run proper."""
    return LocalLearner(model, config.learner, config.loss, **learner_options(config))


def learner_options(config: TrainConfig) -> dict[str, Any]:
    """What a learner is told besides its settings and its loss, wherever it runs."""
    steps = config.stop.steps * config.learner.epochs * config.learner.mini_batches
    return {
        "weighting": config.weighting,
        "constant": config.constant,
        "temperature": config.agent.temperature,
        "total_steps": max(steps, 1),
        "kl_target": config.kl_target,
        "seed": derive_seed("learner", config.seed),
        "gap_limit": gap_limit(config),
    }


def gap_limit(config: TrainConfig) -> float:
    """Nats between engine and learner, on average, above which a run ends."""
    cuda = bool(config.gpus) or torch.cuda.is_available()
    device = config.learner.device or ("cuda" if cuda else "cpu")
    precise = device == "cpu" and config.learner.dtype != "bfloat16" and config.engine.kind == "torch"
    return GAP_LIMIT["float32" if precise else "bfloat16"]


def check_context(model: Path, engine: Engine) -> None:
    """Refuse an engine that goes on where a model's positions begin to mean something else."""
    from transformers import AutoConfig

    limit = position_limit(AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True))
    if limit is not None and engine.context_length > limit:
        raise UsageError(
            f"Positions of the model in {model} change beyond {limit} tokens "
            "(original_max_position_embeddings), and rows beyond that cannot be trained on: start the "
            f"servers with --context-length {limit}."
        )


def scheduler_config(config: TrainConfig) -> SchedulerConfig:
    """How far ahead of the learner episodes are played.

    With staleness 0 nothing new starts until the weights that were trained on a batch are live; with more, as
    many batches are begun ahead, and what is ready first is taken first.
    """
    rollout = config.rollout
    return SchedulerConfig(
        max_in_flight=rollout.max_in_flight,
        groups=GroupPolicy(
            size=rollout.group_size,
            extra=rollout.extra,
            refills=rollout.refills,
            max_infra_retries=rollout.max_infra_retries_per_group,
            when_short=rollout.when_short,
        ),
        order="ready" if rollout.staleness else "strict",
        max_ahead=rollout.groups * (1 + rollout.staleness),
        max_staleness=rollout.staleness,
        under_way=rollout.under_way,
        skip_equal_returns=rollout.skip_equal_returns,
        zero_variance=partial(zero_variance, config=config),
        equal_tolerance=rollout.equal_tolerance,
        max_skipped=rollout.max_skipped,
        stall_seconds=rollout.stall_seconds,
        evaluation_share=1.0,
    )
