"""A model's side of an episode: what it is told, and in which conversation."""

from __future__ import annotations

from collections.abc import Sequence

from rollgym.agents.lm_options import LmOptions
from rollgym.agents.prompting import fill_template
from rollgym.chat import ChatTemplate, Conversation
from rollgym.errors import AgentError, UsageError
from rollgym.records import clean_text


class Dialogue:
    """Observations and replies by turns, as the options of the ``lm`` agent want them told."""

    def __init__(self, chat: ChatTemplate, prompt: str, options: LmOptions, instructions: str) -> None:
        told = fill_template(prompt, instructions, options.parser)
        prompt = clean_text(told) if options.instructions else ""
        self._chat = chat
        self._remember = options.remember
        self._system = prompt if options.system else ""
        self._lead = "" if options.system or not prompt else f"{prompt}\n\n"
        self.turn = 0
        """How many replies there were."""
        self.talk = Conversation(chat, system=self._system)

    def observe(self, observation: str) -> tuple[tuple[int, ...], bool]:
        """The environment speaks: the ids that this adds, and whether they begin a row of their own."""
        anew = self.turn > 0 and not self._remember
        if anew:
            self.talk = Conversation(self._chat, system=self._system)
        lead = self._lead if anew or not self.turn else ""
        try:
            self.talk.observe(f"{lead}{observation}")
        except UsageError as error:
            raise AgentError(f"The conversation cannot go on: {error}") from error
        return self.talk.added_ids, anew or self.talk.new_row

    def reply(self, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> str:
        """The model speaks."""
        text = self.talk.reply(token_ids, logprobs)
        self.turn += 1
        return text

    def spell(self, text: str) -> tuple[int, ...]:
        """A reply as the ids that the model would have to say, the end of its turn included."""
        ids = self._chat.codec.encode([clean_text(text)], before="\n")
        return (*ids, self.talk.stop_ids[0])
