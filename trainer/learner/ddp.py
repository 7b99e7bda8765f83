"""DDP: everything on every rank, and gradients added up while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollgym.trainer.learner.adam import clipped_step, make_adam
from rollgym.trainer.learner.host import moments
from rollgym.trainer.learner.nets import Wish
from rollgym.trainer.learner.shards import Checkpoint, Fragment, adam_fragments, begin_moments, fill
from rollgym.trainer.learner.spmd import RankLearner
from rollgym.trainer.rows import Row


class TorchRankLearner(RankLearner):
    """What DDP and FSDP2 share: one AdamW over all parameters, as they lie here."""

    def _assemble(self) -> None:
        self._wrap()
        self._optimiser = make_adam(self)

    def _wrap(self) -> None:
        raise NotImplementedError

    def _norm(self, parameters: list[nn.Parameter], bound: float) -> Tensor:
        """Hold a gradient to its bound; returns its norm over all ranks."""
        return torch.nn.utils.clip_grad_norm_(parameters, bound)

    def _groups(self) -> list[dict[str, Any]]:
        return self._optimiser.param_groups

    def _begin(self) -> None:
        self._optimiser.zero_grad(set_to_none=True)

    def _step(self) -> float:
        return clipped_step(
            self._optimiser,
            bound=self.settings.clip_norm,
            share=self._share_of_rate(),
            together=self._judge is None,  # as in the local learner, or there is no critic at all
            clip=self._norm,
        )

    def _part(self, part: str) -> list[Tensor]:
        return moments(self._optimiser) if part == "optimiser" else self._parameters()

    def _parameter_steps(self) -> dict[str, int]:
        state = self._optimiser.state
        return {n: int(state[p]["step"]) if state.get(p) else 0 for n, p in self._trained().items()}


class DdpLearner(TorchRankLearner):
    """A rank with a whole copy of everything."""

    strategy = "ddp"

    def _wrap(self) -> None:
        def ddp(net: nn.Module) -> Any:
            # Buffers are what the model was made with, on every rank.
            cast(Any, net)._ddp_params_and_buffers_to_ignore = [name for name, _ in net.named_buffers()]
            return nn.parallel.DistributedDataParallel(net)

        self._policy_ddp = ddp(self._policy)
        self._judge_ddp = None if self._judge is None else ddp(self._judge)

    def _policy_forward(self, rows: Sequence[Row], wish: Wish) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...]
        if not torch.is_grad_enabled():
            found = self._policy(rows, wish)
            return found
        if self._policy.critic is None or wish == "both":
            found = self._policy_ddp(rows, wish)
            return found
        # DDP waits for the gradient of every parameter: a head that nobody asks has one of 0.
        logprobs, entropy, values = self._policy_ddp(rows, "both")
        return logprobs + 0.0 * values.sum(), entropy

    def _judge_forward(self, rows: Sequence[Row]) -> Tensor:
        net = self._judge_ddp if torch.is_grad_enabled() else self._judge
        found: Tensor = cast(Any, net)(rows)[0]
        return found

    def _micro_batch(self, last: bool) -> ExitStack:
        stack = ExitStack()
        if not last:
            for net in (self._policy_ddp, self._judge_ddp):
                if net is not None:
                    stack.enter_context(net.no_sync())
        return stack

    def _backward(self, losses: list[Tensor]) -> None:
        # DDP averages, and what is wanted is the sum.
        cast(Any, sum(losses) * self.world).backward()

    def _owned(self) -> list[Fragment]:
        def share(tensor: Tensor) -> tuple[int, int]:
            count = tensor.numel()
            return count * self.rank // self.world, count * (self.rank + 1) // self.world

        return adam_fragments(self._trained(), self._optimiser, share)

    def _restore(self, checkpoint: Checkpoint) -> None:
        begin_moments(self._trained(), self._optimiser, checkpoint.parameter_steps)
        fill(adam_fragments(self._trained(), self._optimiser), checkpoint)
