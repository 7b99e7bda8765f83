"""Policies and critics as learners need them; with one forward each, for DDP, FSDP2 and DeepSpeed to wrap."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollgym.engines.embedded.model import read_module
from rollgym.trainer.learner.critic import Critic
from rollgym.trainer.rows import Row
from rollgym.trainer.scoring import Layout, parts, score

Wish = Literal["scores", "values", "both"]


def own_copy(model: nn.Module | Path, device: torch.device) -> Any:
    """A copy on the learner's device; a layout is chosen for it next (`rollgym.trainer.layout`)."""
    plain: Any = read_module(model, torch.float32) if isinstance(model, Path) else copy.deepcopy(model)
    # Weights are float32 whatever is computed in: a step is too small for bfloat16 to notice.
    return plain.to(device=device, dtype=torch.float32).train(False)


def mixed_precision(device: str, bfloat16: bool) -> torch.autocast:
    """Compute in bfloat16, or as the weights are.

    Without autocast's cache, which would hold copies of all layers at once; each is needed once in a pass.
    """
    return torch.autocast(device, torch.bfloat16, enabled=bfloat16, cache_enabled=False)


class PolicyNet(nn.Module):
    """A policy, with the critic whose head is on its states."""

    def __init__(
        self, model: Any, critic: Critic | None, *, layout: Layout, temperature: float, bfloat16: bool
    ) -> None:
        super().__init__()
        self.model, self.critic = model, critic
        self._layout: Layout = layout
        self._temperature, self._bfloat16 = temperature, bfloat16
        self.training = False

    def forward(self, rows: Sequence[Row], wish: Wish) -> tuple[Tensor, ...]:
        """Log-probs and entropy of the action tokens, the values before them, or all three."""
        device = parts(self.model)[1].weight.device.type
        with mixed_precision(device, self._bfloat16):
            if wish == "values":
                assert self.critic is not None
                return (self.critic.before(rows, lambda: parts(self.model)[0], self._layout).clone(),)
            scores = score(self.model, rows, layout=self._layout, temperature=self._temperature)
            # Copies: hooks that wait for the backward pass are lost with a view that somebody writes into.
            if wish == "scores":
                return scores.logprobs.clone(), scores.entropy.clone()
            assert self.critic is not None
            values = self.critic.of_states(scores.hidden, rows, self._layout)
            return scores.logprobs.clone(), scores.entropy.clone(), values.clone()


class CriticNet(nn.Module):
    """A critic with a transformer of its own."""

    def __init__(self, critic: Critic, *, layout: Layout, bfloat16: bool) -> None:
        super().__init__()
        self.critic = critic
        self._layout: Layout = layout
        self._bfloat16 = bfloat16
        self.training = False

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        """The values before the action tokens."""
        return _values(self.critic, rows, self._layout, self._bfloat16)


class JudgeNet(nn.Module):
    """A critic in the place of a policy, where it is all that is trained."""

    def __init__(self, judge: Critic, *, layout: Layout, bfloat16: bool) -> None:
        super().__init__()
        self.judge, self.critic = judge, None
        self._layout: Layout = layout
        self._bfloat16 = bfloat16
        self.training = False

    def forward(self, rows: Sequence[Row], wish: Wish) -> tuple[Tensor, ...]:
        """The values before the action tokens: nothing else can be wished for."""
        return _values(self.judge, rows, self._layout, self._bfloat16)


def _values(critic: Critic, rows: Sequence[Row], layout: Layout, bfloat16: bool) -> tuple[Tensor, ...]:
    with mixed_precision(critic.head.weight.device.type, bfloat16):
        return (critic.before(rows, lambda: None, layout).clone(),)
