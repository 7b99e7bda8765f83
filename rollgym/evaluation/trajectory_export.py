"""Recorded episodes as rows of data: conversations, preference pairs and tokens.

Each form is a flat row, which `rollgym.evaluation.trajectory_import` turns back into episodes:

- ``sft``: one row per episode, with ``messages`` in OpenAI's form and the ``tools``;
- ``preference``: one row per pair of episodes of a task, with ``prompt``, ``chosen`` and ``rejected``;
- ``tokens``: one row per training sequence, with token ids, a mask and log-probs as recorded.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from rollgym.core.errors import ResultsError, UsageError, os_reason
from rollgym.core.extras import require
from rollgym.core.files import replacing
from rollgym.core.messages import Message
from rollgym.core.roles import own_trajectory
from rollgym.core.types import Episode, Turn
from rollgym.evaluation.run_results import load_run
from rollgym.io.atomic import locked, replaced

Row = dict[str, Any]
FORMS = ("sft", "preference", "tokens")
FORMATS = ("messages", "parquet", "datasets")
_BATCH = 256
"""Rows that are converted to Arrow together."""
_JSON_COLUMNS = ("tools", "env_kwargs")
"""Columns whose shape differs between rows: text of JSON in Parquet and Arrow."""


@dataclass(slots=True)
class Exported:
    """The result of an export."""

    path: Path
    rows: int = 0
    episodes: int = 0
    """Episodes that were read."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Episodes that are in no row, by reason."""

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "path": str(self.path),
            "rows": self.rows,
            "episodes": self.episodes,
            "left_out": dict(self.left_out),
        }


def export_run(
    run: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    format: str = "messages",
    form: str = "sft",
    keep: str = "all",
) -> Exported:
    """Write the episodes of one or several runs as training data; what ``rollgym export`` does.

    Args:
        run: Run folders of any command.
        out: File to write (a folder for ``datasets``); it must not exist.
        format: ``messages`` (JSONL), ``parquet``, or ``datasets`` (a folder for ``load_from_disk``).
        form: ``sft``, ``preference`` or ``tokens``.
        keep: ``all`` episodes that ended without an error, or the ``successful`` ones.

    Raises:
        UsageError: ``out`` exists, or no episode has what the form needs.

    Example:
        >>> export_run("runs/demo", "demo.jsonl", keep="successful").rows
        64
    """
    for name, value, choices in (("format", format, FORMATS), ("form", form, FORMS)):
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
    if keep not in ("all", "successful"):
        raise UsageError(f"keep must be all or successful, not {keep!r}.")
    if format != "messages":
        require(f"Writing {format}", "parquet")
    path = Path(out)
    if path.exists():
        raise UsageError(f"{path} exists already: pass another --out, nothing is overwritten.")
    runs = [run] if isinstance(run, (str, Path)) else list(run)
    report = Exported(path)
    rows = _rows(_kept(runs, keep, form, report), form, report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write = {"messages": _write_jsonl, "parquet": _write_parquet, "datasets": _write_dataset}[format]
        write(path, _counted(rows, report))
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {os_reason(error)}.") from None
    return report


def export_episodes(run: str | Path, out: str | Path) -> Exported:
    """Write the episodes of a run as lines of ``episodes.jsonl``, whatever form the folder has them in.

    Args:
        run: The run folder, of any command.
        out: File to write; it must not exist.

    Example:
        >>> export_episodes("runs/lake", "lake.jsonl").rows
        6400
    """
    path = Path(out)
    if path.exists():
        raise UsageError(f"{path} exists already: pass another --out, nothing is overwritten.")
    report = Exported(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            for line in load_run(run).episode_lines():
                file.write(line + b"\n")
                report.rows += 1
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {os_reason(error)}.") from None
    report.episodes = report.rows
    return report


def _kept(runs: Sequence[str | Path], keep: str, form: str, report: Exported) -> Iterator[Episode]:
    for run in runs:
        for recorded in load_run(run).episodes:
            report.episodes += 1
            episode = own_trajectory(recorded)
            reason = _left_out(episode, keep, form)
            if reason:
                report.left_out[reason] += 1
            else:
                yield episode


def _left_out(episode: Episode, keep: str, form: str) -> str:
    if episode.outcome.failed:
        return "ended by an error"
    if not episode.turns:
        return "without a turn"
    if keep == "successful" and not episode.success:
        return "not successful"
    if form == "tokens" and not all(turn.action_ids for turn in episode.turns):
        return "without recorded tokens"
    return ""


def _rows(episodes: Iterable[Episode], form: str, report: Exported) -> Iterator[Row]:
    if form == "preference":
        yield from preference_rows(episodes, report.left_out)
        return
    for episode in episodes:
        if form == "sft":
            yield sft_row(episode)
        else:
            yield from token_rows(episode)


def _counted(rows: Iterable[Row], report: Exported) -> Iterator[Row]:
    for row in rows:
        report.rows += 1
        yield row
    if not report.rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
        raise UsageError(
            f"Nothing to export: of {report.episodes} episodes {reasons or 'none is in a pair'}. "
            f"{report.path} was not written."
        )


def sft_row(episode: Episode) -> Row:
    """One conversation with its rewards."""
    return {
        "messages": episode_messages(episode),
        "tools": [tool.to_openai() for tool in episode.tools],
        "actions": [turn.action for turn in episode.turns],
        **_rewards(episode),
        **_origin(episode),
    }


def token_rows(episode: Episode) -> Iterator[Row]:
    """The training sequences of an episode: a new one wherever the chat template rewrote history."""
    starts = [n for n, turn in enumerate(episode.turns) if n == 0 or turn.new_row]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(episode.turns)
        turns = episode.turns[start:end]
        spans = [(turn.prompt_ids, turn.action_ids) for turn in turns]
        logprobs: list[float] = []
        for turn in turns:
            recorded = turn.logprobs or (0.0,) * len(turn.action_ids)
            logprobs += [0.0] * len(turn.prompt_ids) + list(recorded)
        yield {
            "input_ids": [token for prompt, action in spans for token in (*prompt, *action)],
            "action_mask": [bit for prompt, action in spans for bit in [0] * len(prompt) + [1] * len(action)],
            "logprobs": logprobs,
            "has_logprobs": all(bool(turn.logprobs) for turn in turns),
            "prompt_lengths": [len(prompt) for prompt, _ in spans],
            "action_lengths": [len(action) for _, action in spans],
            "observations": [turn.observation for turn in turns],
            "replies": [turn.action if turn.response is None else turn.response for turn in turns],
            "actions": [turn.action for turn in turns],
            "instructions": episode.instructions,
            "sequence": number,
            "sequences": len(starts),
            "sequence_rewards": [turn.reward for turn in turns],
            "policy_version": turns[0].policy_version,
            **_rewards(episode),
            **_origin(episode),
        }


def preference_rows(episodes: Iterable[Episode], left_out: Counter[str] | None = None) -> Iterator[Row]:
    """The best and the worst episode of each task, where their returns differ."""
    groups: dict[Hashable, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(_task(episode), []).append(episode)
    counts = Counter[str]() if left_out is None else left_out
    for members in groups.values():
        best = max(members, key=lambda e: (e.total_reward, -e.length))
        worst = min(members, key=lambda e: (e.total_reward, -e.length))
        if best.total_reward == worst.total_reward:
            counts["with the same return as the others of their task"] += len(members)
            continue
        counts["between the best and the worst of their task"] += len(members) - 2
        chosen, rejected = episode_messages(best), episode_messages(worst)
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        while shared and chosen[shared - 1]["role"] == "assistant":
            shared -= 1  # the first reply that differs follows a prompt
        yield {
            "prompt": chosen[:shared],
            "chosen": chosen[shared:],
            "rejected": rejected[shared:],
            "tools": [tool.to_openai() for tool in best.tools],
            "chosen_reward": best.total_reward,
            "rejected_reward": worst.total_reward,
            "chosen_id": best.spec.episode_id,
            "rejected_id": worst.spec.episode_id,
            "env_id": best.spec.env_id,
            "split": best.spec.split,
            "task": best.spec.task,
        }


def episode_messages(episode: Episode) -> list[dict[str, Any]]:
    """An episode as messages: instructions as system, observations as user or tool results, replies.

    A reply is the recorded message with its tool calls, else the full reply, else the action.
    """
    messages: list[dict[str, Any]] = []
    if episode.instructions:
        messages.append({"role": "system", "content": episode.instructions})
    results: list[dict[str, Any]] = []
    for turn in episode.turns:
        messages += results or [{"role": "user", "content": turn.observation}]
        reply = _reply(turn)
        messages.append(reply)
        results = _tool_results(turn) if reply.get("tool_calls") else []
    return messages


def _reply(turn: Turn) -> dict[str, Any]:
    if turn.message is not None:
        return {"role": "assistant", **{k: v for k, v in turn.message.items() if v is not None}}
    return {"role": "assistant", "content": turn.action if turn.response is None else turn.response}


def _tool_results(turn: Turn) -> list[dict[str, Any]]:
    """The results of the calls of a turn, which the environment put into ``info``, if there are any."""
    messages = turn.info.get("messages")
    try:
        found = [Message.from_openai(message).to_openai() for message in messages or ()]
    except (ValueError, TypeError, AttributeError):
        return []  # another environment's use of the same key
    return found if any(message["role"] == "tool" for message in found) else []


def _rewards(episode: Episode) -> Row:
    return {
        "reward": episode.total_reward,
        "rewards": [turn.reward for turn in episode.turns],
        "success": episode.success,
        "outcome": episode.outcome.value,
        "final_observation": episode.final_observation,
    }


def _origin(episode: Episode) -> Row:
    spec = episode.spec
    return {
        "episode_id": spec.episode_id,
        "env_id": spec.env_id,
        "env_kwargs": spec.env_kwargs,
        "env_version": spec.env_version,
        "split": spec.split,
        "task": spec.task,
        "env_seed": spec.env_seed,
        "group_id": spec.group_id,
        "member": spec.member,
    }


def _task(episode: Episode) -> Hashable:
    """Equal for episodes that start from the same state."""
    spec = episode.spec
    kwargs = msgspec.json.encode(spec.env_kwargs, order="sorted")
    seed = spec.env_seed if spec.task is None else None
    return spec.env_id, kwargs, spec.split, spec.task, seed, spec.role


def _write_jsonl(path: Path, rows: Iterator[Row]) -> None:
    with replacing(path) as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")


def _write_parquet(path: Path, rows: Iterator[Row]) -> None:
    parquet: Any = importlib.import_module("pyarrow.parquet")

    def open_writer(file: IO[bytes], schema: Any) -> Any:
        return parquet.ParquetWriter(file, schema)

    with replacing(path) as file:
        _write_arrow(file, rows, open_writer)


def _write_dataset(path: Path, rows: Iterator[Row]) -> None:
    """The folder that ``datasets.save_to_disk`` would write."""
    arrow: Any = importlib.import_module("pyarrow")

    def open_writer(file: IO[bytes], schema: Any) -> Any:
        return arrow.ipc.new_stream(file, schema)

    name = "data-00000-of-00001.arrow"
    with locked(path), replaced(path) as folder:
        with (folder / name).open("wb") as file:
            _write_arrow(file, rows, open_writer)
        state: dict[str, Any] = {
            "_data_files": [{"filename": name}],
            "_fingerprint": "rollgym",
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (folder / "state.json").write_text(json.dumps(state, indent=2))
        (folder / "dataset_info.json").write_text("{}")


def _write_arrow(file: IO[bytes], rows: Iterator[Row], open_writer: Callable[[Any, Any], Any]) -> None:
    """Write rows in batches, with the schema of the first row's form."""
    arrow: Any = importlib.import_module("pyarrow")

    first = next(rows)
    schema = _schema(arrow, first)
    with open_writer(file, schema) as writer:
        batch = [first]
        for row in rows:
            batch.append(row)
            if len(batch) == _BATCH:
                writer.write_table(arrow.Table.from_pylist([_arrow_row(r) for r in batch], schema))
                batch = []
        if batch:
            writer.write_table(arrow.Table.from_pylist([_arrow_row(r) for r in batch], schema))


def _schema(arrow: Any, row: Row) -> Any:
    text, number = arrow.string(), arrow.float64()
    message = arrow.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning_content", text),
            ("tool_calls", text),
            ("tool_call_id", text),
            ("name", text),
        ]
    )
    whole = arrow.int64()
    kinds = {
        "messages": arrow.list_(message),
        "prompt": arrow.list_(message),
        "chosen": arrow.list_(message),
        "rejected": arrow.list_(message),
        "actions": arrow.list_(text),
        "observations": arrow.list_(text),
        "replies": arrow.list_(text),
        "rewards": arrow.list_(number),
        "sequence_rewards": arrow.list_(number),
        "logprobs": arrow.list_(number),
        "input_ids": arrow.list_(arrow.int64()),
        "action_mask": arrow.list_(arrow.int8()),
        "prompt_lengths": arrow.list_(whole),
        "action_lengths": arrow.list_(whole),
        "reward": number,
        "chosen_reward": number,
        "rejected_reward": number,
        "success": arrow.bool_(),
        "has_logprobs": arrow.bool_(),
        **dict.fromkeys(("task", "env_seed", "member", "sequence", "sequences", "policy_version"), whole),
    }
    return arrow.schema([(name, kinds.get(name, text)) for name in row])


def _arrow_row(row: Row) -> Row:
    """A row with values of differing shape as text of JSON."""
    converted = dict(row)
    for name in _JSON_COLUMNS:
        if name in row:
            converted[name] = json.dumps(row[name], ensure_ascii=False)
    for name in ("messages", "prompt", "chosen", "rejected"):
        if name in row:
            converted[name] = [_arrow_message(message) for message in row[name]]
    return converted


def _arrow_message(message: Mapping[str, Any]) -> Row:
    flat = dict(message)
    if flat.get("tool_calls") is not None:
        flat["tool_calls"] = json.dumps(flat["tool_calls"], ensure_ascii=False)
    if flat.get("content") is not None and not isinstance(flat["content"], str):
        raise ResultsError("Messages with images cannot be written to Parquet or Arrow: export messages.")
    return flat
