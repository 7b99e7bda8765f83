"""`ParallelStrategy`: the interface of all strategies, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rollgym.core.errors import RunError
from rollgym.engines.embedded.precision import SMALLEST
from rollgym.engines.weight_sync.wire import LocalShard
from rollgym.io.run_dir import write_json
from rollgym.trainer.data.sequences import TokenSequence
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.context_parallel import ContextGroup
from rollgym.trainer.learner.modules import Outputs, PolicyModule, TrainedModules
from rollgym.trainer.learner.offload import move, optimizer_state
from rollgym.trainer.learner.optim import DIVERGED, make_adamw
from rollgym.trainer.learner.process_group import ProcessGroup, all_or_none
from rollgym.trainer.learner.sharded_checkpoint import (
    MANIFEST,
    MOMENTS,
    Checkpoint,
    Fragment,
    adam_fragments,
    fill,
    format_of,
    open_checkpoint,
    remove_manifest,
    write_part,
)


class ParallelStrategy:
    """Holds weights, gradients and optimizer states of one rank, and computes with them.

    This class keeps everything whole in one process, with one torch AdamW over all parameters. A strategy
    derives from it and overrides what differs. All ranks call the same methods in the same order.

    Args:
        name: The name that it was registered under.
        config: The learner's.
        device: The learner's device.
        group: The ranks that train together; ``None`` for strategies of a single process.
        cpu_offload: Keep on the CPU whatever the strategy can keep there.
    """

    modules: TrainedModules
    optimizer: torch.optim.Optimizer
    builds_on_meta: ClassVar[bool] = False
    """True if it shards models that have no weights yet, and then calls `TrainedModules.load_weights`."""
    casts_weights: ClassVar[bool] = False
    """True if it casts the weights to bfloat16 itself where the learner computes in it; else by autocast."""

    def __init__(
        self,
        name: str,
        config: LearnerConfig,
        device: torch.device,
        group: ProcessGroup | None,
        *,
        cpu_offload: bool,
    ) -> None:
        self.name, self.config, self.device, self.group = name, config, device, group
        self.cpu_offload = cpu_offload
        self.rank, self.world = (0, 1) if group is None else (group.rank, group.world)
        self.model_ranks = 1
        """Consecutive ranks that compute the same rows together, each with a part of the model or tokens."""

    @property
    def data_world(self) -> int:
        """Number of sets of ranks between which rows are split."""
        return self.world // self.model_ranks

    @property
    def data_rank(self) -> int:
        """The set of ranks that this one belongs to: the index of its share of the rows."""
        return self.rank // self.model_ranks

    @property
    def counted_ranks(self) -> range:
        """The ranks whose results count: one of each set, since the others have the same."""
        return range(0, self.world, self.model_ranks)

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are averaged, where `backward` needs their sum."""
        return self.data_world

    @property
    def context(self) -> ContextGroup | None:
        """The ranks that share the tokens of a micro-batch with this one; ``None``: no others."""
        return None

    def wrap(self, modules: TrainedModules) -> None:
        """Wrap the policy and a separate critic, and make the optimizer. Called once, first."""
        self.modules = modules
        large = modules.parameters >= SMALLEST  # small models keep their bits
        fused = large and self.group is None and self.device.type == "cpu"
        self.optimizer = make_adamw(modules.param_groups(), self.config, fused=fused)

    def wrap_frozen(self, module: PolicyModule) -> PolicyModule:
        """Return a policy that is not trained as this strategy holds it: whole on every rank, or sharded."""
        return module

    def forward(self, rows: Sequence[TokenSequence], outputs: Outputs) -> tuple[Tensor, ...]:
        """Run the policy module."""
        result: tuple[Tensor, ...] = self.modules.policy(rows, outputs)
        return result

    def forward_critic(self, rows: Sequence[TokenSequence]) -> Tensor:
        """Run the separate critic."""
        values: Tensor = cast(nn.Module, self.modules.separate_critic)(rows)[0]
        return values

    def microbatch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward pass; gradients sync in the last."""
        return nullcontext()

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Add the gradient, summed over all ranks, of the policy's loss and of a critic's."""
        # torch averages over ranks.
        cast(Tensor, sum(losses) * self.gradient_ranks).backward()  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients to a norm; returns the norm before, over all ranks."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, lr_scale: float) -> float:
        """Clip the gradients and take an optimizer step; returns the policy's norm before clipping."""
        sets = [group["params"] for group in self.param_groups]
        if self.modules.separate_critic is None:
            # A value head shares the policy's hidden states: one gradient, one norm.
            sets = [sum(sets, [])]
        norms = [self.clip(parameters, self.config.clip_norm or float("inf")) for parameters in sets]
        if not all(map(torch.isfinite, norms)):
            raise RunError(DIVERGED)
        for group in self.param_groups:
            group["lr"] = group["base"] * lr_scale
        self.optimizer.step()
        return float(norms[0])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; ``base`` is the learning rate that ``lr_scale`` applies to."""
        return self.optimizer.param_groups

    def shape(self, parameter: nn.Parameter) -> Sequence[int]:
        """Return the shape of a whole parameter."""
        return parameter.shape

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return whole parameters, which only need to be right on rank 0."""
        return [parameter.detach() for parameter in parameters]

    def local_shard(self, parameter: nn.Parameter) -> LocalShard | None:
        """Return the values of a parameter that this rank sends to engines; ``None`` for none.

        The ranks together send each value once. Where all have all, each sends an equal share.
        """
        whole = parameter.detach()
        if self.group is None:
            return LocalShard(whole, tuple(whole.shape), (0,) * whole.dim())
        count = whole.numel()
        start, stop = count * self.rank // self.world, count * (self.rank + 1) // self.world
        return LocalShard(whole.reshape(-1)[start:stop], (count,), (start,)) if stop > start else None

    def shapes(self) -> dict[str, Sequence[int]]:
        """Return the shapes of all trained parameters by name."""
        return {name: tuple(self.shape(parameter)) for name, parameter in self.modules.trained().items()}

    def fragments(self) -> list[Fragment]:
        """Return what this rank saves; the ranks together hold everything once."""
        return adam_fragments(self.modules.trained(), self.optimizer)

    def parameter_steps(self) -> dict[str, int]:
        """Return the optimizer steps that each parameter has seen."""
        state, trained = self.optimizer.state, self.modules.trained()
        return {name: int(state[p]["step"]) if state.get(p) else 0 for name, p in trained.items()}

    def save(self, path: Path, steps: int) -> None:
        """Write weights, optimizer states and the number of optimizer steps, into a folder all ranks see."""
        group = self.group
        if self.rank == 0:
            remove_manifest(path)
        if group is not None:
            group.barrier()
        with all_or_none(group):
            part = write_part(path, self.rank, self.world, self.fragments())
        parts = [part] if group is None else group.gather(part)
        counts = self.parameter_steps()
        parameters = {n: {"shape": list(shape), "steps": counts[n]} for n, shape in self.shapes().items()}
        with all_or_none(group):
            if self.rank == 0:  # last: it makes the checkpoint valid
                kind = format_of(parts)
                head = {"format": kind, "strategy": self.name, "world": self.world, "steps": steps}
                write_json(path / MANIFEST, {**head, "parameters": parameters, "parts": parts})

    def load(self, path: Path) -> int:
        """Restore a checkpoint of any strategy and number of ranks; returns its number of optimizer steps."""
        with ExitStack() as stack:
            with all_or_none(self.group):
                checkpoint = stack.enter_context(open_checkpoint(path, self.shapes()))
            self.restore(checkpoint)
            return checkpoint.steps

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore this rank's fragments of weights and optimizer states."""
        with all_or_none(self.group):
            self.init_moments(checkpoint.parameter_steps)
            fill(self.restored(), checkpoint)

    def init_moments(self, steps: Mapping[str, int]) -> None:
        """Give the optimizer zero moments, to be filled, for parameters with this many optimizer steps."""
        for name, parameter in self.modules.trained().items():
            self.optimizer.state.pop(parameter, None)
            if steps[name]:
                moments = {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(steps[name])), **moments}

    def restored(self) -> list[Fragment]:
        """Return what this rank restores: what it saves, unless ranks hold the same."""
        return self.fragments()

    def tensors(self, part: str) -> list[Tensor]:
        """Return this rank's tensors of ``optimizer`` or ``weights``."""
        return optimizer_state(self.optimizer) if part == "optimizer" else self.modules.all_parameters()

    def offload(self, part: str) -> int:
        """Move a part to host memory; returns bytes."""
        return move(self.tensors(part), torch.device("cpu"))

    def reload(self, part: str) -> int:
        """Move a part back to the device; returns bytes."""
        return move(self.tensors(part), self.device)
