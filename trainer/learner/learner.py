"""The learner: trains a policy, and a critic where there is one, on batches of token sequences.

A `Learner` cuts a batch into mini-batches, computes losses, and owns schedules, KL adaptation, checkpoints
and exports. Its `RowPartition` divides rows between ranks and into micro-batches, and its `ParallelStrategy`
holds weights, gradients and optimizer states.

With several ranks, every rank is called with the same batch, in the same order, and computes its share of the
rows; it reads the tokens and arrays of these only (`Batch.fetch`). Ranks that hold parts of one model compute
the same rows, and one of them counts. A token's weight is that in the whole batch, so gradients are summed
over ranks. Results are those of the whole batch, and the same on every rank. Ranks with fewer micro-batches
than others compute rows of weight 0 until all are done: collectives must match.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rollgym.core.errors import RunError, UsageError, boundary
from rollgym.core.seeding import derive_rng
from rollgym.devices.torch_device import torch_device
from rollgym.engines.base import WeightSource
from rollgym.engines.embedded.features import position_limit
from rollgym.engines.embedded.offload import trim_memory
from rollgym.engines.embedded.precision import SMALLEST
from rollgym.engines.weight_sync.wire import Part, Sent, ShardEncoder, WireFormat
from rollgym.models.checkpoint_names import separable
from rollgym.trainer.data.batch import Batch, mini_batches
from rollgym.trainer.data.sequences import FloatArray, IntArray, TokenSequence
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.imitation import FreshStart, imitation_config, imitation_loss
from rollgym.trainer.learner.layout import LayoutChoice
from rollgym.trainer.learner.modules import Critic, PolicyModule, TrainedModules
from rollgym.trainer.learner.objective import (
    batch_weights,
    critic_loss,
    engine_gap,
    first_gap,
    micro_batch_loss,
    rows_with_gradient,
    shortest_row,
)
from rollgym.trainer.learner.offload import size
from rollgym.trainer.learner.optim import lr_scale
from rollgym.trainer.learner.process_group import ProcessGroup, all_or_none
from rollgym.trainer.learner.protocol import OFFLOADABLE, Metrics
from rollgym.trainer.learner.row_partition import RowPartition
from rollgym.trainer.learner.sharded_loading import ModelSource
from rollgym.trainer.learner.strategies import find_strategy
from rollgym.trainer.learner.weight_export import (
    Bucket,
    Piece,
    encode_pieces,
    in_buckets,
    pieces_of,
    write_model,
)
from rollgym.trainer.losses.adaptive import AdaptiveEntropy, AdaptiveKL, Coefficients
from rollgym.trainer.losses.metrics import Metric, merge, summary
from rollgym.trainer.losses.settings import LossConfig


class Learner:
    """Policy, optional critic and reference, and an optimizer, in this process. A `LearnerProtocol`.

    Args:
        model: A folder in Hugging Face format, or a model (which is copied).
        config: The optimizer, the critic, and the partition of a batch.
        loss: The policy loss.
        options: Arguments that come from the run.
        strategy: The name of a registered strategy: ``single``, ``ddp``, ``fsdp2``, ``zero1``, ``zero2``,
            ``zero3`` or another. All but ``single`` need `join_group` first.
        rank: This process's rank, from 0.
        world: Number of ranks.
        group: The ranks; default: the process group that this process joined.

    Example:
        >>> learner = Learner(Path("model"), LearnerConfig(learning_rate=1e-5), LossConfig("grpo"))
        >>> learner.update(batch)["policy_loss"]
    """

    def __init__(
        self,
        model: nn.Module | Path | ModelSource,
        config: LearnerConfig,
        loss: LossConfig,
        options: LearnerOptions | None = None,
        *,
        strategy: str = "single",
        rank: int = 0,
        world: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        options = options or LearnerOptions()
        spec = find_strategy(strategy)
        spec.check(world=world, cpu_offload=options.cpu_offload, parallel=config.parallel)
        if spec.distributed and options.share_model:
            raise UsageError(f"strategy={strategy} cannot share a model: it shards or wraps its parameters.")
        self.config, self.loss = config, loss
        self.steps = 0
        """Optimizer steps so far."""
        self._options = options
        self._offloaded: list[str] = []
        self._adaptive_kl = None if loss.kl_target is None else AdaptiveKL(loss.kl_coef, loss.kl_target)
        self._adaptive_entropy = (
            None if loss.entropy_target is None else AdaptiveEntropy(loss.entropy_coef, loss.entropy_target)
        )
        self._rank, self._world = rank, world
        self._group: ProcessGroup | None = None
        name = config.device
        if spec.distributed:
            if name is None and torch.cuda.is_available():
                name = f"cuda:{rank % torch.cuda.device_count()}"
            if name is not None and name.startswith("cuda"):
                torch.cuda.set_device(name)
            self._group = group or ProcessGroup(rank, world)
        self._device = torch_device(name, "learner.device")
        if config.threads is not None and self._device.type == "cpu":
            torch.set_num_threads(config.threads)
        self._keeps_reference = options.keep_reference and not options.value_only
        reference = self._keeps_reference and bool(loss.kl_coef) and config.lora is None
        self.strategy = spec.make(config, self._device, self._group, cpu_offload=options.cpu_offload)
        self.modules = TrainedModules(
            model,
            config,
            options,
            self._device,
            self._group,
            reference=reference,
            on_meta=self.strategy.builds_on_meta,
            autocast=not self.strategy.casts_weights,
            context=self.strategy.context,
        )
        self.partition = RowPartition(
            strategy=self.strategy,
            several=self._group is not None,
            layout=self.modules.layout.layout,
            tokens_per_rank=config.max_tokens_per_microbatch,
        )
        with self._rank_errors("start"):
            self.strategy.wrap(self.modules)
            self._wrap_reference()

    @property
    def model(self) -> Any:
        """The trained transformers or peft model; of a value-only learner, its `Critic`."""
        return self.modules.model

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype; weights are float32."""
        return self.modules.dtype

    @property
    def critic(self) -> Critic | None:
        """The critic that is trained beside the policy."""
        return self.modules.critic

    @property
    def has_critic(self) -> bool:
        """Whether `values` is available."""
        return self.modules.value_only or self.critic is not None

    def describe_layout(self) -> LayoutChoice:
        """Return the layout of rows in a micro-batch and its measured difference from a plain forward."""
        return self.modules.layout

    # Forward passes.

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the current weights."""
        with self._rank_errors("compute log-probs"):
            return self._pass(batch, self._logprobs)

    def top_logprobs(self, batch: Batch, k: int) -> tuple[IntArray, FloatArray]:
        """Return the ``k`` most likely tokens at each action position: ids and log-probs, both [k, N].

        With a smaller vocabulary than ``k``, all of it.
        """
        policy = self.modules.policy
        if self._group is not None or not isinstance(policy, PolicyModule):
            raise UsageError("top_logprobs needs a policy in one process (strategy=single).")

        def compute(rows: Sequence[TokenSequence]) -> Tensor:
            logprobs, ids = policy.top(rows, k)
            return torch.cat([logprobs.T.double(), ids.T.double()])

        both = self._pass(batch, compute)
        logprobs, ids = np.split(both, 2)
        return ids.astype(np.int64), logprobs

    def reference(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the reference policy."""
        with self._rank_errors("compute the reference's log-probs"):
            if self._reference is not None:
                return self._pass(batch, self._reference_logprobs)
            if self.config.lora is not None:
                with self.model.disable_adapter(), self.modules.own_routing():
                    return self._pass(batch, self._logprobs)
            raise UsageError("No reference policy: it is kept if loss.kl_coef is above 0.")

    def set_reference(self, model: Path) -> None:
        """Use the weights in a model folder as the reference policy, such as those after a warm start."""
        with self._rank_errors("read the reference"):
            self.reload()
            if self._keeps_reference and self.loss.kl_coef:
                self.modules.load_reference(model)
                self._wrap_reference()

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """Return the critic's value before each action token and after the last turn of each episode."""
        if not self.has_critic:
            raise UsageError("No critic: set learner.critic to shared or separate.")
        with self._rank_errors("compute values"):
            before = self._pass(batch, self._values)
            own: list[int] = []
            final_lengths = batch.final_lengths
            ends = [number for number, length in enumerate(final_lengths) if length]
            after = np.zeros(len(final_lengths))
            config = self.modules.body.config
            bounds = [getattr(config, "max_position_embeddings", None), position_limit(config)]
            context = min((bound for bound in bounds if bound is not None), default=None)
            lengths = [min(final_lengths[number], context or sys.maxsize) for number in ends]
            shortest = [lengths.index(min(lengths))] if ends else []
            with torch.no_grad():
                for part in self.partition.split(lengths, padded=True):
                    chosen = [_final_row(batch, ends[i], lengths[i]) for i in part or shortest]
                    values = self._values(chosen)
                    if part:
                        after[[ends[i] for i in part]] = values.double().cpu().numpy()
                        own += [ends[i] for i in part]
            places = np.array(own, dtype=np.int64)
            return before, self._combine(after, places, np.ones_like(places)).tolist()

    # Training.

    def update(self, batch: Batch) -> Metrics:
        """Train on a batch: one optimizer step per mini-batch and epoch; returns metrics."""
        with self._rank_errors("update"):
            return self._update(batch)

    def _update(self, batch: Batch) -> Metrics:
        if not batch.num_tokens:
            raise UsageError("There is nothing to learn from: the batch has no action tokens.")
        if self.config.router_replay == "on" and not batch.has_experts:
            raise UsageError(
                "learner.router_replay=on, but the engine reports no experts: start servers at engine.url "
                "with --enable-return-routed-experts, or set learner.router_replay=auto."
            )
        self.reload()
        value_only = self.modules.value_only
        batch, entropy = (batch, {}) if value_only else self._with_old_logprobs(batch)
        seen: list[dict[str, Metric]] = []
        norms: list[float] = []
        first: Metrics = {}
        gap: Metrics | None = None
        if not value_only and batch.arrays["old"] is not batch.arrays["behavior"]:
            gap = self._recomputed_gap(batch)
            self._check_gap(gap)
        for epoch in range(self.config.epochs):
            rng = derive_rng("mini-batches", self._options.seed, self.steps, epoch)
            for episodes in mini_batches(len(batch.episodes), self.config.mini_batches, rng):
                seen += self._accumulate(batch, episodes)
                if not first:
                    first = summary(merge(seen))
                    if not value_only:
                        self._check_gap(first_gap(first) if gap is None else gap)
                norms.append(self.strategy.step(lr_scale(self.config, self.steps, self._options.total_steps)))
                self.steps += 1
        merged = merge(seen)
        metrics = summary(merged)
        for name in (name for name, metric in merged.items() if metric.kind == "sum"):
            metrics[name] /= len(norms)
        metrics |= {} if value_only else (first_gap(first) if gap is None else gap) | entropy
        metrics |= self._routing_metrics()
        metrics["grad_norm"] = float(np.mean(norms))
        metrics["learning_rate"] = self.strategy.param_groups[0]["lr"]
        if self._device.type == "cpu" and self.modules.parameters >= SMALLEST:
            # Activations of many sizes leave gigabytes of free heap, which the engine cannot use.
            trim_memory(self._device)
        return metrics

    def adapt_coefficients(self, metrics: Metrics) -> Coefficients:
        """Move the KL and entropy coefficients towards their targets, if they have one; returns both."""
        if self._adaptive_kl is not None:
            self.loss = replace(self.loss, kl_coef=self._adaptive_kl.update(metrics["reference_kl"]))
        if self._adaptive_entropy is not None:
            self.loss = replace(self.loss, entropy_coef=self._adaptive_entropy.update(metrics["entropy"]))
        return Coefficients(self.loss.kl_coef, self.loss.entropy_coef)

    def set_coefficients(self, coefficients: Coefficients) -> None:
        """Restore adapted coefficients."""
        if self._adaptive_kl is not None and coefficients.kl:
            self._adaptive_kl.coef = coefficients.kl
            self.loss = replace(self.loss, kl_coef=coefficients.kl)
        if self._adaptive_entropy is not None and coefficients.entropy:
            self._adaptive_entropy.coef = coefficients.entropy
            self.loss = replace(self.loss, entropy_coef=coefficients.entropy)

    def start_imitation(self, rate: float, steps: int) -> None:
        """Switch to imitation learning at a learning rate, for a number of optimizer steps.

        The trained parameters (LoRA matrices or all weights), the precision, gradient checkpointing, the
        optimizer and its clipping stay those of the learner's config.
        """
        self._usual = (self.config, self.loss, self._options)
        self.config, self.loss = imitation_config(self.config, rate), imitation_loss()
        self._options = replace(
            self._options,
            total_steps=max(steps, 1),
            gap_limit=None,  # demonstrations are not sampled by an engine
        )
        self.strategy.param_groups[0]["base"] = rate
        self.steps = 0

    def end_imitation(self, taught: Path | None) -> None:
        """Return to the configured loss and schedule with a fresh optimizer.

        A separate critic starts from ``taught``, the policy as `export` wrote it.
        """
        with self._rank_errors("end imitation"):
            offloaded = self.offloaded
            self.reload()
            self.config, self.loss, self._options = self._usual
            self.strategy.param_groups[0]["base"] = self.config.learning_rate
            self.strategy.zero_grad()
            trained = self.modules.trained()
            separate = self.config.critic == "separate"
            self.strategy.restore(FreshStart(trained, taught if separate else None))
            self.steps = 0
            if offloaded:
                self.offload(offloaded)

    # Weights and checkpoints.

    def weights(self, wire: WireFormat | None = None) -> WeightSource:
        """Return the policy's weights, valid until the next `update`.

        With several ranks they come in buckets, which all ranks must iterate over, since all take part in
        gathering them; only those of rank 0 are filled.
        """
        if self._group is None:
            (bucket,) = self._buckets(sys.maxsize)
            return WeightSource(tensors=dict(bucket))
        return WeightSource(buckets=lambda: self._buckets(self._options.bucket_bytes))

    def weight_parts(self, encoder: ShardEncoder, *, full: bool) -> Iterator[tuple[Part, Sent]]:
        """Yield what this rank sends of each bucket of the policy's weights: its own shards of them.

        All ranks must iterate. No rank gathers another's weights, except that those with LoRA matrices are
        merged on rank 0, one at a time.
        """
        offloaded = self._reload_weights()
        for pieces in in_buckets(self._pieces(), self._options.bucket_bytes):
            with self._rank_errors("send weights"), torch.no_grad():
                part = encode_pieces(pieces, self.strategy, encoder, full=full)
            yield part
        if offloaded:
            self.offload(offloaded)

    def save(self, path: Path) -> None:
        """Write a checkpoint into an existing folder, which all ranks see."""
        with self._rank_errors("save"):
            self.strategy.save(path, self.steps)

    def load(self, path: Path) -> None:
        """Restore a checkpoint of any strategy and any number of ranks."""
        self.reload()
        with self._rank_errors("load"):
            self.steps = self.strategy.load(path)

    def export(self, path: Path) -> None:
        """Write the policy into a folder in Hugging Face format, without a tokenizer; rank 0 writes."""
        with self._rank_errors("export"):
            plain, pieces = self.modules.plain_model, self._pieces()
            max_bytes = sys.maxsize
            if self._group is not None:
                shapes = {piece.name: self.strategy.shape(piece.parameters[0]) for piece in pieces}
                # Where a name in checkpoints depends on several weights, all must be there at once.
                max_bytes = self._options.bucket_bytes if separable(plain, shapes) else sys.maxsize
            buckets = self._buckets(max_bytes)
            with all_or_none(self._group):
                try:
                    if self._rank == 0:
                        plain.config.save_pretrained(path)
                        write_model(path, plain, buckets, len(in_buckets(pieces, max_bytes)))
                finally:
                    for _ in buckets:  # the other ranks gather to the end, even if writing fails
                        pass

    # Offloading.

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The parts that are in host memory."""
        return tuple(self._offloaded)

    def offload(self, parts: Sequence[str] = OFFLOADABLE) -> dict[str, int]:
        """Move parts to host memory and drop the gradients; returns this rank's bytes by part.

        Saving and exporting work on offloaded parts; any computation reloads them.
        """
        with self._rank_errors("offload"):
            if unknown := set(parts) - set(OFFLOADABLE):
                raise UsageError(
                    f"A learner has no part {', '.join(sorted(unknown))}: choose from {OFFLOADABLE}."
                )
            if self._options.cpu_offload:  # the strategy keeps them on the CPU already
                return {}
            moved = {}
            self.strategy.zero_grad()
            for part in parts:
                if part not in self._offloaded:
                    moved[part] = self.strategy.offload(part)
                    self._offloaded.append(part)
            trim_memory(self._device)
            return moved

    def reload(self) -> dict[str, int]:
        """Move offloaded parts back to the device; returns bytes by part."""
        moved = {}
        while self._offloaded:
            part = self._offloaded[-1]
            moved[part] = self.strategy.reload(part)
            self._offloaded.pop()
        return moved

    def held(self) -> dict[str, int]:
        """Return the bytes of each part that are on the device."""
        return {
            part: 0 if part in self._offloaded else size(self.strategy.tensors(part)) for part in OFFLOADABLE
        }

    # Computation.

    def _pass(self, batch: Batch, compute: Callable[[Sequence[TokenSequence]], Tensor]) -> FloatArray:
        """Compute numbers for all action tokens without gradients: [N], or [k, N] where ``compute`` is."""
        self.reload()
        results = np.zeros(batch.num_tokens)
        own: list[int] = []
        with torch.no_grad(), self.modules.keep_casts():
            for part in self.partition.micro_batches(batch, range(len(batch.sequences))):
                values = compute([batch.sequences[row] for row in part or shortest_row(batch)])
                if results.ndim < values.dim():
                    results = np.zeros((len(values), batch.num_tokens))
                if part:
                    results[..., batch.token_indices(part)] = values.double().cpu().numpy()
                    own += part
        return self._combine(results, batch.starts[own], np.diff(batch.starts)[own])

    def _combine(self, results: FloatArray, starts: IntArray, lengths: IntArray) -> FloatArray:
        """Add the other ranks' results to this one's, which are at these places of the last dimension."""
        if self._group is None:
            return results
        if self._rank not in self.strategy.counted_ranks:
            starts, lengths = starts[:0], lengths[:0]
        return self._group.combine(results, starts, lengths)

    def _logprobs(self, rows: Sequence[TokenSequence]) -> Tensor:
        return self.strategy.forward(rows, "scores")[0]

    def _logprobs_and_entropy(self, rows: Sequence[TokenSequence]) -> Tensor:
        return torch.stack(self.strategy.forward(rows, "scores"))

    def _reference_logprobs(self, rows: Sequence[TokenSequence]) -> Tensor:
        assert self._reference is not None
        logprobs: Tensor = self._reference(rows, "scores")[0]
        return logprobs

    def _values(self, rows: Sequence[TokenSequence]) -> Tensor:
        if self.modules.separate_critic is not None:
            return self.strategy.forward_critic(rows)
        return self.strategy.forward(rows, "values")[0]

    def _with_old_logprobs(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with the proximal policy's log-probs, and its entropy if a pass computed it.

        That pass reads every row, including those without a gradient: the entropy is over all action tokens.
        """
        if "old" in batch.arrays:
            return batch, {}
        if self.config.old_logprobs == "rollout":
            return batch.with_arrays(old=batch.arrays["behavior"]), {}
        old, entropy = self._pass(batch, self._logprobs_and_entropy)
        return batch.with_arrays(old=old), {"entropy": float(entropy.mean())}

    def _recomputed_gap(self, batch: Batch) -> Metrics:
        """Measure the engine's log-probs against recomputed ones; each rank adds up those of its rows."""
        rows = range(len(batch.sequences))
        if self._group is None:
            batch.fetch(rows)
            return summary(engine_gap(batch, rows))
        parts = self.partition.micro_batches(batch, rows)
        own = engine_gap(batch, [row for part in parts for row in part])
        return summary(merge(_gather_metrics(self._group, own, self.strategy.counted_ranks)))

    def _accumulate(self, batch: Batch, episodes: Sequence[int]) -> list[dict[str, Metric]]:
        """Accumulate the gradient of episodes over micro-batches; returns metrics by micro-batch or rank."""
        self.strategy.zero_grad()
        rows = rows_with_gradient(batch, batch.sequences_of(episodes), self.loss)
        by_episode = self.loss.ratio_level == "episode"
        chosen = list(self.partition.micro_batches(batch, rows, by_episode=by_episode))
        weights = batch_weights(batch, episodes, self.loss, [row for part in chosen for row in part])
        metrics = []
        with self.modules.keep_casts():
            for number, part in enumerate(chosen, start=1):
                with self.strategy.microbatch(last=number == len(chosen)):
                    losses, part_metrics = self._losses(
                        batch, part or shortest_row(batch), weights if part else np.zeros(batch.num_tokens)
                    )
                    self.strategy.backward(losses)
                metrics.append(part_metrics)
        return (
            metrics
            if self._group is None
            else _gather_metrics(self._group, merge(metrics), self.strategy.counted_ranks)
        )

    def _losses(
        self, batch: Batch, part: Sequence[int], weights: FloatArray
    ) -> tuple[list[Tensor], dict[str, Metric]]:
        """Compute the losses of a micro-batch: the policy's and, with returns, the critic's."""
        rows = [batch.sequences[row] for row in part]
        if self.modules.value_only:
            return critic_loss(batch, part, weights, self._values(rows), self.config)
        values: Tensor | None = None
        if self.critic is None or "returns" not in batch.arrays:
            logprobs, entropy = self.strategy.forward(rows, "scores")
        elif self.modules.separate_critic is None:
            logprobs, entropy, values = self.strategy.forward(rows, "both")
        else:
            logprobs, entropy = self.strategy.forward(rows, "scores")
            values = self.strategy.forward_critic(rows)
        return micro_batch_loss(batch, part, weights, logprobs, entropy, values, self.loss, self.config)

    def _routing_metrics(self) -> Metrics:
        """Return how many tokens had recorded experts, and how many choices differed from the learner's."""
        replay = self.modules.router_replay
        if replay is None:
            return {}
        counts = replay.take_counts()
        if self._group is not None:
            counts = self._group.sum(counts * (self._rank in self.strategy.counted_ranks))
        return replay.metrics(counts)

    def _check_gap(self, metrics: Metrics) -> None:
        """Raise `RunError` where engine and learner do not compute the same model."""
        gap, limit = metrics.get("train_rollout_logprob_diff", 0.0), self._options.gap_limit
        if limit is not None and gap > limit:
            raise RunError(
                f"The engine's log-probs of {type(self.modules.plain_model).__name__} differ from the "
                f"learner's by {gap:.2g} nats on average for tokens that the current weights sampled (at "
                f"most {limit:g} can be rounding): one of the two computes another model. The batch was not "
                "trained on. Try learner.layout=padded or another engine.kind, and see "
                "docs/model_families.md."
            )

    def _wrap_reference(self) -> None:
        module = self.modules.reference_module()
        self._reference = None if module is None else self.strategy.wrap_frozen(module)

    def _pieces(self) -> list[Piece]:
        return pieces_of(self.model, lambda parameter: torch.Size(self.strategy.shape(parameter)).numel())

    def _buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield the policy's weights in buckets, gathered one after another; only rank 0's are filled."""
        offloaded = self._reload_weights()
        for pieces in in_buckets(self._pieces(), max_bytes):
            with self._rank_errors("gather weights"), torch.no_grad():
                gathered = iter(self.strategy.gather([p for piece in pieces for p in piece.parameters]))
                bucket: Bucket = []
                for piece in pieces:
                    tensors = [next(gathered) for _ in piece.parameters]
                    if self._rank == 0:
                        bucket.append((piece.name, piece.merge(tensors)))
            yield bucket
        if offloaded:
            self.offload(offloaded)

    def _reload_weights(self) -> tuple[str, ...]:
        """Reload offloaded weights, which ranks gather on the devices; returns what to offload again."""
        offloaded = self.offloaded if self._group is not None and "weights" in self.offloaded else ()
        if offloaded:
            self.reload()
        return offloaded

    def _rank_errors(self, action: str) -> AbstractContextManager[None]:
        """Name the rank in unexpected errors, which may be another rank's."""
        if self._group is None:
            return nullcontext()
        where = f"Learner rank {self._rank} of {self._world} could not {action} (another rank may be lost)"
        return boundary(RunError, where)


def _final_row(batch: Batch, episode: int, length: int) -> TokenSequence:
    """The row with which the state after an episode is valued."""
    ids = cast(IntArray, batch.episodes[episode].final_ids)[:length]
    return TokenSequence(np.append(ids, 0), np.array([len(ids)]))


def _gather_metrics(
    group: ProcessGroup, metrics: dict[str, Metric], ranks: Sequence[int]
) -> list[dict[str, Metric]]:
    """Return the metrics of some ranks, by rank, on all."""
    plain = {
        name: [metric.kind, float(metric.total), float(metric.count)] for name, metric in metrics.items()
    }
    gathered = group.gather(plain)
    return [
        {
            name: Metric(kind, torch.tensor(total).double(), torch.tensor(count).double())
            for name, (kind, total, count) in gathered[rank].items()
        }
        for rank in ranks
    ]
