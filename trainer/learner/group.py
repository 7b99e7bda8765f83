"""The processes that learn together: how they find each other, and the little they tell each other."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollgym.errors import RunError, UsageError, one_line
from rollgym.trainer.rows import FloatArray

TIMEOUT = 600.0
"""Seconds after which a rank that does not come to a meeting is given up."""


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on now: for `join_group`, chosen where rank 0 runs."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def join_group(
    rank: int,
    world: int,
    address: str,
    port: int,
    backend: str | None = None,
    *,
    timeout: float = TIMEOUT,
) -> None:
    """Meet the other ranks at rank 0's address; returns when all are there.

    ``backend`` is gloo without a GPU, else gloo for what lies on the processor and NCCL for the rest. A rank
    that dies or stays away for ``timeout`` seconds is an error on the others.
    """
    if not 0 <= rank < world:
        raise UsageError(f"Rank {rank} cannot be one of {world}: ranks are 0 to {world - 1}.")
    if dist.is_initialized():
        raise UsageError("This process is in a group already: call leave_group first.")
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    # Some libraries read these instead of asking torch.
    here = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    try:
        dist.init_process_group(
            chosen,
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise RunError(
                f"Port {port} of {address}, where rank 0 is to be met, is in use: give another (`free_port`)."
            ) from error
        raise RunError(
            f"Rank {rank} of {world} did not meet the others at {address}:{port} within {timeout:g} s: "
            f"{one_line(error)}"
        ) from error


def leave_group() -> None:
    """Part from the other ranks; nothing where there are none."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Group:
    """The group that this process is in. Every method is called by all ranks, in the same order."""

    def __init__(self, rank: int, world: int) -> None:
        if not dist.is_initialized():
            raise UsageError("A learner of several ranks needs its group first: call join_group.")
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise UsageError(
                f"This process joined as rank {dist.get_rank()} of {dist.get_world_size()}, not as rank "
                f"{rank} of {world}."
            )
        self.rank, self.world = rank, world
        on_cpu = "gloo" in str(dist.get_backend_config())
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def sum(self, values: FloatArray) -> FloatArray:
        """The sum over all ranks, in float64."""
        found = torch.from_numpy(values).to(self._device)
        dist.all_reduce(found)
        total: FloatArray = found.cpu().numpy()
        return total

    def gather(self, value: Any) -> list[Any]:
        """What every rank says, by rank: anything that JSON can hold."""
        said = torch.from_numpy(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy())
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(said)], device=self._device))
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        padded[: len(said)] = said
        heard = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(heard, padded)
        return [
            json.loads(bytes(one[:count].cpu().numpy())) for one, count in zip(heard, counts, strict=True)
        ]

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def agree(self, error: Exception | None) -> None:
        """Raise on all ranks where one of them failed: its own error there, a `RunError` on the others."""
        said = self.gather(None if error is None else one_line(error))
        if error is not None:
            raise error
        for rank, why in enumerate(said):
            if why is not None:
                raise RunError(f"Rank {rank} of {self.world} failed: {why}")
