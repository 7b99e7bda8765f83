"""rollgym's environments for TRL's GRPOTrainer: an environment factory, rewards and a dataset of tasks.

    from trl import GRPOConfig, GRPOTrainer
    from rollgym.integrations import trl

    trainer = GRPOTrainer(
        model=...,
        args=GRPOConfig(...),
        train_dataset=trl.dataset("rollgym/Sokoban-v0", size=256),
        environment_factory=trl.environment_factory("rollgym/Sokoban-v0"),
        reward_funcs=trl.reward_funcs(),
    )

The model plays by tool calls: the tools of the environment, or ``act(action)`` where actions are plain text.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from rollgym.core.env import text_interface
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall, ToolSpec
from rollgym.core.registry import env_id_of, make
from rollgym.core.seeding import derive_seed
from rollgym.core.tool_env import tools_of
from rollgym.core.tools import text_tool

__all__ = ["dataset", "environment_factory", "reward_funcs"]

OVER = "The episode is over."
_TYPES: Mapping[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict,
}  # fmt: skip
_RESERVED = ("reset", "get_reward")


class TRLEnv:
    """One environment as TRL plays it; `environment_factory` makes a class with a method for each tool.

    TRL takes every public method but ``reset`` as a tool, so everything else here is private.
    """

    _env_id = ""
    _kwargs: Mapping[str, Any] = {}
    _split = "train"

    def __init__(self) -> None:
        self._env: gym.Env[str, str] = make(self._env_id, **self._kwargs)
        self._instructions = str(text_interface(self._env).instructions)
        self._return: float | None = None
        self._success: bool | None = None
        self._running = False

    def reset(self, **row: Any) -> str:
        """Start the episode of a dataset row; returns text that TRL appends to the prompt."""
        self._return, self._success, self._running = None, None, False
        options = {name: row[name] for name in ("task", "split") if row.get(name) is not None}
        if text_interface(self._env).tasks is not None:
            options.setdefault("split", self._split)
        observation, _ = self._env.reset(seed=row.get("seed"), options=options)
        self._return, self._success, self._running = 0.0, False, True
        instructed = _has_text(row.get("prompt"))
        return f"\n\n{observation}" if instructed else f"{self._instructions}\n\n{observation}"

    def _play(self, action: str) -> str:
        if not self._running or self._return is None:
            return OVER
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
        except Exception:
            # A failure of the environment is not a reward of 0: the rollout has none.
            self._return, self._success, self._running = None, None, False
            raise
        self._return += float(reward)
        self._success = info.get("success")
        self._running = not (terminated or truncated)
        return observation if self._running else f"{observation}\n\n{OVER}".strip()


def environment_factory(
    env: str | Callable[..., Any], *, env_kwargs: Mapping[str, Any] | None = None, split: str = "train"
) -> type[TRLEnv]:
    """Return what GRPOTrainer's ``environment_factory`` takes, for any environment.

    Args:
        env: An id, ``PREFIX:NAME``, ``module:Class``, a class, or a function that makes an environment.
        env_kwargs: Arguments of the environment.
        split: The split of rows that name none.

    Raises:
        UsageError: The environment or an argument is wrong, or a tool cannot be a Python method.

    Example:
        >>> factory = environment_factory("rollgym/Sokoban-v0")
        >>> env = factory()
        >>> print(env.reset(task=3, split="test"))
        >>> env.act("Up")
    """
    name, kwargs = env_id_of(env), dict(env_kwargs or {})
    example = make(name, **kwargs)
    try:
        interface = text_interface(example)
        if interface.tasks is not None:
            interface.tasks.size(split)
        tools = tools_of(interface)
    finally:
        example.close()
    members: dict[str, Any] = {"_env_id": name, "_kwargs": kwargs, "_split": split}
    act = text_tool("act", "Play one action in the environment.", "action", "The action.")
    for tool in tools or (act,):
        if not tool.name.isidentifier() or tool.name.startswith("_") or tool.name in _RESERVED:
            raise UsageError(f"{name}: TRL cannot offer a tool called {tool.name!r}.")
        members[tool.name] = _method(tool, plain=not tools)
    title = "".join(part for part in name.rsplit("/", 1)[-1].title() if part.isalnum())
    return type(f"{title or 'Env'}Env", (TRLEnv,), members)


def reward_funcs(*, success_weight: float = 0.0) -> list[Callable[..., list[float | None]]]:
    """Return GRPOTrainer's ``reward_funcs``: the sum of an episode's rewards, and optionally its success.

    A rollout whose environment failed has no reward (``None``), which TRL leaves out.

    Args:
        success_weight: Weight of a second reward, 1 for success and 0 for none; 0 leaves it out.
    """

    def episode_return(environments: Sequence[TRLEnv], **columns: Any) -> list[float | None]:
        return [env._return for env in environments]

    def episode_success(environments: Sequence[TRLEnv], **columns: Any) -> list[float | None]:
        return [None if env._success is None else success_weight * env._success for env in environments]

    return [episode_return, episode_success] if success_weight else [episode_return]


def dataset(
    env: str | Callable[..., Any],
    *,
    size: int = 1000,
    split: str = "train",
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return a ``datasets.Dataset`` with a row per task: ``prompt``, ``task``, ``split`` and ``seed``.

    TRL repeats a row for every member of a group, so all members start from the same task and seed.

    Args:
        env: As for `environment_factory`.
        size: Number of rows; at most the size of the split.
        split: The split of the environment's task set.
        seed: Decides the order of tasks and the seeds of episodes.
        env_kwargs: Arguments of the environment.
    """
    try:
        from_list = importlib.import_module("datasets").Dataset.from_list
    except ImportError:
        raise UsageError("A dataset for TRL needs the package datasets: pip install trl datasets") from None
    if size < 1:
        raise UsageError(f"size must be at least 1, not {size}.")
    made = make(env_id_of(env), **dict(env_kwargs or {}))
    try:
        interface = text_interface(made)
        tasks, instructions = interface.tasks, str(interface.instructions)
    finally:
        made.close()
    order: Any = itertools.repeat(None) if tasks is None else tasks.order(split, seed)
    if tasks is not None and size > tasks.size(split):
        raise UsageError(f"size is {size}, but split {split!r} has {tasks.size(split)} tasks.")
    return from_list(
        [
            {
                "prompt": [{"role": "user", "content": instructions}],
                "task": task,
                "split": split if tasks is not None else None,
                "seed": derive_seed("trl", seed, number),
            }
            for number, task in enumerate(itertools.islice(order, size))
        ]
    )


def _method(tool: ToolSpec, *, plain: bool) -> Callable[..., str]:
    """A method with the name, type hints and docstring from which TRL makes the tool's schema."""
    schema = tool.parameters
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = schema.get("required", [])

    def method(self: TRLEnv, **arguments: Any) -> str:
        if plain:
            return self._play(str(arguments.get("action", "")))
        return self._play(ToolCall(name=tool.name, arguments=arguments).to_json())

    def call(self: TRLEnv, *args: Any, **arguments: Any) -> str:
        given = dict(zip(ordered, args, strict=False)) | arguments
        return method(self, **{name: value for name, value in given.items() if value is not None})

    ordered = sorted(properties, key=lambda name: name not in required)  # those with a default come last
    kinds = {name: _TYPES.get(str(field.get("type")), str) for name, field in properties.items()}
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    optional = {name: {} if name in required else {"default": None} for name in ordered}
    parameters = [
        inspect.Parameter("self", positional),
        *(inspect.Parameter(name, positional, annotation=kinds[name], **optional[name]) for name in ordered),
    ]
    call.__name__ = call.__qualname__ = tool.name
    call.__annotations__ = {**kinds, "return": str}
    call.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    lines = [f"    {name}: {_one_line(properties[name]) or name}" for name in ordered]
    arguments_text = "\n\nArgs:\n" + "\n".join(lines) if lines else ""
    call.__doc__ = f"{' '.join(tool.description.split())}{arguments_text}\n\nReturns:\n    What happens."
    return call


def _one_line(field: Mapping[str, Any]) -> str:
    return " ".join(str(field.get("description", "")).split())


def _has_text(prompt: Any) -> bool:
    """True for a prompt that already contains something, such as the instructions."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    return bool(last.get("content") if isinstance(last, Mapping) else last)
