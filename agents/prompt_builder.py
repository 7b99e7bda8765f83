"""Builds the prompts of an episode: instructions, history, examples, and what to drop when they are too long.

Every change of the history (stripped reasoning, dropped turns) starts a new conversation, and with it a new
row to train on: the prompt that a reply was sampled from is never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.agents.parsing import has_thinking, strip_thinking
from rollgym.agents.policy.options import PolicyOptions
from rollgym.agents.prompting import Exchange, fill_template, format_example_turns, listed_actions, remind
from rollgym.chat import ChatTemplate, Conversation
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.serialization import clean_text


class PromptBuilder:
    """Observations and replies in alternation, rendered by the options of the ``lm`` agent.

    Args:
        chat: The model's chat template.
        prompt: Template of the instructions.
        options: History, reasoning, overflow and format options.
        instructions: The environment's instructions.
        context: Tokens of a prompt and its reply together; ``None`` for no limit.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        prompt: str,
        options: PolicyOptions,
        instructions: str,
        context: int | None = None,
    ) -> None:
        filled = fill_template(prompt, instructions, options.parser)
        prompt = clean_text(filled) if options.instructions else ""
        self._chat = chat
        self._options = options
        self._context = context
        self._system = prompt if options.system else ""
        self._lead = "" if options.system or not prompt else f"{prompt}\n\n"
        self._examples: list[Exchange] = []
        self._history: list[Exchange] = []
        self._replies: list[str] = []
        """Earlier replies, where only these are shown."""
        self._observation = ""
        self._history_changed = False
        """Whether the history differs from the conversation so far, so that it must be rendered again."""
        self.turn = 0
        """Number of replies so far."""
        self.dropped_turns = 0
        self.cut_observations = 0
        self.conversation = Conversation(chat, system=self._system)

    def observe(
        self, observation: str, info: Mapping[str, Any] | None = None
    ) -> tuple[tuple[int, ...], bool]:
        """Add an observation; return the ids that it adds, and whether they start a new row."""
        actions = listed_actions(info or {})
        reminder = remind(self._options.parser, actions) if self._options.format_reminder else ""
        if not self.turn and self._options.format_examples:
            self._examples = format_example_turns(
                self._options.parser, actions, self._options.format_examples
            )
            self._history = list(self._examples)
            self._history_changed = True
        if self._replies:
            # After the observation: members of a group that see the same page share it as a prefix.
            reminder = f"\n\nYour actions so far: {', '.join(self._replies)}.{reminder}"
        try:
            return self._observe(observation, reminder)
        except UsageError as error:
            raise AgentError(f"The conversation cannot continue: {error}") from error

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add the model's reply and return its text."""
        text = self.conversation.reply(token_ids)
        reply = self.conversation.last_reply
        strip = self._options.reasoning == "strip" and has_thinking(reply)
        self._history.append(Exchange(self._observation, strip_thinking(reply) if strip else reply))
        self._history_changed |= strip
        if self._options.history == "actions":
            self._replies.append(strip_thinking(reply).strip())
        if self._options.history != "full":
            self._history = list(self._examples)
            self._history_changed = True
        self.turn += 1
        return text

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Return a reply as the ids that the model would have to sample, including the end of its turn."""
        ids = self._chat.codec.encode([clean_text(text)], before="\n")
        return (*ids, self.conversation.stop_ids[0])

    def _observe(self, observation: str, reminder: str) -> tuple[tuple[int, ...], bool]:
        restarted = self._history_changed
        if restarted:
            self._restart()
        self._add(f"{observation}{reminder}")
        while self._options.overflow == "drop_oldest" and self._history and not self._fits:
            self._drop_oldest()
            restarted = True
            self._restart()
            self._add(f"{observation}{reminder}")
        if self._options.overflow == "truncate_observation" and not self._fits:
            self._truncate(observation, reminder)
        return self.conversation.added_ids, self.turn > 0 and (restarted or self.conversation.new_row)

    @property
    def _fits(self) -> bool:
        """True where the context has room for a reply of ``max_tokens``."""
        return self._context is None or (
            len(self.conversation.prompt_ids) + self._options.max_tokens <= self._context
        )

    def _restart(self) -> None:
        """Start a new conversation with the turns that are kept."""
        history = [(exchange.observation, exchange.reply) for exchange in self._history]
        if history:
            history[0] = (f"{self._lead}{history[0][0]}", history[0][1])
        self.conversation = Conversation(self._chat, system=self._system, history=history)
        self._history_changed = False

    def _add(self, text: str) -> None:
        self._observation = text
        self.conversation.observe(text if self._history else f"{self._lead}{text}")

    def _drop_oldest(self) -> None:
        """Drop the older half of the turns for good: otherwise the next turn would overflow again."""
        count = (len(self._history) + 1) // 2
        del self._history[:count]
        self.dropped_turns += count

    def _truncate(self, observation: str, reminder: str) -> None:
        """Cut out as little of the middle of the observation as makes it fit; all of it if necessary."""
        low, high = 0, len(observation)
        while low < high:
            middle = (low + high + 1) // 2
            self.conversation.undo_observe()
            self._add(f"{_without_middle(observation, middle)}{reminder}")
            low, high = (middle, high) if self._fits else (low, middle - 1)
        self.conversation.undo_observe()
        self._add(f"{_without_middle(observation, low)}{reminder}")
        self.cut_observations += 1


def _without_middle(text: str, keep: int) -> str:
    """Return the first and last of ``keep`` characters of a text, with a note on how many are missing."""
    tail = keep // 2
    end = text[len(text) - tail :]
    return f"{text[: keep - tail]}\n[{len(text) - keep} characters left out]\n{end}".strip()
