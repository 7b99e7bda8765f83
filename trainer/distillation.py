"""On-policy distillation: teachers score the policy's own tokens.

    advantage = reward_weight * advantage from rewards
              + weight * sum over teachers of share * (log-prob of the teacher - log-prob of the policy)

The second term is the negative estimate of the reverse KL at a sampled token, without any later tokens. The
policy's log-prob is the one that the token was sampled with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from rollgym.agents.chat.credentials import find_key
from rollgym.chat import load_tokenizer
from rollgym.core.errors import UsageError
from rollgym.core.seeding import file_hash
from rollgym.core.types import SCHEMA_VERSION
from rollgym.engines.servers.scoring import TokenScorer
from rollgym.io.run_dir import read_json, write_json
from rollgym.models.zoo import check_model
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray, IntArray
from rollgym.trainer.distill_config import DistillConfig, TeacherConfig
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.weight_export import holds_weights
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.rollout_batch import RolloutBatch
from rollgym.trainer.server_teacher import ServerTeacher

TEACHERS = "teachers.json"
"""File of a run folder: the hashes of the teachers' weights, or the names of the models of servers."""


class Teacher(Protocol):
    """A frozen model: a `Learner` that is never updated, or a `ServerTeacher`."""

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens."""

    def top_logprobs(self, batch: Batch, k: int) -> tuple[IntArray, FloatArray]:
        """Return the ``k`` most likely tokens at each action position: ids and log-probs, both [k, N]."""


class Teachers:
    """Frozen models that score batches.

    Args:
        settings: The weights.
        models: The model of each teacher.
    """

    def __init__(self, settings: DistillConfig, models: Sequence[Teacher]) -> None:
        self._settings, self._models = settings, models

    def add(self, rollout: RolloutBatch) -> RolloutBatch:
        """Add the distillation term to the advantages, and ``teacher_kl`` to the metrics."""
        settings, batch = self._settings, rollout.batch
        total = sum(teacher.weight for teacher in settings.teachers)
        behavior = batch.arrays["behavior"]
        kl, metrics = np.zeros(batch.num_tokens), {}
        for number, (teacher, model) in enumerate(zip(settings.teachers, self._models, strict=True)):
            own = behavior - model.logprobs(batch)
            kl += teacher.weight / total * own
            if len(self._models) > 1:
                metrics[f"teacher_kl/{number}"] = float(own.mean())
        advantages = settings.reward_weight * batch.arrays["advantages"] - settings.weight * kl
        metrics["teacher_kl"] = float(kl.mean())
        return RolloutBatch(batch.with_arrays(advantages=advantages), rollout.metrics | metrics)


def open_teachers(config: TrainConfig, folder: Path, model: Path) -> Teachers | None:
    """Load the teachers of a run; ``model`` is the policy that it starts from.

    Raises:
        UsageError: A teacher has another tokenizer than the policy, or has changed since the run was started.
    """
    if config.distill is None:
        return None
    return Teachers(config.distill, teacher_models(config.distill.teachers, config, folder, model))


def teacher_models(
    teachers: Sequence[TeacherConfig], config: TrainConfig, folder: Path, model: Path
) -> list[Teacher]:
    """The model of each teacher; ``model`` is the policy that the run in ``folder`` starts from.

    Raises:
        UsageError: A teacher has another tokenizer than the policy, or has changed since the run was started,
            or no server answers at its address.
    """
    paths = [check_model(teacher.path, "distill.teachers path") for teacher in teachers]
    vocabulary = _vocabulary(model)
    for path in paths:
        if _vocabulary(path) != vocabulary:
            raise UsageError(
                f"distill.teachers: the tokenizer in {path} differs from the policy's in {model}. A teacher "
                "must have the same tokens with the same ids."
            )
    scorers = [
        None
        if teacher.url is None
        else TokenScorer(teacher.url, api_key=find_key(teacher.api_key_env).reveal())
        for teacher in teachers
    ]
    _check_unchanged(folder, paths, scorers)
    frozen = LearnerConfig(
        learning_rate=0.0,
        max_tokens_per_microbatch=config.learner.max_tokens_per_microbatch,
        device=config.learner.device,
        dtype=config.learner.dtype,
        threads=config.learner.threads,
        router_replay="off",  # the recorded experts are the policy's
    )
    options = LearnerOptions(temperature=config.learner_temperature)
    loss = LossConfig("reinforce", tis_cap=None)
    return [
        ServerTeacher(scorer, len(vocabulary)) if scorer else Learner(path, replace(frozen), loss, options)
        for path, scorer in zip(paths, scorers, strict=True)
    ]


def _vocabulary(folder: Path) -> dict[str, int]:
    return cast(dict[str, int], cast(Any, load_tokenizer(folder)).get_vocab())


def _check_unchanged(folder: Path, paths: Sequence[Path], scorers: Sequence[TokenScorer | None]) -> None:
    """Store what identifies the teachers; a resumed run must have the same.

    The weights of a server cannot be read, so the name of its model stands for them.
    """
    known = [
        {"server_model": scorer.model}
        if scorer
        else {file.name: file_hash(file) for file in sorted(path.iterdir()) if holds_weights(file)}
        for path, scorer in zip(paths, scorers, strict=True)
    ]
    record = {"schema": SCHEMA_VERSION, "teachers": known}
    file = folder / TEACHERS
    if file.is_file() and read_json(file) != record:
        raise UsageError(f"A teacher has changed since the run in {folder} was started: restore its weights.")
    write_json(file, record)
