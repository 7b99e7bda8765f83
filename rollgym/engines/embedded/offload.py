"""Memory that is not needed: that of the weights for a time, free heap, and kernels of past sizes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["WeightStorage", "trim_memory"]

# oneDNN keeps a kernel with its scratch memory for each size of a matrix product, 1,024 of them by default:
# hundreds of megabytes where rows have many lengths. It reads this at the first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "128")


class WeightStorage:
    """The storages behind some tensors, views included: can be freed, and reallocated without content."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():  # a memory-mapped file
                raise ValueError("memory-mapped weights cannot be released")
            storages[storage._cdata] = storage
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def released(self) -> bool:
        """True while the memory is freed."""
        return any(self._sizes) and not self.nbytes

    def release(self) -> None:
        """Free the memory; the tensors must not be read until `reallocate`."""
        for storage in self._storages:
            storage.resize_(0)

    def reallocate(self) -> None:
        """Allocate the memory again; the content of the tensors is undefined."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)


def trim_memory(device: torch.device) -> None:
    """Return freed memory of a device to the driver or the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc; other allocators return memory on their own
