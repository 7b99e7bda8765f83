"""Recorded conversations as episodes: rows of JSONL, Parquet or Arrow files become a run folder.

Rows are those of `rollgym.evaluation.trajectory_export` (``sft`` and ``tokens``), or any with a column
``messages`` in OpenAI's form. ``rollgym view``, ``rollgym sft`` and ``rollgym.load_run`` read the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.messages import Message, ToolSpec
from rollgym.core.types import SCHEMA_VERSION, Episode, EpisodeSpec, Outcome, Turn
from rollgym.evaluation.metrics import summarize
from rollgym.io.rows import Rows, open_rows
from rollgym.io.run_dir import RunFolder
from rollgym.utils.command_line import command_line

ENV_ID = "imported/conversations"
"""Environment of conversations that name none."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import."""

    path: Path
    episodes: int
    tokens: int
    """Recorded action tokens."""

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {"path": str(self.path), "episodes": self.episodes, "tokens": self.tokens}


def import_conversations(
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    env_id: str = ENV_ID,
) -> Imported:
    """Write recorded conversations as a run folder; what ``rollgym import`` does.

    Args:
        data: Files or a folder that `rollgym.io.rows.open_rows` reads.
        out: New or empty folder.
        columns: Names of the form to columns of the data, such as ``{"messages": "conversation"}``. Default:
            the columns under their own names.
        env_id: Environment of rows that name none.

    Raises:
        UsageError: A row is not a conversation; the message says where and why.

    Example:
        >>> import_conversations("chats.jsonl", "runs/chats").episodes
        120
    """
    rows = open_rows(data, columns=columns)
    folder = Path(out)
    # Read all once before anything is written, so that a broken row leaves no folder behind.
    count = sum(1 for _ in read_conversations(rows, env_id))
    source = {"files": [str(path) for path in _names(data)], "sha256": rows.fingerprint}
    manifest = recorded_manifest(folder, env_id, count, imported=source)
    run = RunFolder.create(folder, manifest)
    try:
        tokens = 0
        for episode in read_conversations(rows, env_id):
            tokens += sum(len(turn.action_ids) for turn in episode.turns)
            run.append(episode)
        run.finish(summarize(manifest, _light(rows, env_id)))
    finally:
        run.close()
    return Imported(folder, count, tokens)


def recorded_manifest(folder: Path, env_id: str, episodes: int, **more: Any) -> dict[str, Any]:
    """The manifest of a run folder whose episodes were not played for it."""
    return {
        "schema": SCHEMA_VERSION,
        "kind": "eval",
        "name": folder.name,
        "command": command_line(),
        "env": {"id": env_id, "version": "", "kwargs": {}},
        "agent": {"name": "recorded", "options": {}},
        "episodes": episodes,
        "split": "",
        "seed": 0,
        "per_task": 1,
        "success_means": "",
        "task_set": {"name": None, "split": "", "size": None, "hash": None},
        **more,
        "versions": {},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _names(data: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [data] if isinstance(data, (str, Path)) else list(data)


def _light(rows: Rows, env_id: str) -> list[Episode]:
    """The episodes without texts and tokens, for the summary."""
    return [
        replace(
            episode,
            instructions="",
            tools=(),
            turns=tuple(
                Turn(
                    observation="", action="", reward=t.reward, terminated=t.terminated, truncated=t.truncated
                )
                for t in episode.turns
            ),
        )
        for episode in read_conversations(rows, env_id)
    ]


def read_conversations(rows: Rows, env_id: str = ENV_ID) -> Iterator[Episode]:
    """The episodes of rows, one at a time; rows of a token form are joined by episode."""
    seen: set[str] = set()
    pending: list[Mapping[str, Any]] = []
    first = 0
    for number, row in enumerate(rows):
        try:
            if "input_ids" in row:
                if not pending:
                    first = number
                pending.append(row)
                if len(pending) < int(row.get("sequences") or 1):
                    continue
                episode = _from_tokens(pending, env_id, first)
                pending = []
            elif "messages" in row:
                episode = _from_messages(row, env_id, number)
            else:
                raise ValueError(f"expected a column messages or input_ids; the columns are {', '.join(row)}")
        except (ValueError, TypeError, KeyError) as error:
            reason = f"there is no column {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{rows.place(number)}: {reason}.") from None
        if episode.spec.episode_id in seen:
            raise UsageError(f"{rows.place(number)}: a second episode is called {episode.spec.episode_id!r}.")
        seen.add(episode.spec.episode_id)
        yield episode
    if pending:
        raise UsageError(
            f"{rows.place(first)}: an episode of {pending[0].get('sequences')} sequences has only "
            f"{len(pending)} of them."
        )


def _from_messages(row: Mapping[str, Any], env_id: str, number: int) -> Episode:
    messages = [_message(message) for message in _json(row["messages"], list, "messages")]
    system = ""
    if messages and messages[0].role == "system":
        system = messages.pop(0).text
    turns: list[Turn] = []
    before: list[Message] = []
    for message in messages:
        if message.role == "system":
            raise ValueError("only the first message can have the role system")
        if message.role != "assistant":
            before.append(message)
            continue
        if not before:
            raise ValueError("an assistant message needs a user or tool message before it")
        turns = _with_results(turns, before)
        called = message.tool_calls
        turns.append(
            Turn(
                observation="\n".join(one.text for one in before),
                action=called[0].to_json() if len(called) == 1 else message.text,
                response=message.text,
                message=message.to_openai() if called or message.reasoning else None,
            )
        )
        before = []
    if not turns:
        raise ValueError("messages have no assistant message")
    final = "\n".join(one.text for one in before)
    if before:
        turns = _with_results(turns, before)
    turns = _with_actions(turns, row.get("actions"))
    return _episode(row, turns, system, final, env_id, number)


def _with_results(turns: list[Turn], messages: Sequence[Message]) -> list[Turn]:
    """Put the results of a turn's calls where the environment would have put them."""
    if turns and any(message.role == "tool" for message in messages):
        info = {"messages": [message.to_openai() for message in messages]}
        return [*turns[:-1], replace(turns[-1], info=info)]
    return turns


def _with_actions(turns: list[Turn], actions: Any) -> list[Turn]:
    if actions is None:
        return turns
    if not isinstance(actions, list) or len(actions) != len(turns):
        raise ValueError(f"actions must be a list of {len(turns)} texts, one for each reply")
    return [replace(turn, action=str(action)) for turn, action in zip(turns, actions, strict=True)]


def _from_tokens(rows: Sequence[Mapping[str, Any]], env_id: str, number: int) -> Episode:
    turns: list[Turn] = []
    for position, row in enumerate(rows):
        if row.get("episode_id") != rows[0].get("episode_id") or int(row["sequence"]) != position:
            raise ValueError("the sequences of an episode must follow one another in order")
        ids, logprobs = row["input_ids"], row["logprobs"]
        lengths = list(zip(row["prompt_lengths"], row["action_lengths"], strict=True))
        if len(ids) != len(logprobs) or len(ids) != sum(prompt + action for prompt, action in lengths):
            raise ValueError("input_ids, logprobs and the lengths of prompts and actions do not agree")
        at = 0
        texts = zip(row["observations"], row["replies"], row["actions"], strict=True)
        for turn, ((prompt, action), (seen, reply, played)) in enumerate(zip(lengths, texts, strict=True)):
            middle, end = at + prompt, at + prompt + action
            turns.append(
                Turn(
                    observation=seen,
                    action=played,
                    response=reply,
                    prompt_ids=tuple(ids[at:middle]),
                    action_ids=tuple(ids[middle:end]),
                    logprobs=tuple(logprobs[middle:end]) if row["has_logprobs"] else (),
                    new_row=position > 0 and turn == 0,
                    policy_version=row.get("policy_version"),
                )
            )
            at = end
    first = rows[0]
    final = str(first.get("final_observation") or "")
    return _episode(first, turns, str(first.get("instructions") or ""), final, env_id, number)


def _episode(
    row: Mapping[str, Any], turns: list[Turn], system: str, final: str, env_id: str, number: int
) -> Episode:
    rewards = row.get("rewards")
    if rewards is None:
        rewards = [0.0] * (len(turns) - 1) + [row.get("reward") or 0.0]
    if not isinstance(rewards, list) or len(rewards) != len(turns):
        raise ValueError(f"rewards must be a list of {len(turns)} numbers, one for each reply")
    turns = [replace(turn, reward=float(reward)) for turn, reward in zip(turns, rewards, strict=True)]
    outcome = Outcome(row.get("outcome") or Outcome.TERMINATED)
    if outcome.failed:
        raise ValueError(f"the outcome {outcome.value!r} is that of a failed episode")
    turns[-1] = replace(
        turns[-1], terminated=outcome is Outcome.TERMINATED, truncated=outcome is Outcome.TRUNCATED
    )
    success = row.get("success")
    return Episode(
        spec=EpisodeSpec(
            episode_id=str(row.get("episode_id") or f"conversation-{number}"),
            env_id=str(row.get("env_id") or env_id),
            env_kwargs=_json(row.get("env_kwargs") or {}, dict, "env_kwargs"),
            env_version=str(row.get("env_version") or ""),
            split=str(row.get("split") or ""),
            task=row.get("task"),
            env_seed=row.get("env_seed") or 0,
            group_id=str(row.get("group_id") or f"conversation-{number}"),
            member=row.get("member") or 0,
        ),
        outcome=outcome,
        turns=tuple(turns),
        instructions=system,
        tools=tuple(_tool(tool) for tool in _json(row.get("tools") or [], list, "tools")),
        final_observation=str(row.get("final_observation") or final),
        success=None if success is None else bool(success),
    )


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError("messages must be objects with role and content")
    plain = {key: item for key, item in value.items() if item is not None}
    if isinstance(plain.get("tool_calls"), str):
        plain["tool_calls"] = _json(plain["tool_calls"], list, "tool_calls")
    return Message.from_openai(plain)


def _tool(value: Any) -> ToolSpec:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("tools must be functions in OpenAI's form")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(
        name=function["name"], description=str(function.get("description") or ""), parameters=dict(parameters)
    )


def _json(value: Any, kind: type[Any], name: str) -> Any:
    """A value, or the one in a text of JSON, as Parquet and Arrow have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{name} are text that is not JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {'list' if kind is list else 'JSON object'}")
    return value
