"""Counts the bytes of tensors while they live: the peak memory of a computation, without a GPU.

Every storage that an operation returns is counted until it is freed, by the tensors' declared sizes. So the
count also works on fake tensors, which have no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that operations make within the context.

    Args:
        fake_only: Count fake tensors only: real ones beside them are small numbers of the program itself.
    """

    def __init__(self, *, fake_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that live now."""
        self.peak = 0
        """The most bytes that lived at once since `phase` was called last."""
        self.peaks: dict[str, int] = {}
        """The most bytes of each phase."""
        self._fake_only = fake_only
        self._phase = ""
        self._sizes: dict[int, int] = {}
        self._paused = 0

    def phase(self, name: str) -> None:
        """Start a phase: peaks are counted by phase."""
        self._phase = name
        self.peak = self.now
        self.peaks[name] = max(self.peaks.get(name, 0), self.now)

    def __enter__(self) -> StorageCount:
        """Start counting."""
        self._undo = [_replace(torch.UntypedStorage, "resize_", self._resizing), *self._ignore_sharding()]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count what an operation returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come next
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if it is not counted yet."""
        if tensor.is_meta or (self._fake_only and not isinstance(tensor, FakeTensor)):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            self._set(key, storage.nbytes())
        else:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._drop, key)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is made in the context."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

    def _resizing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Follow FSDP2, which frees gathered weights by resizing their storage, outside of operations."""

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        return resize

    def _ignore_sharding(self) -> list[Callable[[], None]]:
        """Leave out the whole tensors on which DTensor tries operations to learn the shapes of results."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        def pausing(plain: Callable[..., Any]) -> Callable[..., Any]:
            def propagate(*args: Any, **kwargs: Any) -> Any:
                with self.paused():
                    return plain(*args, **kwargs)

            return propagate

        names = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
        return [
            _replace(ShardingPropagator, name, pausing) for name in names if hasattr(ShardingPropagator, name)
        ]


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace an attribute by its wrapped value; returns a function that restores it."""
    plain = getattr(owner, name)
    setattr(owner, name, wrap(plain))
    return lambda: setattr(owner, name, plain)
