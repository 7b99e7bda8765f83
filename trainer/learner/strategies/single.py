"""``single``: one process with one device, whose checkpoints are two plain files."""

from __future__ import annotations

from pathlib import Path

import torch

from rollgym.core.errors import RunError
from rollgym.models.checkpoint_names import in_memory
from rollgym.trainer.learner.sharded_checkpoint import (
    OTHER_MODEL,
    WHOLE_OPTIMIZER,
    WHOLE_WEIGHTS,
    has_shards,
    remove_manifest,
)
from rollgym.trainer.learner.strategies.base import ParallelStrategy


class SingleStrategy(ParallelStrategy):
    """Everything in one process."""

    def save(self, path: Path, steps: int) -> None:
        """Write weights, optimizer states and the number of optimizer steps."""
        from safetensors.torch import save_file

        remove_manifest(path)
        trained = self.modules.trained()
        save_file({name: in_memory(p.detach()) for name, p in trained.items()}, path / WHOLE_WEIGHTS)
        torch.save({"optimizer": self.optimizer.state_dict(), "steps": steps}, path / WHOLE_OPTIMIZER)

    def load(self, path: Path) -> int:
        """Restore what `save` wrote, or the shards of another strategy; returns the number of steps."""
        from safetensors.torch import load_file

        if has_shards(path):
            return super().load(path)
        trained = self.modules.trained()
        saved_weights = load_file(path / WHOLE_WEIGHTS, device=str(self.device))
        if {n: t.shape for n, t in saved_weights.items()} != {n: p.shape for n, p in trained.items()}:
            raise RunError(OTHER_MODEL.format(path=path))
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved_weights[name])
        saved = torch.load(path / WHOLE_OPTIMIZER, map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(saved["optimizer"])
        steps: int = saved["steps"]
        return steps
