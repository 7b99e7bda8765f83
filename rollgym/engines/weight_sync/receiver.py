"""`WeightReceiver`: the engine's side of a weight update."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rollgym.core.errors import AgentError
from rollgym.engines.weight_sync.delta import apply_delta, checksum
from rollgym.engines.weight_sync.wire import Chunk, Part, delta_of, words_of

if TYPE_CHECKING:
    from rollgym.engines.weight_sync.chain import Handle, WeightChain


class Mismatch(AgentError):
    """An update does not lead to the values that were sent."""


class WeightReceiver:
    """Assembles tensors from the parts of all ranks, bucket by bucket.

    With delta updates it keeps a copy of the weights on the host, in the dtype of the wire, to which the next
    delta is applied; the engine has its own.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._values: Counter[str] = Counter()
        """Values of each tensor received in a full update."""
        self._own: set[str] = set()
        """Tensors that are not a view of what was received."""
        self._stamp: str | None = None
        """The update whose weights it has; ``None`` while one is incomplete."""
        self._coming: str | None = None
        """The update of which it took buckets already."""
        self._taken = 0
        self.fulls = 0
        """Full updates received."""

    @property
    def stamp(self) -> str | None:
        """The update whose weights it has; ``None`` for none."""
        return self._stamp

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights of `stamp`."""
        return self._tensors

    def take(self, stamp: str, base: str | None, number: int, handles: Sequence[Handle]) -> None:
        """Receive a bucket of an update that is still being sent; one that does not fit in is ignored.

        `complete` receives what was ignored.
        """
        if number == 0 and (base is None or base == self._stamp):
            self._begin(stamp, base)
        if (stamp, number) == (self._coming, self._taken):
            try:
                self._apply(handles)
            except BaseException as error:
                self.reset()
                if not isinstance(error, Mismatch):
                    raise

    def complete(self, chain: WeightChain) -> Mapping[str, Tensor]:
        """Return the weights of a chain: receives what is missing of it."""
        try:
            return self._complete(chain)
        except Mismatch:
            self.reset()  # from the full update on, once
            return self._complete(chain)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget everything."""
        self._tensors, self._own = {}, set()
        self._values.clear()
        self._stamp = self._coming = None

    def _complete(self, chain: WeightChain) -> Mapping[str, Tensor]:
        stamps = [link.stamp for link in chain.links]
        last = chain.links[-1]
        if self._coming == last.stamp:
            for handles in last.buckets[self._taken :]:
                self._apply(handles)
            self._end(last.stamp, last.base)
        else:
            have = stamps.index(self._stamp) + 1 if self._stamp in stamps else 0
            for link in chain.links[have:]:
                self._begin(link.stamp, link.base)
                for handles in link.buckets:
                    self._apply(handles)
                self._end(link.stamp, link.base)
        return self._tensors

    def _begin(self, stamp: str, base: str | None) -> None:
        if base is None:
            self._values.clear()
        self._stamp, self._coming, self._taken = None, stamp, 0

    def _end(self, stamp: str, base: str | None) -> None:
        if base is None:
            self._tensors = {name: self._tensors[name] for name in self._values}  # no older names
            for name, tensor in self._tensors.items():
                if self._values[name] != tensor.numel():
                    raise Mismatch(
                        f"The ranks sent {self._values[name]} of the {tensor.numel()} values of {name}."
                    )
            self.fulls += 1
        self._stamp, self._coming = stamp, None

    def _apply(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self._apply_part(handle.read(), handle.shared)
        self._taken += 1

    def _apply_part(self, part: Part, shared: bool) -> None:
        for chunk in part:
            self._values[chunk.name] += prod(chunk.size)
            if chunk.whole:
                self._overwrite(chunk, shared)
            else:
                self._change(chunk)

    def _overwrite(self, chunk: Chunk, shared: bool) -> None:
        """Use the values of a chunk; without copying them if they are all and stay where they are."""
        dtype: torch.dtype = getattr(torch, chunk.dtype)
        data = chunk.arrays[0]
        if checksum(data) != chunk.checksum:
            raise Mismatch(f"The values of {chunk.name} were damaged on the way.")
        with warnings.catch_warnings():
            # The object store is read-only, and so are these tensors.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            values = torch.from_numpy(data).view(dtype).reshape(chunk.size)
        if chunk.covers_all and shared:
            self._tensors[chunk.name] = values.reshape(chunk.shape)
            self._own.discard(chunk.name)
            return
        target = self._tensors.get(chunk.name)
        if (
            target is None
            or chunk.name not in self._own
            or (target.shape, target.dtype) != (chunk.shape, dtype)
        ):
            target = self._tensors[chunk.name] = torch.empty(chunk.shape, dtype=dtype)
            self._own.add(chunk.name)
        _box(target, chunk).copy_(values)

    def _change(self, chunk: Chunk) -> None:
        """Apply a delta, and check the result."""
        target = self._tensors.get(chunk.name)
        if target is None:
            raise Mismatch(f"There is no {chunk.name} that could change.")
        if chunk.name not in self._own:
            target = self._tensors[chunk.name] = target.clone()
            self._own.add(chunk.name)
        box = _box(target, chunk)
        values = box if box.is_contiguous() else box.contiguous()
        words = words_of(values)
        try:
            apply_delta(words, delta_of(chunk))
        except ValueError as error:
            raise Mismatch(f"The update of {chunk.name} does not fit: {error}.") from None
        if checksum(words) != chunk.checksum:
            raise Mismatch(f"The update of {chunk.name} does not lead to the values that were sent.")
        if values is not box:
            box.copy_(values)


def _box(target: Tensor, chunk: Chunk) -> Tensor:
    """Return the values of a tensor that a chunk has."""
    whole = target.view(chunk.view)
    return whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.size, strict=True))]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits; NaN equals itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(np.array_equal(words_of(one.contiguous()), words_of(other.contiguous())))
