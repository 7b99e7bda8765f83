"""Weight loader of an SGLang server (``--custom-weight-loader``): applies packed updates.

SGLang calls it instead of the model's ``load_weights`` where a request names it as ``load_format``. It has no
way to return a failure: an update that does not fit raises, and the scheduler ends rather than generate with
wrong weights.
"""

# The server's PYTHONPATH has rollgym_deltas.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from rollgym_deltas import DeltaReceiver

_RECEIVERS: WeakKeyDictionary[torch.nn.Module, DeltaReceiver] = WeakKeyDictionary()


def load_packed(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load the weights that a bucket changes."""
    receiver = _RECEIVERS.setdefault(model, DeltaReceiver())
    for _, packed in named_tensors:
        model.load_weights(receiver.take(packed))
