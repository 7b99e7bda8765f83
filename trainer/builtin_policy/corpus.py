"""The corpus of an environment: its observations and actions, collected by playing it, for a tokenizer.

The episodes are always the same, so that two policies for the same environments share a vocabulary whatever
their seeds are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollgym.chat.tool_formats import find_format
from rollgym.core.agent import Agent, AgentSetup, FunctionAgent, make_agent
from rollgym.core.env import text_interface
from rollgym.core.errors import RunError
from rollgym.core.registry import env_info, make
from rollgym.core.tasks import TaskSet
from rollgym.core.types import Episode, EpisodeSpec, Limits
from rollgym.pool.inline import InlinePool
from rollgym.rollout.inflight import run_episodes

TASKS = {"random": 24, "expert": 4, "nonsense": 2}
"""Number of tasks for each kind of player."""
TURNS = {"random": 20, "expert": 20, "nonsense": 3}
"""Turn limit of each task, for each kind of player."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text of one environment."""

    env_id: str
    env_kwargs: Mapping[str, Any]
    instructions: str
    complaints: tuple[str, ...]
    """The answers to invalid actions."""
    tasks: tuple[tuple[str, ...], ...]
    """All observations and actions, by task."""
    declared: tuple[str, ...]
    """The valid actions in ``info``."""
    actions: tuple[str, ...]
    """The valid actions, and every action that was played."""
    turns: tuple[tuple[str, str], ...]
    """(observation, action) of every turn, without the invalid actions."""
    words: tuple[str, ...] = ()
    """The vocabulary that the environment declares."""


def collect(env_id: str, env_kwargs: Mapping[str, Any]) -> Corpus:
    """Play an environment with the random agent, its expert, and an agent whose actions are invalid."""
    tasks, words = _look(env_id, env_kwargs)
    played = asyncio.run(_play(env_id, dict(env_kwargs), tasks))
    good = [episode for kind in ("random", "expert") for episode in played[kind]]
    turns = tuple((turn.observation, turn.action) for episode in good for turn in episode.turns)
    declared = dict.fromkeys(a for episode in good for info in _infos(episode) for a in _declared(info))
    by_task: dict[int, list[str]] = {}
    for episode in good:
        by_task.setdefault(episode.spec.env_seed, []).extend(_texts(episode))
    return Corpus(
        env_id=env_id,
        env_kwargs=env_kwargs,
        instructions=_instructions(good[0]),
        complaints=tuple(text for episode in played["nonsense"] for text in _texts(episode)),
        tasks=tuple(tuple(texts) for texts in by_task.values()),
        declared=tuple(declared),
        actions=tuple(declared | dict.fromkeys(action for _, action in turns)),
        turns=turns,
        words=words,
    )


def _instructions(episode: Episode) -> str:
    """The instructions, and the tools as the prompt of a template without tools describes them."""
    if not episode.tools:
        return episode.instructions
    return f"{episode.instructions}\n\n{find_format('json').describe(episode.tools)}"


async def _play(env_id: str, env_kwargs: dict[str, Any], tasks: TaskSet | None) -> dict[str, list[Episode]]:
    """Play all episodes; returns them by kind of player."""
    setup = AgentSetup(env_id=env_id, env_kwargs=env_kwargs)
    agents: dict[str, Agent] = {"random": make_agent("random", setup)}
    if env_info(env_id).expert is not None:
        agents["expert"] = make_agent("expert", setup)
    agents["nonsense"] = FunctionAgent(lambda observation, info: "?")
    episodes: dict[str, list[Episode]] = {kind: [] for kind in TASKS}
    pool = InlinePool()
    try:
        for kind, agent in agents.items():
            specs = _specs(setup, tasks, kind)
            episodes[kind] = await run_episodes(specs, pool, agent, max_in_flight=1, on_episode=_check)
    finally:
        await pool.close()
        for agent in agents.values():
            await agent.close()
    return episodes


def _look(env_id: str, env_kwargs: Mapping[str, Any]) -> tuple[TaskSet | None, tuple[str, ...]]:
    """The environment's tasks and declared vocabulary."""
    env = make(env_id, **env_kwargs)
    try:
        face = text_interface(env)
        return face.tasks, tuple(getattr(face, "words", ()))
    finally:
        env.close()


def _specs(setup: AgentSetup, tasks: TaskSet | None, kind: str) -> Iterator[EpisodeSpec]:
    """The first tasks of the first split, in the same order for every kind of player."""
    split, indices = "", list[int | None]([None] * TASKS[kind])
    if tasks is not None:
        split = next(iter(tasks.splits))
        indices = list(islice(tasks.order(split, 0), min(TASKS[kind], tasks.size(split))))
    for number, task in enumerate(indices):
        yield EpisodeSpec(
            episode_id=f"{kind}-{number}",
            env_id=setup.env_id,
            env_kwargs=dict(setup.env_kwargs),
            task=task,
            split=split,
            env_seed=number,
            sampling_seed=number,
            limits=Limits(turns=TURNS[kind]),
        )


def _check(episode: Episode) -> None:
    """Refuse a failed episode: a vocabulary must not depend on a mishap."""
    if episode.error is not None:
        raise RunError(f"{episode.spec.env_id} could not be played: {episode.error.message}")


def _texts(episode: Episode) -> list[str]:
    texts = [text for turn in episode.turns for text in (turn.observation, turn.action)]
    return [*texts, episode.final_observation]


def _infos(episode: Episode) -> Iterator[Mapping[str, Any]]:
    yield episode.reset_info
    yield from (turn.info for turn in episode.turns)


def _declared(info: Mapping[str, Any]) -> list[str]:
    actions = info.get("actions")
    return [str(action) for action in actions] if isinstance(actions, list) else []
