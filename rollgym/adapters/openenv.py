"""Environments behind an OpenEnv server: ``openenv:ws://127.0.0.1:8000``.

The protocol has seeds, but no splits, no truncation and no success. Splits are made here from seeds and the
first observation; success is what the server's metadata say or what ``success_reward`` defines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.adapters.openenv_session import Observed, OpenEnvSession, read_info
from rollgym.adapters.prefixes import OPENENV
from rollgym.adapters.task_sets import draw, make_task_set
from rollgym.core.env import StepResult, TextEnv, check_number, check_whole
from rollgym.core.errors import UsageError
from rollgym.core.seeding import MAX_SEED
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tasks import Task, TaskSet

MAX_TURNS = 200
"""Default number of actions after which an episode is truncated."""


class OpenEnvEnv(TextEnv):
    """An environment on an OpenEnv server.

    Observation: the only text field of the server's observation, or all its fields as lines.

    Actions: the text of the action's only text field; with other fields, a JSON object that fits the schema.

    Reward: the server's.

    Success: the server's ``metadata.success`` where it sends one; otherwise the sum of rewards is at least
    ``success_reward``; undefined without both.

    Ends: by the server's ``done``, which counts as truncated where ``metadata.truncated`` is true; truncated
    after ``max_turns`` actions. A server that vanishes ends the episode as ``worker_lost``.

    Splits: seeds; no two splits share a first observation, unless ``disjoint=False``.
    """

    tasks: TaskSet

    def __init__(
        self,
        *,
        inner_id: str,
        success_reward: float | None = None,
        max_turns: int = MAX_TURNS,
        action_field: str | None = None,
        observation_field: str | None = None,
        reset_data: Mapping[str, Any] | None = None,
        disjoint: bool = True,
        timeout: float = 30.0,
        splits: Mapping[str, int] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Connect to the server at the address ``inner_id``; ``reset_data`` is sent with every reset."""
        OPENENV.load()
        check_whole("max_turns", max_turns)
        if success_reward is not None:
            check_number("success_reward", success_reward)
        if reset_data is not None and not isinstance(reset_data, Mapping):
            raise UsageError(f"reset_data must be a mapping, not {reset_data!r}.")
        self._url, self._max_turns = inner_id, max_turns
        self._timeout = check_number("timeout", timeout)
        self._success_reward, self._disjoint = success_reward, disjoint
        self._observation_field, self._reset_data = observation_field, dict(reset_data or {})
        server = read_info(inner_id, timeout)
        self._action_field = _text_field(server.action) if action_field is None else action_field
        self.instructions = f"{server.description}\n{self._how_to_act(server.action)}".strip()
        self.success_means = (
            "the server says so in its metadata"
            if success_reward is None
            else f"the server says so in its metadata, or the rewards sum to at least {success_reward:g}"
        )
        # The address is left out: the same environment on another port has the same tasks.
        self.tasks = make_task_set(f"openenv:{server.name}", server.version, self._reset_data, splits)
        super().__init__(render_mode=render_mode)
        self._session: OpenEnvSession | None = None
        self._turns, self._total = 0, 0.0
        self._actions: list[str] = []

    def begin(self, task: Task) -> str:
        """Reset the server's environment with the task's seed."""
        self._turns, self._total = 0, 0.0
        if self._disjoint:
            return draw(self.tasks, task, self._start, key=str)
        return self._start(task.rng())

    def respond(self, action: str) -> StepResult:
        """Send the action."""
        if self._action_field is not None:
            data: Any = {self._action_field: action}
        else:
            try:
                data = json.loads(action)
            except (ValueError, RecursionError):
                data = None
            if not isinstance(data, dict):
                self._turns += 1
                return StepResult(
                    "The action must be a JSON object.",
                    valid=False,
                    truncated=self._turns >= self._max_turns,
                    info=self._undefined(),
                )
        assert self._session is not None
        try:
            seen = self._session.step(data)
        except Exception:
            self.close()  # the next episode connects again
            raise
        self._note_actions(seen)
        self._turns += 1
        self._total += seen.reward
        cut = seen.done and seen.metadata.get("truncated") is True
        success = self._judge(seen)
        return StepResult(
            self._text(seen),
            seen.reward,
            terminated=seen.done and not cut,
            truncated=cut or (not seen.done and self._turns >= self._max_turns),
            success=bool(success),
            valid=seen.metadata.get("valid") is not False,
            info={"success": None} if success is None else {},
        )

    def facts(self) -> Mapping[str, Any]:
        """The actions that the server lists in its metadata, if any."""
        return {"actions": list(self._actions)} if self._actions else {}

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _start(self, rng: np.random.Generator) -> str:
        if self._session is None:
            self._session = OpenEnvSession(self._url, self._timeout)
        try:
            seen = self._session.reset({**self._reset_data, "seed": int(rng.integers(MAX_SEED))})
        except Exception:
            self.close()  # the next episode connects again
            raise
        self._note_actions(seen)
        return clean_text(self._text(seen))

    def _note_actions(self, seen: Observed) -> None:
        listed = seen.metadata.get("actions")
        self._actions = [str(action) for action in listed] if isinstance(listed, list) else []

    def _judge(self, seen: Observed) -> bool | None:
        stated = seen.metadata.get("success")
        if isinstance(stated, bool):
            return stated
        if self._success_reward is None:
            return None
        return seen.done and self._total >= self._success_reward

    def _undefined(self) -> dict[str, Any]:
        return {"success": None} if self._success_reward is None else {}

    def _text(self, seen: Observed) -> str:
        fields = {
            name: value
            for name, value in seen.observation.items()
            if name not in ("metadata", "done", "reward") and value not in (None, "", [], {})
        }
        if self._observation_field is not None:
            fields = {name: value for name, value in fields.items() if name == self._observation_field}
        if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
            return text
        plain = jsonable(fields, lenient=True)
        return "\n".join(
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for name, value in plain.items()
        )

    def _how_to_act(self, schema: Mapping[str, Any]) -> str:
        if self._action_field is not None:
            field = schema.get("properties", {}).get(self._action_field, {})
            hint = field.get("description") if isinstance(field, Mapping) else None
            return f"Reply with the action as plain text{f' ({hint})' if hint else ''}, and nothing else."
        return (
            "Reply with the action as a JSON object, and nothing else. It must fit this JSON schema: "
            f"{json.dumps(jsonable(schema, lenient=True), ensure_ascii=False)}"
        )


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """The field of an action that takes the text: the only one, if it is text; ``None`` otherwise."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return None
    fields = {name: field for name, field in properties.items() if name != "metadata"}
    if len(fields) != 1:
        return None
    name, field = next(iter(fields.items()))
    return str(name) if isinstance(field, Mapping) and field.get("type") == "string" else None
