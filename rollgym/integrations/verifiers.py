r"""rollgym's environments for verifiers 0.4: a task set, the environment that plays it, and a chat harness.

The module ``rollgym_verifiers`` exports the three as a plugin, so verifiers' own commands run them:

    vf-eval rollgym-verifiers --env.taskset.env rollgym/Sokoban-v0 --env.taskset.split test -n 20 \
        -m MODEL --client.base-url http://127.0.0.1:8000/v1 --no-push

In Python, `env_config` returns what ``verifiers.v1.load_environment`` takes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
from pydantic import Field

from rollgym.core.env import text_interface
from rollgym.core.errors import MissingExtra, UsageError
from rollgym.core.registry import env_id_of, make
from rollgym.core.role_env import roles_of
from rollgym.core.seeding import derive_seed
from rollgym.core.tool_env import tools_of

try:
    import verifiers.v1 as vf
except ImportError:
    raise MissingExtra(
        "rollgym.integrations.verifiers needs the package verifiers: pip install 'verifiers==0.4.*'"
    ) from None

__all__ = ["ChatHarness", "RollgymEnv", "RollgymTaskset", "env_config"]

PLUGIN = "rollgym-verifiers"
"""The id of rollgym's plugin in verifiers."""


class RollgymConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is not installed where mypy runs
    """Settings of the task set, under ``--env.taskset.*``."""

    env: str = ""
    """Environment: an id, ``PREFIX:NAME`` or ``module:Class``. It must be given."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    split: str | None = None
    """Split of its task set; the first one by default."""
    seed: int = 0
    """Decides the seeds of episodes. All rollouts of a task have the same."""
    size: int = Field(100, ge=1)
    """Number of tasks where the environment has no task set."""


class RollgymData(vf.TaskData):  # type: ignore[misc]
    """One task of a rollgym environment."""

    env: str
    kwargs: dict[str, Any]
    options: dict[str, Any]
    """What ``reset`` gets: the task and its split."""
    seed: int


class RollgymTask(vf.Task[RollgymData]):  # type: ignore[misc]
    """A task; its reward comes from `RollgymEnv`, which plays it."""


class RollgymTaskset(vf.Taskset[RollgymTask, RollgymConfig]):  # type: ignore[misc]
    """The tasks of a split, in order."""

    def load(self) -> Iterator[RollgymTask]:
        """Yield every task of the split; the system prompt is the environment's instructions."""
        config = self.config
        if not config.env:
            raise UsageError("No environment given: pass --env.taskset.env, such as rollgym/Sokoban-v0.")
        instructions, sizes = _describe(config.env, config.kwargs)
        split = config.split or next(iter(sizes), None)
        if sizes and split not in sizes:
            raise UsageError(f"{config.env} has no split {split!r}: its splits are {', '.join(sizes)}.")
        for index in range(sizes[str(split)] if sizes else config.size):
            options = {"task": index, "split": split} if sizes else {}
            yield RollgymTask(
                RollgymData(
                    name=f"{config.env} {split or 'task'} {index}",
                    system_prompt=instructions or None,
                    env=config.env,
                    kwargs=config.kwargs,
                    options=options,
                    seed=derive_seed("verifiers", config.seed, index),
                ),
                config.task,
            )


class RollgymEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """One seat, ``player``, which needs no sandbox: the environment runs in the process of verifiers."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class RollgymEnv(vf.Env[RollgymEnvConfig]):  # type: ignore[misc]
    """Plays a rollgym environment: observations are the user's turns, replies are actions.

    The reward ``episode_return`` is the sum of the environment's rewards. The metrics are ``success`` (where
    the environment defines it), ``truncated`` and ``invalid_actions``. An environment that fails fails the
    episode, which then has no reward.
    """

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode."""
        loop = asyncio.get_running_loop()
        # An environment may depend on its thread, so all calls of an episode run on the same one.
        with ThreadPoolExecutor(1, thread_name_prefix="rollgym-env") as thread:
            episode: _Episode = await loop.run_in_executor(thread, _Episode, task.data)
            try:
                async with agents.player.interaction(task) as interaction:
                    segment = await interaction.turn(episode.observation)
                    while not segment.terminated:
                        await loop.run_in_executor(thread, episode.play, segment.last_reply)
                        if episode.over:
                            break
                        segment = await interaction.turn(episode.observation)
                episode.record(interaction.trace)
            finally:
                await loop.run_in_executor(thread, episode.env.close)


class _Episode:
    """A running episode and its sums."""

    def __init__(self, data: Any) -> None:
        self.env: gym.Env[str, str] = make(data.env, **data.kwargs)
        self.observation, _ = self.env.reset(seed=data.seed, options=dict(data.options))
        self.over = self.truncated = False
        self.total, self.invalid = 0.0, 0
        self.success: bool | None = None

    def play(self, action: str) -> None:
        self.observation, reward, terminated, self.truncated, info = self.env.step(action)
        self.total += float(reward)
        self.success = info.get("success")
        self.invalid += info.get("valid") is False
        self.over = terminated or self.truncated

    def record(self, trace: Any) -> None:
        trace.record_reward("episode_return", self.total)
        # A limit of verifiers that ended the episode before the environment did truncates it too.
        trace.record_metric("truncated", float(self.truncated or not self.over))
        trace.record_metric("invalid_actions", float(self.invalid))
        if self.success is not None:
            trace.record_metric("success", float(self.success))


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Settings of the chat harness, under ``--env.player.harness.*``."""

    max_retries: int = Field(2, ge=0)
    """Retries of a request that failed for a reason that may pass."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """One chat completion per turn, in the process of verifiers: no tools, no sandbox, no ``uv``."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Ask the model once, through the endpoint of verifiers that records the turn."""
        import httpx
        from openai import AsyncOpenAI, OpenAIError
        from verifiers.v1.dialects.chat import message_to_wire

        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        make_client: Any = AsyncOpenAI
        async with make_client(
            base_url=endpoint,
            api_key=secret,
            max_retries=self.config.max_retries,
            http_client=httpx.AsyncClient(
                verify=_certificates(), timeout=httpx.Timeout(None, connect=30.0), trust_env=False
            ),
        ) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except OpenAIError as error:
                # verifiers knows the cause, or has stopped the episode and expects the failure.
                return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def env_config(
    env: str | Callable[..., Any],
    *,
    split: str | None = None,
    seed: int = 0,
    size: int = 100,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return the config of an environment, for ``verifiers.v1.load_environment`` or an ``EvalConfig``.

    Args:
        env: An id, ``PREFIX:NAME``, ``module:Class``, a class, or a function that makes an environment.
        split: The split of its task set; the first one by default.
        seed: Decides the seeds of episodes.
        size: Number of tasks where the environment has no task set.
        env_kwargs: Arguments of the environment.

    Raises:
        UsageError: The environment, the split or an argument is wrong, or it needs agents in several roles.

    Example:
        >>> env = verifiers.v1.load_environment(env_config("rollgym/Sokoban-v0", split="test"))
        >>> tasks = list(env.taskset.take(3))
    """
    name, kwargs = env_id_of(env), dict(env_kwargs or {})
    settings = {"id": PLUGIN, "env": name, "kwargs": kwargs, "split": split, "seed": seed, "size": size}
    config = vf.resolve_env_config({"taskset": settings})
    next(iter(vf.load_taskset(config.taskset)))  # fails early for a wrong split or argument
    return config


def _describe(env_id: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The instructions of an environment and the sizes of its splits."""
    env = make(env_id, **kwargs)
    try:
        interface = text_interface(env)
        if roles_of(interface) and getattr(interface, "others", None) is None:
            raise UsageError(
                f"{env_id} expects agents in all roles, and verifiers' player is one: leave out others=None."
            )
        lines = [str(interface.instructions)]
        if tools := tools_of(interface):
            lines.append('Reply with a tool call as JSON: {"name": TOOL, "arguments": {...}}. The tools are:')
            lines += [json.dumps(spec.to_openai()["function"], ensure_ascii=False) for spec in tools]
        return "\n".join(lines).strip(), dict(interface.tasks.splits) if interface.tasks else {}
    finally:
        env.close()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Loaded once: it takes longer than a request on this machine."""
    return ssl.create_default_context()
