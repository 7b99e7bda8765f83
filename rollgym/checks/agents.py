"""Rules about agents: instructions that explain, an expert that succeeds, a random agent that does not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rollgym.checks.report import RuleFailed, RuleSkipped, RuleWarning
from rollgym.checks.rollout import Env, EnvUnderTest, Start, Transition, raising, reset, short, step
from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, make_agent
from rollgym.core.registry import env_info
from rollgym.core.tool_env import tools_of
from rollgym.core.types import EpisodeSpec

MARGIN = 0.15
"""Minimum success rate of a baseline above that of the random agent."""
MAX_TURNS = 1_000
_WAYS_TO_ACT = re.compile(
    r"\b(actions?|answer|repl(y|ies)|respond|response|write|type|say|send|enter|choose|pick|guess|commands?|moves?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Score:
    """One episode of an agent."""

    start: Start
    episode: tuple[Transition, ...]

    @property
    def success(self) -> bool | None:
        """Success of the episode; ``None`` where the environment does not report it."""
        success = self.episode[-1].info.get("success")
        return None if success is None else bool(success)

    @property
    def total(self) -> float:
        """The sum of rewards."""
        return sum(float(now.reward) for now in self.episode)

    @property
    def turns(self) -> int:
        """The number of actions."""
        return self.episode[-1].turn

    @property
    def invalid(self) -> str | None:
        """The first invalid action."""
        return next((now.action for now in self.episode if now.info.get("valid") is False), None)


def instructions(subject: EnvUnderTest) -> str:
    """Instructions exist and explain how to act, and the state can be rendered."""
    text = subject.interface.instructions
    if not isinstance(text, str) or len(text.split()) < 3:
        raise RuleFailed(
            f"instructions is {short(text)}; explain in a few sentences the goal and the form of an action: "
            "an agent gets no other explanation."
        )
    with subject.env() as env:
        first = reset(env, Start(0))
        action = subject.player(0)(first.observation, first.info)
    if action.lower() not in text.lower() and not _WAYS_TO_ACT.search(text) and "`" not in text:
        raise RuleFailed(
            f"the instructions do not explain how to act (one action is {short(action)}); "
            "describe the form of an action with an example."
        )
    return f"{len(text.split())} words of instructions{_rendered(subject)}."


def _rendered(subject: EnvUnderTest) -> str:
    modes = subject.copy.metadata.get("render_modes") or ()
    if "ansi" not in modes or "render_mode" in subject.kwargs:
        return ""
    with subject.env(render_mode="ansi") as env:
        first = reset(env, Start(0))
        step(env, subject.player(0)(first.observation, first.info), 1)
        with raising("render() in mode 'ansi'"):
            picture = env.render()
    if not isinstance(picture, str) or not picture.strip():
        raise RuleFailed(f"render() in mode 'ansi' returned {short(picture)}; return the state as text.")
    return "; render() returns text"


def scores(subject: EnvUnderTest, agent: str) -> Sequence[Score]:
    """Episodes of an agent on the first tasks of the test split (or the first seeds); played once."""
    if agent not in subject.memory:
        subject.memory[agent] = _run(_play_all(subject, agent))
    episodes: Sequence[Score] = subject.memory[agent]
    return episodes


def _run(work: Coroutine[Any, Any, list[Score]]) -> list[Score]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # An event loop is already running, as in a notebook.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _play_all(subject: EnvUnderTest, name: str) -> list[Score]:
    with raising(f"making the {name} agent"):
        agent = make_agent(name, AgentSetup(env_id=subject.name, env_kwargs=subject.kwargs))
    # Experts may be slow; random actions never are.
    starts = _test_starts(subject, 8 if subject.quick and name == "expert" else 20)
    try:
        with subject.env() as env:
            return [await _play_one(subject, agent, name, env, start) for start in starts]
    finally:
        await agent.close()


def _test_starts(subject: EnvUnderTest, count: int) -> list[Start]:
    if subject.tasks is None:
        return [Start(seed) for seed in range(count)]
    split = "test" if "test" in subject.tasks.splits else next(iter(subject.tasks.splits))
    size = subject.tasks.size(split)
    # A smaller split is played again with other seeds: a rate needs enough samples.
    return [Start(seed, {"task": seed % size, "split": split}) for seed in range(count)]


async def _play_one(subject: EnvUnderTest, agent: Agent, name: str, env: Env, start: Start) -> Score:
    options: Mapping[str, Any] = start.options or {}
    spec = EpisodeSpec(
        episode_id=f"check-{start.seed}",
        env_id=subject.name,
        env_kwargs=subject.kwargs,
        task=options.get("task"),
        split=options.get("split", "train"),
        env_seed=start.seed,
        sampling_seed=start.seed,
    )
    with raising(f"starting the {name} agent on {start}"):
        interface = subject.interface
        briefing = Briefing(spec=spec, instructions=interface.instructions, tools=tools_of(interface))
        player = agent.player(briefing)
    episode = [now := reset(env, start)]
    while not now.ends and now.turn < (subject.turn_limit or MAX_TURNS):
        with raising(f"the {name} agent on {start} at turn {now.turn + 1}"):
            action = await player.act(now.observation, now.info)
        now = step(env, action.action if isinstance(action, AgentAction) else action, now.turn + 1)
        episode.append(now)
    return Score(start, tuple(episode))


def rate(episodes: Sequence[Score]) -> float | None:
    """The success rate; ``None`` where the environment defines no success."""
    successes = [score.success for score in episodes if score.success is not None]
    return sum(successes) / len(successes) if successes else None


def random_agent(subject: EnvUnderTest) -> str:
    """Random actions are valid and do not succeed."""
    with subject.env() as env:
        subject.play(env, Start(0), 1)
    if not subject.random_plays:
        raise RuleWarning(
            "a random agent cannot play it, so a lower baseline is missing. List the valid actions in "
            "info['actions'] (see facts()) or define random_action()."
        )
    episodes = scores(subject, "random")
    for score in episodes:
        if score.invalid is not None:
            raise RuleFailed(
                f"the random action {short(score.invalid)} on {score.start} was invalid; random_action() and "
                "info['actions'] must contain valid actions only."
            )
    share = rate(episodes)
    if share is None:
        return f"random actions were valid in {len(episodes)} episodes; it defines no success."
    if share >= 0.5:
        verdict = RuleWarning if subject.adapted else RuleFailed
        raise verdict(
            f"the random agent succeeded in {share:.0%} of {len(episodes)} episodes; below 50% was expected. "
            "A task that random actions solve measures nothing: make it harder, or success stricter."
        )
    return f"random actions were valid and succeeded in {share:.0%} of {len(episodes)} episodes."


def expert(subject: EnvUnderTest) -> str:
    """The expert solves every task; a baseline solves clearly more than the random agent."""
    entry = env_info(subject.name)
    if entry.expert is None:
        raise RuleSkipped("it is registered without an expert.")
    episodes = scores(subject, "expert")
    share = rate(episodes)
    if share is None:
        raise RuleSkipped("it defines no success, so an expert cannot be measured.")
    if entry.expert_is == "expert":
        return _require_all(episodes, share)
    return _require_margin(subject, episodes, share)


def _require_all(episodes: Sequence[Score], share: float) -> str:
    for score in episodes:
        if not score.success:
            raise RuleFailed(
                f"the expert succeeded in {share:.0%} of {len(episodes)} episodes, not all: {score.start} "
                f"was lost after {score.turns} turns with return {score.total:g}. Fix the expert, or "
                "register it with expert_is='baseline' if it need not solve every task."
            )
    turns = sum(score.turns for score in episodes) / len(episodes)
    return f"the expert succeeded in all {len(episodes)} episodes, in {turns:.1f} turns on average."


def _require_margin(subject: EnvUnderTest, episodes: Sequence[Score], share: float) -> str:
    chance = (rate(scores(subject, "random")) or 0.0) if subject.random_plays else 0.0
    if share < chance + MARGIN:
        raise RuleFailed(
            f"the baseline succeeded in {share:.0%} of {len(episodes)} episodes and the random agent in "
            f"{chance:.0%}; at least {MARGIN:.0%} more was expected. Fix the baseline, or the task."
        )
    count = len(episodes)
    return f"the baseline succeeded in {share:.0%} of {count} episodes, the random agent in {chance:.0%}."
