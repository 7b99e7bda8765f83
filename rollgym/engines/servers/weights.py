"""Sends weights to the servers: from a folder, as tensors in HTTP calls, or by broadcast.

The servers are paused during an update. Tensors are sent in buckets, within an update session where a server
needs one. An update that fails halfway leaves weights of two versions; `ServerState` records that, and
nothing is generated with them. A subclass for each software knows its routes.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from rollgym.core.errors import AgentError, EngineLost, RollgymError, UsageError, one_line
from rollgym.engines.base import WeightSource
from rollgym.engines.servers.client import Refused
from rollgym.engines.servers.server_group import ServerGroup, ServerWorker
from rollgym.models.hf_files import HFModelFiles
from rollgym.utils.http_client import short

if TYPE_CHECKING:
    from rollgym.engines.servers.weight_broadcast import BroadcastGroup
    from rollgym.engines.servers.weight_delta import DeltaEncoder

Route = Literal["tensor", "group", "disk"]
"""Route of tensors: in the HTTP call, by a broadcast, or through a folder that the server can read."""
BUCKET = 256 << 20
"""Bytes of weights per call."""
Bucket = Sequence[tuple[str, Any]]
"""Named tensors."""
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a server joins the broadcast group of its trainer."""

    name: str
    host: str
    port: int
    rank: int
    """Rank of the server's first process; the trainer is rank 0."""
    world: int
    backend: str


class WeightSender(ABC):
    """Sends weights by one route."""

    routes: ClassVar[tuple[Route, ...]]
    """The routes that the software supports, the default first."""
    packed_routes: ClassVar[tuple[Route, ...]] = ()
    """Those by which a server with rollgym's plugin receives packed buckets (`DeltaEncoder`)."""

    def __init__(
        self,
        model: HFModelFiles,
        route: Route,
        *,
        bucket: int,
        host: str | None,
        timeout: float,
        deltas: DeltaEncoder | None = None,
    ) -> None:
        if route not in self.routes:
            raise UsageError(f"route must be one of {', '.join(self.routes)}, not {route!r}.")
        self._model = model
        self.route = route
        self._bucket = bucket
        self._host = host
        self.timeout = timeout
        self._group: BroadcastGroup | None = None
        self._folder: Path | None = None
        self._deltas = deltas
        self.sent_bytes: int | None = None
        """Bytes of the last update; ``None``: it was whole."""

    @abstractmethod
    async def begin(self, worker: ServerWorker) -> None:
        """Open an update session."""

    @abstractmethod
    async def end(self, worker: ServerWorker, version: str | None) -> None:
        """Close an update session; ``version`` is that of the complete weights, None after a failure."""

    @abstractmethod
    async def read_folder(self, worker: ServerWorker, path: Path, version: str, flush: bool) -> None:
        """Make a server read its weights from a folder."""

    @abstractmethod
    async def send_tensors(
        self, worker: ServerWorker, bucket: Bucket, payload: str, version: str | None, flush: bool
    ) -> None:
        """Send a bucket in the call; ``version`` is set with the last one."""

    @abstractmethod
    async def receive_broadcast(
        self, worker: ServerWorker, bucket: Bucket, version: str | None, flush: bool
    ) -> None:
        """Make a server receive a bucket that is broadcast meanwhile."""

    @abstractmethod
    async def send_join(self, worker: ServerWorker, where: Rendezvous) -> None:
        """Make a server join the broadcast group."""

    @abstractmethod
    async def send_leave(self, worker: ServerWorker, name: str) -> None:
        """Make a server leave the broadcast group."""

    @abstractmethod
    def pack(self, bucket: Bucket) -> str:
        """Serialize a bucket for `send_tensors`."""

    async def send(self, servers: ServerGroup, version: int, source: WeightSource) -> None:
        """Replace the weights of all servers, which must be paused."""
        if source.path is not None:
            await self._from_disk(servers, version, source.path)
        elif self.route == "disk":
            await self._from_disk(
                servers, version, await asyncio.to_thread(self._write, source.tensors or {})
            )
        else:
            await self._from_tensors(servers, version, source.tensors or {})

    def check(self, servers: ServerGroup, source: WeightSource) -> WeightSource:
        """Return the weights to send, checked against the model."""
        if source.tensors is not None:
            return WeightSource(tensors=self._model.fitting(source.tensors))
        assert source.path is not None
        if all(is_local(worker.client.url) for worker in servers.workers):
            self._model.check_folder(source.path)  # a path on another machine cannot be checked here
        return WeightSource(path=source.path.absolute())

    def leave_group(self) -> None:
        """Leave the broadcast group, for example because the servers were restarted."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def forget_servers(self) -> None:
        """The servers are others than before, or were restarted."""
        self.leave_group()
        if self._deltas is not None:
            self._deltas.reset()

    async def close(self, servers: ServerGroup) -> None:
        """Leave the group and delete temporary files."""
        self.leave_group()

        async def one(worker: ServerWorker) -> None:
            if name := worker.state.leave():
                await self.send_leave(worker, name)

        try:
            await servers.each(one)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    async def _from_disk(self, servers: ServerGroup, version: int, path: Path) -> None:
        self.sent_bytes = None
        if self._deltas is not None:
            self._deltas.reset()  # the servers read other weights than those that deltas refer to
        done: list[ServerWorker] = []

        async def one(worker: ServerWorker) -> None:
            worker.state.begin_update(tensors=False)
            await self.read_folder(worker, path, str(version), worker.state.flush())
            done.append(worker)

        await _whole(servers, servers.each(one), lambda: bool(done))
        _flushed(servers)

    async def _from_tensors(self, servers: ServerGroup, version: int, tensors: Mapping[str, Any]) -> None:
        if self._deltas is None:
            await self._send_buckets(servers, version, list(_buckets(tensors, self._bucket)))
        else:
            await self._send_changes(self._deltas, servers, version, tensors)

    async def _send_changes(
        self, deltas: DeltaEncoder, servers: ServerGroup, version: int, tensors: Mapping[str, Any]
    ) -> None:
        """Send what changed since the last update; all of it if a server has other weights than expected."""
        packed = servers.deltas and self.route in self.packed_routes
        if any(worker.state.weights_missing for worker in servers.workers):
            deltas.reset()
        elif deltas.version is not None and not await servers.have_weights(deltas.version):
            deltas.reset()  # restarted or updated by another client
        encode = partial(deltas.encode, tensors, packed=packed, bucket=self._bucket)
        update = await asyncio.to_thread(encode)
        try:
            await self._send_buckets(servers, version, update.buckets)
        except BaseException as error:
            deltas.reset()
            if update.full or not isinstance(error, Refused):
                raise
            update = await asyncio.to_thread(encode)
            await self._send_buckets(servers, version, update.buckets)
        deltas.received(update, tensors, str(version), packed=packed)
        self.sent_bytes = update.sent.nbytes

    async def _send_buckets(self, servers: ServerGroup, version: int, buckets: Sequence[Bucket]) -> None:
        if self.route == "group":
            await self._join(servers)
        sent = 0

        async def all_of_it() -> None:
            nonlocal sent
            await servers.each(self._begin)
            for number, bucket in enumerate(buckets):
                last = number == len(buckets) - 1
                sent += 1
                send = self._broadcast if self.route == "group" else self._call
                await send(servers, bucket, str(version) if last else None)
            await servers.each(lambda worker: self._end(worker, str(version)))

        try:
            await _whole(servers, all_of_it(), lambda: sent > 0)
        except Refused:
            await servers.each(lambda worker: self._end(worker, None))
            raise
        _flushed(servers)

    async def _call(self, servers: ServerGroup, bucket: Bucket, version: str | None) -> None:
        payload = await asyncio.to_thread(self.pack, bucket)

        async def one(worker: ServerWorker) -> None:
            flush = version is not None and worker.state.flush()
            await self.send_tensors(worker, bucket, payload, version, flush)

        await servers.each(one)

    async def _broadcast(self, servers: ServerGroup, bucket: Bucket, version: str | None) -> None:
        from rollgym.engines.servers.weight_broadcast import in_thread

        group = self._group
        assert group is not None
        tensors = [tensor for _, tensor in bucket]

        async def one(worker: ServerWorker) -> None:
            flush = version is not None and worker.state.flush()
            await self.receive_broadcast(worker, bucket, version, flush)

        await self._together(servers, in_thread(lambda: group.send(tensors)), servers.each(one))

    async def _begin(self, worker: ServerWorker) -> None:
        if worker.state.begin_update(tensors=True):
            await self.begin(worker)

    async def _end(self, worker: ServerWorker, version: str | None) -> None:
        if worker.state.end_update():
            await self.end(worker, version)

    async def _join(self, servers: ServerGroup) -> None:
        """Form the broadcast group, once."""
        from rollgym.engines.servers.weight_broadcast import BroadcastGroup, in_thread

        if self._group is not None:
            return
        import torch

        name = f"rollgym-{uuid.uuid4().hex}"
        host = self._host or "127.0.0.1"
        world = 1 + sum(worker.tp for worker in servers.workers)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        group = self._group = BroadcastGroup(host, world, name, backend, self.timeout)
        first: dict[str, int] = {}
        for worker in servers.workers:
            first[worker.client.url] = 1 + sum(one.tp for one in servers.workers[: len(first)])

        async def one(worker: ServerWorker) -> None:
            where = Rendezvous(name, host, group.port, first[worker.client.url], world, backend)
            await self.send_join(worker, where)
            worker.state.join(name)

        await self._together(servers, in_thread(group.meet), servers.each(one))

    async def _together(
        self, servers: ServerGroup, ours: asyncio.Future[None], theirs: Awaitable[None]
    ) -> None:
        """Run both ends of a broadcast: if one fails, the other would wait forever."""
        calls = asyncio.ensure_future(theirs)
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.gather(ours, calls)
        except BaseException as error:
            calls.cancel()
            await asyncio.wait([calls])
            ours.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._group = None  # unusable now; a thread may still hold it
            for worker in servers.workers:
                worker.state.leave()
            if isinstance(error, TimeoutError):
                raise EngineLost(f"The weight broadcast timed out after {self.timeout:g} s.") from None
            if isinstance(error, Exception) and not isinstance(error, RollgymError):
                raise EngineLost(f"The weight broadcast failed: {short(one_line(error))}") from error
            raise

    def _write(self, tensors: Mapping[str, Any]) -> Path:
        """Write weights as a model folder; deletes the previous one, which no server reads any more."""
        from safetensors.torch import save_file

        before, self._folder = self._folder, Path(tempfile.mkdtemp(prefix="rollgym-weights-"))
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        shutil.copy2(self._model.path / "config.json", self._folder)
        save_file(dict(tensors), self._folder / "model.safetensors", {"format": "pt"})
        return self._folder


async def _whole(servers: ServerGroup, update: Awaitable[None], begun: Any) -> None:
    """Await an update; if it fails after it has begun, mark the weights of all servers as inconsistent."""
    try:
        await update
    except BaseException:
        for worker in servers.workers:
            worker.state.consistent = worker.state.consistent and not begun()
        raise
    for worker in servers.workers:
        worker.state.written()


def _flushed(servers: ServerGroup) -> None:
    for worker in servers.workers:
        if worker.state.flush():
            worker.state.flushed()


def is_local(url: str) -> bool:
    """Return whether a URL is of this machine."""
    return urlsplit(url).hostname in _LOCAL


def described(bucket: Bucket) -> dict[str, Any]:
    """Return the names, dtypes and shapes of a bucket, for the receiver of a broadcast."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def _buckets(tensors: Mapping[str, Any], size: int) -> Iterator[list[tuple[str, Any]]]:
    bucket: list[tuple[str, Any]] = []
    held = 0
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if bucket and held + needed > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += needed
    if not bucket:
        raise AgentError("The weight update has no tensors.")
    yield bucket


def own_copy(tensor: Any) -> Any:
    """Return a copy on the CPU: a view would be serialized with its whole base tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def copy_weights(source: WeightSource, dtype: str = "float32") -> WeightSource:
    """Copy weights that the learner will overwrite, in the dtype in which they are sent."""
    from rollgym.engines.weight_sync.wire import to_wire

    if source.tensors is None:
        return source
    return WeightSource(tensors={name: to_wire(tensor, dtype) for name, tensor in source.tensors.items()})
