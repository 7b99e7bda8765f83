"""The training data of a run: records -> selected episodes -> tokens -> training and validation examples.

Every record that was read is counted once: as an example, or under the reason why it is not one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.options import PolicyOptions
from rollgym.chat import load_tokenizer
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.roles import own_trajectory
from rollgym.core.seeding import derive_rng, file_hash
from rollgym.core.types import Episode
from rollgym.engines.base import Engine
from rollgym.trainer.data.sequences import TokenEpisode
from rollgym.trainer.imitation.examples import (
    TokenTurn,
    episode_turns,
    fitting_turns,
    longest_sequence,
    message_turns,
    token_example,
)
from rollgym.trainer.imitation.retokenize import Phrase, recorded_replies, reply_format, retokenize
from rollgym.trainer.sft.config import DataConfig, DataRunConfig, SourceConfig
from rollgym.trainer.sft.records import CHATS, Broken, Chat, DataFile, Record, RecordFormat, read_records

SHOWN = 3
"""Number of unusable records that messages list."""
MOST_LISTED = 1_000
"""Number of records that a report lists for each reason."""
NOTE_SECONDS = 10.0
"""Seconds between notes on the progress of reading."""

DROPPED = {
    "broken": "unusable",
    "failed": "ended by an error",
    "no_turns": "without a turn",
    "held_out": "on a task of the evaluation split",
    "unsuccessful": "not successful",
    "not_best": "not the best of their task",
    "too_long": "too long",
    "unpaired": "without a counterpart of the same task",
}
"""Reasons why a record is not an example, in words."""


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation or an episode in tokens."""

    tokens: TokenEpisode
    task: Hashable
    """Equal for episodes of the same task, which must not be on both sides of a split."""
    recorded: bool | None = None
    """Whether an episode's own token ids are used; ``None`` for a conversation."""
    reply_lengths: tuple[int, ...] = ()
    """Tokens of each learned reply of an episode."""


EpisodeRecord = tuple[Record, Episode]
"""A record, and the episode that is its content."""


@dataclass(slots=True)
class DataReport:
    """Counts and places of everything that was read."""

    files: list[dict[str, Any]] = field(default_factory=list)
    """Path, size and SHA-256 of each file."""
    counts: Counter[str] = field(default_factory=Counter)
    """``read``, ``examples``, and the reasons of `DROPPED`; of the examples, ``truncated``; and, of the
    episodes, ``paired``: those that are in preference pairs."""
    dropped: list[dict[str, str]] = field(default_factory=list)
    """Place and reason of records that are not examples, at most `MOST_LISTED` for each reason."""
    shortest_too_long: int | None = None

    def drop(self, reason: str, place: str, detail: str = "") -> None:
        """Count a record that is not an example."""
        self.counts[reason] += 1
        if self.counts[reason] <= MOST_LISTED:
            text = f"{DROPPED[reason]}: {detail}" if detail else DROPPED[reason]
            self.dropped.append({"place": place, "reason": text})

    def in_words(self) -> str:
        """The records that are not examples, as part of a sentence; empty if there are none."""
        return ", ".join(
            f"{self.counts[name]} {words}" for name, words in DROPPED.items() if self.counts[name]
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"files": self.files, "counts": dict(self.counts), "dropped": self.dropped}


@dataclass(frozen=True, slots=True)
class Dataset:
    """The examples of a run."""

    train: list[Example]
    validation: list[Example]
    report: dict[str, Any]
    """The content of ``data.json``."""

    def num_steps(self, config: DataRunConfig) -> int:
        """Optimizer steps of all epochs, or fewer if ``stop.steps`` says so."""
        steps = config.epochs * -(-len(self.train) // config.batch_size)
        return steps if config.stop.steps is None else min(steps, config.stop.steps)


def prompt_agent(model: Path, options: PolicyOptions) -> PolicyAgent:
    """An agent that builds prompts and encodes replies, without an engine."""
    return PolicyAgent(_no_engine, load_tokenizer(model), options)


def _no_engine() -> Engine:
    raise AssertionError("this agent only builds prompts")


def model_context(model: Path) -> int:
    """The longest sequence that a model can be trained on."""
    from transformers import AutoConfig

    from rollgym.engines.embedded.features import position_limit

    config = AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    text = config.get_text_config()
    bounds = (getattr(text, "max_position_embeddings", None), position_limit(text))
    return int(min((bound for bound in bounds if bound), default=4096))


class RecordReader(ABC):
    """Reads files and turns their records into examples of an objective.

    Args:
        settings: Selection, lengths and the treatment of unusable records.
        agent: Builds the prompts.
        max_tokens: Maximum tokens of a sequence.
        held_out: (environment id, split) whose episodes are not trained on.
        note: Receives a line on progress from time to time.
        check: Called for each record; may raise to stop.
    """

    form: ClassVar[RecordFormat] = CHATS
    """The format of records that are not episodes."""

    def __init__(
        self,
        settings: SourceConfig,
        agent: PolicyAgent,
        max_tokens: int,
        held_out: Iterable[tuple[str, str]] = (),
        note: Callable[[str], None] = lambda text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.report = DataReport()
        self._settings, self._agent, self.max_tokens = settings, agent, max_tokens
        self._held_out = frozenset(held_out)
        self._note, self._check = note, check
        self._noted = time.monotonic()
        self._phrase: Phrase | None = None

    def read(self, files: Sequence[DataFile], extra: Sequence[Record] = ()) -> list[Example]:
        """Return the examples in ``files``, and of ``extra`` records: episodes come last.

        Raises:
            UsageError: A file cannot be read, or too many records are unusable.
        """
        examples: list[Example] = []
        episodes: list[Record] = []
        for file in files:
            size = file.path.stat().st_size
            self.report.files.append({"path": str(file.path), "bytes": size, "sha256": file_hash(file.path)})
            for record in read_records(file, self.form):
                self._read(record, examples, episodes)
        for record in extra:
            self._read(record, examples, episodes)
        self._add_episodes(self._usable(episodes), examples)
        self.report.counts["examples"] = len(examples)
        return examples

    @abstractmethod
    def _add(self, record: Record, examples: list[Example]) -> None:
        """Add the example of a record that is not an episode."""

    @abstractmethod
    def _add_episodes(self, records: Sequence[EpisodeRecord], examples: list[Example]) -> None:
        """Add the examples of all episodes."""

    def hints(self) -> list[str]:
        """Sentences that help a user whose data have no example."""
        report = self.report
        hints = []
        if report.counts["too_long"]:
            hints.append(
                f"The shortest of those that are too long has {report.shortest_too_long} tokens, and at most "
                f"{self.max_tokens} fit: use a model with a longer context{self._if_too_long}."
            )
        if report.counts["held_out"]:
            hints.append("Record episodes of another split: `rollgym eval --split train`.")
        return hints

    _if_too_long: ClassVar[str] = ", or raise data.max_tokens"

    def _read(self, record: Record, examples: list[Example], episodes: list[Record]) -> None:
        self.report.counts["read"] += 1
        self._progress("read", self.report.counts["read"])
        match record.content:
            case Broken(reason):
                self._broken(record.place, reason)
            case Episode() as episode:
                episodes.append(replace(record, content=own_trajectory(episode)))
            case _:
                self._add(record, examples)

    def _progress(self, verb: str, count: int) -> None:
        self._check()
        now = time.monotonic()
        if now - self._noted >= NOTE_SECONDS:
            self._noted = now
            self._note(f"{verb} {count:,} records")

    def _broken(self, place: str, reason: str) -> None:
        settings = self._settings
        if settings.strict:
            raise UsageError(f"{place}: {reason}. (data.strict=false skips such records.)")
        self.report.drop("broken", place, reason)
        if self.report.counts["broken"] > settings.max_broken:
            first = "\n".join(f"  {one}" for one in unusable(self.report.dropped)[:SHOWN])
            raise UsageError(
                f"More than {settings.max_broken} records are unusable (data.max_broken); the first of "
                f"them:\n{first}"
            )

    def _usable(self, records: Sequence[Record]) -> list[EpisodeRecord]:
        """The episodes that may be trained on."""
        report = self.report
        usable: list[EpisodeRecord] = []
        for record in records:
            episode = record.content
            assert isinstance(episode, Episode)
            if episode.outcome.failed:
                detail = "" if episode.error is None else episode.error.message[:200]
                report.drop("failed", record.place, detail)
            elif not episode.turns:
                report.drop("no_turns", record.place)
            elif (episode.spec.env_id, episode.spec.split) in self._held_out:
                report.drop("held_out", record.place)
            else:
                usable.append((record, episode))
        return usable

    def _too_long(self, record: Record, longest: int) -> None:
        report = self.report
        report.drop("too_long", record.place, f"{longest} tokens, at most {self.max_tokens} fit")
        report.shortest_too_long = min(report.shortest_too_long or longest, longest)

    def _turns(self, record: Record) -> tuple[list[TokenTurn], bool | None]:
        agent, content = self._agent, record.content
        if isinstance(content, Chat):
            return message_turns(agent.chat, content.system, content.exchanges), None
        assert isinstance(content, Episode)
        if self._phrase is None:
            self._phrase = reply_format(agent.options.parser)
        recorded = recorded_replies(content, agent)
        told = retokenize(content, agent, self._phrase, recorded=recorded)
        turns = episode_turns(told, [not erred for erred in record.erred])
        if not any(turn.learned for turn in turns):
            raise UsageError("no turn to learn")
        stop_ids = agent.chat.facts.stop_ids
        if any(number in stop_ids for turn in turns for number in turn.action_ids[:-1]):
            raise UsageError("a reply contains a token that ends replies")
        return turns, recorded


class DataReader(RecordReader):
    """Reads conversations and episodes for supervised fine-tuning; arguments as of `RecordReader`."""

    _settings: DataConfig
    _if_too_long = ", raise data.max_tokens, or set data.too_long=truncate"

    def hints(self) -> list[str]:
        """Sentences that help a user whose data have no example."""
        hints = RecordReader.hints(self)
        if self.report.counts["unsuccessful"]:
            hints.append(f"data.keep={self._settings.keep} drops episodes without success.")
        return hints

    def _add_episodes(self, records: Sequence[EpisodeRecord], examples: list[Example]) -> None:
        for record in self._selected(records):
            self._progress("tokenized", len(examples))
            self._add(record, examples)

    def _selected(self, records: Sequence[EpisodeRecord]) -> list[Record]:
        """The episodes that ``data.keep`` selects."""
        report, keep = self.report, self._settings.keep
        usable: list[EpisodeRecord] = []
        for record, episode in records:
            if keep != "all" and not (episode.success or (keep == "best" and episode.success is None)):
                report.drop("unsuccessful", record.place)
            else:
                usable.append((record, episode))
        if keep != "best":
            return [record for record, _ in usable]
        best: dict[Hashable, tuple[float, int]] = {}
        for _, episode in usable:
            task = task_of(episode)
            best[task] = max(best.get(task, rank_of(episode)), rank_of(episode))
        chosen: list[Record] = []
        for record, episode in usable:
            if best.get(task_of(episode)) == rank_of(episode):
                del best[task_of(episode)]  # the first of several that are equally good
                chosen.append(record)
            else:
                report.drop("not_best", record.place)
        return chosen

    def _add(self, record: Record, examples: list[Example]) -> None:
        try:
            turns, recorded = self._turns(record)
        except (UsageError, AgentError) as error:
            self._broken(record.place, str(error).rstrip("."))
            return
        longest = longest_sequence(turns)
        if longest > self.max_tokens:
            fitting = fitting_turns(turns, self.max_tokens) if self._settings.too_long == "truncate" else []
            if not any(turn.learned for turn in fitting):
                self._too_long(record, longest)
                return
            self.report.counts["truncated"] += 1
            turns = fitting
        episode = record.content if isinstance(record.content, Episode) else None
        examples.append(
            Example(
                tokens=token_example(record.place, turns),
                task=record.place if episode is None else task_of(episode),
                recorded=recorded,
                reply_lengths=()
                if episode is None
                else tuple(len(turn.action_ids) for turn in turns if turn.learned),
            )
        )


def task_of(episode: Episode) -> Hashable:
    """The task of an episode: its index, or its seed where the environment has no task set."""
    spec = episode.spec
    kwargs = msgspec.json.encode(spec.env_kwargs, order="sorted")
    return spec.env_id, kwargs, spec.split, spec.task, spec.env_seed if spec.task is None else None


def rank_of(episode: Episode) -> tuple[float, int]:
    """The order of episodes of a task: the higher return, then fewer turns."""
    return episode.total_reward, -len(episode.turns)


def split_off(examples: Sequence[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold out a fraction of the examples at random, whole tasks at a time, but never all.

    Returns:
        The examples to train on, and those to validate on, each in their original order.
    """
    tasks = list(dict.fromkeys(example.task for example in examples))
    sizes = Counter(example.task for example in examples)
    held: set[Hashable] = set()
    count = 0
    for index in derive_rng("validation", seed).permutation(len(tasks))[: len(tasks) - 1].tolist():
        if count >= fraction * len(examples):
            break
        held.add(tasks[index])
        count += sizes[tasks[index]]
    train = [example for example in examples if example.task not in held]
    return train, [example for example in examples if example.task in held]


def unusable(dropped: Sequence[dict[str, str]]) -> list[str]:
    """``FILE:LINE: reason`` of each unusable record."""
    prefix = f"{DROPPED['broken']}: "
    return [
        f"{one['place']}: {one['reason'].removeprefix(prefix)}"
        for one in dropped
        if one["reason"].startswith(prefix)
    ]


def no_examples(reader: RecordReader, what: str) -> UsageError:
    """The error for data without a single example: says where each record went, and what may help."""
    report = reader.report
    if not report.counts["read"]:
        paths = ", ".join(file["path"] for file in report.files)
        return UsageError(f"There is nothing to {what} on: {paths or 'the data'} has no records.")
    hints = [*reader.hints(), *(f"{one}." for one in unusable(report.dropped)[:SHOWN])]
    where = f"of {report.counts['read']} records {report.in_words()}"
    return UsageError(" ".join([f"There is nothing to {what} on: {where}.", *hints]))
