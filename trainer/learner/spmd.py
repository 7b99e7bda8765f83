"""One rank of a learner that several processes are together.

Every rank is called with the same whole batch, in the same order, and computes the rows that are its share.
A token's weight is that in the whole batch, so gradients are added over the ranks. What is returned is of the
whole batch, and the same on every rank. Ranks that have fewer micro-batches than others, or none, compute
rows of weight 0 until all are done: collectives must match.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollgym.engines import WeightSource
from rollgym.engines.checkpoint_names import separable
from rollgym.errors import RunError, boundary
from rollgym.trainer.batch import Batch, balanced, micro_batches
from rollgym.trainer.layout import LayoutChoice
from rollgym.trainer.learner import Metrics
from rollgym.trainer.learner.base import BaseLearner
from rollgym.trainer.learner.buckets import Bucket, in_buckets, pieces_of, write_model
from rollgym.trainer.learner.group import Group
from rollgym.trainer.learner.nets import CriticNet, JudgeNet, PolicyNet, Wish, mixed_precision
from rollgym.trainer.learner.parts import PARTS
from rollgym.trainer.learner.shards import (
    Checkpoint,
    Fragment,
    forget_shards,
    open_checkpoint,
    write_manifest,
    write_part,
)
from rollgym.trainer.loss_metrics import Metric, merge
from rollgym.trainer.rows import FloatArray, Row
from rollgym.trainer.scoring import Scores


class RankLearner(BaseLearner):
    """A learner on one of several ranks; strategies say where weights, gradients and moments are.

    Args:
        group: The ranks that learn together.
        bucket_bytes: How much of the weights is gathered at once for an engine or an export.
        offload: Keep on the processor what the strategy can keep there.
        args: What `BaseLearner` takes.
        options: The same.
    """

    strategy: ClassVar[str]

    def __init__(self, *args: Any, group: Group, bucket_bytes: int, offload: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rank, self.world = group.rank, group.world
        self._group, self._bucket_bytes, self._offload = group, bucket_bytes, offload
        if "padded" in (every := group.gather(self._layout)) and self._layout == "packed":
            # Ranks on unlike machines may have found otherwise, and all must call the same modules.
            self._choice = LayoutChoice(layout="padded", reason=f"ranks chose {', '.join(every)}")
        own = self.critic is not None and self.critic.body is not None
        common: dict[str, Any] = {"layout": self._layout, "bfloat16": super()._precision()._enabled}
        self._policy: PolicyNet | JudgeNet = (
            JudgeNet(self.model, **common)
            if self.judges
            else PolicyNet(self.model, None if own else self.critic, temperature=self._temperature, **common)
        )
        self._judge = CriticNet(self.critic, **common) if self.critic is not None and own else None
        self._first: PolicyNet | None = None
        with self._together("start"):
            self._assemble()
            self._keep_first()

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-probs of all action tokens under the weights as they are now."""
        with self._together("compute log-probs"):
            return super().logprobs(batch)

    def reference(self, batch: Batch) -> FloatArray:
        """The same under the weights that the run began with."""
        with self._together("compute the reference's log-probs"):
            return super().reference(batch)

    def set_reference(self, model: Path) -> None:
        """Take another policy as the reference: the one after a warm start, say."""
        with self._together("read the reference"):
            super().set_reference(model)
            self._keep_first()

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """The critic's value before each action token, and after the last turn of each episode."""
        with self._together("compute values"):
            return super().values(batch)

    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch, in as many optimiser steps as it has mini-batches and epochs."""
        with self._together("update"):
            return super().update(batch)

    def weights(self) -> WeightSource:
        """The policy's weights in buckets; valid until the next `update`.

        All ranks must go through the buckets, since all have a part in gathering them; those of rank 0 are
        full, the others' are empty.
        """
        return WeightSource(buckets=lambda: self._buckets(self._bucket_bytes))

    def save(self, path: Path) -> None:
        """Write this rank's part into a folder that all ranks see; the last word is rank 0's."""
        with self._together("save"):
            if self.rank == 0:
                forget_shards(path)
            self._group.meet()
            with self._all_or_none():
                part = write_part(path, self.rank, self.world, self._owned())
            parts = self._group.gather(part)
            counts = self._parameter_steps()
            shapes = {n: {"shape": list(s), "steps": counts[n]} for n, s in self._shapes().items()}
            with self._all_or_none():
                if self.rank == 0:
                    write_manifest(path, self.strategy, self.steps, shapes, parts)

    def load(self, path: Path) -> None:
        """Go on from what any learner saved, in whatever number of parts."""
        self.reload()
        with self._together("load"), ExitStack() as stack:
            with self._all_or_none():
                checkpoint = stack.enter_context(open_checkpoint(path, self._shapes()))
            self._start_from(checkpoint)
            self.steps = checkpoint.steps

    def end_imitation(self, taught: Path | None) -> None:
        """Go back to the usual loss and schedule with a fresh optimizer."""
        with self._together("end imitation"):
            super().end_imitation(taught)

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Move these parts to the host's memory, as far as they are not there; bytes of this rank by part."""
        with self._together("make room"):
            # What the strategy keeps there anyway has nowhere to go.
            return {} if self._offload else super().offload(parts)

    def export(self, path: Path) -> None:
        """Write the policy as a model folder, without a tokenizer, from rank 0."""
        with self._together("export"):
            inner = self.model.get_base_model() if self.settings.lora is not None else self.model
            # Where names of checkpoints depend on several weights, all must be there at once.
            shapes = {piece.name: self._shape(piece.parameters[0]) for piece in self._pieces()}
            most = self._bucket_bytes if separable(inner, shapes) else sys.maxsize
            buckets = self._buckets(most)
            with self._all_or_none():
                try:
                    if self.rank == 0:
                        inner.config.save_pretrained(path)
                        write_model(path, inner, buckets, len(in_buckets(self._pieces(), most)))
                finally:
                    for _ in buckets:  # the others gather to the end, whatever happens to the files
                        pass

    # What a strategy says of itself.

    def _assemble(self) -> None:
        """Wrap `_policy` and `_judge`, and make an optimiser."""
        raise NotImplementedError

    def _start_from(self, checkpoint: Checkpoint) -> None:
        with self._all_or_none():
            self._restore(checkpoint)
        self._settle()

    def _keep_first(self) -> None:
        """Make the reference ready."""
        if self._original is not None:
            net = PolicyNet(
                self._original,
                None,
                layout=self._layout,
                temperature=self._temperature,
                bfloat16=super()._precision()._enabled,
            )
            self._first = self._spread(net.requires_grad_(False))

    def _spread(self, net: PolicyNet) -> PolicyNet:
        """A frozen policy as this strategy keeps it: whole on every rank, or in parts."""
        return net

    def _policy_forward(self, rows: Sequence[Row], wish: Wish) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _judge_forward(self, rows: Sequence[Row]) -> Tensor:
        raise NotImplementedError

    def _owned(self) -> list[Fragment]:
        """What this rank saves: all ranks together, everything once."""
        raise NotImplementedError

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Take over what this rank needs of a checkpoint."""
        raise NotImplementedError

    def _settle(self) -> None:
        """What all ranks do together after each has taken over its own."""

    def _parameter_steps(self) -> dict[str, int]:
        """Optimiser steps that each parameter has seen."""
        raise NotImplementedError

    def _shape(self, parameter: nn.Parameter) -> Sequence[int]:
        return parameter.shape

    def _full(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Whole parameters, gathered by all ranks; they need only be right on rank 0."""
        return [parameter.detach() for parameter in parameters]

    # What they share.

    def _precision(self) -> torch.autocast:
        """Nothing: the nets know in what they compute, also inside of whatever wraps them."""
        return mixed_precision(self._device.type, False)

    def _together(self, what: str) -> AbstractContextManager[None]:
        where = f"Learner rank {self.rank} of {self.world} could not {what} (another rank may be lost)"
        return boundary(RunError, where)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Fail on all ranks where the work inside, which meets nobody, fails on one."""
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        self._group.agree(problem)

    def _split(self, lengths: Sequence[int], *, padded: bool) -> list[list[int]]:
        parts = []
        for share in balanced([float(length) for length in lengths], self.world):
            own = micro_batches([lengths[i] for i in share], self.settings.micro_tokens, padded=padded)
            parts.append([[share[i] for i in part] for part in own])
        mine, most = parts[self.rank], max(map(len, parts))
        return mine + [[] for _ in range(most - len(mine))]

    def _room(self, tokens: int) -> int:
        # No bundle may be more than half of a rank's share, or others would wait for that rank.
        return min(super()._room(tokens), tokens // (2 * self.world))

    def _join(self, found: FloatArray) -> FloatArray:
        return self._group.sum(found)

    def _accumulate(self, batch: Batch, episodes: Sequence[int]) -> list[dict[str, Metric]]:
        merged = merge(super()._accumulate(batch, episodes))
        told = self._group.gather({n: [m.kind, float(m.total), float(m.count)] for n, m in merged.items()})
        return [
            {n: Metric(kind, torch.tensor(total).double(), torch.tensor(count).double())
             for n, (kind, total, count) in one.items()}
            for one in told
        ]  # fmt: skip

    def _scores(self, rows: Sequence[Row], values: bool) -> tuple[Scores, Tensor | None]:
        both = values and self._judge is None
        logprobs, entropy, *more = self._policy_forward(rows, "both" if both else "scores")
        found = more[0] if both else self._judge_forward(rows) if values else None
        return Scores(logprobs, entropy, logprobs), found

    def _values(self, rows: Sequence[Row]) -> Tensor:
        if self._judge is not None:
            return self._judge_forward(rows)
        return self._policy_forward(rows, "values")[0]

    def _reference_logprobs(self, rows: Sequence[Row]) -> Tensor:
        assert self._first is not None
        found: Tensor = self._first(rows, "scores")[0]
        return found

    def _shapes(self) -> dict[str, Sequence[int]]:
        return {name: tuple(self._shape(parameter)) for name, parameter in self._trained().items()}

    def _pieces(self) -> list[Any]:
        return pieces_of(self.model, lambda p: torch.Size(self._shape(p)).numel())

    def _buckets(self, most: int) -> Iterator[Bucket]:
        away = self.away if "weights" in self.away else ()
        if away:  # what is gathered is gathered on the devices
            self.reload()
        for pieces in in_buckets(self._pieces(), most):
            with self._together("gather weights"), torch.no_grad():
                every = [parameter for piece in pieces for parameter in piece.parameters]
                full = iter(self._full(every))
                bucket: Bucket = []
                for piece in pieces:
                    tensors = [next(full) for _ in piece.parameters]
                    if self.rank == 0:
                        bucket.append((piece.name, piece.merge(tensors)))
            yield bucket
        if away:
            self.offload(away)
