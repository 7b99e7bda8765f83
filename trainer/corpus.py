"""What an environment says and is told, collected by playing it: the text that a tokenizer is made for.

The episodes are always the same ones, so that two policies for the same environments share a vocabulary
whatever their seeds are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollgym.agent import Agent, AgentSetup, FunctionAgent, make_agent
from rollgym.errors import RunError
from rollgym.pool.inline import InlinePool
from rollgym.registry import card, make
from rollgym.scheduler.episode import play_episode
from rollgym.tasks import TaskSet
from rollgym.text import text_face
from rollgym.types import Episode, EpisodeSpec, Limits

TASKS = {"random": 24, "expert": 4, "nonsense": 2}
"""How many tasks each kind of player is given."""
TURNS = {"random": 20, "expert": 20, "nonsense": 3}
"""How many turns of each task are played, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text of one environment."""

    env_id: str
    env_kwargs: Mapping[str, Any]
    instructions: str
    complaints: tuple[str, ...]
    """What it answers to nonsense."""
    tasks: tuple[tuple[str, ...], ...]
    """All that is said and done in each task that was played."""
    declared: tuple[str, ...]
    """The actions that ``info`` named as valid."""
    actions: tuple[str, ...]
    """These, and every action that was played."""
    turns: tuple[tuple[str, str], ...]
    """(observation, action) of every turn, nonsense left out."""
    words: tuple[str, ...] = ()
    """What the environment itself says its words are."""


def collect(env_id: str, env_kwargs: Mapping[str, Any]) -> Corpus:
    """Play an environment with the random agent, its expert and one that talks nonsense."""
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
        instructions=good[0].instructions,
        complaints=tuple(text for episode in played["nonsense"] for text in _texts(episode)),
        tasks=tuple(tuple(texts) for texts in by_task.values()),
        declared=tuple(declared),
        actions=tuple(declared | dict.fromkeys(action for _, action in turns)),
        turns=turns,
        words=words,
    )


async def _play(env_id: str, env_kwargs: dict[str, Any], tasks: TaskSet | None) -> dict[str, list[Episode]]:
    """Episodes by kind of player."""
    setup = AgentSetup(env_id=env_id, env_kwargs=env_kwargs)
    agents: dict[str, Agent] = {"random": make_agent("random", setup)}
    if card(env_id).expert is not None:
        agents["expert"] = make_agent("expert", setup)
    agents["nonsense"] = FunctionAgent(lambda observation, info: "?")
    played: dict[str, list[Episode]] = {kind: [] for kind in TASKS}
    pool = InlinePool()
    try:
        for kind, agent in agents.items():
            for spec in _specs(setup, tasks, kind):
                played[kind].append(_sound(await play_episode(spec, pool, agent)))
    finally:
        await pool.close()
        for agent in agents.values():
            await agent.close()
    return played


def _look(env_id: str, env_kwargs: Mapping[str, Any]) -> tuple[TaskSet | None, tuple[str, ...]]:
    """The tasks that it has, and the words that it names itself."""
    env = make(env_id, **env_kwargs)
    try:
        face = text_face(env)
        return face.tasks, tuple(getattr(face, "words", ()))
    finally:
        env.close()


def _specs(setup: AgentSetup, tasks: TaskSet | None, kind: str) -> Iterator[EpisodeSpec]:
    """The first tasks of the first split, in one order for every kind of player."""
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


def _sound(episode: Episode) -> Episode:
    """The episode, unless it failed: a vocabulary must not depend on a mishap."""
    if episode.error is not None:
        raise RunError(f"{episode.spec.env_id} could not be played: {episode.error.message}")
    return episode


def _texts(episode: Episode) -> list[str]:
    said = [text for turn in episode.turns for text in (turn.observation, turn.action)]
    return [*said, episode.final_observation]


def _infos(episode: Episode) -> Iterator[Mapping[str, Any]]:
    yield episode.reset_info
    yield from (turn.info for turn in episode.turns)


def _declared(info: Mapping[str, Any]) -> list[str]:
    actions = info.get("actions")
    return [str(action) for action in actions] if isinstance(actions, list) else []
