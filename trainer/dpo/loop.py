"""The loop of direct preference optimization: batches of pairs, with the log-probs of the starting policy.

The reference is the policy before training. Its log-probs of all pairs are computed once, before the first
step, and kept in ``reference_logprobs.npy`` in the run folder, so that no second model is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from rollgym.core.errors import UsageError
from rollgym.core.files import replacing
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray
from rollgym.trainer.dpo.pairs import Pair
from rollgym.trainer.imitation.examples import supervised_batch
from rollgym.trainer.learner.objective import batch_weights
from rollgym.trainer.learner.protocol import LearnerProtocol, Metrics
from rollgym.trainer.losses.metrics import summary
from rollgym.trainer.losses.policy import Tokens
from rollgym.trainer.losses.preference import preference_loss
from rollgym.trainer.losses.preference_settings import PreferenceLoss
from rollgym.trainer.sft.dataset import Example
from rollgym.trainer.sft.loop import DataLoop

REFERENCE_LOGPROBS = "reference_logprobs.npy"
PREFERENCE = (
    "preference_accuracy",
    "ranking_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
)
"""Metrics of steps and, with the prefix ``validation_``, of validations."""


class DPOLoop(DataLoop):
    """Direct preference optimization on pairs."""

    kept: ClassVar[tuple[str, ...]] = (
        *DataLoop.kept,
        *PREFERENCE,
        "logprob_chosen",
        "logprob_rejected",
        "dpo_loss",
        "sft_loss",
    )

    async def prepare(self) -> None:
        """Compute the log-probs of the starting policy, or read those that the run has stored."""
        await DataLoop.prepare(self)
        components, run = self.components, self.run
        examples = [*self.train_set, *self.validation_set]
        path = run.folder / REFERENCE_LOGPROBS
        if path.is_file():
            logprobs = _read(path, sum(example.tokens.num_tokens for example in examples))
        elif run.state.step:
            raise UsageError(f"Cannot resume the run in {run.folder}: it has no {REFERENCE_LOGPROBS}.")
        else:
            run.console.phase("reference")
            async with components.training():
                batch = supervised_batch([example.tokens for example in examples])
                logprobs = await components.compute(components.learner.logprobs, batch)
            with replacing(path) as file:
                np.save(file, logprobs)
            # With `devices.offload`, the engine may have given up its weights meanwhile.
            await components.sync_weights(run.state.version)
        cuts = np.cumsum([example.tokens.num_tokens for example in examples])[:-1]
        pairs: list[Example] = [
            replace(_pair(example), reference=part)
            for example, part in zip(examples, np.split(logprobs, cuts), strict=True)
        ]
        count = len(self.train_set)
        self.train_set, self.validation_set = pairs[:count], pairs[count:]

    def make_batch(self, examples: Sequence[Example]) -> Batch:
        """The batch of a step."""
        return pair_batch([_pair(example) for example in examples])

    def measure(self, learner: LearnerProtocol, examples: Sequence[Example]) -> Metrics:
        """The validation loss, accuracy and rewards of the current weights."""
        batch = self.make_batch(examples)
        loss = self.components.config.loss
        assert isinstance(loss, PreferenceLoss)
        found = batch_metrics(batch, learner.logprobs(batch), loss)
        return {
            "validation_loss": found["policy_loss"],
            **{f"validation_{name}": found[name] for name in PREFERENCE},
        }


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    """A batch for `PreferenceLoss`: a pair is an episode, and the sign of a token is its advantage."""
    batch = supervised_batch([pair.tokens for pair in pairs], [pair.signs for pair in pairs])
    references = [pair.reference for pair in pairs if pair.reference is not None]
    return batch.with_arrays(reference=np.concatenate(references))


def batch_metrics(batch: Batch, logprobs: FloatArray, loss: PreferenceLoss) -> Metrics:
    """The loss and the metrics of a batch of pairs, from log-probs of all its action tokens."""
    ids = np.repeat(np.arange(len(batch.episodes)), [episode.num_tokens for episode in batch.episodes])
    tokens = Tokens(
        logprobs=torch.from_numpy(logprobs),
        weights=torch.from_numpy(batch_weights(batch, range(len(batch.episodes)), loss)),
        sequence_ids=torch.from_numpy(ids),
        **{
            name: torch.from_numpy(batch.arrays[name])
            for name in ("old", "behavior", "advantages", "reference")
        },
    )
    return summary(preference_loss(tokens, loss.settings).metrics)


def _pair(example: Example) -> Pair:
    assert isinstance(example, Pair)
    return example


def _read(path: Path, count: int) -> FloatArray:
    try:
        logprobs = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from None
    if logprobs.shape != (count,) or logprobs.dtype != np.float64:
        raise UsageError(f"{path} does not fit the pairs of the run: expected {count} log-probs in float64.")
    return np.asarray(logprobs, dtype=np.float64)
