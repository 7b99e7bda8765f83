"""A learner over roles in a Ray cluster: the policy, and a reference or critic on separate devices.

The reference is a policy that is never updated, the critic a value-only learner. Both get the same whole
batch as the policy, by reference; policy and critic train at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollgym.core.errors import RunError
from rollgym.engines.base import WeightSource
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.layout import LayoutChoice
from rollgym.trainer.learner.protocol import OFFLOADABLE, Metrics
from rollgym.trainer.learner.ray_learner import RayLearner, total_bytes

CRITIC = "critic"
"""The critic's folder in a checkpoint."""


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
        self.offloads = offloads or dict.fromkeys(self._roles, OFFLOADABLE)

    @property
    def has_critic(self) -> bool:
        """Whether `values` is available."""
        return self._critic is not None or self.policy.has_critic

    def describe_layout(self) -> LayoutChoice:
        """Return the layout of the policy's rows and its measured difference from a plain forward."""
        return self.policy.describe_layout()

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the current weights."""
        return self.policy.logprobs(batch)

    def reference(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the reference policy."""
        return self.policy.reference(batch) if self._reference is None else self._reference.logprobs(batch)

    def set_reference(self, model: Path) -> None:
        """Use the weights in a model folder as the reference policy."""
        if self._reference is None:
            self.policy.set_reference(model)
        else:
            self._reference.reset(model)

    def adapt_kl(self, metrics: Metrics) -> float:
        """Adapt the KL coefficient to an update's metrics; returns the coefficient."""
        return self.policy.adapt_kl(metrics)

    def set_kl(self, coef: float) -> None:
        """Restore an adapted KL coefficient."""
        self.policy.set_kl(coef)

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

    def start_imitation(self, rate: float, steps: int) -> None:
        """Switch the policy to imitation learning."""
        self.policy.start_imitation(rate, steps)

    def end_imitation(self, taught: Path | None) -> None:
        """Return to the configured loss with fresh optimizers; the critic starts from ``taught``."""
        self.policy.end_imitation(taught)
        if self._critic is not None:
            assert taught is not None
            self._critic.reset(taught)

    def weights(self) -> WeightSource:
        """Return the policy's weights, for an engine."""
        return self.policy.weights()

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

    def export(self, path: Path) -> None:
        """Write the policy into a folder in Hugging Face format, without a tokenizer."""
        self.policy.export(path)

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
