"""One episode as the page shows it: plain JSON, of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollgym.types import Episode, Turn
from rollgym.view.bounds import bounded, bounded_text
from rollgym.view.credit import Recomputed
from rollgym.view.read import RunView
from rollgym.view.tokens import TokenTexts

NAMES = ("advantages", "ratios")
"""Values of action tokens that a line may hold."""


class Bodies:
    """Makes the bodies of a run's episodes."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._texts = TokenTexts(run.folder, run.manifest)
        self._credit: Recomputed | None = None
        self._worked: tuple[tuple[int, int, str], dict[str, list[float]]] | None = None

    def body(self, n: int) -> dict[str, Any]:
        """The episode in row ``n``."""
        episode, extra = self._run.episode(n)
        found = make_body(episode, extra.step)
        count = sum(len(turn.action_ids) for turn in episode.turns)
        if count:
            kept = {name: extra.tokens[name] for name in NAMES if len(extra.tokens.get(name, ())) == count}
            values, source = self._values(episode, extra.step, kept)
            ids = [one for turn in episode.turns for one in (*turn.prompt_ids, *turn.action_ids)]
            found |= {"values": values, "source": source, "texts": self._texts.of(ids)}
        return {"n": n, **found}

    def _values(
        self, episode: Episode, step: int | None, kept: Mapping[str, list[float | None]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Each action token's values, and where they come from."""
        values: dict[str, Any] = dict(kept)
        source = {name: "recorded" if name in kept else "not recorded" for name in NAMES}
        if "advantages" not in kept and step is not None:
            worked = self._advantages(step, episode.spec.group_id).get(episode.spec.episode_id)
            credit = self._credit
            if worked is not None and credit is not None:
                values["advantages"] = worked
                source["advantages"] = f"worked out again with {credit.estimator}"
            elif credit is not None:
                source["advantages"] = credit.why or "not recorded"
        return values, source

    def _advantages(self, step: int, group: str) -> dict[str, list[float]]:
        """By episode id, of the step or of the one group in it that is looked at."""
        if self._credit is None:
            self._credit = Recomputed(self._run.folder)
        if self._credit.why:
            return {}
        run, alone = self._run, self._credit.groups_stand_alone
        key = (run.epoch, step, group if alone else "")
        if self._worked is None or self._worked[0] != key:
            members = [n for n in run.by_step.get(step, []) if not alone or run.rows[n].group == group]
            self._worked = (key, self._credit.of_step([run.episode(n)[0] for n in members]))
        return self._worked[1]


def make_body(episode: Episode, step: int | None) -> dict[str, Any]:
    """Everything about an episode that can be shown; long texts are cut."""
    spec = episode.spec
    return {
        "id": spec.episode_id,
        "step": step,
        "spec": bounded(msgspec.to_builtins(spec)),
        "outcome": episode.outcome.value,
        "success": episode.success,
        "return": episode.total_reward,
        "attempts": episode.attempts,
        "started": episode.started,
        "seconds": episode.seconds,
        "error": bounded(msgspec.to_builtins(episode.error)),
        "instructions": bounded(episode.instructions),
        "reset": bounded(episode.reset_info),
        "final": bounded(episode.final_observation),
        "turns": [_turn(turn) for turn in episode.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn, without what is empty."""
    seconds = turn.seconds
    found = {
        "response": turn.response,
        "prompt_ids": turn.prompt_ids,
        "action_ids": turn.action_ids,
        "logprobs": turn.logprobs,
        "new_row": turn.new_row,
        "policy_version": turn.policy_version,
        "version_spans": turn.version_spans,
        "finish_reason": turn.finish_reason,
        "usage": None if turn.usage is None else msgspec.to_builtins(turn.usage),
        "info": bounded(turn.info),
    }
    return {
        "observation": bounded(turn.observation),
        "action": bounded(turn.action),
        "reward": turn.reward,
        "seconds": [round(part, 5) for part in (seconds.queue, seconds.generate, seconds.step)],
        **{name: bounded_text(value) for name, value in found.items() if value not in (None, (), False, {})},
    }
