"""Sends weights to the servers: from a folder, as tensors in HTTP calls, or by broadcast.

The servers are paused during an update. Tensors are sent in buckets, within an update session for versions
that need one. An update that fails halfway leaves weights of two versions; `ServerState` records that, and
nothing is generated with them.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rollgym.core.errors import AgentError, EngineLost, RollgymError, one_line
from rollgym.engines.base import WeightSource
from rollgym.engines.sglang.client import Refused
from rollgym.engines.sglang.server_group import ServerGroup, ServerWorker
from rollgym.models.hf_files import HFModelFiles
from rollgym.utils.http_client import short

if TYPE_CHECKING:
    from rollgym.engines.sglang.weight_broadcast import BroadcastGroup

Route = Literal["tensor", "group", "disk"]
ROUTES: tuple[Route, ...] = ("tensor", "group", "disk")
BUCKET = 256 << 20
"""Bytes of weights per call."""
_LOCAL = ("127.0.0.1", "localhost", "::1")


class WeightSender:
    """Sends weights by one route."""

    def __init__(
        self, model: HFModelFiles, route: Route, *, bucket: int, host: str | None, timeout: float
    ) -> None:
        self._model = model
        self._route = route
        self._bucket = bucket
        self._host = host
        self._timeout = timeout
        self._group: BroadcastGroup | None = None
        self._folder: Path | None = None

    async def send(self, servers: ServerGroup, version: int, source: WeightSource) -> None:
        """Replace the weights of all servers, which must be paused."""
        if source.path is not None:
            await self._from_disk(servers, version, source.path)
        elif self._route == "disk":
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
        if all(urlsplit(worker.client.url).hostname in _LOCAL for worker in servers.workers):
            self._model.check_folder(source.path)  # a path on another machine cannot be checked here
        return WeightSource(path=source.path.absolute())

    def leave_group(self) -> None:
        """Leave the broadcast group, for example because the servers were restarted."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def close(self, servers: ServerGroup) -> None:
        """Leave the group and delete temporary files."""
        self.leave_group()

        async def one(worker: ServerWorker) -> None:
            if name := worker.state.leave():
                await worker.client.post("/destroy_weights_update_group", {"group_name": name}, timeout=10.0)

        try:
            await servers.each(one)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    async def _from_disk(self, servers: ServerGroup, version: int, path: Path) -> None:
        done: list[ServerWorker] = []

        async def one(worker: ServerWorker) -> None:
            worker.state.begin_update(tensors=False)
            body = {
                "model_path": str(path),
                "weight_version": str(version),
                "flush_cache": worker.state.flush(),
            }
            await worker.client.post("/update_weights_from_disk", {**body, "abort_all_requests": False})
            done.append(worker)

        await _whole(servers, servers.each(one), lambda: bool(done))
        _flushed(servers)

    async def _from_tensors(self, servers: ServerGroup, version: int, tensors: Mapping[str, Any]) -> None:
        buckets = list(_buckets(tensors, self._bucket))
        if self._route == "group":
            await self._join(servers)
        sent = 0

        async def all_of_it() -> None:
            nonlocal sent
            await servers.each(_begin)
            for number, bucket in enumerate(buckets):
                last = number == len(buckets) - 1
                sent += 1
                if self._route == "group":
                    await self._broadcast(servers, bucket, str(version) if last else None, last)
                else:
                    await self._call(servers, bucket, str(version) if last else None, last)
            await servers.each(_end)

        try:
            await _whole(servers, all_of_it(), lambda: sent > 0)
        except Refused:
            await servers.each(_end)
            raise
        _flushed(servers)

    async def _call(
        self, servers: ServerGroup, bucket: Sequence[tuple[str, Any]], version: str | None, last: bool
    ) -> None:
        payload = await asyncio.to_thread(_pack, bucket)

        async def one(worker: ServerWorker) -> None:
            body = {
                "serialized_named_tensors": [payload] * worker.tp,
                "flush_cache": last and worker.state.flush(),
                "abort_all_requests": False,
                "weight_version": version,
            }
            await worker.client.post("/update_weights_from_tensor", body)

        await servers.each(one)

    async def _broadcast(
        self, servers: ServerGroup, bucket: Sequence[tuple[str, Any]], version: str | None, last: bool
    ) -> None:
        from rollgym.engines.sglang.weight_broadcast import in_thread

        group = self._group
        assert group is not None
        tensors = [tensor for _, tensor in bucket]
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "abort_all_requests": False,
            "weight_version": version,
        }

        async def one(worker: ServerWorker) -> None:
            named = {**body, "group_name": worker.state.broadcast()}
            flush = last and worker.state.flush()
            await worker.client.post("/update_weights_from_distributed", {**named, "flush_cache": flush})

        await self._together(servers, in_thread(lambda: group.send(tensors)), servers.each(one))

    async def _join(self, servers: ServerGroup) -> None:
        """Form the broadcast group, once."""
        from rollgym.engines.sglang.weight_broadcast import BroadcastGroup, in_thread

        if self._group is not None:
            return
        import torch

        name = f"rollgym-{uuid.uuid4().hex}"
        host = self._host or "127.0.0.1"
        world = 1 + sum(worker.tp for worker in servers.workers)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        group = self._group = BroadcastGroup(host, world, name, backend, self._timeout)
        first: dict[str, int] = {}
        for worker in servers.workers:
            first[worker.client.url] = 1 + sum(one.tp for one in servers.workers[: len(first)])

        async def one(worker: ServerWorker) -> None:
            body = {
                "master_address": host,
                "master_port": group.port,
                "rank_offset": first[worker.client.url],
                "world_size": world,
                "group_name": name,
                "backend": backend,
            }
            await worker.client.post("/init_weights_update_group", body, timeout=self._timeout)
            worker.state.join(name)

        await self._together(servers, in_thread(group.meet), servers.each(one))

    async def _together(
        self, servers: ServerGroup, ours: asyncio.Future[None], theirs: Awaitable[None]
    ) -> None:
        """Run both ends of a broadcast: if one fails, the other would wait forever."""
        calls = asyncio.ensure_future(theirs)
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.gather(ours, calls)
        except BaseException as error:
            calls.cancel()
            await asyncio.wait([calls])
            ours.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._group = None  # unusable now; a thread may still hold it
            for worker in servers.workers:
                worker.state.leave()
            if isinstance(error, TimeoutError):
                raise EngineLost(f"The weight broadcast timed out after {self._timeout:g} s.") from None
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
        save_file(
            {name: _own(tensor) for name, tensor in tensors.items()}, self._folder / "model.safetensors"
        )
        return self._folder


async def _begin(worker: ServerWorker) -> None:
    if worker.state.begin_update(tensors=True):
        await worker.client.post("/begin_weight_update", {"selector": "all"})


async def _end(worker: ServerWorker) -> None:
    if worker.state.end_update():
        await worker.client.post("/end_weight_update", {})


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


def _pack(bucket: Sequence[tuple[str, Any]]) -> str:
    """Serialize tensors by value: shared-memory handles would crash a server on another machine."""
    return base64.b64encode(pickle.dumps([(name, _own(one)) for name, one in bucket], protocol=4)).decode()


def _own(tensor: Any) -> Any:
    """Return a copy on the CPU: a view would be serialized with its whole base tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def copy_weights(source: WeightSource) -> WeightSource:
    """Copy weights that the learner will overwrite, for a server that is restarted."""
    if source.tensors is None:
        return source
    return WeightSource(tensors={name: _own(tensor) for name, tensor in source.tensors.items()})
