"""Environments whose actions are tool calls: the base class `ToolEnv`.

Methods marked with `tool` are the tools. An agent calls one or several in a turn; the results are the
observation, and as messages of role ``tool`` they are in ``info["messages"]``. As text, an action is the call
as JSON, so that everything which plays text environments plays these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from rollgym.core.env import StepResult, TextEnv
from rollgym.core.errors import UsageError
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.tools import (
    BadCall,
    Tool,
    find_tools,
    list_calls,
    random_arguments,
    read_calls,
    tool,
    unknown_tool,
    with_ids,
)

__all__ = ["ToolEnv", "tool"]

_TRIES = 100
"""Draws of random arguments before giving up."""


_tools: WeakKeyDictionary[type, dict[str, Tool]] = WeakKeyDictionary()


def _tools_of_class(cls: type) -> dict[str, Tool]:
    if cls not in _tools:
        for method in find_tools(cls).values():
            if hasattr(ToolEnv, method):
                raise UsageError(
                    f"The tool {cls.__name__}.{method} replaces a method of environments: rename it, and set "
                    f"the tool's name with @tool(name={method!r})."
                )
        _tools[cls] = {name: Tool(name, cls, method) for name, method in find_tools(cls).items()}
    return _tools[cls]


class ToolEnv(TextEnv):
    """Base class of environments whose actions are calls of tools; override `begin` and mark tools.

    A tool is a method with type hints and a docstring, marked with `tool`. It returns the observation as a
    string, or a `StepResult` with a reward, end flags or success. The rewards of the calls of a turn add up;
    after a call that ends the episode, the others of its turn are not executed.

    An invalid call (not JSON, an unknown tool, arguments that do not match the schema) is an invalid action:
    no call of that turn is executed, and the observation states what was wrong.

    An environment whose tools are not methods sets ``self.tools`` in ``__init__`` and overrides `call_tool`.
    One without tools (``self.tools = ()``) plays plain text and overrides `respond`.

    Example:
        >>> class Lock(ToolEnv):
        ...     instructions = "Open the lock. Its code is a digit."
        ...     def begin(self, task):
        ...         self.code = int(task.rng().integers(10))
        ...         return "The lock is closed."
        ...     @tool
        ...     def enter(self, digit: Annotated[int, Field(ge=0, le=9)]) -> StepResult:
        ...         '''Enter a digit.'''
        ...         right = digit == self.code
        ...         return StepResult("It opens." if right else "No.", float(right), right, success=right)
        >>> env.step('{"name": "enter", "arguments": {"digit": 4}}')
    """

    max_calls_per_turn: int = 16
    """Calls of one turn; a turn with more is an invalid action."""

    def __init__(self, *, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.tools = tuple(known.spec for known in _tools_of_class(type(self)).values())

    def call_tool(self, call: ToolCall) -> str | StepResult:
        """Execute one call, which `check_call` accepted; calls the method by default."""
        known = _tools_of_class(type(self))[call.name]
        result: str | StepResult = getattr(self, known.method)(**known.check(call.arguments))
        return result

    def check_call(self, call: ToolCall) -> None:
        """Raise `BadCall` where a call is invalid; its message is shown to the agent."""
        if call.name not in {spec.name for spec in self.tools}:
            raise BadCall(unknown_tool(call.name, self.tools))
        known = _tools_of_class(type(self)).get(call.name)
        if known is not None:
            known.check(call.arguments)

    def refuse(self, reason: str) -> StepResult:
        """Answer an invalid action. Override it to count the turn, or to show the state again."""
        return StepResult(reason, valid=False)

    def respond(self, action: str) -> StepResult:
        """Execute the calls of a turn, given as JSON."""
        try:
            calls = with_ids(read_calls(action))
            if len(calls) > self.max_calls_per_turn:
                count = (
                    "1 tool call" if self.max_calls_per_turn == 1 else f"{self.max_calls_per_turn} tool calls"
                )
                raise BadCall(f"A turn may have {count} at most, not {len(calls)}.")
        except BadCall as error:
            return _refuse_text(self, str(error))
        problems = [_problem(self, call) for call in calls]
        if any(problems):
            return _refuse_calls(self, calls, problems)
        return _joined(calls, _execute(self, calls))

    def facts(self) -> Mapping[str, Any]:
        """All calls as ``actions``, where they are few."""
        actions = list_calls(self.tools) if self.tools else None
        return {} if actions is None else {"actions": actions}

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """One of ``info["actions"]``, or a random call by the schemas of the tools."""
        if info.get("actions") or not self.tools:
            return super().random_action(observation, info, rng)
        spec = self.tools[int(rng.integers(len(self.tools)))]
        for _ in range(_TRIES):
            call = ToolCall(name=spec.name, arguments=random_arguments(spec, rng))
            if not _problem(self, call):
                return call.to_json()
        raise UsageError(
            f"A random agent cannot play {type(self).__name__}: no random arguments of the tool {spec.name} "
            "were valid. List the valid actions in info['actions'] (see facts()) or define random_action()."
        )


# Functions and not methods: an environment's private methods may have any name.


def _problem(env: ToolEnv, call: ToolCall) -> str:
    try:
        env.check_call(call)
    except BadCall as error:
        return str(error)
    return ""


def _refuse_text(env: ToolEnv, problem: str) -> StepResult:
    result = env.refuse(problem)
    names = ", ".join(spec.name for spec in env.tools)
    # Without the JSON form, which is for text: an agent with tools writes calls in another form.
    stated = result.observation.replace(problem, f"No valid tool call. The tools are: {names}.")
    message = Message(role="user", content=stated)
    return replace(result, valid=False, info={**result.info, "messages": [message.to_openai()]})


def _refuse_calls(env: ToolEnv, calls: Sequence[ToolCall], problems: Sequence[str]) -> StepResult:
    """Return one answer for all calls of a turn of which at least one is invalid."""
    first = next(number for number, problem in enumerate(problems) if problem)
    others = "Not executed, since another call of this turn is invalid."
    results = [StepResult(problem or others, valid=False) for problem in problems]
    results[first] = replace(env.refuse(problems[first]), valid=False)
    return _joined(calls, results)


def _execute(env: ToolEnv, calls: Sequence[ToolCall]) -> list[StepResult]:
    results: list[StepResult] = []
    for call in calls:
        result = env.call_tool(call)
        results.append(result if isinstance(result, StepResult) else StepResult(str(result)))
        if results[-1].terminated or results[-1].truncated:
            break
    return results


def _joined(calls: Sequence[ToolCall], results: Sequence[StepResult]) -> StepResult:
    """Return the results of the executed calls of a turn as one result."""
    messages = []
    info: dict[str, Any] = {}
    rewards: dict[str, float] = {}
    successes: dict[str, bool] = {}
    for result in results:
        for role, reward in result.rewards.items():
            rewards[role] = rewards.get(role, 0.0) + float(reward)
        for role, success in result.successes.items():
            successes[role] = successes.get(role, False) or bool(success)
    for call, result in zip(calls, results, strict=False):
        message = Message(role="tool", content=result.observation, tool_call_id=call.id, name=call.name)
        messages.append(message.to_openai())
        info |= result.info
    if len(results) == 1:
        observation = results[0].observation
    else:
        parts = [f"{call.name}:\n{result.observation}" for call, result in zip(calls, results, strict=False)]
        observation = "\n\n".join(parts)
    return StepResult(
        observation,
        reward=sum(float(result.reward) for result in results),
        terminated=any(result.terminated for result in results),
        truncated=any(result.truncated for result in results),
        success=any(result.success for result in results),
        valid=all(result.valid for result in results),
        info={**info, "messages": messages},
        rewards=rewards,
        successes=successes,
    )


def tools_of(interface: object) -> tuple[ToolSpec, ...]:
    """Return the tools of an environment or adapter; none for one that does not know of tools."""
    tools = getattr(interface, "tools", ())
    return tuple(spec for spec in tools if isinstance(spec, ToolSpec)) if isinstance(tools, tuple) else ()
