"""The process group of a learner's ranks: rendezvous, and the few collectives beside those of strategies."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollgym.core.errors import RunError, UsageError, one_line
from rollgym.trainer.data.sequences import FloatArray, IntArray

TIMEOUT = 600.0
"""Seconds after which a collective that a rank does not join is an error."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return an unused port for `join_group`, chosen where rank 0 runs."""
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
    """Join the process group at rank 0's address; returns when all ranks have joined.

    Args:
        rank: This process's rank, from 0.
        world: Number of ranks.
        address: Rank 0's address.
        port: A free port there, such as `free_port` returns.
        backend: Default: gloo without a GPU, else gloo for CPU tensors and NCCL for the rest.
        timeout: Seconds after which a rank that dies or does not respond is an error on the others.
    """
    if not 0 <= rank < world:
        raise UsageError(f"Rank {rank} is out of range: {world} ranks are 0 to {world - 1}.")
    if dist.is_initialized():
        raise UsageError("This process is already in a process group: call leave_group first.")
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
                f"Port {port} on {address}, rank 0's rendezvous, is in use: choose another with `free_port`."
            ) from error
        raise RunError(
            f"Rank {rank} of {world} could not join the others at {address}:{port} within {timeout:g} s: "
            f"{one_line(error)}"
        ) from error


def leave_group() -> None:
    """Leave the process group; does nothing outside of one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ProcessGroup:
    """The process group that this process has joined. All ranks call every method, in the same order."""

    def __init__(self, rank: int, world: int) -> None:
        if not dist.is_initialized():
            raise UsageError("This process is not in a process group: call join_group first.")
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise UsageError(
                f"This process joined as rank {dist.get_rank()} of {dist.get_world_size()}, not as rank "
                f"{rank} of {world}."
            )
        self.rank, self.world = rank, world
        on_cpu = "gloo" in str(dist.get_backend_config())
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def sum(self, values: FloatArray) -> FloatArray:
        """Return the sum over all ranks, in float64."""
        tensor = torch.from_numpy(values).to(self._device)
        dist.all_reduce(tensor)
        total: FloatArray = tensor.cpu().numpy()
        return total

    def combine(self, values: FloatArray, starts: IntArray, lengths: IntArray) -> FloatArray:
        """Return the values of all ranks: each has its own, at these places of the last dimension.

        Sends each value once, as float32 where that loses nothing on any rank.
        """
        planes = values.reshape(-1, values.shape[-1])
        at = _places(starts, lengths)
        mine = planes[:, at] + 0.0  # never -0.0, as in a sum
        exact = bool(np.array_equal(mine.astype(np.float32), mine, equal_nan=True))
        shares = self.gather([exact, starts.tolist(), lengths.tolist(), len(planes)])
        kind = torch.float32 if all(share[0] for share in shares) else torch.float64
        most = max(len(share[1]) and sum(share[2]) for share in shares)
        # A rank without values does not know how many numbers each place has.
        height = max(share[3] for share in shares)
        padded = torch.zeros(height, most, dtype=kind)
        padded[: len(planes), : mine.shape[1]] = torch.from_numpy(mine)
        padded = padded.to(self._device)
        received = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(received, padded)
        result = np.zeros((height, values.shape[-1]))
        for (_, theirs, counts, _), part in zip(shares, received, strict=True):
            places = _places(np.array(theirs, dtype=np.int64), np.array(counts, dtype=np.int64))
            result[:, places] = part[:, : len(places)].double().cpu().numpy()
        return result.reshape((*values.shape[:-1], -1)) if height == len(planes) else result

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; values must be JSON-serializable."""
        data = torch.from_numpy(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy())
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self._device))
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = data
        received = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(received, padded)
        return [
            json.loads(bytes(raw[:count].cpu().numpy())) for raw, count in zip(received, counts, strict=True)
        ]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if one failed: its own error there, a `RunError` on the others."""
        errors = self.gather(None if error is None else one_line(error))
        if error is not None:
            raise error
        for rank, message in enumerate(errors):
            if message is not None:
                raise RunError(f"Rank {rank} of {self.world} failed: {message}")


def _places(starts: IntArray, lengths: IntArray) -> IntArray:
    spans = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


@contextmanager
def all_or_none(group: ProcessGroup | None) -> Iterator[None]:
    """Fail on all ranks where the block, which must not contain collectives, fails on one."""
    if group is None:
        yield
        return
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    group.raise_together(problem)
