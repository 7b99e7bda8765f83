"""``ddp``: everything on every rank; gradients are summed while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollgym.trainer.data.sequences import TokenSequence
from rollgym.trainer.learner.modules import Outputs, TrainedModules
from rollgym.trainer.learner.sharded_checkpoint import Fragment, adam_fragments
from rollgym.trainer.learner.strategies.base import ParallelStrategy


class DdpStrategy(ParallelStrategy):
    """A rank with a whole copy of everything."""

    def wrap(self, modules: TrainedModules) -> None:
        """Wrap the modules in DistributedDataParallel, and make the optimizer."""

        def ddp(module: nn.Module) -> Any:
            # Buffers never change: they are the same on every rank.
            cast(Any, module)._ddp_params_and_buffers_to_ignore = [name for name, _ in module.named_buffers()]
            return nn.parallel.DistributedDataParallel(module)

        self._policy = ddp(modules.policy)
        self._critic = None if modules.separate_critic is None else ddp(modules.separate_critic)
        super().wrap(modules)

    def forward(self, rows: Sequence[TokenSequence], outputs: Outputs) -> tuple[Tensor, ...]:
        """Run the policy module, through DDP where gradients are computed."""
        if not torch.is_grad_enabled():
            return super().forward(rows, outputs)
        if self.modules.policy.critic is None or outputs == "both":
            result: tuple[Tensor, ...] = self._policy(rows, outputs)
            return result
        # DDP waits for the gradient of every parameter: an unused value head gets a gradient of 0.
        logprobs, entropy, values = self._policy(rows, "both")
        return logprobs + 0.0 * values.sum(), entropy

    def forward_critic(self, rows: Sequence[TokenSequence]) -> Tensor:
        """Run the separate critic, through DDP where gradients are computed."""
        if not torch.is_grad_enabled():
            return super().forward_critic(rows)
        values: Tensor = cast(Any, self._critic)(rows)[0]
        return values

    def microbatch(self, *, last: bool) -> ExitStack:
        """Return a context in which gradients stay on their rank, but for the last micro-batch."""
        stack = ExitStack()
        if not last:
            for module in (self._policy, self._critic):
                if module is not None:
                    stack.enter_context(module.no_sync())
        return stack

    def fragments(self) -> list[Fragment]:
        """Return an equal share of every parameter."""

        def share(tensor: Tensor) -> tuple[int, int]:
            count = tensor.numel()
            return count * self.rank // self.world, count * (self.rank + 1) // self.world

        return adam_fragments(self.modules.trained(), self.optimizer, share)

    def restored(self) -> list[Fragment]:
        """Return all of every parameter."""
        return super().fragments()
