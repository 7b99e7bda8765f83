"""SGLang's routes for weight updates."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

from rollgym.engines.servers.server_group import ServerWorker
from rollgym.engines.servers.weights import Bucket, Rendezvous, WeightSender, described, own_copy
from rollgym.engines.sglang.server import LOADER
from rollgym.engines.weight_sync.server_plugin.rollgym_deltas import PACKED


class SglangWeightSender(WeightSender):
    """Sends weights to SGLang servers; versions from 0.5.21 get an update session."""

    routes = ("tensor", "group", "disk")
    packed_routes = ("tensor",)  # a broadcast is always loaded by the model's own loader

    async def begin(self, worker: ServerWorker) -> None:
        """Open an update session."""
        await worker.client.post("/begin_weight_update", {"selector": "all"})

    async def end(self, worker: ServerWorker, version: str | None) -> None:
        """Close an update session."""
        await worker.client.post("/end_weight_update", {})

    async def read_folder(self, worker: ServerWorker, path: Path, version: str, flush: bool) -> None:
        """Make a server read its weights from a folder."""
        body = {"model_path": str(path), "weight_version": version, "flush_cache": flush}
        await worker.client.post("/update_weights_from_disk", {**body, "abort_all_requests": False})

    async def send_tensors(
        self, worker: ServerWorker, bucket: Bucket, payload: str, version: str | None, flush: bool
    ) -> None:
        """Send a bucket in the call, once for each process of the server."""
        body: dict[str, Any] = {
            "serialized_named_tensors": [payload] * worker.tp,
            "flush_cache": flush,
            "abort_all_requests": False,
            "weight_version": version,
        }
        if bucket[0][0] == PACKED:
            body["load_format"] = LOADER
        await worker.client.post("/update_weights_from_tensor", body)

    async def receive_broadcast(
        self, worker: ServerWorker, bucket: Bucket, version: str | None, flush: bool
    ) -> None:
        """Make a server receive a bucket that is broadcast meanwhile."""
        body = {
            **described(bucket),
            "abort_all_requests": False,
            "weight_version": version,
            "group_name": worker.state.broadcast(),
            "flush_cache": flush,
        }
        await worker.client.post("/update_weights_from_distributed", body)

    async def send_join(self, worker: ServerWorker, where: Rendezvous) -> None:
        """Make a server join the broadcast group."""
        body = {
            "master_address": where.host,
            "master_port": where.port,
            "rank_offset": where.rank,
            "world_size": where.world,
            "group_name": where.name,
            "backend": where.backend,
        }
        await worker.client.post("/init_weights_update_group", body, timeout=self.timeout)

    async def send_leave(self, worker: ServerWorker, name: str) -> None:
        """Make a server leave the broadcast group."""
        await worker.client.post("/destroy_weights_update_group", {"group_name": name}, timeout=10.0)

    def pack(self, bucket: Bucket) -> str:
        """Serialize tensors by value: shared-memory handles would crash a server on another machine."""
        named = [(name, own_copy(one)) for name, one in bucket]
        return base64.b64encode(pickle.dumps(named, protocol=4)).decode()
