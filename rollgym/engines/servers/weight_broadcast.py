"""Weight broadcast: the trainer is rank 0 of a process group that the servers join."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class BroadcastGroup:
    """Broadcasts tensors to the servers of a group. Methods block: call them with `in_thread`."""

    def __init__(self, host: str, world: int, name: str, backend: str, timeout: float) -> None:
        self.name = name
        self.backend = backend
        self._world = world
        self._timeout = timedelta(seconds=timeout)
        # Binds the port now, so that no other process can take it.
        self._store = cast(Any, dist).TCPStore(
            host, 0, world, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self._group: Any = None

    @property
    def port(self) -> int:
        """Port that the servers connect to."""
        return int(self._store.port)

    def meet(self) -> None:
        """Wait until all servers have joined."""
        from torch.distributed import distributed_c10d as c10d

        # Servers join the same way; a group of torch's public API would have to include all processes.
        self._group, _ = cast(Any, c10d)._new_process_group_helper(
            self._world,
            0,
            [],
            c10d.Backend(self.backend),
            c10d.PrefixStore(self.name, self._store),
            group_name=self.name,
            timeout=self._timeout,
        )
        cast(Any, c10d)._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._world)}

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors in order."""
        device = "cuda" if self.backend == "nccl" else "cpu"
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach().to(device).contiguous(), src=0, group=self._group)

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                dist.destroy_process_group(group)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking work in a daemon thread, which does not delay the exit of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(error: BaseException | None, value: Any = None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            failed: tuple[BaseException | None, Any] = (error, None)
        else:
            failed = (None, value)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *failed)

    threading.Thread(target=run, name="rollgym-broadcast", daemon=True).start()
    return future
