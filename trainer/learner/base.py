"""What all learners share: which rows are scored, what is lost on them, and how an update is made of that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rollgym.devices.choose import torch_device
from rollgym.engines.embedded.features import position_limit
from rollgym.errors import RunError, UsageError
from rollgym.seeding import derive_rng
from rollgym.trainer.batch import Batch, micro_batches, mini_batches
from rollgym.trainer.kl import AdaptiveKL
from rollgym.trainer.layout import LayoutChoice, choose_layout, known_layout, use_layout
from rollgym.trainer.learner import Metrics
from rollgym.trainer.learner.critic import Critic
from rollgym.trainer.learner.host import Movable
from rollgym.trainer.learner.imitation import FreshStart, imitation_loss, imitation_settings
from rollgym.trainer.learner.lora import add_lora
from rollgym.trainer.learner.nets import mixed_precision, own_copy
from rollgym.trainer.learner.objective import (
    batch_weights,
    critic_loss,
    engine_gap,
    losses_of,
    shortest,
    teaching,
    wrong_model,
)
from rollgym.trainer.learner.settings import LearnerSettings, rate_at
from rollgym.trainer.learner.shards import Checkpoint
from rollgym.trainer.loss_metrics import Metric, merge, summary
from rollgym.trainer.losses import LossSettings
from rollgym.trainer.packing import bundles, whole_episodes
from rollgym.trainer.rows import FloatArray, Row
from rollgym.trainer.scoring import Layout, Scores, parts
from rollgym.trainer.weighting import Mode


class BaseLearner(Movable):
    """A learner but for its optimiser, and for where its weights are.

    Args:
        model: A folder in Hugging Face format, or a model (which is copied).
        settings: The optimiser, and how a batch is cut up.
        loss: The policy loss.
        weighting: What a token weighs: ``token-mean``, ``sequence-mean`` or ``constant`` (with ``constant``).
        temperature: That the engine samples with: log-probs are of that distribution.
        total_steps: Optimiser steps in the whole run, for the schedule.
        kl_target: Adapt the loss's ``kl_coef`` so that the KL to the first policy stays near this.
        seed: Of how a batch is dealt into mini-batches.
        share: Train the very model that is given, not a copy.
        judges: Train a critic of its own and nothing else; the policy is somebody else's.
        keep_reference: Whether a KL penalty has this learner keep the first policy.
        gap_limit: Nats by which the engine's log-probs of tokens that these weights sampled may differ from
            the learner's on average: more ends the run before anything is learnt from them.
    """

    def __init__(
        self,
        model: nn.Module | Path,
        settings: LearnerSettings,
        loss: LossSettings,
        *,
        weighting: Mode = "token-mean",
        constant: float | None = None,
        temperature: float = 1.0,
        total_steps: int = 1,
        kl_target: float | None = None,
        seed: int = 0,
        share: bool = False,
        judges: bool = False,
        keep_reference: bool = True,
        gap_limit: float | None = None,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise UsageError("Training needs a temperature above 0: at 0 nothing is sampled.")
        self.settings = settings
        self.loss = loss
        self.steps = 0
        """Optimiser steps so far."""
        self._weighting, self._constant = weighting, constant
        self._temperature = temperature
        self._total_steps = total_steps
        self._seed = seed
        self._adaptive = None if kl_target is None else AdaptiveKL(loss.kl_coef, kl_target)
        self._device = torch_device(settings.device, "learner.device")
        if settings.threads is not None and self._device.type == "cpu":
            torch.set_num_threads(settings.threads)
        self._gap_limit = gap_limit
        plain: Any = model if share else own_copy(model, self._device)
        choose = known_layout if share else choose_layout
        self._choice = choose(plain, settings.layout)
        self.judges, self._keeps = judges, keep_reference and not judges
        first = self._keeps and loss.kl_coef and settings.lora is None
        self._original: Any = copy.deepcopy(plain).requires_grad_(False) if first else None
        self.critic = None if judges else Critic.make(plain, settings)
        self.model: Any = plain if settings.lora is None else add_lora(plain, settings.lora)
        if judges:
            self.model = Critic(plain, own=True)
        elif settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in self.model.modules():
                # transformers keeps everything otherwise; nothing else is in training mode, nor any dropout
                module.training = getattr(module, "gradient_checkpointing", False)

    @property
    def has_critic(self) -> bool:
        """Whether `values` can be asked."""
        return self.judges or self.critic is not None

    @property
    def _layout(self) -> Layout:
        return self._choice.layout

    def describe_layout(self) -> LayoutChoice:
        """How rows are laid out for the model, and how far that is from a plain forward."""
        return self._choice

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-probs of all action tokens under the weights as they are now."""
        return self._pass(batch, self._logprobs)

    def reference(self, batch: Batch) -> FloatArray:
        """The same under the weights that the run began with."""
        if self._original is None and self.settings.lora is not None:
            with self.model.disable_adapter():
                return self._pass(batch, self._logprobs)
        if self._original is None:
            raise UsageError("There is no reference policy: it is kept where kl_coef is above 0.")
        return self._pass(batch, self._reference_logprobs)

    def set_reference(self, model: Path) -> None:
        """Take another policy as the reference: the one after a warm start, say."""
        self.reload()
        if self._keeps and self.loss.kl_coef:
            self._original = own_copy(model, self._device).requires_grad_(False)
            use_layout(self._original, self._layout)

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """The critic's value before each action token, and after the last turn of each episode."""
        self._critic()
        before = self._pass(batch, self._values)
        ends = [number for number, one in enumerate(batch.episodes) if one.final is not None]
        found = np.zeros(len(batch.episodes))
        config = self._body_states().config
        bounds = [getattr(config, "max_position_embeddings", None), position_limit(config)]
        context = min((bound for bound in bounds if bound is not None), default=None)
        finals = [cast(Any, batch.episodes[number].final)[:context] for number in ends]
        rows = [Row(np.append(ids, 0), np.array([len(ids)])) for ids in finals]
        with torch.no_grad(), self._precision():
            for part in self._split(list(map(len, finals)), padded=True):
                values = self._values([rows[i] for i in part] or [min(rows, key=lambda row: len(row.inputs))])
                if part:
                    found[[ends[i] for i in part]] = values.double().cpu().numpy()
        return before, self._join(found).tolist()

    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch, in as many optimiser steps as it has mini-batches and epochs."""
        if not batch.tokens:
            raise UsageError("There is nothing to learn from: the batch has no action tokens.")
        self.reload()
        batch, entropy = (batch, {}) if self.judges else self._with_old(batch)
        seen: list[dict[str, Metric]] = []
        norms: list[float] = []
        first: Metrics = {}
        if not self.judges and batch.arrays["old"] is not batch.arrays["behaviour"]:
            self._check_gap(engine_gap(batch, {}))
        for epoch in range(self.settings.epochs):
            rng = derive_rng("mini-batches", self._seed, self.steps, epoch)
            for episodes in mini_batches(len(batch.episodes), self.settings.mini_batches, rng):
                seen += self._accumulate(batch, episodes)
                if not first:
                    first = summary(merge(seen))
                    if not self.judges:
                        self._check_gap(engine_gap(batch, first))
                norms.append(self._step())
                self.steps += 1
        merged = merge(seen)
        metrics = summary(merged)
        for name in (name for name, metric in merged.items() if metric.kind == "sum"):
            metrics[name] /= len(norms)
        metrics |= {} if self.judges else engine_gap(batch, first) | entropy
        metrics["grad_norm"] = float(np.mean(norms))
        metrics["learning_rate"] = self._groups()[0]["lr"]
        return metrics

    def _check_gap(self, found: Metrics) -> None:
        """Stop where engine and learner do not compute the same model."""
        gap = found.get("logprob_gap", 0.0)
        if self._gap_limit is not None and gap > self._gap_limit:
            raise RunError(wrong_model(self._policy_name, gap, self._gap_limit))

    @property
    def _policy_name(self) -> str:
        inner = self.model.get_base_model() if self.settings.lora is not None else self.model
        return type(inner).__name__

    def adapt_kl(self, metrics: Metrics) -> float:
        """Move the KL coefficient towards its target, where it has one; returns the coefficient."""
        if self._adaptive is not None:
            self.loss = replace(self.loss, kl_coef=self._adaptive.update(metrics["reference_kl"]))
        return self.loss.kl_coef

    def set_kl(self, coef: float) -> None:
        """Go on with a KL coefficient that was adapted before."""
        if self._adaptive is not None and coef:
            self._adaptive.coef = coef
            self.loss = replace(self.loss, kl_coef=coef)

    def start_imitation(self, rate: float, steps: int) -> None:
        """Learn by imitation from here on, at this rate, in so many optimizer steps.

        The trained parameters (LoRA matrices or all weights), the precision, gradient checkpointing, the
        optimizer and its clipping stay those of the learner's settings.
        """
        self._usual = (self.settings, self.loss, self._weighting, self._constant, self._total_steps)
        self._usual_gap_limit, self._gap_limit = self._gap_limit, None  # no engine sampled what is shown
        self.settings, self.loss = imitation_settings(self.settings, rate), imitation_loss()
        self._weighting, self._constant, self._total_steps = "token-mean", None, max(steps, 1)
        self._groups()[0]["base"] = rate
        self.steps = 0

    def end_imitation(self, taught: Path | None) -> None:
        """Go back to the usual loss and schedule with a fresh optimizer.

        Args:
            taught: The policy as `export` wrote it. A separate critic starts from it; others do not need it.
        """
        away = self.away
        self.reload()
        self.settings, self.loss, self._weighting, self._constant, self._total_steps = self._usual
        self._gap_limit = self._usual_gap_limit
        self._groups()[0]["base"] = self.settings.learning_rate
        self._begin()
        self._start_from(FreshStart(self._trained(), taught if self.settings.critic == "own" else None))
        self.steps = 0
        if away:
            self.offload(away)

    # What a kind of learner says of itself.

    def _groups(self) -> list[dict[str, Any]]:
        """The optimiser's parameter groups."""
        raise NotImplementedError

    def _start_from(self, checkpoint: Checkpoint) -> None:
        """Take over the weights and the optimizer state of a checkpoint."""
        raise NotImplementedError

    def _scores(self, rows: Sequence[Row], values: bool) -> tuple[Scores, Tensor | None]:
        """What the policy makes of rows, and the critic where it is asked; with gradients."""
        raise NotImplementedError

    def _values(self, rows: Sequence[Row]) -> Tensor:
        raise NotImplementedError

    def _reference_logprobs(self, rows: Sequence[Row]) -> Tensor:
        raise NotImplementedError

    def _micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """What is around the forward and backward pass of a micro-batch."""
        return nullcontext()

    def _backward(self, losses: list[Tensor]) -> None:
        """Add to the gradient: of the policy's loss and, if there is a second, of the critic's."""
        raise NotImplementedError

    def _step(self) -> float:
        """Use up the gradient; returns its norm."""
        raise NotImplementedError

    def _split(self, lengths: Sequence[int], *, padded: bool) -> list[list[int]]:
        """The micro-batches to compute here. An empty one keeps others company, and counts for 0."""
        return micro_batches(lengths, self.settings.micro_tokens, padded=padded)

    def _join(self, found: FloatArray) -> FloatArray:
        """Numbers of all rows, from those that were computed here and zeros."""
        return found

    def _precision(self) -> torch.autocast:
        asked = self.settings.dtype or ("float32" if self._device.type == "cpu" else "bfloat16")
        return mixed_precision(self._device.type, asked == "bfloat16")

    def _logprobs(self, rows: Sequence[Row]) -> Tensor:
        return self._scores(rows, False)[0].logprobs

    def _logprobs_and_entropy(self, rows: Sequence[Row]) -> Tensor:
        scores = self._scores(rows, False)[0]
        return torch.stack([scores.logprobs, scores.entropy])

    def _body_states(self) -> Any:
        return self.model.body if self.judges else parts(self.model)[0]

    def _pass(self, batch: Batch, compute: Callable[[Sequence[Row]], Tensor]) -> FloatArray:
        """Numbers for all action tokens, without gradients; where ``compute`` gives [k, N], k of each."""
        self.reload()
        found = np.zeros(batch.tokens)
        with torch.no_grad(), self._precision():
            for part in self._parts(batch, range(len(batch.rows))):
                values = compute([batch.rows[row] for row in part or shortest(batch)])
                if found.ndim < values.dim():
                    found = np.zeros((len(values), batch.tokens))
                if part:
                    found[..., batch.flat(part)] = values.double().cpu().numpy()
        return self._join(found)

    def _parts(self, batch: Batch, rows: Sequence[int], *, whole: bool = False) -> Iterator[list[int]]:
        """Micro-batches; what the model reads alike is in the same one where it can be, and counts once.

        With ``whole``, the rows of an episode are never apart.
        """
        padded = self._layout == "padded"
        chosen = [batch.rows[row] for row in rows]
        if whole:
            sets = whole_episodes([int(batch.owner[row]) for row in rows], chosen, padded=padded)
        else:
            # Padded rows lie side by side, so only whole rows can count once: no bundle has room for others.
            sets = bundles(chosen, 0 if padded else self._room(sum(len(row.inputs) for row in chosen)))
        for part in self._split([cost for _, cost in sets], padded=padded):
            yield [rows[i] for number in part for i in sets[number][0]]

    def _room(self, tokens: int) -> int:
        """How much is kept together of a batch with so many tokens."""
        return self.settings.micro_tokens

    def _with_old(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with the proximal policy's log-probs, and its entropy where a pass computed it.

        That pass reads every row, also those that have no gradient: the entropy is over all action tokens.
        """
        if "old" in batch.arrays:
            return batch, {}
        if self.settings.old_logprobs == "behaviour":
            return batch.having(old=batch.arrays["behaviour"]), {}
        old, entropy = self._pass(batch, self._logprobs_and_entropy)
        return batch.having(old=old), {"entropy": float(entropy.mean())}

    def _accumulate(self, batch: Batch, episodes: Sequence[int]) -> list[dict[str, Metric]]:
        """Add up the gradient of these episodes, micro-batch by micro-batch."""
        self._begin()
        weights = batch_weights(batch, episodes, self._weighting, self._constant)
        whole = self.loss.ratio_level == "episode"
        chosen = list(self._parts(batch, self._teaching(batch, batch.rows_of(episodes)), whole=whole))
        asked = self.critic is not None and "returns" in batch.arrays
        found = []
        for number, part in enumerate(chosen, start=1):
            rows = part or shortest(batch)
            weight = weights if part else np.zeros(batch.tokens)
            with self._micro_batch(number == len(chosen)):
                with self._precision():
                    losses, metrics = self._losses(batch, rows, weight, asked)
                self._backward(losses)
            found.append(metrics)
        return found

    def _losses(
        self, batch: Batch, part: Sequence[int], weights: FloatArray, asked: bool
    ) -> tuple[list[Tensor], dict[str, Metric]]:
        rows = [batch.rows[row] for row in part]
        if self.judges:
            return critic_loss(batch, part, weights, self._values(rows), self.settings)
        scores, values = self._scores(rows, asked)
        return losses_of(batch, part, weights, scores, values, self.loss, self.settings)

    def _teaching(self, batch: Batch, rows: list[int]) -> list[int]:
        return teaching(batch, rows, self.loss)

    def _share_of_rate(self) -> float:
        return rate_at(self.settings, self.steps, self._total_steps)

    def _critic(self) -> Critic:
        found: Critic | None = self.model if self.judges else self.critic
        if found is None:
            raise UsageError("There is no critic: set learner.critic to head or own.")
        return found

    def _trained(self) -> dict[str, nn.Parameter]:
        """Every parameter that is trained, by name, in the optimiser's order."""
        found = {f"model.{n}": p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.critic is not None:
            found |= {f"critic.{n}": p for n, p in self.critic.named_parameters()}
        return found
