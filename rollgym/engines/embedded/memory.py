"""Giving up memory for a while: of the weights, without the tensors that lie in it being made anew."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Blocks", "return_freed"]


class Blocks:
    """The memory behind some tensors, views included: it can be given up, and taken back without content."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():  # a file that is mapped into memory
                raise ValueError("memory that is not the model's own cannot be given up")
            found[storage._cdata] = storage
        self._storages = list(found.values())
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def given_up(self) -> bool:
        """True where there is nothing behind the tensors."""
        return any(self._sizes) and not self.held

    def give_up(self) -> None:
        """Free it all; nobody may look at the tensors now."""
        for storage in self._storages:
            storage.resize_(0)

    def take_back(self) -> None:
        """Have as much memory again; what the tensors say is anything."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)


def return_freed(device: torch.device) -> None:
    """Hand what was freed on a device to whoever else needs it, instead of keeping it for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # of glibc; others give memory back by themselves
