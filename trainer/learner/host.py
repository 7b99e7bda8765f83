"""What a learner moves to the host's memory while something else has its device, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollgym.engines.embedded.memory import return_freed
from rollgym.errors import UsageError
from rollgym.trainer.learner.parts import PARTS


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is in this process; of one that is in parts over the ranks, its own part."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors in this process."""
    return sum(local(tensor).nbytes for tensor in tensors)


def move(tensors: Iterable[Tensor], to: torch.device) -> None:
    """Move what lies behind tensors; whoever holds them keeps holding the same ones.

    On a processor too it is a copy, and the old memory is freed: the same happens everywhere.
    """
    for tensor in tensors:
        here = local(tensor)
        there = torch.empty_like(here.data, device=to, pin_memory=to.type == "cpu" and here.is_cuda)
        there.copy_(here.data)
        here.data = there


class Movable:
    """A learner whose state can leave its device for a while.

    Saving and exporting read it where it is; whatever computes brings it back first.
    """

    _device: torch.device
    model: Any
    critic: Any
    _original: Any

    def __init__(self) -> None:
        self._away: list[str] = []

    @property
    def away(self) -> tuple[str, ...]:
        """The parts that are in the host's memory."""
        return tuple(self._away)

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Move these parts to the host's memory, as far as they are not there; bytes by part."""
        if unknown := set(parts) - set(PARTS):
            raise UsageError(f"A learner has no part {', '.join(sorted(unknown))}: its parts are {PARTS}.")
        moved = {}
        self._begin()
        for part in parts:
            if part not in self._away:
                moved[part] = self._leave(part)
                self._away.append(part)
        return_freed(self._device)
        return moved

    def reload(self) -> dict[str, int]:
        """Bring back what was moved; bytes by part."""
        moved = {}
        while self._away:
            part = self._away[-1]
            moved[part] = self._return(part)
            self._away.pop()
        return moved

    def held(self) -> Mapping[str, int]:
        """Bytes of each part that are on the device."""
        return {part: 0 if part in self._away else size(self._part(part)) for part in PARTS}

    def _parameters(self) -> list[Tensor]:
        """All weights here: of the policy, of a critic and of a reference."""
        every = (net for net in (self.model, self.critic, self._original) if net is not None)
        return list({id(one): one for net in every for one in net.parameters()}.values())

    def _begin(self) -> None:
        """Forget the last gradient."""
        raise NotImplementedError

    def _part(self, part: str) -> list[Tensor]:
        """The tensors of a part."""
        raise NotImplementedError

    def _leave(self, part: str) -> int:
        tensors = self._part(part)
        move(tensors, torch.device("cpu"))
        return size(tensors)

    def _return(self, part: str) -> int:
        tensors = self._part(part)
        move(tensors, self._device)
        return size(tensors)


def moments(optimiser: Any) -> list[Tensor]:
    """The state of an optimiser but for its counts, which are nothing."""
    return [t for state in optimiser.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]
