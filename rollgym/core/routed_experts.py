"""The experts that the routers of a mixture-of-experts model chose, by token, layer and choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExpertArray", "RoutedExperts", "expert_dtype", "missing_expert"]

ExpertArray = NDArray[np.uint8] | NDArray[np.uint16]
"""[tokens, layers, choices] ids of experts; the largest value of the dtype where none was recorded."""


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the smallest dtype for ids of so many experts and for the value that marks a missing one.

    Example:
        >>> expert_dtype(128).itemsize, expert_dtype(256).itemsize
        (1, 2)
    """
    return np.dtype(np.uint8) if num_experts < 256 else np.dtype(np.uint16)


def missing_expert(dtype: np.dtype[np.uint8] | np.dtype[np.uint16]) -> int:
    """Return the value that marks a choice that was not recorded."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Experts of consecutive tokens, as plain values that survive JSON: a byte or two for each choice.

    Example:
        >>> RoutedExperts.from_array(np.zeros((5, 48, 8), dtype=np.uint8)).num_tokens
        5
    """

    layers: int
    """Layers with a router."""
    choices: int
    """Experts for each token in each layer."""
    bytes_per_choice: int
    """1 or 2."""
    data: bytes
    """Ids of experts, little-endian, by token, layer and choice."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.choices < 1 or self.bytes_per_choice not in (1, 2):
            raise ValueError(
                f"routed experts need layers, choices and 1 or 2 bytes per choice, not {self.layers}, "
                f"{self.choices} and {self.bytes_per_choice}"
            )
        if len(self.data) % self.bytes_per_token:
            raise ValueError(f"{len(self.data)} bytes are not whole tokens of {self.bytes_per_token} bytes")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the choices of one token."""
        return self.layers * self.choices * self.bytes_per_choice

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.data) // self.bytes_per_token

    @classmethod
    def from_array(cls, experts: ExpertArray) -> RoutedExperts:
        """Return the experts of an array ``[tokens, layers, choices]`` of uint8 or uint16."""
        _, layers, choices = experts.shape
        plain = np.ascontiguousarray(experts, dtype=experts.dtype.newbyteorder("<"))
        return cls(layers=layers, choices=choices, bytes_per_choice=plain.itemsize, data=plain.tobytes())

    def to_array(self) -> ExpertArray:
        """Return a read-only array ``[tokens, layers, choices]``."""
        dtype = np.dtype("<u1" if self.bytes_per_choice == 1 else "<u2")
        experts: ExpertArray = np.frombuffer(self.data, dtype=dtype).reshape(-1, self.layers, self.choices)
        return experts

    def part(self, start: int, end: int) -> RoutedExperts:
        """Return the experts of the tokens from ``start`` up to ``end``."""
        size = self.bytes_per_token
        return RoutedExperts(
            layers=self.layers,
            choices=self.choices,
            bytes_per_choice=self.bytes_per_choice,
            data=self.data[start * size : end * size],
        )
