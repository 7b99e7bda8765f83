"""Router replay: the learner's forward pass uses the experts that the engine chose for each token.

Rounding, another kernel or newer weights make the routers of engine and learner choose other experts for some
tokens, and such a token's log-prob moves by far more than rounding. With the engine's choice given, the
weights of these experts are computed from the learner's own scores, and gradients flow through them; only
which experts they are is fixed. Tokens without recorded experts are routed by the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rollgym.core.errors import UsageError
from rollgym.core.routed_experts import ExpertArray, missing_expert
from rollgym.engines.embedded.routing import Router, find_routers, watch_topk
from rollgym.trainer.data.sequences import IntArray

RouterReplaySetting = Literal["auto", "on", "off"]
_ATTRIBUTE = "rollgym_router_replay"
MISSING = -1


class RouterReplay:
    """Replaces the choices of a transformer's routers in the forward pass that `set_experts` prepares."""

    def __init__(self, body: Any, routers: Sequence[Router]) -> None:
        self._routers = list(routers)
        self._num_layers = int(getattr(body.config, "num_hidden_layers", 0))
        self._experts: Tensor | None = None
        """[tokens, routers, choices] of the pass that is prepared, or `MISSING`."""
        self._wanted: Tensor | None = None
        """The tokens that the last layer computes, if those are not all."""
        self._paused = False
        self.counts = np.zeros(4)
        """Tokens read, those with recorded experts, their choices, and those that the learner would not have
        made."""
        for number, router in enumerate(self._routers):
            self._attach(number, router)
        setattr(body, _ATTRIBUTE, self)

    def __deepcopy__(self, memo: Any) -> None:
        """Leave copies of the model, such as an engine's, to their own routers."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the routers choose, as those of another policy on the same modules."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def set_experts(
        self,
        experts: Sequence[ExpertArray | None],
        spots: Sequence[IntArray],
        size: int,
        device: torch.device,
    ) -> None:
        """Prepare the next forward pass.

        Args:
            experts: For each part of the pass, the experts of its tokens.
            spots: Positions of these tokens in the pass.
            size: Number of tokens in the pass.
            device: The device of the model.
        """
        self._experts = self._wanted = None
        if self._paused or all(part is None for part in experts):
            return
        choices = max(router.choices for router in self._routers)
        given = np.full((size, len(self._routers), choices), MISSING, dtype=np.int32)
        for part, at in zip(experts, spots, strict=True):
            if part is not None:
                given[at] = self._by_router(part, choices)[: len(at)]
        most = given.max((0, 2))
        for router, largest in zip(self._routers, most, strict=True):
            if largest >= router.experts:
                raise UsageError(
                    f"The engine reports expert {largest} in {router.name}, which has {router.experts}: "
                    "engine and learner run different models."
                )
        recorded = int((given[:, 0, 0] != MISSING).sum())
        self.counts[:2] += len(np.unique(np.concatenate(spots))), recorded
        self._experts = torch.from_numpy(given).to(device)

    def set_wanted(self, wanted: Tensor | None) -> None:
        """Note which tokens the last layer computes in the pass that is prepared."""
        self._wanted = wanted

    def metrics(self, counts: Any) -> dict[str, float]:
        """Return the metrics of an update from `counts`, which may be summed over ranks."""
        tokens, recorded, choices, differing = counts.tolist()
        if not tokens:
            return {}
        return {"router_replay_frac": recorded / tokens} | (
            {"router_mismatch_frac": differing / choices} if choices else {}
        )

    def take_counts(self) -> Any:
        """Return `counts` and start again."""
        counts, self.counts = self.counts, np.zeros(4)
        return counts

    def _by_router(self, part: ExpertArray, choices: int) -> Any:
        """Return recorded experts by router; some engines report all layers, also those without a router."""
        known = part.astype(np.int32)
        known[part == missing_expert(part.dtype)] = MISSING
        if part.shape[1] != len(self._routers):
            layers = [router.layer for router in self._routers]
            if part.shape[1] != self._num_layers or None in layers:
                raise UsageError(
                    f"The engine reports experts of {part.shape[1]} layers, but the learner's model has "
                    f"{len(self._routers)} routers: engine and learner run different models."
                )
            known = known[:, np.array(layers)]
        if part.shape[2] != choices:
            raise UsageError(
                f"The engine reports {part.shape[2]} experts for each token, but the learner's model uses "
                f"{choices}: engine and learner run different models."
            )
        return known

    def _attach(self, number: int, router: Router) -> None:
        def choose(call: int, topk: Callable[[], Any], scores: Tensor, k: int) -> Any:
            if call != router.call or self._experts is None:
                return topk()
            return self._replay(number, topk, scores, k)

        watch_topk(router.module, choose)

    def _replay(self, number: int, topk: Callable[[], Any], scores: Tensor, k: int) -> Any:
        """Return what topk would return if the recorded experts had the highest scores."""
        assert self._experts is not None
        flat = scores.reshape(-1, scores.shape[-1])
        given = self._experts[:, number, :k]
        if len(given) != len(flat) and self._wanted is not None:
            given = given[self._wanted]
        if len(given) != len(flat):
            raise RuntimeError(f"{len(flat)} tokens in a router, but experts of {len(given)}")
        given = given.long()
        with torch.no_grad():
            own = topk()[1].reshape(-1, k)
            recorded = given[:, :1] != MISSING
            chosen = torch.where(recorded, given, own)
            differs = ~(own[:, :, None] == chosen[:, None, :]).any(-1)
            self.counts[2:] += int(recorded.sum()) * k, int(differs.sum())
        shape = (*scores.shape[:-1], k)
        values = flat.gather(-1, chosen)
        return torch.return_types.topk((values.view(shape), chosen.view(shape)))


def make_router_replay(model: Any, body: Any, setting: RouterReplaySetting) -> RouterReplay | None:
    """Prepare a model for router replay, if it is asked for and the model has experts.

    Raises:
        UsageError: ``on`` for a model without routers that can be replayed.
    """
    if setting == "off":
        return None
    routers = find_routers(model)
    if routers:
        return RouterReplay(body, routers)
    if setting == "on":
        raise UsageError(
            f"learner.router_replay=on needs a mixture-of-experts model whose routers choose by torch.topk, "
            f"which {type(model).__name__} does not: set learner.router_replay=off."
        )
    return None


def router_replay_of(body: Any) -> RouterReplay | None:
    """Return the router replay of a transformer."""
    replay: RouterReplay | None = getattr(body, _ATTRIBUTE, None)
    return replay
