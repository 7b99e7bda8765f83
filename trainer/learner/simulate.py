"""Simulates one rank of the learner without a device, weights or other ranks: its peak memory, and mistakes.

The learner itself runs, on fake tensors: they have shapes, dtypes and a device, but no numbers. Collectives
go to a process group that contains only this rank and claims to be of any size. The device is one that no
build of torch has, so that a tensor that is left on the CPU fails here as it would on a GPU, and so does an
operation between two dtypes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rollgym.core.errors import RunError, UsageError, one_line
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import FloatArray, TokenEpisode, TokenSequence
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.layout import LayoutChoice
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.memory_count import StorageCount
from rollgym.trainer.learner.process_group import ProcessGroup
from rollgym.trainer.learner.sharded_loading import Checked, Owners
from rollgym.trainer.losses.settings import LossConfig

DEVICE = "simulated"
STRATEGIES = ("single", "ddp", "fsdp2")
"""Strategies that run on fake tensors; DeepSpeed's do not."""
MICRO_BATCHES = 2
"""Micro-batches of the simulated update: in the second, the gradients of the first are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Peak bytes of one rank."""

    peaks: Mapping[str, int]
    """By phase: ``start``, ``score actor`` and ``update actor``."""
    held: int
    """Bytes between two updates: weights and optimizer state."""

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
) -> Simulation:
    """Run the learner of one rank on fake tensors: its start, a forward pass and an update.

    Args:
        model_config: A transformers config.
        config: The learner's; the device is replaced.
        loss: The policy loss; with a KL coefficient, the rank holds a reference.
        strategy: One of `STRATEGIES`.
        world: Number of ranks.
        tokens: Tokens of a micro-batch.
        replies: Action tokens among them.

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
    device = _register_device()
    dtype = "bfloat16" if config.dtype in (None, "auto") else config.dtype
    count = StorageCount(fake_only=True)
    with ExitStack() as stack:
        stack.enter_context(_fake_group(world))
        stack.enter_context(_fake_tensors())
        stack.enter_context(count)
        count.phase("start")
        try:
            learner = Learner(
                FakeSource(model_config),
                _replaced(config, device, dtype),
                loss,
                LearnerOptions(),
                strategy=strategy,
                world=world,
                group=FakeGroup(world),
            )
            learner.strategy.init_moments(dict.fromkeys(learner.modules.trained(), 1))
            held = count.now
            limit = int(getattr(model_config, "vocab_size", 1000))
            batch = fake_batch(world * MICRO_BATCHES, tokens, replies, limit)
            count.phase("score actor")
            batch = batch.with_arrays(old=learner.logprobs(batch))
            if loss.kl_coef and config.lora is None:
                count.phase("score reference")
                batch = batch.with_arrays(reference=learner.reference(batch))
            count.phase("update actor")
            learner.update(batch)
        except UsageError:
            raise
        except Exception as error:
            raise RunError(f"The simulated learner failed: {one_line(error)}") from error
    return Simulation(peaks=dict(count.peaks), held=held)


def fake_batch(rows: int, tokens: int, replies: int, vocabulary: int) -> Batch:
    """Make a batch of rows that share no prefix, each of which fills a micro-batch."""
    rng = np.random.default_rng(0)
    replies = max(1, min(replies, tokens - 1))
    episodes = [
        TokenEpisode(
            name=str(number),
            sequences=(
                TokenSequence(
                    rng.integers(0, vocabulary, tokens + 1), np.arange(tokens + 1 - replies, tokens + 1)
                ),
            ),
            behavior=np.full(replies, -1.0),
            tokens_per_turn=np.array([replies]),
            final_ids=None,
        )
        for number in range(rows)
    ]
    return make_batch(episodes, advantages=[rng.normal(size=replies) for _ in episodes])


def _replaced(config: LearnerConfig, device: torch.device, dtype: Any) -> LearnerConfig:
    from dataclasses import replace

    return replace(config, device=str(device), dtype=dtype, threads=None)


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
        from rollgym.trainer.learner.sharded_loading import parameter_owners

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

    def gather(self, value: Any) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * self.world


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        f"cpu:fake,{DEVICE}:fake",
        rank=0,
        world_size=world,
        store=FakeStore(),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Compute with fake tensors, whose numbers are 1 wherever they are read."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    from rollgym.trainer.learner.strategies import fsdp2

    def real_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init(*args: Any, **kwargs: Any) -> Any:  # the ranks of a mesh are real numbers
            with _disable_current_modes():
                return plain(*args, **kwargs)

        return init

    def ones(tensor: Any, *_: Any, **__: Any) -> Any:
        return np.ones(tensor.shape)

    kinds: Any = FakeTensor
    numbers = {"item": lambda tensor: 1.0, "__bool__": lambda tensor: True, "__float__": lambda tensor: 1.0}
    numbers |= {"__int__": lambda tensor: 1, "numpy": ones, "tolist": lambda tensor: ones(tensor).tolist()}
    kept = {name: vars(kinds).get(name) for name in numbers}
    init = DeviceMesh.__init__
    attention = F.scaled_dot_product_attention
    mesh: Any = DeviceMesh
    functions: Any = F
    sharding: Any = fsdp2
    make_mesh = sharding.init_device_mesh
    try:
        mesh.__init__ = real_mesh(init)
        sharding.init_device_mesh = real_mesh(make_mesh)
        functions.scaled_dot_product_attention = _attention
        for name, value in numbers.items():
            setattr(kinds, name, value)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        mesh.__init__ = init
        sharding.init_device_mesh = make_mesh
        functions.scaled_dot_product_attention = attention
        for name, value in kept.items():
            delattr(kinds, name) if value is None else setattr(kinds, name, value)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attention with the memory of a GPU's fused kernels."""
    apply: Any = _FusedAttention.apply
    result: Tensor = apply(query, key, value)
    return result


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(f"attention of {query.dtype} with {key.dtype} and {value.dtype}")
        output = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _register_device() -> torch.device:
    """Register the simulated device with torch, once."""
    if not hasattr(torch, DEVICE):
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(DEVICE, _device_module())
    return torch.device(DEVICE, 0)


def _device_module() -> ModuleType:
    """Return what torch asks of a device's module: that of the CPU, with one device."""
    module: Any = ModuleType(DEVICE)
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]
