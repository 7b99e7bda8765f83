"""A learner whose reference or critic work on devices of their own; the loop calls it like any other.

The reference is a policy that never learns, the critic a learner of values alone. Both get the same whole
batch as the policy, by reference; policy and critic learn at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.engines import WeightSource
from rollgym.errors import RunError
from rollgym.trainer.batch import Batch
from rollgym.trainer.learner import Metrics
from rollgym.trainer.learner.parts import PARTS
from rollgym.trainer.learner.remote import RemoteLearner, summed
from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.rows import FloatArray

if TYPE_CHECKING:
    from rollgym.trainer.layout import LayoutChoice

CRITIC = "critic"
"""Of a checkpoint: the folder with the critic's."""


class LearnerApart:
    """A policy's learner, and a reference or a critic elsewhere.

    Args:
        policy: The one that trains the policy, without whatever is elsewhere.
        reference: A learner of the policy that a KL penalty holds to. It is never updated.
        critic: A learner that ``judges``.
        leaves: What of each may go to the host's memory, by ``policy``, ``reference`` and ``critic``.
    """

    def __init__(
        self,
        policy: RemoteLearner,
        reference: RemoteLearner | None = None,
        critic: RemoteLearner | None = None,
        leaves: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.policy, self._reference, self._critic = policy, reference, critic
        self.loss = policy.loss
        named = {"policy": policy, "reference": reference, "critic": critic}
        self._all = {name: one for name, one in named.items() if one is not None}
        self.leaves = leaves or dict.fromkeys(self._all, PARTS)

    @property
    def has_critic(self) -> bool:
        """Whether `values` can be asked."""
        return self._critic is not None or self.policy.has_critic

    def describe_layout(self) -> LayoutChoice:
        """How the policy's rows are laid out, and how far that is from a plain forward."""
        return self.policy.describe_layout()

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-probs of all action tokens under the weights as they are now."""
        return self.policy.logprobs(batch)

    def reference(self, batch: Batch) -> FloatArray:
        """The same under the weights that the run began with."""
        return self.policy.reference(batch) if self._reference is None else self._reference.logprobs(batch)

    def set_reference(self, model: Path) -> None:
        """Take the weights in a folder as the reference."""
        if self._reference is None:
            self.policy.set_reference(model)
        else:
            self._reference.begin_with(model)

    def adapt_kl(self, metrics: Metrics) -> float:
        """Change the weight of the KL penalty by what an update saw, and return it."""
        return self.policy.adapt_kl(metrics)

    def set_kl(self, coef: float) -> None:
        """Go on with this weight of the KL penalty."""
        self.policy.set_kl(coef)

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """The critic's value before each action token, and after the last turn of each episode."""
        return (self._critic or self.policy).values(batch)

    def update(self, batch: Batch) -> Metrics:
        """Have policy and critic learn from a batch, at the same time."""
        if self._critic is None or "returns" not in batch.arrays:
            return self.policy.update(batch)
        with ThreadPoolExecutor(1, thread_name_prefix="rollgym-critic") as other:
            judged = other.submit(self._critic.update, batch)
            metrics = self.policy.update(batch)
            return {**judged.result(), **metrics}

    def weights(self) -> WeightSource:
        """The policy's weights, for an engine."""
        return self.policy.weights()

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Have all move these parts to their hosts' memory; bytes by part."""
        return summed(
            [
                one.offload([part for part in parts if part in self.leaves.get(name, ())])
                for name, one in self._all.items()
            ]
        )

    def reload(self) -> dict[str, int]:
        """Have all bring back what was moved; bytes by part."""
        return summed([one.reload() for one in self._all.values()])

    def held(self) -> dict[str, int]:
        """Bytes of each part on the devices of all."""
        return summed([one.held() for one in self._all.values()])

    def save(self, path: Path) -> None:
        """Write everything needed to go on; the critic's has a folder of its own."""
        self.policy.save(path)
        if self._critic is not None:
            (path / CRITIC).mkdir(exist_ok=True)
            self._critic.save(path / CRITIC)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        if self._critic is not None:
            if not (path / CRITIC).is_dir():
                raise RunError(f"The checkpoint in {path} is of a run whose critic was not elsewhere.")
            self._critic.load(path / CRITIC)
        self.policy.load(path)

    def export(self, path: Path) -> None:
        """Write the policy as a model folder in Hugging Face format."""
        self.policy.export(path)

    def restart(self, **roles: Mapping[str, Any]) -> None:
        """Start all ranks anew: what `RemoteLearner.restart` takes, for each of policy, reference, critic."""
        for name, one in self._all.items():
            one.restart(**roles.get(name, {}))

    def start_imitation(self, rate: float, steps: int) -> None:
        """Have the policy learn by imitation from here on."""
        self.policy.start_imitation(rate, steps)

    def end_imitation(self, taught: Path | None) -> None:
        """Go on as usual with fresh optimizers; the critic starts from the policy in ``taught``."""
        self.policy.end_imitation(taught)
        if self._critic is not None:
            assert taught is not None
            self._critic.begin_with(taught)

    def close(self) -> None:
        """End all ranks."""
        for one in self._all.values():
            one.close()


def policy_settings(settings: LearnerSettings) -> LearnerSettings:
    """Those of a learner without a critic."""
    return replace(settings, critic="none", critic_rate=None, value_clip=None, value_coef=0.5)
