"""vLLM's routes for weight updates: start, update (once a bucket), finish."""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollgym.engines.servers.client import Refused
from rollgym.engines.servers.server_group import ServerWorker
from rollgym.engines.servers.weights import Bucket, Rendezvous, WeightSender, described, own_copy


class VllmWeightSender(WeightSender):
    """Sends weights to vLLM servers."""

    routes = ("group", "tensor", "disk")
    packed_routes = ("group", "tensor")

    async def begin(self, worker: ServerWorker) -> None:
        """Open an update session; one that a lost trainer left open is closed first."""
        try:
            await worker.client.post("/start_weight_update", {})
        except Refused:
            await worker.client.post("/finish_weight_update", {})
            await worker.client.post("/start_weight_update", {})

    async def end(self, worker: ServerWorker, version: str | None) -> None:
        """Close an update session, and drop what was computed with the old weights."""
        if version is None:
            with suppress(Refused):  # an update that failed has closed it
                await worker.client.post("/finish_weight_update", {})
            return
        await worker.client.post("/finish_weight_update", {"weight_version": version})
        if worker.state.flush():
            await self._reset(worker)

    async def read_folder(self, worker: ServerWorker, path: Path, version: str, flush: bool) -> None:
        """Make a server read its weights from a folder."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await worker.client.post("/collective_rpc", body)
        await worker.client.post("/update_weight_version", {"new_version": version})
        if flush:
            await self._reset(worker)

    async def send_tensors(
        self, worker: ServerWorker, bucket: Bucket, payload: str, version: str | None, flush: bool
    ) -> None:
        """Send a bucket in the call."""
        await self._update(worker, {**described(bucket), "data": payload})

    async def receive_broadcast(
        self, worker: ServerWorker, bucket: Bucket, version: str | None, flush: bool
    ) -> None:
        """Make a server receive a bucket that is broadcast meanwhile."""
        worker.state.broadcast()
        await self._update(worker, described(bucket))

    async def send_join(self, worker: ServerWorker, where: Rendezvous) -> None:
        """Make a server join the broadcast group."""
        info = {
            "name": where.name,
            "host": where.host,
            "port": where.port,
            "rank": where.rank,
            "world": where.world,
            "backend": where.backend,
            "timeout": self.timeout,
        }
        body = {"init_info": info}
        await worker.client.post("/init_weight_transfer_engine", body, timeout=self.timeout)

    async def send_leave(self, worker: ServerWorker, name: str) -> None:
        """Make a server leave the broadcast group."""
        await worker.client.post("/shutdown_weight_transfer_engine", {}, timeout=10.0)

    def pack(self, bucket: Bucket) -> str:
        """Return the bytes of the tensors, one after the other, in base64."""
        import torch

        parts = [own_copy(one).reshape(-1).view(torch.uint8).numpy().tobytes() for _, one in bucket]
        return base64.b64encode(b"".join(parts)).decode()

    async def _update(self, worker: ServerWorker, info: dict[str, Any]) -> None:
        await worker.client.post("/update_weights", {"update_info": info})

    async def _reset(self, worker: ServerWorker) -> None:
        await worker.client.post("/reset_prefix_cache?reset_running_requests=true", {})
