"""A learner whose ranks are actors on a cluster; the loop calls it like any other.

Every rank is called with the same whole batch, stored once; what comes back is of the whole batch. Weights
never pass through the driver: rank 0 stores them in buckets, and engines read them by reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.cluster.errors import need_ray
from rollgym.cluster.heartbeat import TIMEOUT
from rollgym.cluster.workers import ParallelWorker
from rollgym.devices.types import Role
from rollgym.engines import WeightSource
from rollgym.errors import UsageError
from rollgym.registry import import_module
from rollgym.trainer.batch import Batch
from rollgym.trainer.learner import Metrics
from rollgym.trainer.learner.parts import PARTS
from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.loss_settings import LossSettings
from rollgym.trainer.rows import FloatArray

if TYPE_CHECKING:
    from rollgym.trainer.layout import LayoutChoice

LOCAL = "local"
"""The strategy of a single rank: a `LocalLearner`."""


class LearnerRank:
    """What runs in the actor of one rank."""

    def __init__(self, rank: int, world: int, settings: LearnerSettings, modules: Sequence[str] = ()) -> None:
        self._rank, self._world, self._modules = rank, world, modules
        if settings.threads is not None:
            import torch

            torch.set_num_threads(settings.threads)
        self._learner: Any = None

    def meeting(self) -> tuple[str, int]:
        """An address and a free port of this node, for the ranks to meet at."""
        from rollgym.trainer.learner.group import free_port

        address = need_ray().util.get_node_ip_address()
        return address, free_port(address)

    def join(self, address: str, port: int) -> None:
        """Meet the other ranks."""
        from rollgym.trainer.learner.group import join_group

        join_group(self._rank, self._world, address, port)

    def make(
        self, strategy: Any, model: Path, settings: LearnerSettings, loss: LossSettings, options: Any
    ) -> None:
        """Make this rank's learner, in place of the one there was."""
        for module in self._modules:
            import_module(module, "rollout.modules")
        self._learner = None
        if strategy == LOCAL:
            from rollgym.trainer.learner.local import LocalLearner

            self._learner = LocalLearner(model, settings, loss, **options)
            return
        from rollgym.trainer.learner.ranks import make_rank_learner

        self._learner = make_rank_learner(
            strategy, model, settings, loss, rank=self._rank, world=self._world, **options
        )

    def do(self, name: str, *args: Any) -> Any:
        """Call the learner. All ranks compute the whole result; one tells it."""
        found = getattr(self._learner, name)(*args)
        return found if self._rank == 0 else None

    def each(self, name: str, *args: Any) -> Any:
        """Call the learner where every rank has an answer of its own."""
        return getattr(self._learner, name)(*args)

    def share(self) -> WeightSource | None:
        """Store the weights; all ranks gather them, rank 0 has them."""
        from rollgym.cluster.tensors import share_weights

        weights: WeightSource = self._learner.weights()
        if self._rank == 0:
            return share_weights(weights)
        if weights.buckets is not None:
            for _ in weights.buckets():
                pass
        return None


class RemoteLearner:
    """A `Learner` over the ranks of a cluster.

    Args:
        strategy: ``local`` for one rank, or one of `rollgym.trainer.learner.ranks`.
        model: A folder that all nodes can read.
        settings: The optimiser, and how a batch is cut up.
        loss: The policy loss.
        places: Options for each rank's actor, such as `Seat.options`.
        role: What its ranks are called in messages.
        modules: Imported by every rank first, such as one that registers the loss.
        heartbeat_timeout: Seconds without a sign of life after which a rank that works counts as lost.
        options: What `LocalLearner` takes besides; of ranks also ``offload`` and ``bucket_bytes``.
    """

    def __init__(
        self,
        strategy: str,
        model: Path,
        settings: LearnerSettings,
        loss: LossSettings,
        *,
        places: Sequence[Mapping[str, Any]],
        role: Role = "actor_train",
        modules: Sequence[str] = (),
        heartbeat_timeout: float = TIMEOUT,
        **options: Any,
    ) -> None:
        _check(strategy, len(places))
        self.settings, self.loss = settings, loss
        self._strategy = strategy
        self._made = (model.absolute(), settings, loss, options)
        self._reference: Path | None = None
        self._coef: float | None = None
        self._worker = ParallelWorker(
            role, LearnerRank, places, settings, tuple(modules), heartbeat_timeout=heartbeat_timeout
        )
        try:
            self._assemble()
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._worker.world

    @property
    def has_critic(self) -> bool:
        """Whether `values` can be asked."""
        return self.settings.critic != "none"

    def describe_layout(self) -> LayoutChoice:
        """How rows are laid out for the model, and how far that is from a plain forward."""
        found: LayoutChoice = self._do("describe_layout")
        return found

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-probs of all action tokens under the weights as they are now."""
        found: FloatArray = self._do("logprobs", batch)
        return found

    def reference(self, batch: Batch) -> FloatArray:
        """The same under the weights that the run began with."""
        found: FloatArray = self._do("reference", batch)
        return found

    def set_reference(self, model: Path) -> None:
        """Take the weights in a folder as the reference."""
        self._reference = model.absolute()
        self._do("set_reference", self._reference)

    def adapt_kl(self, metrics: Metrics) -> float:
        """Change the weight of the KL penalty by what an update saw, and return it."""
        coef: float = self._do("adapt_kl", metrics)
        self._coef = coef
        return coef

    def set_kl(self, coef: float) -> None:
        """Go on with this weight of the KL penalty."""
        self._coef = coef
        self._do("set_kl", coef)

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """The critic's value before each action token, and after the last turn of each episode."""
        found: tuple[FloatArray, list[float]] = self._do("values", batch)
        return found

    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch. `ActorLost` where a rank died: `restart` then goes on from a checkpoint."""
        metrics: Metrics = self._do("update", batch)
        return metrics

    def weights(self) -> WeightSource:
        """The policy's weights, stored in the cluster as they are now; gone when rank 0 is."""
        shared: WeightSource = self._worker.call("share")[0]
        return shared

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Have all ranks move these parts to their hosts' memory; bytes by part, of all together."""
        return summed(self._worker.call("each", "offload", tuple(parts)))

    def reload(self) -> dict[str, int]:
        """Have all ranks bring back what was moved; bytes by part, of all together."""
        return summed(self._worker.call("each", "reload"))

    def held(self) -> dict[str, int]:
        """Bytes of each part on the devices of all ranks."""
        return summed(self._worker.call("each", "held"))

    def save(self, path: Path) -> None:
        """Write everything needed to go on, into an existing folder that all nodes see."""
        self._do("save", path.absolute())

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        self._do("load", path.absolute())

    def export(self, path: Path) -> None:
        """Write the policy as a model folder in Hugging Face format."""
        self._do("export", path.absolute())

    def restart(
        self,
        path: Path | None = None,
        places: Sequence[Mapping[str, Any]] | None = None,
        strategy: str | None = None,
        **options: Any,
    ) -> None:
        """Start all ranks anew and go on from a checkpoint.

        Args:
            path: What `save` wrote; without one, from the beginning.
            places: Where the ranks are now, if not where they were; there may be fewer or more of them.
            strategy: Another one.
            options: Those that change, of the ones it was made with; ``None`` leaves one out.
        """
        _check(strategy or self._strategy, len(places or self._worker.places))
        self._strategy = strategy or self._strategy
        merged = {**self._made[3], **options}
        self._made = (*self._made[:3], {name: one for name, one in merged.items() if one is not None})
        self._worker.start(places)
        self._assemble()
        if self._reference is not None:
            self._do("set_reference", self._reference)
        if self._coef is not None:
            self._do("set_kl", self._coef)
        if path is not None:
            self.load(path)

    def begin_with(self, model: Path) -> None:
        """Begin again, with the weights in a folder that all nodes can read."""
        self._made = (model.absolute(), *self._made[1:])
        self._worker.call("make", self._strategy, *self._made)

    def start_imitation(self, rate: float, steps: int) -> None:
        """Learn by imitation from here on, at this rate, in so many optimizer steps."""
        self._do("start_imitation", rate, steps)

    def end_imitation(self, taught: Path | None) -> None:
        """Go on as usual with a fresh optimizer; a separate critic starts from the policy in ``taught``."""
        self._do("end_imitation", None if taught is None else taught.absolute())

    def close(self) -> None:
        """End all ranks."""
        self._worker.close()

    def _assemble(self) -> None:
        if self._strategy != LOCAL:
            self._worker.call("join", *self._worker.call_one(0, "meeting"))
        self._worker.call("make", self._strategy, *self._made)

    def _do(self, name: str, *args: Any) -> Any:
        return self._worker.call("do", name, *args)[0]


def _check(strategy: str, ranks: int) -> None:
    if strategy == LOCAL and ranks != 1:
        raise UsageError(f"The strategy local is of one rank, not of {ranks}: choose ddp or another.")


def summed(found: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by part, of all together."""
    names = {name: None for one in found for name in one}
    return {name: sum(one.get(name, 0) for one in found) for name in names}
