"""The learner in this process: one model, one device, any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rollgym.engines import WeightSource
from rollgym.engines.checkpoint_names import in_memory, to_checkpoint
from rollgym.errors import RunError
from rollgym.trainer.learner.adam import clipped_step, make_adam
from rollgym.trainer.learner.base import BaseLearner
from rollgym.trainer.learner.host import moments
from rollgym.trainer.learner.lora import merged_weights
from rollgym.trainer.learner.shards import (
    LOCAL_OPTIMISER,
    LOCAL_WEIGHTS,
    Checkpoint,
    adam_fragments,
    begin_moments,
    fill,
    forget_shards,
    has_shards,
    open_checkpoint,
)
from rollgym.trainer.rows import Row
from rollgym.trainer.scoring import Scores, score
from rollgym.trainer.weights import write_weights


class LocalLearner(BaseLearner):
    """Policy, optional critic and reference, and an optimiser. `BaseLearner` says what it takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._optimiser = make_adam(self)

    def weights(self) -> WeightSource:
        """The policy's weights by name; valid until the next `update`."""
        return WeightSource(tensors=self._tensors())

    def save(self, path: Path) -> None:
        """Write weights, optimiser and step count."""
        from safetensors.torch import save_file

        forget_shards(path)
        save_file({name: in_memory(one) for name, one in self._state().items()}, path / LOCAL_WEIGHTS)
        torch.save({"optimiser": self._optimiser.state_dict(), "steps": self.steps}, path / LOCAL_OPTIMISER)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote, or from the shards of other learners."""
        from safetensors.torch import load_file

        self.reload()
        own = self._state()
        if has_shards(path):
            with open_checkpoint(path, {n: t.shape for n, t in own.items()}) as checkpoint:
                self._start_from(checkpoint)
                self.steps = checkpoint.steps
            return
        found = load_file(path / LOCAL_WEIGHTS, device=str(self._device))
        if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in own.items()}:
            raise RunError(f"The checkpoint in {path} is of another model or other learner settings.")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])
        saved = torch.load(path / LOCAL_OPTIMISER, map_location=self._device, weights_only=True)
        self._optimiser.load_state_dict(saved["optimiser"])
        self.steps = saved["steps"]

    def export(self, path: Path) -> None:
        """Write the policy as a model folder, without a tokenizer."""
        inner = self.model.get_base_model() if self.settings.lora is not None else self.model
        inner.config.save_pretrained(path)
        named = to_checkpoint(inner, self._tensors())
        write_weights({name: in_memory(tensor) for name, tensor in named.items()}, path)

    def _start_from(self, checkpoint: Checkpoint) -> None:
        begin_moments(self._trained(), self._optimiser, checkpoint.parameter_steps)
        fill(adam_fragments(self._trained(), self._optimiser), checkpoint)

    def _groups(self) -> list[dict[str, Any]]:
        return self._optimiser.param_groups

    def _score(self, rows: Sequence[Row], model: Any = None) -> Scores:
        return score(model or self.model, rows, layout=self._layout, temperature=self._temperature)

    def _reference_logprobs(self, rows: Sequence[Row]) -> Tensor:
        return self._score(rows, self._original).logprobs

    def _scores(self, rows: Sequence[Row], values: bool) -> tuple[Scores, Tensor | None]:
        scores = self._score(rows)
        return scores, self._critic().of_states(scores.hidden, rows, self._layout) if values else None

    def _values(self, rows: Sequence[Row]) -> Tensor:
        return self._critic().before(rows, self._body_states, self._layout)

    def _begin(self) -> None:
        self._optimiser.zero_grad(set_to_none=True)

    def _backward(self, losses: list[Tensor]) -> None:
        cast(Any, losses[0] + losses[1] if len(losses) > 1 else losses[0]).backward()

    def _step(self) -> float:
        return clipped_step(
            self._optimiser,
            bound=self.settings.clip_norm,
            share=self._share_of_rate(),
            # A head pulls at the policy's own states: one gradient, one norm.
            together=self.critic is not None and self.critic.body is None,
        )

    def _part(self, part: str) -> list[Tensor]:
        return moments(self._optimiser) if part == "optimiser" else self._parameters()

    def _tensors(self) -> dict[str, Tensor]:
        if self.settings.lora is not None:
            return merged_weights(self.model)
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def _state(self) -> dict[str, Tensor]:
        """Everything that is trained, by name."""
        return {name: parameter.detach() for name, parameter in self._trained().items()}
