"""Summary of an evaluation, computed from its episodes: rates and means with intervals, outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.core.roles import role_names, role_return, role_success
from rollgym.core.seeding import stable_digest
from rollgym.core.types import Episode, Outcome
from rollgym.evaluation.run_warnings import as_json, warnings_of
from rollgym.evaluation.stats import bootstrap_mean, pass_at_k, percentiles, success_interval

EXCLUDED_EPISODES = 3
EXCLUDED_SHARE = 0.02
"""A score is marked if more episodes than this, or a larger share of them, are excluded from it."""


def summarize(manifest: dict[str, Any], episodes: Sequence[Episode]) -> dict[str, Any]:
    """Summarize episodes as a JSON-able object.

    Episodes ended by infrastructure are excluded from rates and means, and counted. Errors that the agent
    can have caused count as its failures.
    """
    episodes = sorted(episodes, key=lambda episode: episode.spec.episode_id)
    scored = [episode for episode in episodes if not episode.excluded]
    excluded = len(episodes) - len(scored)
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in scored:
        groups[episode.spec.group_id or episode.spec.episode_id].append(episode)
    clusters = list(groups.values())
    outcomes = Counter(episode.outcome for episode in episodes)
    return {
        "env": manifest["env"]["id"],
        "env_version": manifest["env"]["version"],
        "env_kwargs": manifest["env"]["kwargs"],
        "agent": manifest["agent"]["name"],
        "agent_options": manifest["agent"]["options"],
        "split": manifest["split"],
        "seed": manifest["seed"],
        "episodes": len(episodes),
        "requested": manifest["episodes"],
        "complete": len(episodes) == manifest["episodes"],
        "scored": len(scored),
        "failed": sum(episode.outcome.failed for episode in episodes),
        "excluded": excluded,
        "many_excluded": many_excluded(excluded, len(episodes)),
        "per_task": manifest["per_task"],
        **_success(clusters),
        "success_all": _success_all(episodes),
        **_roles(clusters),
        **_returns(clusters),
        "pass_at_k": _pass_at_k(clusters),
        "outcomes": {kind.value: outcomes[kind] for kind in Outcome if outcomes[kind]},
        "length": percentiles([float(episode.length) for episode in scored]),
        "valid_actions": _valid_share(scored),
        "seconds": percentiles([episode.seconds for episode in scored]),
        "usage": _usage(episodes),
        "errors": _errors(episodes),
        "warnings": as_json(warnings_of(episodes)),
        "success_means": manifest["success_means"],
        "task_set": manifest["task_set"],
        "content_hash": content_hash(episodes),
        "versions": manifest["versions"],
    }


def _success(clusters: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    values = [_successes(cluster) for cluster in clusters if _successes(cluster)]
    count = sum(map(len, values))
    if not count:
        return {"success_rate": None, "success_ci": None, "success_ci_method": None}
    method, interval = success_interval(values)
    rate = int(sum(map(sum, values))) / count
    return {"success_rate": rate, "success_ci": list(interval), "success_ci_method": method}


def _successes(episodes: Sequence[Episode]) -> list[float]:
    return [float(e.scored_success) for e in episodes if e.scored_success is not None]


def _roles(clusters: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    """Success and return of each role, where agents play several; else nothing."""
    episodes = [episode for cluster in clusters for episode in cluster if episode.roles]
    roles: dict[str, Any] = {}
    for role in dict.fromkeys(name for episode in episodes for name in role_names(episode)):
        own = [episode for episode in episodes if role in role_names(episode)]
        successes = [role_success(e, role) for e in own if e.scored_success is not None]
        known = [success for success in successes if success is not None]
        roles[role] = {
            "player": own[0].spec.players.get(role, ""),
            "success_rate": sum(known) / len(known) if known else None,
            "mean_return": sum(role_return(episode, role) for episode in own) / len(own),
        }
    return {"roles": roles} if roles else {}


def _success_all(episodes: Sequence[Episode]) -> float | None:
    """The success rate over all episodes, with excluded ones as failures."""
    successes = _successes(episodes)
    lost = sum(episode.excluded for episode in episodes)
    return sum(successes) / (len(successes) + lost) if successes else None


def many_excluded(excluded: int, episodes: int) -> bool:
    """Return whether so many episodes are excluded that the score may mislead."""
    return excluded > EXCLUDED_EPISODES or excluded > EXCLUDED_SHARE * episodes


def exclusion_note(summary: Mapping[str, Any]) -> str | None:
    """A warning for a summary from which more than a few episodes are excluded."""
    if not summary["many_excluded"]:
        return None
    rate, whole = summary["success_rate"], summary["success_all"]
    counted = (
        "" if rate is None else f" Success is {rate:.3f} without them and {whole:.3f} with them as failures."
    )
    return (
        f"{summary['excluded']} of {summary['episodes']} episodes ended by infrastructure errors and "
        f"are excluded from the score.{counted}"
    )


def _returns(clusters: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    if not clusters:
        return {"mean_return": None, "return_ci": None}
    values = [[episode.total_reward for episode in cluster] for cluster in clusters]
    mean = sum(map(sum, values)) / sum(map(len, values))
    return {"mean_return": mean, "return_ci": list(bootstrap_mean(values))}


def _pass_at_k(clusters: Sequence[Sequence[Episode]]) -> dict[str, float]:
    successes = [_successes(cluster) for cluster in clusters]
    tries = [(len(cluster), int(sum(cluster))) for cluster in successes if cluster]
    if not tries:
        return {}
    most = min(n for n, _ in tries)
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < most] + [most]
    return {str(k): sum(pass_at_k(n, wins, k) for n, wins in tries) / len(tries) for k in ks}


def _valid_share(episodes: Sequence[Episode]) -> float | None:
    flags = [bool(turn.info.get("valid", True)) for episode in episodes for turn in episode.turns]
    return sum(flags) / len(flags) if flags else None


def _usage(episodes: Sequence[Episode]) -> dict[str, float]:
    usages = [turn.usage for episode in episodes for turn in episode.turns if turn.usage is not None]
    names = ("prompt_tokens", "completion_tokens", "cost")
    return {name: sum(getattr(usage, name) for usage in usages) for name in names} if usages else {}


def _errors(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    counts = Counter((e.outcome.value, e.error.message) for e in episodes if e.error is not None)
    return [
        {"outcome": outcome, "message": message, "count": count}
        for (outcome, message), count in counts.most_common(5)
    ]


def first_observation(episode: Episode) -> str:
    """The first observation, whether or not the agent acted on it."""
    return episode.turns[0].observation if episode.turns else episode.final_observation


def content_hash(episodes: Sequence[Episode]) -> str:
    """A hash of the tasks as played: the seed and first observation of each episode."""
    parts: list[object] = []
    for episode in sorted(episodes, key=lambda e: e.spec.episode_id):
        parts += [episode.spec.episode_id, episode.spec.env_seed, first_observation(episode)]
    return stable_digest(*parts).hex()[:16]
