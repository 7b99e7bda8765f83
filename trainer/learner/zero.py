"""DeepSpeed ZeRO: the optimiser (1), the gradients too (2), the weights too (3) in parts over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollgym.errors import RunError
from rollgym.trainer.learner.adam import DIVERGED, make_groups
from rollgym.trainer.learner.fsdp import point, shard
from rollgym.trainer.learner.host import moments, move, size
from rollgym.trainer.learner.nets import PolicyNet, Wish
from rollgym.trainer.learner.shards import MOMENTS, Checkpoint, Fragment, fill
from rollgym.trainer.learner.spmd import RankLearner
from rollgym.trainer.learner.zero_start import import_deepspeed, start_deepspeed
from rollgym.trainer.rows import Row

REDUCE_BUCKET = 500_000_000


class ZeroLearner(RankLearner):
    """A rank with DeepSpeed engines: one for the policy, and one for a critic that is a model of its own."""

    stage: ClassVar[int]
    states: ClassVar[dict[str, tuple[str, ...]]]
    """What DeepSpeed moves to the host by itself, by part."""

    def _assemble(self) -> None:
        deepspeed = start_deepspeed(self._device)
        groups = make_groups(self)
        self._width = int(self._body_states().get_input_embeddings().weight.shape[-1])
        own = self._judge is not None
        self._engines = [self._engine(deepspeed, self._policy, groups[:1] if own else groups)]
        if self._judge is not None:
            self._engines.append(self._engine(deepspeed, self._judge, groups[1:]))

    def _engine(self, deepspeed: Any, net: nn.Module, groups: list[dict[str, Any]]) -> Any:
        settings = self.settings
        optimiser = torch.optim.AdamW(
            groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=optimiser, config=self._config(net), dist_init_required=False
        )
        return engine

    def _config(self, net: nn.Module) -> dict[str, Any]:
        count = sum(parameter.numel() for parameter in net.parameters())
        bucket = min(count + count % 2, REDUCE_BUCKET)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": self._device.type == "cuda",
        }
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 10 * self._width  # norms and biases stay whole
        if self._offload:
            kept = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
            zero["offload_optimizer"] = kept
            if self.stage == 3:
                zero["offload_param"] = kept
        return {
            "train_micro_batch_size_per_gpu": 1,
            # How many micro-batches there are is known batch by batch: `step` says that it was the last.
            "managed_gradient_accumulation": False,
            "gradient_clipping": self.settings.clip_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def _groups(self) -> list[dict[str, Any]]:
        return [group for engine in self._engines for group in engine.optimizer.param_groups]

    def _policy_forward(self, rows: Sequence[Row], wish: Wish) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._engines[0](rows, wish)
        return found

    def _judge_forward(self, rows: Sequence[Row]) -> Tensor:
        found: Tensor = self._engines[1](rows)[0]
        return found

    def _begin(self) -> None:
        for engine in self._engines:
            engine.optimizer.zero_grad(set_to_none=True)

    def _backward(self, losses: list[Tensor]) -> None:
        # DeepSpeed averages over ranks, and what is wanted is the sum.
        if len(self._engines) == 1:
            losses = [sum(losses[1:], losses[0])]
        # A separate critic has no loss where the batch has no returns: its engine then takes no step.
        self._stepping = self._engines[: len(losses)]
        for engine, loss in zip(self._stepping, losses, strict=True):
            engine.backward(loss * self.world, scale_wrt_gas=False)

    def _step(self) -> float:
        for group in self._groups():
            group["lr"] = group["base"] * self._share_of_rate()
        norms = []
        for engine in self._stepping:
            engine.step()
            if engine.optimizer.overflow:
                raise RunError(DIVERGED)
            norms.append(float(engine.get_global_grad_norm()))
        return norms[0]

    def _leave(self, part: str) -> int:
        moved = size(self._part(part))
        kinds: Any = import_module("deepspeed.runtime.zero.offload_config")
        include = [kinds.OffloadStateTypeEnum(name) for name in self.states[part]]
        for engine in self._engines:
            engine.offload_states(include=include, pin_memory=self._device.type == "cuda")
        self._move_others(part, torch.device("cpu"))
        return moved

    def _return(self, part: str) -> int:
        for engine in self._engines:
            if engine.optimizer.offloaded_states:
                engine.reload_states()
        self._move_others(part, self._device)
        return size(self._part(part))

    def _move_others(self, part: str, to: torch.device) -> None:
        """Move what DeepSpeed does not move."""
        if part == "weights" and self._original is not None:
            move(self._original.parameters(), to)
            point(self._first)

    def _named(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        """Every parameter that is trained, with the ZeRO optimiser that has it."""
        own = self._judge is not None
        for name, parameter in self._trained().items():
            yield name, parameter, self._engines[own and name.startswith("critic.")].optimizer

    def _parameter_steps(self) -> dict[str, int]:
        found = {}
        for name, _, optimiser in self._named():
            steps = [int(state["step"]) for state in optimiser.optimizer.state.values() if "step" in state]
            found[name] = max(steps, default=0)
        return found

    def _begin_moments(self, checkpoint: Checkpoint) -> None:
        """Moments of all that this rank's optimisers step: one flat tensor for many parameters."""
        for engine in self._engines:
            # Parameters of a flat tensor are stepped together.
            counts = checkpoint.parameter_steps
            steps = max(counts[name] for name, _, its in self._named() if its is engine.optimizer)
            state = engine.optimizer.optimizer.state
            for flat in self._flats(engine.optimizer):
                known = state.get(flat) or {}
                if not steps:
                    state.pop(flat, None)
                    continue
                moments = {key: known.get(key, torch.zeros_like(flat.detach())) for key in MOMENTS}
                state[flat] = {"step": torch.tensor(float(steps)), **moments}

    def _flats(self, optimiser: Any) -> list[Tensor]:
        raise NotImplementedError


class _Zero12Learner(ZeroLearner):
    """Whole weights on every rank; master weights and moments of a stretch of them all."""

    states: ClassVar[dict[str, tuple[str, ...]]] = {
        "optimiser": ("hp_params", "optim_states", "lp_grads"),
        "weights": ("lp_params",),
    }

    def _assemble(self) -> None:
        super()._assemble()
        # Which stretches are this rank's; DeepSpeed forgets it while weights are away.
        mapped = ((name, getattr(one, "_hp_mapping", None)) for name, one, _ in self._named())
        self._mapped = {name: _stretch(mapping) for name, mapping in mapped if mapping is not None}

    def _part(self, part: str) -> list[Tensor]:
        every = [engine.optimizer for engine in self._engines]
        if part == "weights":
            return [flat for one in every for flat in one.bit16_groups_flat]
        return [t for one in every for t in (*self._flats(one), *moments(one.optimizer))]

    def _flats(self, optimiser: Any) -> list[Tensor]:
        found: list[Tensor] = optimiser.single_partition_of_fp32_groups
        return found

    def _owned(self) -> list[Fragment]:
        found = []
        for name, _, optimiser in self._named():
            if name not in self._mapped:  # another rank has all of it
                continue
            group, at, count, start = self._mapped[name]
            flat = self._flats(optimiser)[group]
            held = {"weight": flat.detach(), **optimiser.optimizer.state.get(flat, {})}
            tensors = {key: held[key][at : at + count] for key in ("weight", *MOMENTS) if key in held}
            found.append(Fragment(name, start, start + count, tensors))
        return found

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._begin_moments(checkpoint)
        fill(self._owned(), checkpoint)
        for name, parameter in self._trained().items():
            whole = {"weight": parameter.detach().view(-1)}
            fill([Fragment(name, 0, parameter.numel(), whole)], checkpoint)


class Zero1Learner(_Zero12Learner):
    """ZeRO-1."""

    strategy = "zero1"
    stage = 1


class Zero2Learner(_Zero12Learner):
    """ZeRO-2."""

    strategy = "zero2"
    stage = 2


class Zero3Learner(ZeroLearner):
    """ZeRO-3: a stretch of every parameter, and of its moments."""

    strategy = "zero3"
    stage = 3
    states: ClassVar[dict[str, tuple[str, ...]]] = {
        "optimiser": (),  # it would move those of its own Adam only
        "weights": ("lp_params", "lp_grads", "contiguous_grad_buffer"),
    }

    def _part(self, part: str) -> list[Tensor]:
        every = [engine.optimizer for engine in self._engines]
        if part == "weights":
            return [one.lp_param_buffer for one in every]
        return [t for one in every for t in (*self._flats(one), *moments(one.optimizer))]

    def _move_others(self, part: str, to: torch.device) -> None:
        super()._move_others(part, to)
        if part == "optimiser":
            move(self._part(part), to)

    def _spread(self, net: PolicyNet) -> PolicyNet:
        found: PolicyNet = shard(net, self._offload)
        return found

    def _flats(self, optimiser: Any) -> list[Tensor]:
        found: list[Tensor] = optimiser.fp32_partitioned_groups_flat
        return found

    def _shape(self, parameter: nn.Parameter) -> Sequence[int]:
        found: Sequence[int] = parameter.ds_shape  # type: ignore[attr-defined]
        return found

    def _full(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        deepspeed = import_deepspeed()
        with deepspeed.zero.GatheredParameters(list(parameters)):
            return [p.detach().clone() if self.rank == 0 else p.new_empty(0) for p in parameters]

    def _owned(self) -> list[Fragment]:
        found = []
        for name, parameter, optimiser in self._named():
            ds: Any = parameter
            start = min(self.rank * ds.ds_tensor.ds_numel, ds.ds_numel)
            stop = min(start + ds.ds_tensor.ds_numel, ds.ds_numel)
            group, at, _ = optimiser.grad_position[optimiser.get_param_id(parameter)]
            flat = self._flats(optimiser)[group]
            held = {"weight": flat.detach(), **optimiser.optimizer.state.get(flat, {})}
            keys = [key for key in ("weight", *MOMENTS) if key in held]
            tensors = {key: held[key][at : at + stop - start] for key in keys}
            found.append(Fragment(name, start, stop, tensors))
        return found

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._begin_moments(checkpoint)
        fill(self._owned(), checkpoint)

    def _settle(self) -> None:
        for engine in self._engines:
            _publish(engine.optimizer)


def _stretch(mapping: Any) -> tuple[int, int, int, int]:
    """Of a parameter: its group, where it is in the group's stretch, how long, and where it begins itself."""
    address = mapping.hp_fragment_address
    return mapping.param_group_index, address.start, address.numel, mapping.lp_fragment_address.start


@torch.no_grad()
def _publish(optimiser: Any) -> None:
    """Have the parts that are computed with say what the master weights say."""
    optimiser._partition_all_parameters()
    for number in range(len(optimiser.fp32_partitioned_groups_flat)):
        optimiser._reassign_or_swap_out_partitioned_parameters(number)
    if kept := optimiser.persistent_parameters:
        kept[0].all_gather(kept)
