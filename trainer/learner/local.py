"""The learner in this process: one model, one device, any Hugging Face causal language model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rollgym.engines import WeightSource
from rollgym.engines.embedded.model import read_module
from rollgym.errors import RunError, UsageError
from rollgym.seeding import derive_rng
from rollgym.trainer.batch import Batch, micro_batches, mini_batches
from rollgym.trainer.kl import AdaptiveKL
from rollgym.trainer.learner import Metrics
from rollgym.trainer.learner.critic import Critic
from rollgym.trainer.learner.lora import add_lora, merged_weights
from rollgym.trainer.learner.settings import LearnerSettings, rate_at
from rollgym.trainer.loss_metrics import Metric, max_of, mean_of, merge, summary
from rollgym.trainer.losses import LossSettings, Tokens, policy_loss, value_loss
from rollgym.trainer.rows import FloatArray, Row
from rollgym.trainer.scoring import Layout, Scores, allow_packing, check_parts, packs, parts, score
from rollgym.trainer.weighting import Mode, token_weights
from rollgym.trainer.weights import write_weights


class LocalLearner:
    """Policy, optional critic and reference, and an optimiser.

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
    ) -> None:
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
        self._device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if settings.threads is not None and self._device.type == "cpu":
            torch.set_num_threads(settings.threads)
        plain: Any = model if share else self._own(model)
        self._layout: Layout = "packed" if settings.layout != "padded" and packs(plain) else "padded"
        self._original: Any = copy.deepcopy(plain) if loss.kl_coef and settings.lora is None else None
        self.critic = Critic.make(plain, settings)
        self.model: Any = plain if settings.lora is None else add_lora(plain, settings.lora)
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in self.model.modules():
                # transformers keeps everything otherwise; nothing else is in training mode, nor any dropout
                module.training = getattr(module, "gradient_checkpointing", False)
        self._optimiser = torch.optim.AdamW(
            self._groups(), betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )

    @property
    def has_critic(self) -> bool:
        """Whether `values` can be asked."""
        return self.critic is not None

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-probs of all action tokens under the weights as they are now."""
        return self._pass(batch, lambda rows: self._score(rows).logprobs)

    def reference(self, batch: Batch) -> FloatArray:
        """The same under the weights that the run began with."""
        if self._original is None and self.settings.lora is not None:
            with self.model.disable_adapter():
                return self.logprobs(batch)
        if self._original is None:
            raise UsageError("There is no reference policy: it is kept where kl_coef is above 0.")
        return self._pass(batch, lambda rows: self._score(rows, self._original).logprobs)

    def set_reference(self, model: Path) -> None:
        """Take another policy as the reference: the one after a warm start, say."""
        if self.loss.kl_coef:
            self._original = self._own(model)

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """The critic's value before each action token, and after the last turn of each episode."""
        critic = self._critic()
        before = self._pass(batch, lambda rows: critic.before(rows, self._body_states, self._layout))
        ends = [number for number, one in enumerate(batch.episodes) if one.final is not None]
        found = [0.0] * len(batch.episodes)
        context = getattr(self._body_states().config, "max_position_embeddings", None)
        finals = [cast(Any, batch.episodes[number].final)[:context] for number in ends]
        rows = [Row(np.append(ids, 0), np.array([len(ids)])) for ids in finals]
        with torch.no_grad(), self._precision():
            for part in micro_batches(list(map(len, finals)), self.settings.micro_tokens, padded=True):
                chosen = [rows[i] for i in part]
                for i, value in zip(
                    part, critic.before(chosen, self._body_states, self._layout), strict=True
                ):
                    found[ends[i]] = float(value)
        return before, found

    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch, in as many optimiser steps as it has mini-batches and epochs."""
        if not batch.tokens:
            raise UsageError("There is nothing to learn from: the batch has no action tokens.")
        batch = self._with_old(batch)
        seen: list[dict[str, Metric]] = []
        norms: list[float] = []
        first: Metrics = {}
        for epoch in range(self.settings.epochs):
            rng = derive_rng("mini-batches", self._seed, self.steps, epoch)
            for episodes in mini_batches(len(batch.episodes), self.settings.mini_batches, rng):
                seen += self._accumulate(batch, episodes)
                first = first or summary(merge(seen))
                norms.append(self._step())
        merged = merge(seen)
        metrics = summary(merged)
        for name in (name for name, metric in merged.items() if metric.kind == "sum"):
            metrics[name] /= len(norms)
        metrics |= _gap(batch, first)
        metrics["grad_norm"] = float(np.mean(norms))
        metrics["learning_rate"] = self._optimiser.param_groups[0]["lr"]
        return metrics

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

    def weights(self) -> WeightSource:
        """The policy's weights by name; valid until the next `update`."""
        return WeightSource(tensors=self._tensors())

    def save(self, path: Path) -> None:
        """Write weights, optimiser and step count."""
        from safetensors.torch import save_file

        save_file(_contiguous(self._state()), path / "learner.safetensors")
        torch.save({"optimiser": self._optimiser.state_dict(), "steps": self.steps}, path / "optimiser.pt")

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        from safetensors.torch import load_file

        found = load_file(path / "learner.safetensors", device=str(self._device))
        own = self._state()
        if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in own.items()}:
            raise RunError(f"The checkpoint in {path} is of another model or other learner settings.")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])
        saved = torch.load(path / "optimiser.pt", map_location=self._device, weights_only=True)
        self._optimiser.load_state_dict(saved["optimiser"])
        self.steps = saved["steps"]

    def export(self, path: Path) -> None:
        """Write the policy as a model folder, without a tokenizer."""
        inner = self.model.get_base_model() if self.settings.lora is not None else self.model
        inner.config.save_pretrained(path)
        write_weights(_contiguous(self._tensors()), path)

    def _own(self, model: nn.Module | Path) -> Any:
        """A copy on the learner's device that scores rows as the learner needs it."""
        plain: Any = read_module(model) if isinstance(model, Path) else copy.deepcopy(model)
        # Weights are float32 whatever is computed in: a step is too small for bfloat16 to notice.
        plain = plain.to(device=self._device, dtype=torch.float32).train(False)
        if self.settings.layout != "padded" and not allow_packing(plain) and self.settings.layout == "packed":
            raise UsageError(
                f"{type(plain).__name__} cannot attend to packed rows: set learner.layout to padded."
            )
        check_parts(plain, plain.config.vocab_size)
        return plain

    def _precision(self) -> torch.autocast:
        asked = self.settings.dtype or ("float32" if self._device.type == "cpu" else "bfloat16")
        return torch.autocast(self._device.type, torch.bfloat16, enabled=asked == "bfloat16")

    def _score(self, rows: Sequence[Row], model: Any = None) -> Scores:
        return score(model or self.model, rows, layout=self._layout, temperature=self._temperature)

    def _body_states(self) -> Any:
        return parts(self.model)[0]

    def _pass(self, batch: Batch, compute: Any) -> FloatArray:
        """Numbers for all action tokens, without gradients."""
        found = np.zeros(batch.tokens)
        with torch.no_grad(), self._precision():
            for part in self._parts(batch, range(len(batch.rows))):
                found[batch.flat(part)] = compute([batch.rows[row] for row in part]).double().cpu().numpy()
        return found

    def _parts(self, batch: Batch, rows: Sequence[int]) -> Iterator[list[int]]:
        """Micro-batches; rows that the model reads alike are in the same one, and count once."""
        alike: dict[tuple[bytes, bytes], list[int]] = {}
        for row in rows:
            alike.setdefault(batch.rows[row].key, []).append(row)
        sets = list(alike.values())
        lengths = [len(batch.rows[members[0]].inputs) for members in sets]
        for part in micro_batches(lengths, self.settings.micro_tokens, padded=self._layout == "padded"):
            yield [row for i in part for row in sets[i]]

    def _with_old(self, batch: Batch) -> Batch:
        if "old" in batch.arrays:
            return batch
        if self.settings.old_logprobs == "behaviour":
            return batch.having(old=batch.arrays["behaviour"])
        return batch.having(old=self.logprobs(batch))

    def _accumulate(self, batch: Batch, episodes: Sequence[int]) -> list[dict[str, Metric]]:
        """Add up the gradient of these episodes, micro-batch by micro-batch."""
        self._optimiser.zero_grad(set_to_none=True)
        every = batch.lengths
        lengths = [every[number] for number in episodes]
        weights = np.zeros(batch.tokens)
        rows = batch.rows_of(episodes)
        weights[batch.flat(rows)] = np.concatenate(
            token_weights(lengths, self._weighting, constant=self._constant)
        )
        found = []
        for part in self._parts(batch, self._teaching(batch, rows)):
            with self._precision():
                result, metrics = self._losses(batch, part, weights)
            cast(Any, result).backward()
            found.append(metrics)
        return found

    def _teaching(self, batch: Batch, rows: list[int]) -> list[int]:
        """The rows whose gradient is not zero by itself; the others still count in every denominator."""
        loss = self.loss
        if loss.entropy_coef or (loss.kl_coef and loss.kl_in == "loss") or "returns" in batch.arrays:
            return rows
        advantages, starts = batch.arrays["advantages"], batch.starts
        return [row for row in rows if np.any(advantages[starts[row] : starts[row + 1]])] or rows[:1]

    def _losses(self, batch: Batch, part: list[int], weights: FloatArray) -> tuple[Tensor, dict[str, Metric]]:
        rows = [batch.rows[row] for row in part]
        at = batch.flat(part)
        scores = self._score(rows)
        arrays = {name: self._tensor(values[at]) for name, values in batch.arrays.items()}
        numbers = np.repeat(np.arange(len(part)), [len(row.places) for row in rows])
        weight = self._tensor(weights[at])
        result = policy_loss(
            Tokens(
                logprobs=scores.logprobs,
                old=arrays["old"],
                behaviour=arrays["behaviour"],
                advantages=arrays["advantages"],
                weights=weight,
                rows=torch.from_numpy(numbers).to(self._device),
                entropy=scores.entropy,
                reference=arrays.get("reference"),
            ),
            self.loss,
        )
        loss, metrics = result.loss, dict(result.metrics)
        gap = (scores.logprobs.detach() - arrays["behaviour"]).abs()
        metrics |= {"logprob_gap": mean_of(gap, weight != 0), "logprob_gap_max": max_of(gap, weight != 0)}
        if self.critic is not None and "returns" in arrays:
            values = self.critic.of_states(scores.hidden, rows, self._layout)
            worth = value_loss(values, arrays["values"], arrays["returns"], weight, self.settings.value_clip)
            loss = loss + self.settings.value_coef * worth.loss
            metrics |= worth.metrics
        return loss, metrics

    def _step(self) -> float:
        sets = [group["params"] for group in self._optimiser.param_groups]
        if self.critic is not None and self.critic.body is None:
            sets = [sum(sets, [])]  # a head pulls at the policy's own states: one gradient, one norm
        bound = self.settings.clip_norm or float("inf")
        norms = [torch.nn.utils.clip_grad_norm_(parameters, bound) for parameters in sets]
        if not all(map(torch.isfinite, norms)):
            raise RunError(
                "The gradient is not finite: the loss diverged. Lower learner.learning_rate, or look at the "
                "rewards. Nothing that was saved is affected."
            )
        for group in self._optimiser.param_groups:
            group["lr"] = group["base"] * rate_at(self.settings, self.steps, self._total_steps)
        self._optimiser.step()
        self.steps += 1
        return float(norms[0])

    def _groups(self) -> list[dict[str, Any]]:
        rate = self.settings.learning_rate
        groups = [{"params": [p for p in self.model.parameters() if p.requires_grad], "base": rate}]
        if self.critic is not None:
            own = self.settings.critic_rate
            groups.append({"params": list(self.critic.parameters()), "base": rate if own is None else own})
        return [{**group, "lr": group["base"]} for group in groups]

    def _critic(self) -> Critic:
        if self.critic is None:
            raise UsageError("There is no critic: set learner.critic to head or own.")
        return self.critic

    def _tensors(self) -> dict[str, Tensor]:
        if self.settings.lora is not None:
            return merged_weights(self.model)
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def _state(self) -> dict[str, Tensor]:
        """Everything that is trained, by name."""
        found = {f"model.{n}": p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        if self.critic is not None:
            found |= {f"critic.{n}": p.detach() for n, p in self.critic.named_parameters()}
        return found

    def _tensor(self, values: FloatArray) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.float32)


def _gap(batch: Batch, first: Metrics) -> Metrics:
    """How far the engine's log-probs are from this policy's: of all rows, or of those of the first step."""
    old, behaviour = batch.arrays["old"], batch.arrays["behaviour"]
    if old is behaviour:  # the engine's word was taken; the first step began with the policy that played
        return {name: first.get(name, 0.0) for name in ("logprob_gap", "logprob_gap_max")}
    gap = np.abs(old - behaviour)
    return {"logprob_gap": float(gap.mean()), "logprob_gap_max": float(gap.max())}


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
