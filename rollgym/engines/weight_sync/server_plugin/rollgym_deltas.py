"""Packed weight updates: buckets of whole tensors and deltas as one tensor of bytes, and their receiver.

A server imports this file without rollgym: it uses numpy, torch and ``delta.py`` in the folder above.

A packed bucket is the length of the header (8 bytes, little-endian), the header as JSON, and the arrays of
its tensors one after the other, each starting at a multiple of 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import numpy as np
import torch

PACKED = "rollgym.packed"
"""Name under which a packed bucket is sent as a tensor."""
_ALIGN = 8


class TensorEntry(TypedDict):
    """A tensor in the header."""

    name: str
    dtype: str
    shape: Sequence[int]
    sizes: Sequence[int]
    """Bytes of its arrays: all values, or gaps, steps and words of a delta."""
    checksum: int
    """Of the values after the update."""


class Header(TypedDict):
    """What a packed bucket contains."""

    stamp: str
    """The update."""
    base: str | None
    """The update that it is a delta to; ``None``: it has all tensors."""
    first: bool
    last: bool
    tensors: list[TensorEntry]


def _load_codec() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "delta.py"
    spec = spec_from_file_location("rollgym_delta_codec", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


codec = _load_codec()


def pack(header: Header, arrays: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Return a bucket as bytes; ``arrays`` are those of its tensors, in the order of the header."""
    text = json.dumps(header).encode()
    parts = [len(text).to_bytes(8, "little") + text, *(array.tobytes() for array in arrays)]
    data = bytearray()
    for part in parts:
        data += part + bytes(-len(part) % _ALIGN)
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack(data: np.ndarray[Any, Any]) -> tuple[Header, Iterator[np.ndarray[Any, Any]]]:
    """Return the header of a bucket and its arrays, as views of bytes."""
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header: Header = json.loads(data[8:at].tobytes())
    sizes = [size for entry in header["tensors"] for size in entry["sizes"]]
    ends = np.cumsum([_aligned(at), *map(_aligned, sizes)]).tolist()
    if ends[-1] != len(data):
        raise ValueError(f"the bucket has {len(data)} bytes, its tensors need {ends[-1]}")
    return header, (data[start : start + size] for start, size in zip(ends, sizes, strict=False))


def _aligned(size: int) -> int:
    return size + -size % _ALIGN


class DeltaReceiver:
    """Keeps a copy of the weights on the host, in the dtype of the wire, and applies deltas to it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.stamp: str | None = None
        """The update whose weights it has; ``None`` while one is incomplete."""
        self.delta = False
        """Whether the last bucket is part of a delta."""
        self._coming: str | None = None

    def take(self, packed: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Receive a bucket; returns the tensors that it changes, as views of the copy.

        Raises:
            ValueError: It does not follow what was received, or does not lead to the values that were sent.
        """
        header, arrays = unpack(packed.detach().to("cpu").contiguous().numpy())
        self.delta = header["base"] is not None
        if header["first"]:
            if self.delta and header["base"] != self.stamp:
                raise ValueError("the update is a delta to other weights than those of this server")
            if not self.delta:
                self.tensors = {}
        elif header["stamp"] != self._coming:
            raise ValueError("the first bucket of the update is missing")
        self.stamp, self._coming = None, header["stamp"]
        changed = [self._apply(entry, [next(arrays) for _ in entry["sizes"]]) for entry in header["tensors"]]
        if header["last"]:
            self.stamp, self._coming = header["stamp"], None
        return changed

    def _apply(self, entry: TensorEntry, arrays: list[np.ndarray[Any, Any]]) -> tuple[str, torch.Tensor]:
        name, dtype = entry["name"], getattr(torch, entry["dtype"])
        words_type = codec.WORDS[dtype.itemsize]
        if len(arrays) == 1:
            values = torch.from_numpy(arrays[0].copy()).view(dtype).reshape(tuple(entry["shape"]))
            self.tensors[name] = values
        elif name not in self.tensors:
            raise ValueError(f"there is no {name} that could change")
        tensor = self.tensors[name]
        words = tensor.reshape(-1).view(torch.uint8).numpy().view(words_type)
        if len(arrays) > 1:
            gaps, steps, whole = arrays
            codec.apply_delta(words, codec.Delta(gaps, steps.view(np.int8), whole.view(words_type)))
        if codec.checksum(words) != entry["checksum"]:
            raise ValueError(f"the update of {name} does not lead to the values that were sent")
        return name, tensor
