"""Simulates one rank of the learner without a device, weights or other ranks: its peak memory, and mistakes.

The learner itself runs, on fake tensors: they have shapes, dtypes and a device, but no numbers. Collectives
go to a process group that contains only this rank and claims to be of any size. Mistakes with devices and
dtypes fail as they would on a GPU (see `simulated_device`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollgym.core.errors import RunError, UsageError, one_line
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import FloatArray, IntArray, TokenEpisode, TokenSequence
from rollgym.trainer.learner import expert_parallel
from rollgym.trainer.learner import learner as learner_module
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.layout import LayoutChoice
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.memory_count import StorageCount
from rollgym.trainer.learner.process_group import ProcessGroup
from rollgym.trainer.learner.sharded_loading import Checked, Owners, parameter_owners
from rollgym.trainer.learner.simulated_device import (
    NAME,
    fake_process_group,
    fake_tensors,
    simulated_device,
)
from rollgym.trainer.learner.strategies.mesh import MeshStrategy
from rollgym.trainer.losses.settings import LossConfig

STRATEGIES = ("single", "ddp", "fsdp2", "mesh")
"""Strategies that are simulated; DeepSpeed's cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Peak bytes of one rank."""

    peaks: Mapping[str, int]
    """By phase: ``start``, ``score actor``, ``score reference``, ``first update``, ``second update``."""
    held: int
    """Bytes after the second update: weights and optimizer state."""

    @property
    def peak(self) -> int:
        """The largest peak of all phases."""
        return max(self.peaks.values())


def simulate(
    model_config: Any,
    config: LearnerConfig,
    loss: LossConfig,
    *,
    strategy: str,
    world: int,
    tokens: int,
    replies: int,
    cpu_offload: bool = False,
) -> Simulation:
    """Run the learner of one rank on fake tensors: its start, a forward pass and two updates.

    The first update makes the optimizer's state. The second has two micro-batches: with the second one, the
    gradients of the first are there.

    Args:
        model_config: A transformers config.
        config: The learner's; the device is replaced.
        loss: The policy loss; with a KL coefficient, the rank holds a reference.
        strategy: One of `STRATEGIES`.
        world: Number of ranks.
        tokens: Tokens of a micro-batch, which the ranks of a context group share.
        replies: Action tokens among them.
        cpu_offload: Keep on the host whatever the strategy can keep there.

    Raises:
        RunError: The learner fails, such as by using a tensor on another device.
    """
    if strategy not in STRATEGIES:
        raise UsageError(
            f"strategy={strategy} cannot be simulated: choose one of {', '.join(STRATEGIES)} with "
            "learner.strategy."
        )
    if dist.is_initialized():
        raise UsageError(
            "A simulation makes a process group, but this process is in one already: call leave_group first."
        )
    device = simulated_device()
    dtype: Any = "bfloat16" if config.dtype in (None, "auto") else config.dtype
    config = replace(config, device=str(device), dtype=dtype, threads=None)
    count = StorageCount(device=NAME)
    with ExitStack() as stack:
        if strategy not in ("single", "ddp"):
            stack.enter_context(fake_process_group(world))
        stack.enter_context(
            fake_tensors(
                (learner_module, "_gather_metrics", _own_metrics),
                (MeshStrategy, "clip", _no_clip),  # it compares numbers of ranks
                (expert_parallel, "row_counts", _balanced),
            )
        )
        stack.enter_context(count)
        count.phase("start")
        try:
            learner = _OneRank(
                FakeSource(model_config),
                config,
                loss,
                LearnerOptions(cpu_offload=cpu_offload),
                **_ranks(strategy, world),
            )
            buckets = _ddp_buckets(learner) if strategy == "ddp" else None
            vocabulary = int(getattr(model_config, "vocab_size", 1000))
            with_reference = bool(loss.kl_coef)
            shared = learner.strategy.context is not None
            batch = fake_batch(1, tokens, replies, vocabulary, reference=with_reference, spread=shared)
            count.phase("score actor")
            learner.logprobs(batch)
            if with_reference:
                count.phase("score reference")
                learner.reference(batch)
            count.phase("first update")
            learner.update(batch)
            count.phase("second update")
            learner.update(
                fake_batch(2, tokens, replies, vocabulary, reference=with_reference, spread=shared)
            )
            learner.strategy.zero_grad()
            held = count.now
            del buckets
        except UsageError:
            raise
        except Exception as error:
            raise RunError(f"The simulated learner failed: {first_line(error)}") from error
    return Simulation(peaks=dict(count.peaks), held=held)


def _ranks(strategy: str, world: int) -> dict[str, Any]:
    """Return a learner's arguments. DDP's reducer is not Python: a single process takes its place."""
    if strategy in ("single", "ddp"):
        return {"strategy": "single"}
    return {"strategy": strategy, "world": world, "group": FakeGroup(world)}


def _ddp_buckets(learner: Learner) -> Tensor:
    """Return what DDP sends gradients from: a copy of all of them."""
    size = sum(parameter.numel() for parameter in learner.modules.trained().values())
    return torch.empty(size, dtype=torch.float32, device=NAME)


def _no_clip(*_: Any) -> Tensor:
    return torch.ones((), device=NAME)


def _balanced(counts: Tensor, expected: int) -> list[int]:
    """Share rows out: every expert gets as many tokens."""
    each, more = divmod(expected, len(counts))
    return [each + (number < more) for number in range(len(counts))]


def _own_metrics(_: Any, metrics: Any, *__: Any) -> list[Any]:
    return [metrics]


class _OneRank(Learner):
    """A learner that computes all rows of a batch: the rows of other ranks need not be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.partition.several = False


def first_line(error: Exception) -> str:
    """Return the first sentences of an error: torch lists all backends of an operation after them."""
    return one_line(error)[:500]


def fake_batch(
    rows: int,
    tokens: int,
    replies: int,
    vocabulary: int,
    *,
    reference: bool = False,
    spread: bool = False,
) -> Batch:
    """Make a batch of rows that share no prefix, each of which fills a micro-batch.

    Action tokens are the last ones, or with ``spread`` all over the row, as those of many turns are.
    """
    rng = np.random.default_rng(0)
    replies = max(1, min(replies, tokens))
    positions = np.arange(tokens + 1 - replies, tokens + 1)
    if spread:
        positions = np.arange(1, replies + 1) * tokens // replies
    episodes = [
        TokenEpisode(
            name=str(number),
            sequences=(TokenSequence(rng.integers(0, vocabulary, tokens + 1), positions),),
            behavior=np.full(replies, -1.0),
            tokens_per_turn=np.array([replies]),
            final_ids=None,
        )
        for number in range(rows)
    ]
    batch = make_batch(episodes, advantages=[rng.normal(size=replies) for _ in episodes])
    behavior = batch.arrays["behavior"]
    batch = batch.with_arrays(old=behavior - 0.01)
    return batch.with_arrays(reference=behavior) if reference else batch


class FakeSource:
    """A transformers config as a model whose weights have no numbers."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def build(self) -> Any:
        """Return the model on the meta device, in float32."""
        from transformers import AutoModelForCausalLM

        made: Any = AutoModelForCausalLM
        with torch.device("meta"):
            return made.from_config(copy.deepcopy(self._config), dtype=torch.float32).train(False)

    def check(self, asked: Literal["auto", "padded", "packed"], device: torch.device) -> Checked:
        """Return what a learner chooses for the families that plans know."""
        return LayoutChoice(layout="padded" if asked == "padded" else "packed"), True

    @torch.no_grad()
    def load(self, owners: Owners, model: nn.Module, device: torch.device) -> None:
        """Give every parameter and buffer a fake tensor."""
        done: dict[int, nn.Parameter] = {}
        for module, attribute in owners.values():
            old: Any = getattr(module, attribute)
            if not old.is_meta:
                continue
            if id(old) not in done:
                done[id(old)] = nn.Parameter(_filled(old, device), requires_grad=old.requires_grad)
            module._parameters[attribute] = done[id(old)]
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)

    def load_whole(self, device: torch.device) -> Any:
        """Return the whole model with fake tensors."""
        model = self.build()
        self.load(parameter_owners(model), model, device)
        return model


def _filled(old: Any, device: torch.device) -> Tensor:
    if not isinstance(old, DTensor):
        return torch.empty(old.shape, dtype=old.dtype, device=device)
    local = torch.empty(old._local_tensor.shape, dtype=old.dtype, device=device)
    filled: Tensor = DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    return filled


class FakeGroup(ProcessGroup):
    """A process group whose other ranks agree with this one."""

    def __init__(self, world: int) -> None:
        self.rank, self.world = 0, world

    def sum(self, values: FloatArray) -> FloatArray:
        """Return this rank's values."""
        return values

    def combine(self, values: FloatArray, starts: IntArray, lengths: IntArray) -> FloatArray:
        """Return this rank's values, with zeros for the rows of the others."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * self.world
