"""An episode for the page: plain JSON of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollgym.core.files import read_bounded
from rollgym.core.roles import role_return, role_success
from rollgym.core.types import Episode, RoleSpec, Turn
from rollgym.view.page import bounded, bounded_text
from rollgym.view.reader import RunView

FOLDERS = ("final", "model")
FILE = "tokenizer.json"
MOST_BYTES = 200_000_000
LONGEST = 1_000
"""Maximum characters of a token."""


class TokenTexts:
    """Decodes token ids; empty without a tokenizer or the package ``tokenizers``."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._decode = _decoder(folder, manifest)
        self._known: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """Return the text of each id; unknown ids are omitted."""
        if self._decode is None:
            return {}
        texts = {}
        for token_id in sorted(set(ids)):
            if token_id not in self._known:
                self._known[token_id] = self._decode(token_id)
            if self._known[token_id]:
                texts[str(token_id)] = self._known[token_id]
        return texts


def _decoder(folder: Path, manifest: Mapping[str, Any]) -> Callable[[int], str] | None:
    files: list[tuple[Path, Path | None]] = [(folder / name / FILE, folder) for name in FOLDERS]
    agent = manifest.get("agent")
    options = agent.get("options") if isinstance(agent, dict) else None
    if isinstance(options, dict) and isinstance(options.get("model"), str):
        files.append((Path(options["model"]) / FILE, None))
    source = next(((file, where) for file, where in files if file.is_file()), None)
    if source is None:
        return None
    try:
        from tokenizers import Tokenizer

        content = read_bounded(source[0], MOST_BYTES, source[1])
        decodes = b'"Regex"' not in msgspec.json.encode(msgspec.json.decode(content).get("decoder"))
        tokenizer = Tokenizer.from_str(content.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # no package, or a broken file (a panic is not an Exception): show ids
        return None

    def decode(token_id: int) -> str:
        try:
            if not decodes:  # an untrusted regular expression may run forever
                return str(tokenizer.id_to_token(token_id) or "")[:LONGEST]
            text = str(tokenizer.decode([token_id], skip_special_tokens=False))
            # A partial character has no text: show its vocabulary entry. The same for pieces
            # that a decoder strips to nothing.
            text = text if text and "\ufffd" not in text else str(tokenizer.id_to_token(token_id) or "")
            return text[:LONGEST]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # an id out of range, a decoder that panics
            return ""

    return decode


GROUP, NAME = "rollgym.view", "advantages"


class AdvantageSource(Protocol):
    """Computes the advantages of recorded episodes."""

    why: str
    """Why nothing can be computed; empty if it can."""
    estimator: str

    @property
    def groups_stand_alone(self) -> bool:
        """Whether a group's advantages depend on nothing outside it."""

    def of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Advantages by episode id for all episodes of a step, or for a group that stands alone."""


class Unavailable:
    """The source where the trainer is not installed."""

    why = "not recorded, and the trainer that computes advantages is not installed"
    estimator = ""
    groups_stand_alone = False

    def of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Return no advantages."""
        return {}


def advantage_source(folder: Path) -> AdvantageSource:
    """Return the registered source for a run folder."""
    for entry in entry_points(group=GROUP, name=NAME):
        try:
            source: AdvantageSource = entry.load()(folder)
        except ImportError:
            continue
        return source
    return Unavailable()


NAMES = ("advantages", "ratios")
"""Per-token values that an episode line may hold."""


class EpisodeDetails:
    """Builds the details of a run's episodes."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._texts = TokenTexts(run.folder, run.manifest)
        self._credit: AdvantageSource | None = None
        self._worked: tuple[tuple[int, int, str], dict[str, list[float]]] | None = None

    def body(self, n: int) -> dict[str, Any]:
        """The episode in row ``n``."""
        episode, extra = self._run.episode(n)
        detail = episode_detail(episode, extra.step)
        count = sum(len(turn.action_ids) for turn in episode.turns)
        if count:
            kept = {name: extra.tokens[name] for name in NAMES if len(extra.tokens.get(name, ())) == count}
            values, source = self._values(episode, extra.step, kept)
            ids = [token_id for turn in episode.turns for token_id in (*turn.prompt_ids, *turn.action_ids)]
            detail |= {"values": values, "source": source, "texts": self._texts.of(ids)}
        return {"n": n, **detail}

    def _values(
        self, episode: Episode, step: int | None, kept: Mapping[str, list[float | None]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return per-token values and their source."""
        values: dict[str, Any] = dict(kept)
        source = {name: "recorded" if name in kept else "not recorded" for name in NAMES}
        if "advantages" not in kept and step is not None:
            worked = self._advantages(step, episode.spec.group_id).get(episode.spec.episode_id)
            credit = self._credit
            if worked is not None and credit is not None:
                values["advantages"] = worked
                source["advantages"] = f"recomputed with {credit.estimator}"
            elif credit is not None:
                source["advantages"] = credit.why or "not recorded"
        return values, source

    def _advantages(self, step: int, group: str) -> dict[str, list[float]]:
        """Return advantages by episode id for the step, or for the group of this episode only."""
        if self._credit is None:
            self._credit = advantage_source(self._run.folder)
        if self._credit.why:
            return {}
        run, alone = self._run, self._credit.groups_stand_alone
        key = (run.epoch, step, group if alone else "")
        if self._worked is None or self._worked[0] != key:
            members = [n for n in run.by_step.get(step, []) if not alone or run.rows[n].group == group]
            self._worked = (key, self._credit.of_step([run.episode(n)[0] for n in members]))
        return self._worked[1]


def episode_detail(episode: Episode, step: int | None) -> dict[str, Any]:
    """Return everything the page shows of an episode; long texts are cut."""
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
        **({"roles": bounded([_role(episode, role) for role in episode.roles])} if episode.roles else {}),
        "reset": bounded(episode.reset_info),
        "final": bounded(episode.final_observation),
        "turns": [_turn(turn) for turn in episode.turns],
    }


def _role(episode: Episode, role: RoleSpec) -> dict[str, Any]:
    """Return a role with its player, its return and its success."""
    return {
        "name": role.name,
        "player": episode.spec.players.get(role.name, ""),
        "return": role_return(episode, role.name),
        "success": role_success(episode, role.name),
        "instructions": role.instructions,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """Return a turn without empty fields."""
    seconds = turn.seconds
    optional = {
        "role": turn.role or None,
        "rewards": turn.rewards,
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
        **{
            name: bounded_text(value)
            for name, value in optional.items()
            if value not in (None, (), False, {})
        },
    }
