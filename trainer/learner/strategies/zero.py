"""``zero1``, ``zero2``, ``zero3``: DeepSpeed ZeRO shards optimizer states, gradients too, weights too."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollgym.core.errors import MissingExtra, RunError
from rollgym.engines.weight_sync.wire import LocalShard
from rollgym.trainer.data.sequences import TokenSequence
from rollgym.trainer.learner.modules import Outputs, PolicyModule, TrainedModules
from rollgym.trainer.learner.offload import move, optimizer_state, size
from rollgym.trainer.learner.optim import DIVERGED, make_adamw
from rollgym.trainer.learner.sharded_checkpoint import MOMENTS, Checkpoint, Fragment
from rollgym.trainer.learner.strategies.base import ParallelStrategy
from rollgym.trainer.learner.strategies.fsdp2 import reset_shards, shard

REDUCE_BUCKET = 500_000_000


def import_deepspeed() -> Any:
    """Import DeepSpeed, or raise `MissingExtra` with the command that installs it."""
    try:
        deepspeed: Any = import_module("deepspeed")
    except ImportError as error:
        raise MissingExtra("DeepSpeed ZeRO", "distributed") from error
    return deepspeed


def start_deepspeed(device: torch.device) -> Any:
    """Start DeepSpeed in this process's group, without a launcher."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(LOCAL_RANK=str(device.index or 0), LOCAL_SIZE=str(dist.get_world_size()))
    deepspeed = import_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Compiling it takes more than a minute, and only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False, verbose=False
    )
    return deepspeed


class ZeroStrategy(ParallelStrategy, ABC):
    """A rank with DeepSpeed engines: one for the policy, and one for a separate critic.

    The stages differ in which fragments a rank holds, and how.
    """

    stage: ClassVar[int]
    offload_states: ClassVar[dict[str, tuple[str, ...]]]
    """States that DeepSpeed moves to the host, by part."""
    _frozen: PolicyModule | None = None

    def wrap(self, modules: TrainedModules) -> None:
        """Make a DeepSpeed engine of the policy, and one of a separate critic."""
        deepspeed = start_deepspeed(self.device)
        self.modules = modules
        groups = modules.param_groups()
        self._width = int(modules.body.get_input_embeddings().weight.shape[-1])
        separate = modules.separate_critic is not None
        self._engines = [self._engine(deepspeed, modules.policy, groups[:1] if separate else groups)]
        if modules.separate_critic is not None:
            self._engines.append(self._engine(deepspeed, modules.separate_critic, groups[1:]))

    def wrap_frozen(self, module: PolicyModule) -> PolicyModule:
        """Return the module as it is."""
        self._frozen = module
        return module

    def forward(self, rows: Sequence[TokenSequence], outputs: Outputs) -> tuple[Tensor, ...]:
        """Run the policy module."""
        result: tuple[Tensor, ...] = self._engines[0](rows, outputs)
        return result

    def forward_critic(self, rows: Sequence[TokenSequence]) -> Tensor:
        """Run the separate critic."""
        values: Tensor = self._engines[1](rows)[0]
        return values

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Add the gradients; DeepSpeed averages over ranks, so that losses are scaled to a sum."""
        if len(self._engines) == 1:
            losses = [sum(losses[1:], losses[0])]
        # A separate critic has no loss where the batch has no returns: its engine then takes no step.
        self._stepping = self._engines[: len(losses)]
        for engine, loss in zip(self._stepping, losses, strict=True):
            engine.backward(loss * self.world, scale_wrt_gas=False)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for engine in self._engines:
            engine.optimizer.zero_grad(set_to_none=True)

    def step(self, lr_scale: float) -> float:
        """Clip the gradients and take an optimizer step; returns the policy's norm before clipping."""
        for group in self.param_groups:
            group["lr"] = group["base"] * lr_scale
        norms = []
        for engine in self._stepping:
            engine.step()
            if engine.optimizer.overflow:
                raise RunError(DIVERGED)
            norms.append(float(engine.get_global_grad_norm()))
        return norms[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all engines."""
        return [group for engine in self._engines for group in engine.optimizer.param_groups]

    def parameter_steps(self) -> dict[str, int]:
        """Return the optimizer steps that each parameter has seen."""
        counts = {}
        for name, _, optimizer in self._named():
            steps = [int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state]
            counts[name] = max(steps, default=0)
        return counts

    def tensors(self, part: str) -> list[Tensor]:
        """Return this rank's tensors of ``optimizer`` or ``weights``."""
        optimizers = [engine.optimizer for engine in self._engines]
        if part == "weights":
            return [tensor for optimizer in optimizers for tensor in self._weights(optimizer)]
        return [t for zero in optimizers for t in (*self._master(zero), *optimizer_state(zero.optimizer))]

    def offload(self, part: str) -> int:
        """Move a part to host memory; returns bytes."""
        moved = size(self.tensors(part))
        states: Any = import_module("deepspeed.runtime.zero.offload_config")
        include = [states.OffloadStateTypeEnum(name) for name in self.offload_states[part]]
        for engine in self._engines:
            engine.offload_states(include=include, pin_memory=self.device.type == "cuda")
        self._move_rest(part, torch.device("cpu"))
        return moved

    def reload(self, part: str) -> int:
        """Move a part back to the device; returns bytes."""
        for engine in self._engines:
            if engine.optimizer.offloaded_states:
                engine.reload_states()
        self._move_rest(part, self.device)
        return size(self.tensors(part))

    def fragments(self) -> list[Fragment]:
        """Return this rank's ranges of the flat master weights and moments, by parameter."""
        fragments = []
        for name, parameter, optimizer in self._named():
            if (span := self._span(name, parameter, optimizer)) is None:  # another rank has all of it
                continue
            group, at, start, stop = span
            flat = self._master(optimizer)[group]
            held = {"weight": flat.detach(), **optimizer.optimizer.state.get(flat, {})}
            keys = [key for key in ("weight", *MOMENTS) if key in held]
            tensors = {key: held[key][at : at + stop - start] for key in keys}
            fragments.append(Fragment(name, start, stop, tensors))
        return fragments

    @abstractmethod
    def _span(self, name: str, parameter: Any, optimizer: Any) -> tuple[int, int, int, int] | None:
        """Return the group of a parameter's master weights, the position in it, and this rank's range."""

    @abstractmethod
    def _master(self, optimizer: Any) -> list[Tensor]:
        """Return this rank's flat float32 master weights."""

    @abstractmethod
    def _weights(self, optimizer: Any) -> list[Tensor]:
        """Return the flat weights that are computed with."""

    def _move_rest(self, part: str, to: torch.device) -> None:
        """Move what DeepSpeed does not move."""
        if part == "weights" and self.modules.reference_model is not None:
            move(self.modules.reference_model.parameters(), to)
            reset_shards(self._frozen)

    def _engine(self, deepspeed: Any, module: nn.Module, groups: list[dict[str, Any]]) -> Any:
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=make_adamw(groups, self.config),
            config=self._deepspeed_config(module),
            dist_init_required=False,
        )
        return engine

    def _deepspeed_config(self, module: nn.Module) -> dict[str, Any]:
        count = sum(parameter.numel() for parameter in module.parameters())
        bucket = min(count + count % 2, REDUCE_BUCKET)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": self.device.type == "cuda",
        }
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 10 * self._width  # norms and biases stay whole
        if self.cpu_offload:
            on_cpu = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
            zero["offload_optimizer"] = on_cpu
            if self.stage == 3:
                zero["offload_param"] = on_cpu
        return {
            "train_micro_batch_size_per_gpu": 1,
            # The number of micro-batches differs by batch: `step` marks the last.
            "managed_gradient_accumulation": False,
            "gradient_clipping": self.config.clip_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def _named(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        """Yield every trained parameter with the ZeRO optimizer that has it."""
        separate = self.modules.separate_critic is not None
        for name, parameter in self.modules.trained().items():
            yield name, parameter, self._engines[separate and name.startswith("critic.")].optimizer

    def init_moments(self, steps: Mapping[str, int]) -> None:
        """Make moments of all that this rank's optimizers step: one flat tensor for many parameters."""
        for engine in self._engines:
            # Parameters of a flat tensor are stepped together.
            count = max(steps[name] for name, _, its in self._named() if its is engine.optimizer)
            state = engine.optimizer.optimizer.state
            for flat in self._master(engine.optimizer):
                current = state.pop(flat, None) or {}
                if count:
                    moments = {key: current.get(key, torch.zeros_like(flat.detach())) for key in MOMENTS}
                    state[flat] = {"step": torch.tensor(float(count)), **moments}


class Zero12Strategy(ZeroStrategy):
    """Whole weights on every rank; master weights and moments of one range of them all."""

    offload_states: ClassVar[dict[str, tuple[str, ...]]] = {
        "optimizer": ("hp_params", "optim_states", "lp_grads"),
        "weights": ("lp_params",),
    }

    def wrap(self, modules: TrainedModules) -> None:
        """Make the engines, and note which ranges are this rank's: offloaded weights lose that note."""
        super().wrap(modules)
        self._spans: dict[str, tuple[int, int, int, int]] = {}
        for name, parameter, _ in self._named():
            if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                address, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
                stop = start + address.numel
                self._spans[name] = (mapping.param_group_index, address.start, start, stop)

    def restored(self) -> list[Fragment]:
        """Return this rank's fragments, and all weights that are computed with."""
        weights = [
            Fragment(name, 0, parameter.numel(), {"weight": parameter.detach().view(-1)})
            for name, parameter in self.modules.trained().items()
        ]
        return [*self.fragments(), *weights]

    def _span(self, name: str, parameter: Any, optimizer: Any) -> tuple[int, int, int, int] | None:
        return self._spans.get(name)

    def _master(self, optimizer: Any) -> list[Tensor]:
        master: list[Tensor] = optimizer.single_partition_of_fp32_groups
        return master

    def _weights(self, optimizer: Any) -> list[Tensor]:
        weights: list[Tensor] = optimizer.bit16_groups_flat
        return weights


class Zero1Strategy(Zero12Strategy):
    """ZeRO-1: optimizer states are sharded."""

    stage = 1


class Zero2Strategy(Zero12Strategy):
    """ZeRO-2: gradients are sharded too."""

    stage = 2


class Zero3Strategy(ZeroStrategy):
    """ZeRO-3: a range of every parameter, and of its moments."""

    stage = 3
    offload_states: ClassVar[dict[str, tuple[str, ...]]] = {
        "optimizer": (),  # DeepSpeed moves those of its bundled Adam only
        "weights": ("lp_params", "lp_grads", "contiguous_grad_buffer"),
    }

    def wrap_frozen(self, module: PolicyModule) -> PolicyModule:
        """Shard the module with FSDP2."""
        return super().wrap_frozen(shard(module, self.cpu_offload))

    def shape(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape of a whole parameter."""
        shape: Sequence[int] = parameter.ds_shape  # type: ignore[attr-defined]
        return shape

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return whole parameters on rank 0."""
        deepspeed = import_deepspeed()
        with deepspeed.zero.GatheredParameters(list(parameters)):
            return [p.detach().clone() if self.rank == 0 else p.new_empty(0) for p in parameters]

    def local_shard(self, parameter: nn.Parameter) -> LocalShard | None:
        """Return this rank's range of a parameter."""
        sharded: Any = parameter
        start, stop = self._range(sharded)
        values = sharded.ds_tensor.detach()[: stop - start]
        return LocalShard(values, (sharded.ds_numel,), (start,)) if stop > start else None

    def _range(self, parameter: Any) -> tuple[int, int]:
        start = min(self.rank * parameter.ds_tensor.ds_numel, parameter.ds_numel)
        return start, min(start + parameter.ds_tensor.ds_numel, parameter.ds_numel)

    def _span(self, name: str, parameter: Any, optimizer: Any) -> tuple[int, int, int, int]:
        start, stop = self._range(parameter)
        group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return group, at, start, stop

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore this rank's fragments, then the weights that are computed with."""
        super().restore(checkpoint)
        for engine in self._engines:
            _publish(engine.optimizer)

    def _master(self, optimizer: Any) -> list[Tensor]:
        master: list[Tensor] = optimizer.fp32_partitioned_groups_flat
        return master

    def _weights(self, optimizer: Any) -> list[Tensor]:
        return [optimizer.lp_param_buffer]

    def _move_rest(self, part: str, to: torch.device) -> None:
        super()._move_rest(part, to)
        if part == "optimizer":
            move(self.tensors(part), to)


@torch.no_grad()
def _publish(optimizer: Any) -> None:
    """Copy the master weights to the shards that are computed with."""
    optimizer._partition_all_parameters()
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if persistent := optimizer.persistent_parameters:
        persistent[0].all_gather(persistent)
