"""Rules about who plays: instructions to follow, an expert that wins, a random agent that does not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rollgym.agent import Agent, AgentSetup, Briefing, Move, make_agent
from rollgym.check.play import Env, Start, Transition, raising, reset, short, step
from rollgym.check.report import Broken, Doubt, Skip
from rollgym.check.subject import Subject
from rollgym.registry import card
from rollgym.types import EpisodeSpec

MARGIN = 0.15
"""How much more often than the random agent a baseline must succeed."""
MAX_TURNS = 1_000
_WAYS_TO_ACT = re.compile(
    r"\b(actions?|answer|repl(y|ies)|respond|response|write|type|say|send|enter|choose|pick|guess|commands?|moves?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Score:
    """How one episode of an agent went."""

    start: Start
    episode: tuple[Transition, ...]

    @property
    def success(self) -> bool | None:
        """Whether the task was achieved; ``None`` where the environment does not say."""
        success = self.episode[-1].info.get("success")
        return None if success is None else bool(success)

    @property
    def total(self) -> float:
        """The sum of rewards."""
        return sum(float(now.reward) for now in self.episode)

    @property
    def turns(self) -> int:
        """How many actions were played."""
        return self.episode[-1].turn

    @property
    def invalid(self) -> str | None:
        """The first action the environment did not know."""
        return next((now.action for now in self.episode if now.info.get("valid") is False), None)


def instructions(subject: Subject) -> str:
    """There are instructions that say how to act, and the state can be shown."""
    text = subject.face.instructions
    if not isinstance(text, str) or len(text.split()) < 3:
        raise Broken(
            f"instructions is {short(text)}; say in a few sentences what the goal is and what an action "
            "looks like: an agent is told nothing else."
        )
    with subject.env() as env:
        first = reset(env, Start(0))
        action = subject.player(0)(first.observation, first.info)
    if action.lower() not in text.lower() and not _WAYS_TO_ACT.search(text) and "`" not in text:
        raise Broken(
            f"the instructions do not say how to act ({short(action)} is an action, for one); "
            "write down the form of an action with an example."
        )
    return f"{len(text.split())} words of instructions{_rendered(subject)}."


def _rendered(subject: Subject) -> str:
    modes = subject.copy.metadata.get("render_modes") or ()
    if "ansi" not in modes or "render_mode" in subject.kwargs:
        return ""
    with subject.env(render_mode="ansi") as env:
        first = reset(env, Start(0))
        step(env, subject.player(0)(first.observation, first.info), 1)
        with raising("render() in mode 'ansi'"):
            picture = env.render()
    if not isinstance(picture, str) or not picture.strip():
        raise Broken(f"render() in mode 'ansi' gave {short(picture)}; return the state as text.")
    return "; render() gives text"


def scores(subject: Subject, agent: str) -> Sequence[Score]:
    """How an agent did on the first tasks of the test split (or the first seeds); played once."""
    if agent not in subject.memory:
        subject.memory[agent] = _run(_play_all(subject, agent))
    found: Sequence[Score] = subject.memory[agent]
    return found


def _run(work: Coroutine[Any, Any, list[Score]]) -> list[Score]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A loop runs already, as it does in a notebook.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _play_all(subject: Subject, name: str) -> list[Score]:
    with raising(f"making the {name} agent"):
        agent = make_agent(name, AgentSetup(env_id=subject.name, env_kwargs=subject.kwargs))
    # Experts may think for long, random actions never do.
    starts = _test_starts(subject, 8 if subject.quick and name == "expert" else 20)
    try:
        with subject.env() as env:
            return [await _play_one(subject, agent, name, env, start) for start in starts]
    finally:
        await agent.close()


def _test_starts(subject: Subject, count: int) -> list[Start]:
    if subject.tasks is None:
        return [Start(seed) for seed in range(count)]
    split = "test" if "test" in subject.tasks.splits else next(iter(subject.tasks.splits))
    size = subject.tasks.size(split)
    # A split smaller than that is played again with other seeds: a rate needs its sample.
    return [Start(seed, {"task": seed % size, "split": split}) for seed in range(count)]


async def _play_one(subject: Subject, agent: Agent, name: str, env: Env, start: Start) -> Score:
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
        player = agent.player(Briefing(spec=spec, instructions=subject.face.instructions))
    episode = [now := reset(env, start)]
    while not now.ends and now.turn < (subject.turn_limit or MAX_TURNS):
        with raising(f"the {name} agent on {start} at turn {now.turn + 1}"):
            move = await player.act(now.observation, now.info)
        now = step(env, move.action if isinstance(move, Move) else move, now.turn + 1)
        episode.append(now)
    return Score(start, tuple(episode))


def rate(found: Sequence[Score]) -> float | None:
    """The share of successes; ``None`` where the environment defines no success."""
    known = [score.success for score in found if score.success is not None]
    return sum(known) / len(known) if known else None


def random_agent(subject: Subject) -> str:
    """Random actions are valid, and do not win."""
    with subject.env() as env:
        subject.play(env, Start(0), 1)
    if not subject.random_plays:
        raise Doubt(
            "a random agent cannot play it, so there is no lower baseline. List the valid actions in "
            "info['actions'] (see facts()) or define random_action()."
        )
    found = scores(subject, "random")
    for score in found:
        if score.invalid is not None:
            raise Broken(
                f"the random action {short(score.invalid)} on {score.start} was called invalid; "
                "random_action() and info['actions'] must give valid actions only."
            )
    share = rate(found)
    if share is None:
        return f"random actions were valid in {len(found)} episodes; it defines no success."
    if share >= 0.5:
        verdict = Doubt if subject.adapted else Broken
        raise verdict(
            f"the random agent succeeded in {share:.0%} of {len(found)} episodes; below 50% was expected. A "
            "task that chance solves measures nothing: make it harder, or success stricter."
        )
    return f"random actions were valid and succeeded in {share:.0%} of {len(found)} episodes."


def expert(subject: Subject) -> str:
    """The expert wins every task; a baseline wins clearly more than chance."""
    entry = card(subject.name)
    if entry.expert is None:
        raise Skip("it is registered without an expert.")
    found = scores(subject, "expert")
    share = rate(found)
    if share is None:
        raise Skip("it defines no success, so an expert cannot be measured.")
    if entry.expert_is == "expert":
        return _require_all(found, share)
    return _require_margin(subject, found, share)


def _require_all(found: Sequence[Score], share: float) -> str:
    for score in found:
        if not score.success:
            raise Broken(
                f"the expert succeeded in {share:.0%} of {len(found)} episodes, not all: {score.start} was "
                f"lost after {score.turns} turns with return {score.total:g}. Mend the expert, or register "
                "it with expert_is='baseline' if no promise is meant."
            )
    turns = sum(score.turns for score in found) / len(found)
    return f"the expert succeeded in all {len(found)} episodes, in {turns:.1f} turns on average."


def _require_margin(subject: Subject, found: Sequence[Score], share: float) -> str:
    chance = (rate(scores(subject, "random")) or 0.0) if subject.random_plays else 0.0
    if share < chance + MARGIN:
        raise Broken(
            f"the baseline succeeded in {share:.0%} of {len(found)} episodes and the random agent in "
            f"{chance:.0%}; at least {MARGIN:.0%} more was expected. Mend the baseline, or the task."
        )
    return (
        f"the baseline succeeded in {share:.0%} of {len(found)} episodes, the random agent in {chance:.0%}."
    )
