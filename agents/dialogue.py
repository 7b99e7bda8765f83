"""A model's side of an episode: what it is told, in which conversation, and what becomes of the past.

Whatever changes the past (thinking that is left out, turns that are dropped) begins a conversation of its
own, and with it a row to train on: what a reply was sampled from is never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.agents.lm_options import LmOptions
from rollgym.agents.parsing import has_thinking, strip_thinking
from rollgym.agents.prompting import Exchange, fill_template, listed_actions, practice_turns, remind
from rollgym.chat import ChatTemplate, Conversation
from rollgym.errors import AgentError, UsageError
from rollgym.records import clean_text


class Dialogue:
    """Observations and replies by turns, as the options of the ``lm`` agent want them told.

    ``context`` is how many tokens a prompt and its reply may have; without it, nothing overflows here.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        prompt: str,
        options: LmOptions,
        instructions: str,
        context: int | None = None,
    ) -> None:
        told = fill_template(prompt, instructions, options.parser)
        prompt = clean_text(told) if options.instructions else ""
        self._chat = chat
        self._options = options
        self._context = context
        self._system = prompt if options.system else ""
        self._lead = "" if options.system or not prompt else f"{prompt}\n\n"
        self._practice: list[Exchange] = []
        self._past: list[Exchange] = []
        self._heard = ""
        self._changed = False
        """Whether what the model is told of the past is not what it saw and said."""
        self.turn = 0
        """How many replies there were."""
        self.dropped_turns = 0
        self.cut_observations = 0
        self.talk = Conversation(chat, system=self._system)

    def observe(
        self, observation: str, info: Mapping[str, Any] | None = None
    ) -> tuple[tuple[int, ...], bool]:
        """The environment speaks: the ids that this adds, and whether they begin a row of their own."""
        actions = listed_actions(info or {})
        reminder = remind(self._options.parser, actions) if self._options.remind else ""
        if not self.turn and self._options.practice:
            self._practice = practice_turns(self._options.parser, actions, self._options.practice)
            self._past = list(self._practice)
            self._changed = True
        try:
            return self._observe(observation, reminder)
        except UsageError as error:
            raise AgentError(f"The conversation cannot go on: {error}") from error

    def reply(self, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> str:
        """The model speaks."""
        text = self.talk.reply(token_ids, logprobs)
        said = self.talk.said
        kept = strip_thinking(said) if self._options.reasoning == "strip" and has_thinking(said) else said
        self._past.append(Exchange(self._heard, kept))
        self._changed |= kept != said
        if not self._options.remember:
            self._past = list(self._practice)
            self._changed = True
        self.turn += 1
        return text

    def spell(self, text: str) -> tuple[int, ...]:
        """A reply as the ids that the model would have to say, the end of its turn included."""
        ids = self._chat.codec.encode([clean_text(text)], before="\n")
        return (*ids, self.talk.stop_ids[0])

    def _observe(self, observation: str, reminder: str) -> tuple[tuple[int, ...], bool]:
        anew = self._changed
        if anew:
            self._begin()
        self._tell(f"{observation}{reminder}")
        while self._options.overflow == "drop_oldest" and self._past and not self._fits:
            self._drop_oldest()
            anew = True
            self._begin()
            self._tell(f"{observation}{reminder}")
        if self._options.overflow == "truncate_observation" and not self._fits:
            self._cut(observation, reminder)
        return self.talk.added_ids, self.turn > 0 and (anew or self.talk.new_row)

    @property
    def _fits(self) -> bool:
        """Whether there is room for a whole reply."""
        return self._context is None or (
            len(self.talk.prompt_ids) + self._options.max_tokens <= self._context
        )

    def _begin(self) -> None:
        """Tell what is kept of the past anew."""
        past = [(exchange.observation, exchange.reply) for exchange in self._past]
        if past:
            past[0] = (f"{self._lead}{past[0][0]}", past[0][1])
        self.talk = Conversation(self._chat, system=self._system, past=past)
        self._changed = False

    def _tell(self, text: str) -> None:
        self._heard = text
        self.talk.observe(text if self._past else f"{self._lead}{text}")

    def _drop_oldest(self) -> None:
        """Forget the older half of the turns, for good: the next turn would overflow again otherwise."""
        count = (len(self._past) + 1) // 2
        del self._past[:count]
        self.dropped_turns += count

    def _cut(self, observation: str, reminder: str) -> None:
        """Leave out the middle of the observation, as little of it as will do; all of it if need be."""
        least, most = 0, len(observation)
        while least < most:
            middle = (least + most + 1) // 2
            self.talk.take_back()
            self._tell(f"{_without_middle(observation, middle)}{reminder}")
            least, most = (middle, most) if self._fits else (least, middle - 1)
        self.talk.take_back()
        self._tell(f"{_without_middle(observation, least)}{reminder}")
        self.cut_observations += 1


def _without_middle(text: str, keep: int) -> str:
    """The beginning and the end of a text, ``keep`` characters in all, and how much is missing."""
    tail = keep // 2
    end = text[len(text) - tail :]
    return f"{text[: keep - tail]}\n[{len(text) - keep} characters left out]\n{end}".strip()
