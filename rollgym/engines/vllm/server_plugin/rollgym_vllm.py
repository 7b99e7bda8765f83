"""Worker extension of a vLLM server: receives weights by broadcast or in the call, and keeps them plain.

On a CPU, vLLM packs matrices for its kernels and drops or keeps the originals. No weight update packs a head
that is tied to the embedding again: the server then answers with old and new weights mixed, without an error.
With the packed kernels disabled, weights are replaced in place.
"""

# vLLM is not installed where this file is type-checked.
# mypy: disable-error-code="import-not-found,misc,no-any-return,untyped-decorator"

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import vllm._custom_ops as custom_ops
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

try:
    import rollgym_deltas
except ModuleNotFoundError:  # another folder, which only servers with deltas have on their path
    rollgym_deltas = None

BACKEND = "rollgym"
"""Name of the weight transfer backend (``--weight-transfer-config``)."""

if current_platform.is_cpu():
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False


PACKED = "rollgym.packed"
"""Name of a packed bucket (``rollgym_deltas``)."""


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Address of the trainer's broadcast group, in which the trainer is rank 0."""

    name: str
    host: str
    port: int
    rank: int
    """Rank of the server's first process."""
    world: int
    backend: str
    timeout: float = 300.0


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The tensors of a bucket: in ``data``, or broadcast if there is none."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    data: str | None = None
    """Their bytes, one tensor after the other, in base64."""


class RollgymTransfer(WeightTransferEngine):
    """Receives weights from rollgym's trainer."""

    init_info_cls = JoinInfo
    update_info_cls = BucketInfo
    _group: Any = None
    _receiver: Any = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the trainer's broadcast group, after leaving the one before."""
        from torch.distributed import distributed_c10d

        c10d, distributed = cast(Any, distributed_c10d), cast(Any, torch.distributed)
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout)
        store = distributed.TCPStore(
            init_info.host, init_info.port, init_info.world, is_master=False, timeout=timeout
        )
        # The trainer forms the group the same way (rollgym.engines.servers.weight_broadcast).
        self._group, _ = c10d._new_process_group_helper(
            init_info.world,
            rank,
            [],
            c10d.Backend(init_info.backend),
            c10d.PrefixStore(init_info.name, store),
            group_name=init_info.name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {one: one for one in range(init_info.world)}

    def start_weight_update(self) -> None:
        """Prepare layers whose weights are stored in another form than in checkpoints."""
        if not current_platform.is_cpu():
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Convert those layers."""
        if not current_platform.is_cpu():
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket; the base class synchronizes an accelerator, which a CPU is not."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Receive a bucket and load it into the model."""
        received = self._broadcast(update_info) if update_info.data is None else _decoded(update_info)
        if update_info.names == [PACKED]:
            received = self._changed(received[0][1])
        self.model.load_weights(received)

    def _changed(self, packed: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return what to load after a packed bucket."""
        if self._receiver is None:
            self._receiver = rollgym_deltas.DeltaReceiver()
        changed = self._receiver.take(packed)
        if self._receiver.delta and not current_platform.is_cpu():
            # The layerwise reload expects all tensors of a layer: they are copied from the host at the end.
            return list(self._receiver.tensors.items()) if self._receiver.stamp is not None else []
        return cast("list[tuple[str, torch.Tensor]]", changed)

    def shutdown(self) -> None:
        """Leave the broadcast group."""
        group, self._group = self._group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)

    def _broadcast(self, info: BucketInfo) -> list[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("The server has not joined a broadcast group.")
        received = []
        for name, dtype, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            torch.distributed.broadcast(tensor, src=0, group=self._group)
            received.append((name, tensor))
        return received


def _decoded(info: BucketInfo) -> list[tuple[str, torch.Tensor]]:
    data = bytearray(base64.b64decode(info.data or "", validate=True))
    received: list[tuple[str, torch.Tensor]] = []
    at = 0
    for name, dtype, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        tensor = torch.frombuffer(data, dtype=kind, count=count, offset=at).reshape(shape)
        at += count * tensor.element_size()
        received.append((name, tensor))
    if at != len(data):
        raise ValueError(f"the bucket has {len(data)} bytes, its tensors {at}")
    return received


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, RollgymTransfer)


class WorkerExtension:
    """Methods of each worker, called by ``/collective_rpc``."""

    def rollgym_describe(self) -> dict[str, Any]:
        """Return what the trainer checks before it uses the server."""
        worker: Any = self
        config = worker.vllm_config
        linear = [one.weight for one in worker.model_runner.model.modules() if hasattr(one, "cpu_linear")]
        transfer = config.weight_transfer_config
        return {
            "device": current_platform.device_type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "context": config.model_config.max_model_len,
            "world": config.parallel_config.world_size_across_dp,
            "transfer": None if transfer is None else transfer.backend,
            "deltas": rollgym_deltas is not None,
            "routed_experts": config.aux_output_config.enable_return_routed_experts,
            "packed": any(weight.numel() == 0 for weight in linear),
        }
