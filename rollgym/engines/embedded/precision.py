"""Compute dtype: bfloat16 where this machine is faster with it, else float32.

CPUs with AVX-512-BF16 or AMX multiply bfloat16 matrices faster than float32 ones; others emulate it and are
slower. A short measurement decides, with products as in a decode step.
"""

from __future__ import annotations

import logging
import time
from functools import cache

import torch

__all__ = ["bfloat16_speedup", "choose_dtype", "dtype_name", "is_fast_at_bfloat16"]

FAST = 1.3
"""Least speedup for which bfloat16 is chosen: it costs precision."""
SMALLEST = 20_000_000
"""Models with fewer parameters always run in float32 on CPU: they spend little time in matrix products."""
_ROWS, _SIZE, _REPEATS = 32, 1024, 4
log = logging.getLogger(__name__)


@cache
def bfloat16_speedup(threads: int) -> float:
    """Measure how much faster a matrix product is in bfloat16 than in float32 on this CPU: about 20 ms."""
    del threads  # the result depends on it, so the cache does, too
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(_ROWS, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
        times = []
        with torch.inference_mode():
            for _ in range(1 + _REPEATS):
                began = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                times.append(time.perf_counter() - began)
        seconds[dtype] = min(times[1:])
    return seconds[torch.float32] / seconds[torch.bfloat16]


def choose_dtype(requested: torch.dtype | str | None, device: torch.device, parameters: int) -> torch.dtype:
    """Return the dtype to compute with.

    Args:
        requested: A dtype or its name; ``auto``: bfloat16 for a model of at least 20 million parameters on a
            CPU that is fast at it, or on CUDA; None: bfloat16 on CUDA, float32 on CPU.
        device: The device of the model.
        parameters: Number of parameters of the model.
    """
    if isinstance(requested, torch.dtype):
        return requested
    if requested not in (None, "auto"):
        named: torch.dtype = getattr(torch, requested)
        return named
    if device.type != "cpu":
        return torch.bfloat16
    if requested is None or parameters < SMALLEST:
        return torch.float32
    return torch.bfloat16 if is_fast_at_bfloat16() else torch.float32


def is_fast_at_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices clearly faster than float32 ones."""
    speedup = bfloat16_speedup(torch.get_num_threads())
    log.info("bfloat16 is %.2f times as fast as float32 on this CPU", speedup)
    return speedup >= FAST


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that settings use, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
