"""A critic: how much reward is still to come, said before each action token."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.rows import Row
from rollgym.trainer.scoring import Layout, distinct, parts, states


class Critic(nn.Module):
    """A linear head on the states of the policy, or of a transformer of its own. It begins by saying 0."""

    def __init__(self, policy: Any, *, own: bool) -> None:
        super().__init__()
        body, head = parts(policy)
        width = head.weight.shape[1]
        self.body: Any = copy.deepcopy(body) if own else None
        self.head = nn.Linear(width, 1, device=head.weight.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def make(cls, policy: Any, settings: LearnerSettings) -> Critic | None:
        """The critic that was asked for, if any."""
        if settings.critic == "none":
            return None
        return cls(policy, own=settings.critic == "own")

    def of_states(self, hidden: Tensor, rows: Sequence[Row], layout: Layout) -> Tensor:
        """Values from the policy's states, or from this critic's own of the same rows."""
        if self.body is not None:
            return self.before(rows, lambda: None, layout)
        return self._value(hidden)

    def before(self, rows: Sequence[Row], policy_body: Callable[[], Any], layout: Layout) -> Tensor:
        """Values before each action token of these rows."""
        body = policy_body() if self.body is None else self.body
        once, again = distinct(rows)
        hidden = states(body, once, layout, self.head.weight.device)
        found = self._value(hidden)
        return found[torch.from_numpy(again).to(found.device)]

    def _value(self, hidden: Tensor) -> Tensor:
        # In float32 also where the states are computed in bfloat16: that rounds a value near 1 to 1/128.
        with torch.autocast(hidden.device.type, enabled=False):
            found: Tensor = self.head(hidden.float())
        return found[:, 0]
