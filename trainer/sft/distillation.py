"""Offline distillation: recorded tokens are trained towards the distribution of teachers.

    q    = sum over teachers of share * (their probabilities of their top_k tokens, divided by their sum)
    loss = mean over learned tokens of  - sum over v of q(v) * log p(v)

The loss differs from the forward KL of q and the policy p by the entropy of q, which has no gradient.
Teachers read all data once, before the first step; their probabilities are kept in ``teacher_targets.npz`` in
the run folder, so that no second model is in memory while the policy trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple
from zipfile import BadZipFile

import numpy as np

from rollgym.core.errors import UsageError
from rollgym.core.files import replacing
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray, IntArray, TokenEpisode, TokenSequence
from rollgym.trainer.distill_config import OfflineDistillConfig
from rollgym.trainer.distillation import Teacher, teacher_models
from rollgym.trainer.imitation.examples import supervised_batch
from rollgym.trainer.learner.protocol import LearnerProtocol, Metrics
from rollgym.trainer.runtime import MODEL, Components
from rollgym.trainer.sft.config import SFTConfig
from rollgym.trainer.sft.dataset import Dataset, Example
from rollgym.trainer.sft.loop import DataLoop, SFTLoop
from rollgym.trainer.train_run import TrainRun

TARGETS = "teacher_targets.npz"
CHUNK = 256
"""Examples that teachers read at a time."""


class Targets(NamedTuple):
    """The teachers' distributions at learned tokens: entries in the order of the tokens, several for each."""

    tokens: IntArray
    """Index of the learned token."""
    ids: IntArray
    """A token that a teacher expects there."""
    weights: FloatArray
    """Its probability; the sum over the entries of a token is 1."""
    mass: float
    """Mean probability of the teachers' top tokens before it is divided by their sum."""


@dataclass(frozen=True, slots=True)
class SoftExample(Example):
    """An example with an action token for each target."""

    weights: FloatArray = None  # type: ignore[assignment]
    """The probability of each target."""
    learned: int = 0
    """Number of learned tokens."""
    entropy: float = 0.0
    """Sum over the learned tokens of the teachers' entropy."""


class DistillLoop(SFTLoop):
    """Offline distillation."""

    kept: ClassVar[tuple[str, ...]] = ("grad_norm", "learning_rate")
    """Without ``entropy``, whose mean is over targets here."""

    async def prepare(self) -> None:
        """Let the teachers read the data, or read what the run has stored of them."""
        await DataLoop.prepare(self)
        examples = [*self.train_set, *self.validation_set]
        found = await self.components.compute(self._targets, examples)
        count = sum(example.tokens.num_tokens for example in examples)
        starts = np.searchsorted(found.tokens, np.arange(count + 1))
        soft: list[Example] = []
        first = 0
        for example in examples:
            last = first + example.tokens.num_tokens
            part = slice(starts[first], starts[last])
            soft.append(soften(example, found.tokens[part] - first, found.ids[part], found.weights[part]))
            first = last
        count = len(self.train_set)
        self.train_set, self.validation_set = soft[:count], soft[count:]

    def _targets(self, examples: Sequence[Example]) -> Targets:
        config, run = self.config, self.run
        path = run.folder / TARGETS
        if path.is_file():
            return _read(path, sum(example.tokens.num_tokens for example in examples))
        if run.state.step:
            raise UsageError(f"Cannot resume the run in {run.folder}: it has no {TARGETS}.")
        assert isinstance(config, SFTConfig)
        assert config.distill is not None
        run.console.phase("teachers")
        teachers = teacher_models(
            config.distill.teachers, self.components.config, run.folder, run.folder / MODEL
        )
        found = teacher_targets([example.tokens for example in examples], config.distill, teachers)
        with replacing(path) as file:
            np.savez(
                file,
                tokens=found.tokens,
                ids=found.ids.astype(np.int32),
                weights=found.weights,
                mass=np.float64(found.mass),
            )
        run.console.note(
            f"teachers: {len(found.tokens):,} targets, {found.mass:.4f} of the probability in the top "
            f"{config.distill.top_k} tokens"
        )
        return found

    def make_batch(self, examples: Sequence[Example]) -> Batch:
        """The batch of a step."""
        return soft_batch([_soft(example) for example in examples])

    def step_metrics(self, examples: Sequence[Example], found: Metrics) -> Metrics:
        """The metrics of a step, with the forward KL to the teachers."""
        metrics = DataLoop.step_metrics(self, examples, found)
        return {**metrics, "teacher_kl": metrics["loss"] - _entropy(examples)}

    def measure(self, learner: LearnerProtocol, examples: Sequence[Example]) -> Metrics:
        """The validation loss and the forward KL of the current weights."""
        logprobs = learner.logprobs(self.make_batch(examples))
        weights = np.concatenate([_soft(example).weights for example in examples])
        loss = -math.fsum((weights * logprobs).tolist()) / sum(_soft(example).learned for example in examples)
        return {"validation_loss": loss, "validation_teacher_kl": loss - _entropy(examples)}


def make_loop(components: Components, run: TrainRun, config: SFTConfig, data: Dataset) -> SFTLoop:
    """The loop of supervised fine-tuning, or of offline distillation where ``distill`` is set."""
    return (SFTLoop if config.distill is None else DistillLoop)(components, run, config, data)


def teacher_targets(
    episodes: Sequence[TokenEpisode], settings: OfflineDistillConfig, teachers: Sequence[Teacher]
) -> Targets:
    """Let the teachers read episodes; the result is over all their action tokens in order."""
    total = sum(teacher.weight for teacher in settings.teachers)
    shares = [teacher.weight / total for teacher in settings.teachers]
    parts: list[Targets] = []
    masses: list[FloatArray] = []
    first = 0
    for start in range(0, len(episodes), CHUNK):
        batch = supervised_batch(episodes[start : start + CHUNK])
        tokens, ids, weights = [], [], []
        for share, teacher in zip(shares, teachers, strict=True):
            top, logprobs = teacher.top_logprobs(batch, settings.top_k)
            probs = np.exp(logprobs)
            masses.append(share * probs.sum(0))
            tokens.append(np.broadcast_to(np.arange(batch.num_tokens), top.shape).reshape(-1))
            ids.append(top.reshape(-1))
            weights.append((share * probs / probs.sum(0)).reshape(-1))
        parts.append(_merged(np.concatenate(tokens), np.concatenate(ids), np.concatenate(weights), first))
        first += batch.num_tokens
    return Targets(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.weights for part in parts]),
        float(sum(mass.sum() for mass in masses) / first),
    )


def _merged(tokens: IntArray, ids: IntArray, weights: FloatArray, first: int) -> Targets:
    """One entry for each token and target, in order; ``first`` is the index of the first token."""
    size = int(ids.max()) + 1
    keys, spots = np.unique(tokens * size + ids, return_inverse=True)
    sums = np.zeros(len(keys))
    np.add.at(sums, spots, weights)
    return Targets(keys // size + first, keys % size, sums, 1.0)


def soften(example: Example, tokens: IntArray, ids: IntArray, weights: FloatArray) -> SoftExample:
    """An example with its targets as action tokens; ``tokens`` are indices of its learned tokens."""
    episode, first = example.tokens, 0
    sequences = []
    for sequence in episode.sequences:
        last = first + len(sequence.action_positions)
        part = slice(*np.searchsorted(tokens, [first, last]))
        positions = sequence.action_positions[tokens[part] - first]
        sequences.append(TokenSequence(sequence.ids, positions, ids[part].astype(np.int64), sequence.experts))
        first = last
    counts = np.bincount(tokens, minlength=first)
    turns = np.split(counts, np.cumsum(episode.tokens_per_turn)[:-1])
    return SoftExample(
        tokens=replace(
            episode,
            sequences=tuple(sequences),
            behavior=np.zeros(len(tokens)),
            tokens_per_turn=np.array([turn.sum() for turn in turns], dtype=np.int64),
        ),
        task=example.task,
        recorded=example.recorded,
        reply_lengths=example.reply_lengths,
        weights=weights,
        learned=first,
        entropy=-float(np.sum(weights * np.log(np.maximum(weights, np.finfo(np.float64).tiny)))),
    )


def soft_batch(examples: Sequence[SoftExample]) -> Batch:
    """A batch whose loss is the mean over learned tokens of the cross-entropy to the teachers.

    The learner divides by the number of action tokens, which are the targets here.
    """
    targets = sum(len(example.weights) for example in examples)
    scale = targets / sum(example.learned for example in examples)
    return supervised_batch(
        [example.tokens for example in examples], [scale * example.weights for example in examples]
    )


def _soft(example: Example) -> SoftExample:
    assert isinstance(example, SoftExample)
    return example


def _entropy(examples: Sequence[Example]) -> float:
    """The teachers' mean entropy over the learned tokens."""
    soft = [_soft(example) for example in examples]
    return math.fsum(example.entropy for example in soft) / sum(example.learned for example in soft)


def _read(path: Path, count: int) -> Targets:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = Targets(
                file["tokens"], file["ids"].astype(np.int64), file["weights"], float(file["mass"])
            )
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from None
    if not np.array_equal(np.unique(found.tokens), np.arange(count)):
        raise UsageError(f"{path} does not fit the data of the run: expected targets of {count} tokens.")
    return found
