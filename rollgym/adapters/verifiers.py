"""Environments of verifiers 0.4: ``verifiers:PACKAGE``, where PACKAGE is an installed task set.

verifiers has task sets without splits, and rewards at the end of an episode without a notion of success.
Splits are made here from hashes of the tasks; success is what ``success_reward`` defines.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, version
from typing import Any

import numpy as np

from rollgym.adapters.global_random import PrivateRandom
from rollgym.adapters.prefixes import VERIFIERS
from rollgym.adapters.random_text import random_word
from rollgym.adapters.task_sets import content_key, make_task_set
from rollgym.adapters.verifiers_session import HARNESS, Asked, Over, VerifiersSession, text_of
from rollgym.core.env import StepResult, TextEnv, check_number, check_whole
from rollgym.core.errors import EnvError, UsageError, one_line
from rollgym.core.seeding import MAX_SEED
from rollgym.core.tasks import Task, TaskSet

MAX_TURNS = 200
"""Default number of actions after which an episode is truncated."""
MAX_TASKS = 1000
"""Default number of tasks that are taken from an endless task set."""
SHARES: Mapping[str, float] = {"train": 0.8, "dev": 0.1, "test": 0.1}
"""Default shares of the splits."""
_TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
_ROUNDING = 1e-9
"""Weighted rewards are sums of floats: 0.7 + 0.2 + 0.1 is a little below 1."""
_INSTRUCTIONS = "Reply to the last message. The reward comes at the end of the episode."
_PLUGIN = HARNESS.replace("-", "_")


class VerifiersEnv(TextEnv):
    """A task set of verifiers, played by its environment with one agent.

    Observation: the messages since the last reply. A system prompt that all tasks share is part of the
    instructions; otherwise the first observation starts with it.

    Actions: a reply, as plain text.

    Reward: the sum of the weighted rewards of verifiers, at the end of the episode.

    Success: that sum is at least ``success_reward``.

    Ends: terminated when verifiers ends the episode; truncated by its limits, ``max_turns`` among them.

    Splits: shares of the tasks, by a hash of their content; tasks with the same content count once.
    """

    tasks: TaskSet

    def __init__(
        self,
        *,
        inner_id: str,
        success_reward: float = 1.0,
        max_turns: int = MAX_TURNS,
        max_tasks: int | None = None,
        splits: Mapping[str, float] | None = None,
        env_options: Mapping[str, Any] | None = None,
        timeout: float = 120.0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        """Load the task set ``inner_id``; ``options`` are its settings, ``env_options`` its environment's."""
        self._vf: Any = VERIFIERS.load()
        self._success_reward = check_number("success_reward", success_reward)
        self._name, self._timeout = inner_id, check_number("timeout", timeout)
        self._max_turns = check_whole("max_turns", max_turns)
        limit = None if max_tasks is None else check_whole("max_tasks", max_tasks)
        self._config = self._make_config(options, dict(env_options or {}))
        with PrivateRandom(0):
            rows = self._load(limit)
        self._rows = split_rows(rows, SHARES if splits is None else splits, f"verifiers:{inner_id}")
        system = {row.data.system_prompt for row in rows}
        self._system = str(system.pop() or "") if len(system) == 1 else None
        self.instructions = f"{self._system}\n\n{_INSTRUCTIONS}" if self._system else _INSTRUCTIONS
        self.success_means = f"the rewards of verifiers sum to at least {success_reward:g}"
        contents = content_key([row_key(row) for row in rows])
        self.tasks = make_task_set(
            f"verifiers:{inner_id}",
            f"{_package_version(inner_id)} verifiers {version(VERIFIERS.package)}",
            {"options": options, "env_options": dict(env_options or {}), "tasks": contents},
            {split: len(part) for split, part in self._rows.items()},
        )
        super().__init__(render_mode=render_mode)
        self._session: VerifiersSession | None = None
        self._random = PrivateRandom(0)

    def begin(self, task: Task) -> str:
        """Start the task's episode, up to the first question to the agent."""
        self._random = PrivateRandom(int(self.np_random.integers(MAX_SEED)))
        if self._session is None:
            self._session = VerifiersSession(self._name, self._load_environment, self._timeout)
        with self._random:
            event = self._session.begin(self._rows[task.split][task.index])
        if isinstance(event, Over):
            self._check(event.episode)
            raise EnvError(f"verifiers:{self._name} ended an episode without asking its agent.")
        messages = list(event.messages)
        if self._system and messages and messages[0].get("role") == "system":
            del messages[0]  # it is part of the instructions
        return text_of(messages)

    def respond(self, action: str) -> StepResult:
        """Send the reply, and wait for the next question or the end."""
        assert self._session is not None
        with self._random:
            event = self._session.reply(action)
        if isinstance(event, Asked):
            return StepResult(text_of(event.messages))
        trace = self._check(event.episode)
        truncated = trace.stop_condition in _TRUNCATED or trace.is_timeout
        reward = float(trace.reward)
        return StepResult(
            "The episode is over.",
            reward,
            terminated=not truncated,
            truncated=truncated,
            success=reward >= self._success_reward - _ROUNDING,
            info={
                "rewards": {name: part.value for name, part in trace.rewards.items() if part is not None},
                "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
                "stop_condition": trace.stop_condition,
            },
        )

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A word of the observation, or a number from 0 to 9."""
        return random_word(observation, rng)

    def close(self) -> None:
        """End the thread of the environment."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _make_config(self, options: dict[str, Any], env_options: dict[str, Any]) -> Any:
        """The config: the task set's settings, and one agent whose replies are our actions."""
        vf, name = self._vf, self._name
        module = self._import()
        if not _exports(module, vf.Taskset):
            classic = hasattr(module, "load_environment")
            raise UsageError(
                f"verifiers:{name} has load_environment, as packages for verifiers before 0.4 have; "
                "verifiers 0.4 runs packages that export a v1 Taskset."
                if classic
                else f"verifiers:{name} is not a task set: it exports no v1 Taskset in __all__."
            )
        try:
            taskset = {**options, "id": name}
            roles = _roles(vf, vf.env_config_type(name, str(env_options.get("id") or "")))
            if len(roles) != 1:
                raise UsageError(
                    f"verifiers:{name} has {len(roles)} agents ({', '.join(roles) or 'none'}); the adapter "
                    "supports environments with one."
                )
            (role,) = roles
            agent = {
                **dict(env_options.pop(role, {})),
                "harness": {"id": HARNESS, "max_retries": 0},
                "runtime": {"type": "subprocess"},
                "max_turns": self._max_turns,
                "retries": {"max_retries": 0},
            }
            return vf.resolve_env_config({**env_options, "taskset": taskset, role: agent})
        except UsageError:
            raise
        except Exception as error:  # pydantic's errors, and what the package raises
            raise UsageError(
                f"verifiers:{name} does not accept the options {options or env_options}: {_explain(error)}."
            ) from error

    def _import(self) -> Any:
        if self._name.rsplit("/", 1)[-1].replace("-", "_").lower() == _PLUGIN:
            raise UsageError(
                f"verifiers:{self._name} is rollgym's own plugin: use the environment's id without verifiers."
            )
        try:
            return self._vf.import_taskset(self._name)
        except ModuleNotFoundError as error:
            if "not found (tried to import" in str(error):
                raise UsageError(
                    f"There is no task set {self._name!r} for verifiers: install the package that has it."
                ) from error
            raise UsageError(f"verifiers:{self._name} cannot be imported: {one_line(error)}.") from error
        except Exception as error:  # a package may raise anything while it is imported
            raise UsageError(f"verifiers:{self._name} cannot be imported: {one_line(error)}.") from error

    def _load(self, limit: int | None) -> list[Any]:
        """The tasks, each content once; raises `UsageError` for those that the adapter cannot run."""
        name, config = self._name, self._config.taskset
        try:
            taskset = self._vf.load_taskset(config)
            if limit is None and not taskset.bounded:
                limit = MAX_TASKS
            rows = list(itertools.islice(taskset, limit))
            tools = [*taskset.toolsets(config), *taskset.task_type().toolsets(config.task)]
        except Exception as error:  # a missing data set, wrong settings
            raise UsageError(f"verifiers:{name} cannot load its tasks: {one_line(error)}.") from error
        if tools:
            raise UsageError(
                f"verifiers:{name} has tool servers, which the adapter does not support: it plays text only."
            )
        if taskset.task_type().NEEDS_CONTAINER or any(row.data.image for row in rows):
            raise UsageError(f"verifiers:{name} needs a container, which the adapter does not support.")
        return list({row_key(row): row for row in reversed(rows)}.values())[::-1]

    def _load_environment(self) -> Any:
        logging.getLogger("aiohttp").setLevel(logging.ERROR)
        return self._vf.load_environment(self._config)

    def _check(self, episode: Any) -> Any:
        """The episode's trace; raises `EnvError` where verifiers recorded a failure."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or len(episode.traces) != 1:
            reason = f"{errors[0].type}: {errors[0].message}" if errors else "its agent did not run once"
            raise EnvError(f"verifiers:{self._name} failed: {' '.join(reason.split())[:500]}")
        return episode.traces[0]


def row_key(row: Any) -> str:
    """The content of a task without what only names it: two tasks with the same key are one."""
    names = {"idx", "id", "name", "description"}
    data = row.data.model_dump(mode="json", exclude_none=True, exclude=names)
    return json.dumps(data, sort_keys=True)


def split_rows(rows: Sequence[Any], shares: Mapping[str, float], name: str) -> dict[str, list[Any]]:
    """Divide tasks by a hash of their content: at least one for each split, in the task set's order."""
    good = isinstance(shares, Mapping) and shares and all(_is_share(share) for share in shares.values())
    if not good:
        raise UsageError(
            f"splits must map names to shares, such as {{'train': 0.8, 'test': 0.2}}, not {shares!r}."
        )
    if len(rows) < len(shares):
        raise UsageError(
            f"{name} has {len(rows)} tasks, too few for the splits {', '.join(shares)}: pass the option "
            "splits with fewer, such as {'test': 1}."
        )
    order = sorted(range(len(rows)), key=lambda number: content_key(row_key(rows[number])))
    bounds = np.cumsum(list(shares.values())) / sum(shares.values()) * len(rows)
    parts, start = dict[str, list[Any]](), 0
    for number, (split, bound) in enumerate(zip(shares, bounds, strict=True)):
        later = len(shares) - number - 1
        end = min(max(round(float(bound)), start + 1), len(rows) - later)
        parts[split] = [rows[place] for place in sorted(order[start:end])]
        start = end
    return parts


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _exports(module: Any, base: type) -> bool:
    names = getattr(module, "__all__", ())
    found = (getattr(module, name, None) for name in names)
    return any(isinstance(item, type) and issubclass(item, base) and item is not base for item in found)


def _roles(vf: Any, config_type: Any) -> list[str]:
    return [
        name for name, field in config_type.model_fields.items() if isinstance(field.default, vf.AgentConfig)
    ]


def _explain(error: Exception) -> str:
    """The first problem that pydantic found, or the error's first line."""
    find = getattr(error, "errors", None)
    if not callable(find):
        return one_line(error)
    first = find()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def _package_version(name: str) -> str:
    """The version of the distribution that has the task set."""
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()
    if importlib.util.find_spec(f"verifiers.v1.tasksets.{module}") is not None:
        return "built-in"
    distributions = packages_distributions().get(module, [])
    return version(distributions[0]) if distributions else "unversioned"
