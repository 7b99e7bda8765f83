"""Routers of mixture-of-experts models: which experts they choose, and how that choice can be replaced.

A router of transformers computes a score for every expert and calls `torch.topk`; what follows turns the
chosen scores into weights, differently in each family. The last such call of a router is its choice.
It is read where an engine records experts, and replaced where a learner replays them (`TopKCalls`): scores,
weights and their gradients are then computed by the model itself, for the given experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollgym.core.routed_experts import expert_dtype

__all__ = [
    "ExpertRecorder",
    "Router",
    "RoutingShape",
    "TopKCalls",
    "find_routers",
    "routing_shape",
    "store_dtype",
    "watch_topk",
]

Choose = Callable[[int, Callable[[], Any], Tensor, int], Any]
"""Takes the number of a call of topk, the call itself, the scores and k; returns what topk is to return."""
_NAMES = ("gate", "router")
_TOPK = (torch.topk, torch.Tensor.topk)
_PROBE = 5
"""Tokens of the pass that finds the routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """Shape of the experts of one token."""

    layers: int
    choices: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which an engine keeps them."""
        return store_dtype(self.experts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.choices * self.dtype.itemsize


def store_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of stored ids of experts; int16 has the bits of uint16 and more operations."""
    return torch.uint8 if expert_dtype(num_experts).itemsize == 1 else torch.int16


@dataclass(frozen=True, slots=True)
class Router:
    """A module that chooses experts."""

    module: nn.Module
    name: str
    call: int
    """Which of its calls of topk chooses the experts, from 0: the last."""
    experts: int
    """Number of experts that it chooses from."""
    choices: int
    """Number of experts that it chooses."""

    @property
    def layer(self) -> int | None:
        """Number of its layer in the model, if its name tells."""
        numbers = re.findall(r"\.(\d+)\.", self.name)
        return int(numbers[0]) if numbers else None


class TopKCalls(TorchFunctionMode):
    """A context in which every call of `torch.topk` is replaced; calls are numbered from 0."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self._choose = choose
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything but topk on."""
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        self._calls += 1
        return self._choose(self._calls - 1, lambda: func(*args, **kwargs), scores, k)


class _Watch:
    """Hooks that replace topk within a module's forward. Copies of the module lose them."""

    def __init__(self, module: nn.Module, choose: Choose) -> None:
        self._choose = choose
        self._modes: list[TopKCalls] = []
        module.register_forward_pre_hook(_Hook(self._enter))
        module.register_forward_hook(_Hook(self._leave), always_call=True)

    def _enter(self) -> None:
        self._modes.append(TopKCalls(self._choose))
        self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Hook:
    def __init__(self, call: Callable[[], None] | None) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        if self._call is not None:
            self._call()

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None)


def watch_topk(module: nn.Module, choose: Choose) -> None:
    """Replace topk within the forward of a module from now on."""
    _Watch(module, choose)


@torch.no_grad()
def find_routers(model: Any) -> list[Router]:
    """Return the routers of a model in the order of a forward pass; empty if it has none that are known.

    Args:
        model: A causal language model. Of one without weights, on the meta device, routers that take hidden
            states alone are found.
    """
    seen: dict[str, Router] = {}
    modules = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in _NAMES}
    scopes: list[str] = []
    handles = []

    def note(number: int, call: Callable[[], Any], scores: Tensor, k: int) -> Any:
        del number
        if scopes:
            name = scopes[-1]
            counts[name] = counts.get(name, -1) + 1
            seen.pop(name, None)  # the order is that of the last calls
            if scores.numel() == _PROBE * scores.shape[-1]:
                seen[name] = Router(modules[name], name, counts[name], scores.shape[-1], int(k))
        return call()

    counts: dict[str, int] = {}
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: scopes.append(name)))
        handles.append(module.register_forward_hook(lambda *_: _leave(scopes), always_call=True))
    embedding = model.get_input_embeddings().weight
    try:
        with TopKCalls(note):
            if embedding.is_meta:
                _probe_alone(modules, torch.zeros(_PROBE, embedding.shape[1], device="meta"))
            elif modules:
                ids = torch.arange(_PROBE, device=embedding.device)[None] % embedding.shape[0]
                model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    found = list(seen.values())
    layers = [router.layer for router in found]
    # Called alone, the routers of one layer are not in the order of a forward pass.
    return [] if embedding.is_meta and len(set(layers)) < len(layers) else found


def _leave(scopes: list[str]) -> None:
    scopes.pop()


def _probe_alone(modules: Mapping[str, nn.Module], hidden: Tensor) -> None:
    """Call each module that may be a router with hidden states; the others fail, which does not matter."""
    for module in modules.values():
        with suppress(Exception):
            module(hidden)


def routing_shape(routers: Sequence[Router]) -> RoutingShape | None:
    """Return the shape of the experts of one token, or ``None`` without routers.

    Layers with fewer choices than others leave places unused; ids are those within a layer.
    """
    if not routers:
        return None
    return RoutingShape(
        layers=len(routers),
        choices=max(router.choices for router in routers),
        experts=max(router.experts for router in routers),
    )


class ExpertRecorder:
    """Collects the experts that each router of a module chooses in a forward pass."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self.shape = routing_shape(routers)
        self._routers = list(routers)
        self._chosen: list[Tensor | None] = [None] * len(routers)
        for number, router in enumerate(routers):
            self._attach(number, router)

    def _attach(self, number: int, router: Router) -> None:
        def choose(call: int, topk: Callable[[], Any], scores: Tensor, k: int) -> Any:
            result = topk()
            if call == router.call:
                self._chosen[number] = result[1].reshape(-1, k)
            return result

        watch_topk(router.module, choose)

    def take(self) -> Tensor:
        """Return the experts of the last pass, ``[row, layer, choice]``."""
        shape = self.shape
        assert shape is not None
        layers = []
        for number, router in enumerate(self._routers):
            chosen = self._chosen[number]
            assert chosen is not None, f"{router.name} has chosen no experts"
            self._chosen[number] = None
            if missing := shape.choices - router.choices:
                chosen = torch.cat([chosen, chosen[:, :1].expand(-1, missing)], 1)
            layers.append(chosen)
        return torch.stack(layers, 1).to(shape.dtype)
