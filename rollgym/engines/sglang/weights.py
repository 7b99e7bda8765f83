"""How new weights get to the servers: from a folder, as tensors in the call, or by broadcast.

The servers are paused all the while. Tensors go in buckets; where a version wants it, between the begin and
the end of an update session. An update that ends halfway leaves weights of two versions, which the state of
the server remembers: nothing is generated with them.
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

from rollgym.engines import WeightSource
from rollgym.engines.sglang.client import Refused, short
from rollgym.engines.sglang.fleet import Fleet, Worker
from rollgym.engines.sglang.folder import ModelFolder
from rollgym.errors import AgentError, EngineLost, RollgymError, one_line

if TYPE_CHECKING:
    from rollgym.engines.sglang.group import Group

Route = Literal["tensor", "group", "disk"]
ROUTES: tuple[Route, ...] = ("tensor", "group", "disk")
BUCKET = 256 << 20
"""Bytes of weights in one call."""
_LOCAL = ("127.0.0.1", "localhost", "::1")


class Sender:
    """Sends weights by one route."""

    def __init__(
        self, model: ModelFolder, route: Route, *, bucket: int, host: str | None, timeout: float
    ) -> None:
        self._model = model
        self._route = route
        self._bucket = bucket
        self._host = host
        self._timeout = timeout
        self._group: Group | None = None
        self._folder: Path | None = None

    async def send(self, fleet: Fleet, version: int, source: WeightSource) -> None:
        """Replace the weights of all servers, which are paused."""
        if source.path is not None:
            await self._from_disk(fleet, version, source.path)
        elif self._route == "disk":
            await self._from_disk(fleet, version, await asyncio.to_thread(self._write, source.tensors or {}))
        else:
            await self._from_tensors(fleet, version, source.tensors or {})

    def check(self, fleet: Fleet, source: WeightSource) -> WeightSource:
        """What is to be sent, known to fit the model."""
        if source.tensors is not None:
            return WeightSource(tensors=self._model.fitting(source.tensors))
        assert source.path is not None
        if all(urlsplit(worker.client.url).hostname in _LOCAL for worker in fleet.workers):
            self._model.check_folder(source.path)  # a path of another machine is that machine's affair
        return WeightSource(path=source.path.absolute())

    def forget(self) -> None:
        """The servers are new: they are in no group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def close(self, fleet: Fleet) -> None:
        """Leave the group, and remove what was written."""
        self.forget()

        async def one(worker: Worker) -> None:
            if name := worker.state.leave():
                await worker.client.post("/destroy_weights_update_group", {"group_name": name}, timeout=10.0)

        try:
            await fleet.each(one)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    async def _from_disk(self, fleet: Fleet, version: int, path: Path) -> None:
        done: list[Worker] = []

        async def one(worker: Worker) -> None:
            worker.state.begin_update(tensors=False)
            body = {
                "model_path": str(path),
                "weight_version": str(version),
                "flush_cache": worker.state.flush(),
            }
            await worker.client.post("/update_weights_from_disk", {**body, "abort_all_requests": False})
            done.append(worker)

        await _whole(fleet, fleet.each(one), lambda: bool(done))
        _flushed(fleet)

    async def _from_tensors(self, fleet: Fleet, version: int, tensors: Mapping[str, Any]) -> None:
        buckets = list(_buckets(tensors, self._bucket))
        if self._route == "group":
            await self._join(fleet)
        sent = 0

        async def all_of_it() -> None:
            nonlocal sent
            await fleet.each(_begin)
            for number, bucket in enumerate(buckets):
                last = number == len(buckets) - 1
                sent += 1
                if self._route == "group":
                    await self._broadcast(fleet, bucket, str(version) if last else None, last)
                else:
                    await self._call(fleet, bucket, str(version) if last else None, last)
            await fleet.each(_end)

        try:
            await _whole(fleet, all_of_it(), lambda: sent > 0)
        except Refused:
            await fleet.each(_end)
            raise
        _flushed(fleet)

    async def _call(
        self, fleet: Fleet, bucket: Sequence[tuple[str, Any]], version: str | None, last: bool
    ) -> None:
        payload = await asyncio.to_thread(_pack, bucket)

        async def one(worker: Worker) -> None:
            body = {
                "serialized_named_tensors": [payload] * worker.tp,
                "flush_cache": last and worker.state.flush(),
                "abort_all_requests": False,
                "weight_version": version,
            }
            await worker.client.post("/update_weights_from_tensor", body)

        await fleet.each(one)

    async def _broadcast(
        self, fleet: Fleet, bucket: Sequence[tuple[str, Any]], version: str | None, last: bool
    ) -> None:
        from rollgym.engines.sglang.group import in_thread

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

        async def one(worker: Worker) -> None:
            named = {**body, "group_name": worker.state.broadcast()}
            flush = last and worker.state.flush()
            await worker.client.post("/update_weights_from_distributed", {**named, "flush_cache": flush})

        await self._together(fleet, in_thread(lambda: group.send(tensors)), fleet.each(one))

    async def _join(self, fleet: Fleet) -> None:
        """Meet the servers in a group, once."""
        from rollgym.engines.sglang.group import Group, in_thread

        if self._group is not None:
            return
        import torch

        name = f"rollgym-{uuid.uuid4().hex}"
        host = self._host or "127.0.0.1"
        world = 1 + sum(worker.tp for worker in fleet.workers)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        group = self._group = Group(host, world, name, backend, self._timeout)
        first: dict[str, int] = {}
        for worker in fleet.workers:
            first[worker.client.url] = 1 + sum(one.tp for one in fleet.workers[: len(first)])

        async def one(worker: Worker) -> None:
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

        await self._together(fleet, in_thread(group.meet), fleet.each(one))

    async def _together(self, fleet: Fleet, ours: asyncio.Future[None], theirs: Awaitable[None]) -> None:
        """Both ends of a broadcast: where either fails, the other would wait in vain."""
        calls = asyncio.ensure_future(theirs)
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.gather(ours, calls)
        except BaseException as error:
            calls.cancel()
            await asyncio.wait([calls])
            ours.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._group = None  # it is of no use any more; a thread may still hold it
            for worker in fleet.workers:
                worker.state.leave()
            if isinstance(error, TimeoutError):
                raise EngineLost(f"A broadcast of weights was not done within {self._timeout:g} s.") from None
            if isinstance(error, Exception) and not isinstance(error, RollgymError):
                raise EngineLost(f"A broadcast of weights failed: {short(one_line(error))}") from error
            raise

    def _write(self, tensors: Mapping[str, Any]) -> Path:
        """Weights as a model folder; the one before is removed, as no server reads it any more."""
        from safetensors.torch import save_file

        before, self._folder = self._folder, Path(tempfile.mkdtemp(prefix="rollgym-weights-"))
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        shutil.copy2(self._model.path / "config.json", self._folder)
        save_file(
            {name: _own(tensor) for name, tensor in tensors.items()}, self._folder / "model.safetensors"
        )
        return self._folder


async def _begin(worker: Worker) -> None:
    if worker.state.begin_update(tensors=True):
        await worker.client.post("/begin_weight_update", {"selector": "all"})


async def _end(worker: Worker) -> None:
    if worker.state.end_update():
        await worker.client.post("/end_weight_update", {})


async def _whole(fleet: Fleet, update: Awaitable[None], begun: Any) -> None:
    """Await an update; where it fails after it had begun, no server's weights can be relied on."""
    try:
        await update
    except BaseException:
        for worker in fleet.workers:
            worker.state.whole = worker.state.whole and not begun()
        raise
    for worker in fleet.workers:
        worker.state.written()


def _flushed(fleet: Fleet) -> None:
    for worker in fleet.workers:
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
        raise AgentError("There are no weights to send.")
    yield bucket


def _pack(bucket: Sequence[tuple[str, Any]]) -> str:
    """Tensors in a form that holds all of them: handles to shared memory end a server on another machine."""
    return base64.b64encode(pickle.dumps([(name, _own(one)) for name, one in bucket], protocol=4)).decode()


def _own(tensor: Any) -> Any:
    """A copy on the CPU: a view would carry everything it is a view of."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def keep(source: WeightSource) -> WeightSource:
    """Weights that stay as they are when the learner goes on, for a server that has to be started again."""
    if source.tensors is None:
        return source
    return WeightSource(tensors={name: _own(tensor) for name, tensor in source.tensors.items()})
