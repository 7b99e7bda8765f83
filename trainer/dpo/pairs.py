"""Preference pairs: from records with a prompt and two replies, and from recorded episodes of the same task.

A pair is one example. Its sequences are those of the chosen conversation, then those of the rejected one, so
that a shared prompt is computed once and both stay in the same micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rollgym.core.errors import AgentError, UsageError
from rollgym.core.types import Episode
from rollgym.trainer.data.sequences import FloatArray, TokenEpisode
from rollgym.trainer.dpo.config import PairDataConfig
from rollgym.trainer.imitation.examples import longest_sequence, token_example
from rollgym.trainer.sft.dataset import EpisodeRecord, Example, RecordReader, rank_of, task_of
from rollgym.trainer.sft.records import ChatPair, Record, RecordFormat, parse_messages


@dataclass(frozen=True, slots=True)
class Pair(Example):
    """A chosen and a rejected conversation as one example."""

    chosen_tokens: int = 0
    """Action tokens of the chosen conversation, which come first."""
    reference: FloatArray | None = None
    """Log-probs of all action tokens under the policy before training."""

    @property
    def signs(self) -> FloatArray:
        """1 for each action token of the chosen conversation, -1 for those of the rejected one."""
        signs = np.ones(self.tokens.num_tokens)
        signs[self.chosen_tokens :] = -1.0
        return signs


def make_pair(
    name: str, task: Hashable, chosen: TokenEpisode, rejected: TokenEpisode, recorded: bool | None = None
) -> Pair:
    """Join two tokenized conversations."""
    return Pair(
        tokens=TokenEpisode(
            name=name,
            sequences=(*chosen.sequences, *rejected.sequences),
            behavior=np.concatenate([chosen.behavior, rejected.behavior]),
            tokens_per_turn=np.concatenate([chosen.tokens_per_turn, rejected.tokens_per_turn]),
        ),
        task=task,
        recorded=recorded,
        chosen_tokens=chosen.num_tokens,
    )


def parse_pair(record: dict[str, Any]) -> ChatPair:
    """Check a pair in TRL's format: ``prompt``, ``chosen`` and ``rejected``, as texts or as messages.

    A text is one message: of the user in ``prompt``, of the assistant in the others. Assistant messages of
    the prompt are context. Without ``prompt``, the messages that both lists start with are the prompt.

    Raises:
        UsageError: The pair cannot be trained on.

    Example:
        >>> parse_pair({"prompt": "2+2?", "chosen": "4", "rejected": "5"}).rejected.exchanges[0].reply
        '5'
    """
    chosen, rejected = (_messages(record[key], key, "assistant") for key in ("chosen", "rejected"))
    if record.get("prompt") is not None:
        prompt = _messages(record["prompt"], "prompt", "user")
    else:
        if isinstance(record["chosen"], str) or isinstance(record["rejected"], str):
            raise UsageError("prompt missing: only lists of messages can contain the prompt")
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if chosen == rejected:
        raise UsageError("chosen and rejected are equal")
    context = [{**m, "weight": 0} if _role(m) == "assistant" else m for m in prompt]
    chats = []
    for key, reply in (("chosen", chosen), ("rejected", rejected)):
        try:
            chats.append(parse_messages([*context, *reply]))
        except UsageError as error:
            raise UsageError(f"prompt and {key}: {error}") from None
    if chats[0] == chats[1]:
        raise UsageError("chosen and rejected are equal")
    return ChatPair(*chats)


def _messages(value: Any, key: str, role: str) -> list[Any]:
    """The messages of a part of a record: a list of them, or a text, which is one message."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UsageError(f"{key} must be a text or a list of messages, not {type(value).__name__}")
    return value


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


class PairReader(RecordReader):
    """Reads preference pairs, and builds them from episodes; arguments as of `RecordReader`."""

    form: ClassVar[RecordFormat] = RecordFormat(("chosen", "rejected"), ("prompt",), parse_pair)
    _settings: PairDataConfig

    def hints(self) -> list[str]:
        """Sentences that help a user whose data have no example."""
        hints = RecordReader.hints(self)
        if self.report.counts["unpaired"]:
            different = "success" if self._settings.pairs == "success" else "return"
            hints.append(
                f"A pair needs two episodes of the same task with different {different}: record several "
                "episodes of each task, or set data.agent and data.per_task."
            )
        return hints

    def _add(self, record: Record, examples: list[Example]) -> None:
        pair = record.content
        assert isinstance(pair, ChatPair)
        chosen = self._tokens(replace(record, content=pair.chosen))
        rejected = self._tokens(replace(record, content=pair.rejected)) if chosen is not None else None
        if chosen is None or rejected is None:
            return
        if _same(chosen[0], rejected[0]):
            self._broken(record.place, "chosen and rejected have the same tokens")
        else:
            examples.append(make_pair(record.place, record.place, chosen[0], rejected[0]))

    def _tokens(self, record: Record) -> tuple[TokenEpisode, bool | None] | None:
        """The tokens of a conversation or an episode; ``None`` if it is unusable, which is reported."""
        try:
            turns, recorded = self._turns(record)
        except (UsageError, AgentError) as error:
            self._broken(record.place, str(error).rstrip("."))
            return None
        longest = longest_sequence(turns)
        if longest > self.max_tokens:
            self._too_long(record, longest)
            return None
        return token_example(record.place, turns), recorded

    def _add_episodes(self, records: Sequence[EpisodeRecord], examples: list[Example]) -> None:
        tasks: dict[Hashable, list[_Played]] = {}
        for count, (record, episode) in enumerate(records):
            self._progress("tokenized", count)
            found = self._tokens(record)
            if found is not None:
                played = _Played(record.place, episode, found[0], bool(found[1]))
                tasks.setdefault(task_of(episode), []).append(played)
        for task, episodes in tasks.items():
            pairs = select_pairs(episodes, self._settings)
            used = {played.place for pair in pairs for played in pair}
            self.report.counts["paired"] += len(used)
            for played in episodes:
                if played.place not in used:
                    self.report.drop("unpaired", played.place)
            for chosen, rejected in pairs:
                name = f"{chosen.place} over {rejected.place}"
                recorded = chosen.recorded and rejected.recorded
                examples.append(make_pair(name, task, chosen.tokens, rejected.tokens, recorded))


@dataclass(frozen=True, slots=True)
class _Played:
    """An episode that can be in a pair."""

    place: str
    episode: Episode
    tokens: TokenEpisode
    recorded: bool


def select_pairs(episodes: Sequence[_Played], settings: PairDataConfig) -> list[tuple[_Played, _Played]]:
    """The pairs of a task's episodes, the largest difference first; no episode is reused before all are used.

    By success, an environment's ``None`` counts as neither. The order of equal episodes is that of the data.
    """
    best = sorted(episodes, key=lambda played: rank_of(played.episode), reverse=True)
    if settings.pairs == "success":
        good = [played for played in best if played.episode.success]
        bad = [played for played in reversed(best) if played.episode.success is False]
    else:
        half = len(best) // 2
        good, bad = best[:half], best[::-1][:half]
    count = max(len(good), len(bad)) if good and bad else 0
    pairs = [(good[number % len(good)], bad[number % len(bad)]) for number in range(count)]
    return [pair for pair in pairs if _differ(*pair, settings)][: settings.pairs_per_task]


def _differ(chosen: _Played, rejected: _Played, settings: PairDataConfig) -> bool:
    difference = chosen.episode.total_reward - rejected.episode.total_reward
    if settings.pairs == "return" and difference <= 0:
        return False
    return (not settings.min_difference or difference >= settings.min_difference) and not _same(
        chosen.tokens, rejected.tokens
    )


def _same(chosen: TokenEpisode, rejected: TokenEpisode) -> bool:
    """Whether both have the same tokens, so that no preference can be learned."""
    if len(chosen.sequences) != len(rejected.sequences):
        return False
    return all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.action_positions, b.action_positions)
        for a, b in zip(chosen.sequences, rejected.sequences, strict=True)
    )
