"""One game of TextArena: its players, messages and rewards, and the legal actions that a trial finds.

TextArena's games read and seed Python's global generator and list no legal actions. `Game` gives each game
its own generator, and finds legal actions by trying examples from the game's prompt on a copy of the game.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollgym.adapters.global_random import PrivateRandom
from rollgym.adapters.task_sets import content_key
from rollgym.core.errors import EnvError, UnknownName, UsageError, one_line
from rollgym.core.seeding import derive_rng

MAX_PLAYERS = 15
MAX_CANDIDATES = 256
"""Actions that are tried on a copy of the game per turn, and as often again until one is legal."""
SAMPLES = 64
"""Variants that are tried of an example with more than two numbers or letters."""
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_SLOT = re.compile(r"\d+|(?<![A-Za-z])[A-Z](?![A-Za-z])")
_NUMBERS, _DIGITS, _LETTERS = tuple(map(str, range(21))), tuple("0123456789"), tuple("ABCDEFGH")


class Game:
    """A game with a fixed number of players; raises `UsageError` where TextArena cannot make it."""

    def __init__(
        self,
        library: Any,
        name: str,
        players: int | None,
        options: Mapping[str, Any],
        examples: Sequence[str] = (),
    ) -> None:
        known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if name not in known:
            raise UnknownName("game of TextArena", name, known)
        self.name = name
        try:
            with PrivateRandom(0):
                wrapped = library.make(name, **options)
        except TypeError as error:
            raise UsageError(f"textarena:{name} does not accept these options: {error}.") from error
        except LookupError as error:
            raise UsageError(
                f"textarena:{name} needs data of NLTK that is not installed: python -m nltk.downloader words "
                "averaged_perceptron_tagger_eng"
            ) from error
        self._brackets = False
        while isinstance(wrapped, library.Wrapper):
            self._brackets |= type(wrapped).__name__ == "ActionFormattingWrapper"
            wrapped = wrapped.env
        self._fresh: Any = wrapped
        self._env: Any = wrapped
        self._random = PrivateRandom(0)
        self.num_players = self._find_players() if players is None else self._check_players(players)
        self._more_examples = tuple(examples)
        self._examples: dict[int, list[str]] = {}

    # One game.

    def start(self, seed: int) -> str:
        """Start a game and return a key of its whole state: games with the same key are the same task."""
        self._env = copy.deepcopy(self._fresh)
        self._random = PrivateRandom(seed)
        with self._random:
            self._env.reset(num_players=self.num_players, seed=seed)
        self._examples = {player: self._read_examples(player) for player in range(self.num_players)}
        return self._key()

    def reseed(self, seed: int) -> None:
        """Set the generator from which the rest of the game draws."""
        self._random = PrivateRandom(seed)

    @property
    def current(self) -> int:
        """The number of the player who acts next."""
        return int(self._env.state.current_player_id)

    def messages(self, player: int) -> str:
        """Take the messages that a player has not seen yet, without those the player wrote."""
        state = self._env.state
        unread, state.observations[player] = state.observations[player], []
        lines = []
        for sender, message, _ in unread:
            if not isinstance(message, str):
                raise EnvError(f"textarena:{self.name} sent a {type(message).__name__} as message, not str.")
            if sender != player:
                who = "" if sender < 0 else f"{state.role_mapping.get(sender, f'Player {sender}')}: "
                lines.append(f"{who}{message.strip()}")
        return "\n".join(line for line in lines if line)

    def play(self, action: str) -> tuple[bool, bool]:
        """Play an action of the current player; return whether the game is over, and whether it was valid."""
        with self._random:
            return self._step(self._env, action)

    def rewards(self) -> dict[int, float]:
        """The rewards of all players after the end."""
        with self._random:
            answer = self._env.close()
        rewards = answer[0] if isinstance(answer, tuple) and answer else answer
        if not isinstance(rewards, Mapping):
            raise EnvError(f"textarena:{self.name} ended without rewards ({type(rewards).__name__}).")
        return {int(player): float(reward) for player, reward in rewards.items()}

    def reason(self, player: int) -> str:
        """Why the game ended, as the game says it to a player."""
        return str(self._env.state.game_info.get(player, {}).get("reason") or "")

    def actions(self) -> list[str]:
        """Legal actions of the current player among those like the examples in the prompt; may be empty."""
        candidates = self._candidates()
        for first in range(0, len(candidates), MAX_CANDIDATES):
            tried = sorted(candidates[first : first + MAX_CANDIDATES])
            if legal := [action for action in tried if self._is_legal(action)]:
                return legal
        return []

    def shown_actions(self, text: str) -> list[str]:
        """The examples that the game was made with, or else what a text shows in square brackets."""
        return list(self._more_examples) or list(dict.fromkeys(_BRACKETED.findall(text)))

    # Details.

    def _step(self, env: Any, action: str) -> tuple[bool, bool]:
        text = f"[{action}]" if self._brackets and "[" not in action and "]" not in action else action
        state = env.state
        mover, errors = state.current_player_id, _errors(state)
        answer = env.step(action=text)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], bool):
            raise EnvError(f"textarena:{self.name} answered a step with {answer!r}, not (done, info).")
        refused = bool(state.game_info.get(mover, {}).get("invalid_move"))
        return answer[0], not refused and _errors(state) <= errors

    def _is_legal(self, action: str) -> bool:
        trial = copy.deepcopy(self._env)
        try:
            with self._random.copy():
                return self._step(trial, action)[1]
        except Exception:  # a game may raise on an action that it does not know
            return False

    def _candidates(self) -> list[str]:
        shown = self._env.state.observations[self.current]
        text = "\n".join(message for _, message, _ in shown if isinstance(message, str))
        # Rules show examples, which are varied; later messages list legal actions as they are.
        examples = dict.fromkeys([*self._examples.get(self.current, []), *self._more_examples])
        found = itertools.chain(_BRACKETED.findall(text), *map(_varied, examples))
        varied = list(dict.fromkeys(found))
        if len(varied) <= MAX_CANDIDATES:
            return varied
        # The same text gives the same order.
        order = derive_rng("textarena", self.name, text).permutation(len(varied))
        return [varied[int(number)] for number in order]

    def _read_examples(self, player: int) -> list[str]:
        text = "\n".join(str(message) for _, message, _ in self._env.state.observations[player])
        return list(dict.fromkeys(_BRACKETED.findall(text)))

    def _key(self) -> str:
        state = self._env.state
        return content_key((state.game_state, state.observations))

    def _find_players(self) -> int:
        problem = ""
        for players in range(1, MAX_PLAYERS + 1):
            try:
                return self._check_players(players)
            except UsageError as error:
                problem = problem or str(error)
        raise UsageError(problem)

    def _check_players(self, players: int) -> int:
        trial = copy.deepcopy(self._fresh)
        try:
            with PrivateRandom(0):
                trial.reset(num_players=players, seed=0)
        except Exception as error:  # games check the number with assertions and other errors
            raise UsageError(
                f"textarena:{self.name} does not start with {players} player(s): {one_line(error)}."
            ) from error
        return players


def _errors(state: Any) -> int:
    return int(getattr(state, "error_count", 0))


def _varied(example: str) -> list[str]:
    """An example, and those that differ from it in its numbers and single capital letters."""
    slots = [slot.group() for slot in _SLOT.finditer(example)]
    if not slots:
        return [example]
    numbers = _NUMBERS if len(slots) == 1 else _DIGITS
    values = [numbers if slot.isdigit() else _LETTERS for slot in slots]
    fillings: Iterable[tuple[str, ...]]
    if len(slots) <= 2:
        fillings = itertools.product(*values)
    else:  # too many to try: a sample of them
        rng = derive_rng("textarena example", example)
        picks = (tuple(v[int(rng.integers(len(v)))] for v in values) for _ in range(SAMPLES))
        fillings = dict.fromkeys(picks)
    parts = _SLOT.split(example)
    varied = [
        "".join(itertools.chain.from_iterable(zip(parts, [*filling, ""], strict=True)))
        for filling in fillings
    ]
    return [example, *varied]
