"""A learner over roles in a Ray cluster: the policy, and a reference or critic on separate devices.

The reference is a policy that is never updated, the critic a value-only learner. Both get the same whole
batch as the policy, by reference; policy and critic train at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rollgym.core.errors import RunError
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.protocol import OFFLOADABLE, Metrics
from rollgym.trainer.learner.ray_learner import RayLearner, total_bytes

P = ParamSpec("P")
R = TypeVar("R")
CRITIC = "critic"
"""The critic's folder in a checkpoint."""


def _of_policy(
    method: Callable[Concatenate[RayLearner, P], R],
) -> Callable[Concatenate[MultiRoleLearner, P], R]:
    """Make a method of `MultiRoleLearner` that is the policy's."""

    @functools.wraps(method)
    def call(self: MultiRoleLearner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.policy, *args, **kwargs)

    return call


class MultiRoleLearner:
    """A `LearnerProtocol` that trains a policy, with a reference or critic on separate devices.

    Args:
        policy: Trains the policy, and whatever of reference and critic is not separate.
        reference: Holds the policy of the KL penalty; never updated.
        critic: A value-only learner.
        offloads: Parts that each may move to host memory, by ``policy``, ``reference`` and ``critic``;
            default: all parts of each.
    """

    def __init__(
        self,
        policy: RayLearner,
        reference: RayLearner | None = None,
        critic: RayLearner | None = None,
        offloads: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.policy, self._reference, self._critic = policy, reference, critic
        self.loss = policy.loss
        roles = {"policy": policy, "reference": reference, "critic": critic}
        self._roles = {name: learner for name, learner in roles.items() if learner is not None}
        for learner in self._roles.values():
            learner.batches = policy.batches
        self.offloads = offloads or dict.fromkeys(self._roles, OFFLOADABLE)

    @property
    def has_critic(self) -> bool:
        """Whether `values` is available."""
        return self._critic is not None or self.policy.has_critic

    describe_layout = _of_policy(RayLearner.describe_layout)
    logprobs = _of_policy(RayLearner.logprobs)
    adapt_coefficients = _of_policy(RayLearner.adapt_coefficients)
    set_coefficients = _of_policy(RayLearner.set_coefficients)
    start_imitation = _of_policy(RayLearner.start_imitation)
    weights = _of_policy(RayLearner.weights)
    export = _of_policy(RayLearner.export)

    def reference(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the reference policy."""
        return self.policy.reference(batch) if self._reference is None else self._reference.logprobs(batch)

    def set_reference(self, model: Path) -> None:
        """Use the weights in a model folder as the reference policy."""
        if self._reference is None:
            self.policy.set_reference(model)
        else:
            self._reference.reset(model)

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """Return the critic's value before each action token and after the last turn of each episode."""
        return (self._critic or self.policy).values(batch)

    def update(self, batch: Batch) -> Metrics:
        """Train policy and critic on a batch at the same time; returns metrics of both."""
        if self._critic is None or "returns" not in batch.arrays:
            return self.policy.update(batch)
        with ThreadPoolExecutor(1, thread_name_prefix="rollgym-critic") as executor:
            critic_metrics = executor.submit(self._critic.update, batch)
            metrics = self.policy.update(batch)
            return {**critic_metrics.result(), **metrics}

    def end_imitation(self, taught: Path | None) -> None:
        """Return to the configured loss with fresh optimizers; the critic starts from ``taught``."""
        self.policy.end_imitation(taught)
        if self._critic is not None:
            assert taught is not None
            self._critic.reset(taught)

    def offload(self, parts: Sequence[str] = OFFLOADABLE) -> dict[str, int]:
        """Move parts of all roles to host memory; returns bytes by part."""
        return total_bytes(
            [
                learner.offload([part for part in parts if part in self.offloads.get(name, ())])
                for name, learner in self._roles.items()
            ]
        )

    def reload(self) -> dict[str, int]:
        """Move offloaded parts back to the devices; returns bytes by part."""
        return total_bytes([learner.reload() for learner in self._roles.values()])

    def held(self) -> dict[str, int]:
        """Return the bytes of each part on the devices of all roles."""
        return total_bytes([learner.held() for learner in self._roles.values()])

    def save(self, path: Path) -> None:
        """Write a checkpoint into an existing folder; a separate critic's is in a folder inside."""
        self.policy.save(path)
        if self._critic is not None:
            (path / CRITIC).mkdir(exist_ok=True)
            self._critic.save(path / CRITIC)

    def load(self, path: Path) -> None:
        """Restore a checkpoint that `save` wrote."""
        if self._critic is not None:
            if not (path / CRITIC).is_dir():
                raise RunError(f"The checkpoint in {path} has no separate critic: {CRITIC}/ is missing.")
            self._critic.load(path / CRITIC)
        self.policy.load(path)

    def restart(self, roles: Mapping[str, Mapping[str, Any]]) -> None:
        """Restart all ranks, with arguments of `RayLearner.restart` by role."""
        for name, learner in self._roles.items():
            learner.restart(**roles.get(name, {}))

    def close(self) -> None:
        """Stop all ranks."""
        for learner in self._roles.values():
            learner.close()


def policy_config(config: LearnerConfig) -> LearnerConfig:
    """Return the config of a learner without a critic."""
    return replace(config, critic="none", critic_rate=None, value_clip=None, value_coef=0.5)
