"""DeepSpeed in a process that is in a group already, without a launcher."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from rollgym.errors import MissingExtra


def import_deepspeed() -> Any:
    """DeepSpeed itself, or a sentence about how to get it."""
    try:
        deepspeed: Any = import_module("deepspeed")
    except ImportError as error:
        raise MissingExtra("DeepSpeed ZeRO", "distributed") from error
    return deepspeed


def start_deepspeed(device: torch.device) -> Any:
    """DeepSpeed in this process's group, without a launcher."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(LOCAL_RANK=str(device.index or 0), LOCAL_SIZE=str(dist.get_world_size()))
    deepspeed = import_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It is built with a compiler, for more than a minute, and only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False, verbose=False
    )
    return deepspeed
