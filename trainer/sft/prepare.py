"""The data of a run, from files and demonstrations to examples; ``data.json`` reports on all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollgym.agents.policy.agent import PolicyAgent
from rollgym.chat import load_tokenizer
from rollgym.core.agent import Agent, AgentSetup, make_agent
from rollgym.core.errors import UsageError
from rollgym.core.files import replacing
from rollgym.core.serialization import encode_episode
from rollgym.core.types import SCHEMA_VERSION, Episode
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.evaluation.run_warnings import long_demonstrations
from rollgym.io.run_dir import read_json, write_json
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.trainer.config import EnvConfig
from rollgym.trainer.imitation.warm_start import Demonstration, play
from rollgym.trainer.learner.thread import LearnerThread
from rollgym.trainer.runtime import engine_options, prepare_model
from rollgym.trainer.sft.config import POLICY, DataRunConfig
from rollgym.trainer.sft.dataset import (
    SHOWN,
    Dataset,
    RecordReader,
    model_context,
    no_examples,
    prompt_agent,
    split_off,
    unusable,
)
from rollgym.trainer.sft.records import DATA, DEMONSTRATIONS, DataFile, Record, data_files, read_records
from rollgym.trainer.train_run import TrainRun

T = TypeVar("T")


async def prepare_data(
    config: DataRunConfig, run: TrainRun, files: Sequence[DataFile], make_reader: type[RecordReader]
) -> Dataset:
    """Make or copy the model, play demonstrations, and turn all data into examples."""
    with LearnerThread() as thread:

        async def call(work: Callable[..., T], *args: object) -> T:
            return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

        model = await call(prepare_model, config.run_config(0), run.folder)
        demonstrations: list[Record] = []
        if config.data.agent is not None:
            demonstrations = await _demonstrations(config, run, model)
        run.console.phase("read the data")
        return await call(_read_data, config, run, model, files, demonstrations, make_reader)


def _read_data(
    config: DataRunConfig,
    run: TrainRun,
    model: Path,
    files: Sequence[DataFile],
    demonstrations: Sequence[Record],
    make_reader: type[RecordReader],
) -> Dataset:
    settings, context = config.data, model_context(model)
    max_tokens = settings.max_tokens or context
    if max_tokens > context:
        raise UsageError(f"data.max_tokens={max_tokens} exceeds the model's context of {context} tokens.")
    agent = prompt_agent(model, config.agent)

    def reader(*held_out: tuple[str, str]) -> RecordReader:
        return make_reader(settings, agent, max_tokens, held_out, run.console.note, run.stop.check)

    first, second = reader(*((env.id, config.evaluation.split) for env in config.envs)), reader()
    examples = first.read(files, demonstrations)
    if not examples:
        raise no_examples(first, "train")
    if config.validation.files:
        train, validation = examples, second.read(data_files(config.validation.files))
        if not validation:
            raise no_examples(second, "validate")
    else:
        train, validation = split_off(examples, config.validation.fraction, config.seed)
        if config.validation.fraction and not validation:
            raise UsageError("validation.fraction: with examples of a single task, nothing can be held out.")
    report = {
        "schema": SCHEMA_VERSION,
        "max_tokens": max_tokens,
        "train": len(train),
        "validation": len(validation),
        "learned_tokens": sum(example.tokens.num_tokens for example in train),
        "tokens": sum(len(sequence.ids) for example in train for sequence in example.tokens.sequences),
        "recorded_token_ids": sum(example.recorded is True for example in examples),
        "retokenized": sum(example.recorded is False for example in examples),
        "data": first.report.to_json(),
        "validation_data": second.report.to_json(),
    }
    path = run.folder / DATA
    if path.is_file():
        _refuse_other_data(run.folder, read_json(path), report)
    write_json(path, report)
    console = run.console
    console.note(
        f"data: {len(train)} examples, {report['learned_tokens']:,} of {report['tokens']:,} tokens learned"
        + (f", {len(validation)} to validate" if validation else "")
        + (f"; not used: {words}" if (words := first.report.in_words()) else "")
        + (f"; {count} truncated" if (count := first.report.counts["truncated"]) else "")
    )
    for line in [*unusable(first.report.dropped), *unusable(second.report.dropped)][:SHOWN]:
        console.note(f"skipped {line}")
    for warning in long_demonstrations(
        [length for example in train for length in example.reply_lengths], config.agent.max_tokens
    ):
        console.note(f"warning: {warning.sentence}")
        run.warnings.append(warning)
    return Dataset(train, validation, report)


def _refuse_other_data(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `UsageError` if the data of a resumed run are not those that it was started with."""
    for part in ("data", "validation_data"):
        hashes = {file["path"]: file["sha256"] for file in before[part]["files"]}
        for file in now[part]["files"]:
            if hashes.get(file["path"]) != file["sha256"]:
                raise UsageError(
                    f"{file['path']} has changed since the run in {folder} was started: restore it, or start "
                    "another run."
                )
    if before != now:
        raise UsageError(f"The data differ from those that the run in {folder} was started with ({DATA}).")


async def _demonstrations(config: DataRunConfig, run: TrainRun, model: Path) -> list[Record]:
    """Play demonstrations once and keep them in the run folder; a resumed run reads them."""
    path = run.folder / DEMONSTRATIONS
    if not path.is_file():
        demos = await _play(config, run, model)
        with replacing(path) as file:
            for demo in demos:
                head = msgspec.json.encode({"erred": list(demo.erred)})[:-1] + b","
                file.write(head + encode_episode(demo.episode)[1:] + b"\n")
    records = read_records(DataFile(path, run.folder))
    # Without the folder, whose name may be written differently when the run is resumed.
    return [replace(record, place=Path(record.place).name) for record in records]


async def _play(config: DataRunConfig, run: TrainRun, model: Path) -> list[Demonstration]:
    settings, workers, played = config.data, config.evaluation.workers, 0

    def make(env: EnvConfig) -> Agent:
        if settings.agent == POLICY:
            return _policy(config, model)
        setup = AgentSetup(env_id=env.id, env_kwargs=env.kwargs)
        return make_agent(settings.agent or "", setup, **settings.agent_options)

    def count(episode: Episode) -> None:
        nonlocal played
        played += 1
        run.console.phase(f"play demonstrations: {played}/{settings.episodes}")

    pool = LocalPool(workers, modules=config.imports) if workers else InlinePool()
    try:
        return await play(
            config.demonstrations(),
            config.run_config(0),
            pool,
            per_task=settings.per_task,
            make=make,
            on_episode=count,
        )
    finally:
        await pool.close()


def _policy(config: DataRunConfig, model: Path) -> Agent:
    """The policy before training, with an engine that is closed with the agent."""
    options = engine_options(config.run_config(0))
    return PolicyAgent(lambda: EmbeddedEngine(model, **options), load_tokenizer(model), config.agent)
