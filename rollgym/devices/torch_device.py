"""Resolves the torch device of a setting."""

from __future__ import annotations

import importlib
from typing import Any

from rollgym.core.errors import UsageError


def torch_device(name: str | None, key: str = "device") -> Any:
    """Return a `torch.device` that exists; None: CUDA if available, else CPU. Imports torch."""
    torch: Any = importlib.import_module("torch")
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{key} {name!r} is not a device: write cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            why = "sees no CUDA device" if torch.version.cuda else "was built without CUDA"
            raise UsageError(f"{key} {name!r} needs CUDA, but this torch {why}: use cpu, or leave it out.")
        if device.index is not None and device.index >= count:
            raise UsageError(f"{key} {name!r} does not exist: this machine has cuda:0 to cuda:{count - 1}.")
    return device
