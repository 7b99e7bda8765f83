"""Routed experts as servers report them: the choices of every layer for every token but the last."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import AgentError
from rollgym.core.routed_experts import ExpertArray, RoutedExperts, expert_dtype
from rollgym.models.hf_files import ExpertShape
from rollgym.utils.http_client import short

BYTES_PER_CHOICE = 6
"""Upper bound of the size of one choice in a reply: four bytes in base64."""


def token_bytes(shape: ExpertShape | None) -> int:
    """Return the maximum size of the experts of one token in a reply."""
    return 0 if shape is None else shape.layers * shape.choices * BYTES_PER_CHOICE


def from_int32(text: str, shape: ExpertShape, tokens: int) -> RoutedExperts:
    """Return the experts that SGLang reports: int32 values in base64.

    Raises:
        ValueError: They are not those of so many tokens of this model.
    """
    values = np.frombuffer(_decoded(text), dtype="<i4")
    return _checked(values.reshape(-1, shape.layers, shape.choices), shape, tokens)


def from_npy(text: str, shape: ExpertShape, tokens: int) -> RoutedExperts:
    """Return the experts that vLLM reports: an array in numpy's file format, in base64.

    Raises:
        ValueError: They are not those of so many tokens of this model.
    """
    try:
        values = np.load(io.BytesIO(_decoded(text)), allow_pickle=False)
    except (OSError, EOFError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, np.ndarray):
        raise ValueError("they are not an array")
    return _checked(values, shape, tokens)


def routed_experts(
    text: str | None,
    decode: Callable[[str, ExpertShape, int], RoutedExperts],
    shape: ExpertShape | None,
    tokens: int,
    where: str,
) -> RoutedExperts | None:
    """Return the experts of a reply; ``None`` if the server reports none."""
    if text is None or shape is None:
        return None
    try:
        return decode(text, shape, tokens)
    except ValueError as error:
        raise AgentError(f"{where} returned invalid routed experts: {short(error)}.") from None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(str(error)) from None


def _checked(values: NDArray[np.generic], shape: ExpertShape, tokens: int) -> RoutedExperts:
    if values.shape != (tokens, shape.layers, shape.choices) or values.dtype.kind not in "iu":
        raise ValueError(
            f"{values.dtype} of the shape {values.shape} for {tokens} tokens, {shape.layers} layers and "
            f"{shape.choices} choices"
        )
    integers = values.astype(np.int64)
    if integers.size and not 0 <= integers.min() <= integers.max() < shape.experts:
        raise ValueError(f"ids outside the {shape.experts} experts")
    return RoutedExperts.from_array(cast(ExpertArray, integers.astype(expert_dtype(shape.experts))))
