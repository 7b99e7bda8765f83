"""A learner whose ranks are Ray actors.

A batch is stored once, in shards, and every rank fetches those of its rows; results are those of the whole
batch. Weights never pass through the driver: each rank stores its shards in buckets, and engines read them by
reference.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from rollgym.cluster.errors import need_ray
from rollgym.cluster.heartbeat import TIMEOUT
from rollgym.cluster.object_store import StoredFile, StoredPart
from rollgym.cluster.worker_group import WorkerGroup
from rollgym.core.registry import import_module
from rollgym.devices.types import Role
from rollgym.engines.base import WeightSource
from rollgym.engines.weight_sync.chain import Link, WeightChain
from rollgym.engines.weight_sync.folder import PartFile, clean_folder, write_part
from rollgym.engines.weight_sync.wire import Part, Sent, ShardEncoder, WireFormat
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions, ParallelConfig
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.process_group import free_port, join_group
from rollgym.trainer.learner.protocol import OFFLOADABLE, Metrics
from rollgym.trainer.learner.sharded_calls import BatchReader, BatchStore, StoredBatch
from rollgym.trainer.learner.strategies import find_strategy
from rollgym.trainer.losses.adaptive import Coefficients
from rollgym.trainer.losses.settings import LossConfig

P = ParamSpec("P")
R = TypeVar("R")


class LearnerActor:
    """The actor of one rank."""

    _learner: Learner | None

    def __init__(self, rank: int, world: int, threads: int | None, imports: Sequence[str]) -> None:
        self._rank, self._world, self._imports = rank, world, imports
        if threads is not None:
            torch.set_num_threads(threads)
        self._learner = None
        self._encoder: ShardEncoder | None = None
        self._batches = BatchReader()

    def rendezvous(self) -> tuple[str, int]:
        """Return an address and a free port of this node, for the ranks to join at."""
        address = need_ray().util.get_node_ip_address()
        return address, free_port(address)

    def join(self, address: str, port: int) -> None:
        """Join the process group of the ranks."""
        join_group(self._rank, self._world, address, port)

    def make(
        self, strategy: str, model: Path, config: LearnerConfig, loss: LossConfig, options: LearnerOptions
    ) -> None:
        """Make this rank's learner, replacing the one it had."""
        for module in self._imports:
            import_module(module, "imports")
        self._learner = self._encoder = None
        self._learner = Learner(
            model, config, loss, options, strategy=strategy, rank=self._rank, world=self._world
        )

    def run(self, method: Callable[Concatenate[Learner, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of this rank's learner."""
        assert self._learner is not None
        opened: list[Any] = [
            self._batches.open(value) if isinstance(value, StoredBatch) else value for value in args
        ]
        return method(self._learner, *opened, **kwargs)

    def run_together(
        self, method: Callable[Concatenate[Learner, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """Call a method whose result is the same on every rank: only rank 0 sends it."""
        result = self.run(method, *args, **kwargs)
        return result if self._rank == 0 else None

    def send_weights(self, wire: WireFormat, stamp: str, full: bool) -> Iterator[Part | PartFile | Sent]:
        """Yield what this rank sends of each bucket, which Ray stores or a file holds, and its counts."""
        assert self._learner is not None
        if self._encoder is None or self._encoder.wire != wire:
            self._encoder = ShardEncoder(wire)
        for number, (part, sent) in enumerate(self._learner.weight_parts(self._encoder, full=full)):
            # A part is stored before the next one is encoded; engines fetch it meanwhile.
            yield part if wire.folder is None else write_part(wire.folder, stamp, number, self._rank, part)
            yield sent


def _on_ranks(method: Callable[Concatenate[Learner, P], R]) -> Callable[Concatenate[RayLearner, P], R]:
    """Make a method of `RayLearner` that calls the learner's on all ranks."""

    @functools.wraps(method)
    def call(self: RayLearner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(method, *args, **kwargs)

    return call


class RayLearner:
    """A `LearnerProtocol` over ranks in a Ray cluster.

    Args:
        model: A folder in Hugging Face format that all nodes can read.
        config: The optimizer, the critic, and the partition of a batch.
        loss: The policy loss.
        options: Arguments that come from the run.
        strategy: The name of a registered strategy.
        actor_options: Ray options of each rank's actor, such as `ActorSlot.options`; one per rank.
        role: The name of the ranks in messages.
        imports: Modules that every rank imports first, such as one that registers the loss.
        heartbeat_timeout: Seconds without a heartbeat after which a busy rank counts as lost.
    """

    def __init__(
        self,
        model: Path,
        config: LearnerConfig,
        loss: LossConfig,
        options: LearnerOptions | None = None,
        *,
        strategy: str,
        actor_options: Sequence[Mapping[str, Any]],
        role: Role = "actor_train",
        imports: Sequence[str] = (),
        heartbeat_timeout: float = TIMEOUT,
    ) -> None:
        self.config, self.loss = config, loss
        self._model, self._strategy = model.absolute(), strategy
        self._options = options or LearnerOptions()
        self._reference: Path | None = None
        self._coefficients: Coefficients | None = None
        self._chain: list[Link] = []
        """The last full update and the deltas after it."""
        self._wire: WireFormat | None = None
        self._sending: threading.Thread | None = None
        self._padded: bool | None = None
        self.batches = BatchStore()
        """The store of batches; roles can share one."""
        self._check(len(actor_options))
        self.workers = WorkerGroup(
            role,
            LearnerActor,
            actor_options,
            config.threads,
            tuple(imports),
            heartbeat_timeout=heartbeat_timeout,
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def has_critic(self) -> bool:
        """Whether `values` is available."""
        return self.config.critic != "none"

    describe_layout = _on_ranks(Learner.describe_layout)
    logprobs = _on_ranks(Learner.logprobs)
    reference = _on_ranks(Learner.reference)
    values = _on_ranks(Learner.values)
    update = _on_ranks(Learner.update)
    """Train on a batch; raises `ActorLost` if a rank died: `restart` continues from a checkpoint."""
    start_imitation = _on_ranks(Learner.start_imitation)
    end_imitation = _on_ranks(Learner.end_imitation)
    save = _on_ranks(Learner.save)
    load = _on_ranks(Learner.load)
    export = _on_ranks(Learner.export)

    def set_reference(self, model: Path) -> None:
        """Use the weights in a model folder as the reference policy."""
        self._reference = model.absolute()
        self._run(Learner.set_reference, self._reference)

    def adapt_coefficients(self, metrics: Metrics) -> Coefficients:
        """Adapt the KL and entropy coefficients to an update's metrics; returns them."""
        self._coefficients = self._run(Learner.adapt_coefficients, metrics)
        return self._coefficients

    def set_coefficients(self, coefficients: Coefficients) -> None:
        """Restore adapted coefficients."""
        self._coefficients = coefficients
        self._run(Learner.set_coefficients, coefficients)

    def weights(self, wire: WireFormat | None = None) -> WeightSource:
        """Return the policy's current weights, which the ranks store in the cluster from now on.

        Engines may fetch the first buckets while the ranks prepare the others. The learner must not be used
        before the last bucket is there (`WeightChain.sent` waits for it).
        """
        wire = wire or WireFormat()
        if self._sending is not None:
            self._sending.join()
        chain, self._chain = self._chain, []
        full = not wire.delta or wire != self._wire or not 0 < len(chain) < wire.full_every
        if wire.folder is not None:
            clean_folder(wire.folder, {link.stamp for link in chain})
        link = Link(None if full else chain[-1].stamp)
        links = [link] if full else [*chain, link]
        self._wire = wire
        self._sending = threading.Thread(
            target=self._send, args=(wire, links, full), name="rollgym-weight-sync", daemon=True
        )
        self._sending.start()
        return WeightSource(tensors=WeightChain(links, delta=wire.delta))

    def _send(self, wire: WireFormat, links: list[Link], full: bool) -> None:
        """Publish the buckets of all ranks as they come."""
        link = links[-1]
        try:
            for refs, counts in self.workers.stream(LearnerActor.send_weights, wire, link.stamp, full):
                stored = [StoredPart(ref) if wire.folder is None else StoredFile(ref) for ref in refs]
                link.publish(stored, functools.reduce(Sent.plus, counts))
        except BaseException as error:
            link.end(error)
            return
        self._chain = links
        link.end()

    def offload(self, parts: Sequence[str] = OFFLOADABLE) -> dict[str, int]:
        """Move parts of all ranks to host memory; returns bytes by part, summed over ranks."""
        return total_bytes(self._run_each(Learner.offload, tuple(parts)))

    def reload(self) -> dict[str, int]:
        """Move offloaded parts back to the devices; returns bytes by part, summed over ranks."""
        return total_bytes(self._run_each(Learner.reload))

    def held(self) -> dict[str, int]:
        """Return the bytes of each part on the devices, summed over ranks."""
        return total_bytes(self._run_each(Learner.held))

    def restart(
        self,
        path: Path | None = None,
        *,
        actor_options: Sequence[Mapping[str, Any]] | None = None,
        strategy: str | None = None,
        cpu_offload: bool | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Restart all ranks and continue from a checkpoint.

        Args:
            path: A checkpoint that `save` wrote; ``None``: from the first weights.
            actor_options: Ray options of each rank's actor, if they change; the number of ranks may change.
            strategy: The strategy, if it changes.
            cpu_offload: Whether to use CPU offload, if it changes.
            parallel: The mesh, if it changes.
        """
        if parallel is not None:
            self.config = replace(self.config, parallel=parallel)
        self._strategy = strategy or self._strategy
        if cpu_offload is not None:
            self._options = replace(self._options, cpu_offload=cpu_offload)
        self._check(len(actor_options or self.workers.actor_options))
        self.workers.start(actor_options)
        self._start()
        if self._reference is not None:
            self.set_reference(self._reference)
        if self._coefficients is not None:
            self.set_coefficients(self._coefficients)
        if path is not None:
            self.load(path)

    def reset(self, model: Path) -> None:
        """Start over with the weights in a folder that all nodes can read."""
        self._model = model.absolute()
        self._make()

    def close(self) -> None:
        """Stop all ranks."""
        self.batches.clear()
        self.workers.close()

    def _check(self, world: int) -> None:
        find_strategy(self._strategy).check(
            world=world, cpu_offload=self._options.cpu_offload, parallel=self.config.parallel
        )

    def _start(self) -> None:
        if find_strategy(self._strategy).distributed:
            address, port = self.workers.call_one(0, LearnerActor.rendezvous)
            self.workers.call(LearnerActor.join, address, port)
        self._make()

    def _make(self) -> None:
        self._chain = []
        self.workers.call(
            LearnerActor.make, self._strategy, self._model, self.config, self.loss, self._options
        )

    def _run(self, method: Callable[Concatenate[Learner, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method on all ranks; returns the result of rank 0, which is that of all."""
        reads_arrays = method is Learner.update
        args = tuple(
            self._store(value, reads_arrays) if isinstance(value, Batch) else value for value in args
        )  # type: ignore[assignment]
        # Folders are relative to the driver's working directory, which is not that of the ranks.
        absolute = [value.absolute() if isinstance(value, Path) else value for value in args]
        call: Any = self.workers.call
        return cast(R, call(LearnerActor.run_together, method, *absolute, **kwargs)[0])

    def _store(self, batch: Batch, arrays: bool) -> StoredBatch:
        if self._padded is None:
            self._padded = self.describe_layout().layout == "padded"
        room = self.config.max_tokens_per_microbatch
        ranks = self.workers.world
        if find_strategy(self._strategy).mesh:
            ranks = self.config.parallel.data_ranks(ranks)
        return self.batches.store(batch, ranks, room=room, padded=self._padded, arrays=arrays)

    def _run_each(
        self, method: Callable[Concatenate[Learner, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method on all ranks; returns the result of each."""
        return self.workers.call(LearnerActor.run, method, *args, **kwargs)


def total_bytes(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sum bytes by part."""
    total: Counter[str] = Counter()
    for by_part in counts:
        total.update(by_part)
    return dict(total)
