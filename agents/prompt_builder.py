"""Builds the prompts of an episode: instructions, history, examples, and what to drop when they are too long.

Every change of the history (stripped reasoning, dropped turns) starts a new conversation, and with it a new
row to train on: the prompt that a reply was sampled from is never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgym.agents.parsing import has_thinking, strip_thinking
from rollgym.agents.policy.options import PolicyOptions
from rollgym.agents.prompting import (
    fill_template,
    format_example_turns,
    listed_actions,
    read_results,
    remind,
)
from rollgym.chat import ChatTemplate, Conversation
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.messages import Message, ToolSpec
from rollgym.core.serialization import clean_text
from rollgym.core.tools import BadCall, read_calls


@dataclass(frozen=True, slots=True)
class _Seen:
    """An observation: as text, and as the messages that answer the calls of the reply before it."""

    text: str
    messages: tuple[Message, ...] = ()

    @property
    def longest(self) -> str:
        """The longest text in it, which can be cut."""
        return max((message.text for message in self.messages), key=len, default=self.text)

    def with_longest(self, text: str) -> _Seen:
        """Return the observation with another text in place of the longest one."""
        if not self.messages:
            return _Seen(text)
        longest = self.longest
        messages = [replace(m, content=text) if m.text == longest else m for m in self.messages]
        return _Seen(self.text.replace(longest, text, 1), tuple(messages))


class PromptBuilder:
    """Observations and replies in alternation, rendered by the options of the ``lm`` agent.

    Args:
        chat: The model's chat template.
        prompt: Template of the instructions.
        options: History, reasoning, overflow and format options.
        instructions: The environment's instructions.
        context: Tokens of a prompt and its reply together; ``None`` for no limit.
        tools: Tools that the model may call.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        prompt: str,
        options: PolicyOptions,
        instructions: str,
        context: int | None = None,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        if tools and options.format_examples:
            raise UsageError("format_examples requires an environment without tools: set it to 0.")
        filled = fill_template(prompt, instructions, options.parser, tools=bool(tools))
        prompt = clean_text(filled) if options.instructions else ""
        self._chat = chat
        self._options = options
        self._context = context
        self._tools = tuple(tools)
        self._system = prompt if options.system else ""
        self._lead = "" if options.system or not prompt else f"{prompt}\n\n"
        self._examples: list[tuple[_Seen, str]] = []
        self._history: list[tuple[_Seen, str]] = []
        self._replies: list[str] = []
        """Earlier replies, where only these are shown."""
        self._observation = _Seen("")
        self._history_changed = False
        """Whether the history differs from the conversation so far, so that it must be rendered again."""
        self.turn = 0
        """Number of replies so far."""
        self.dropped_turns = 0
        self.cut_observations = 0
        self.conversation = self._converse()

    def observe(
        self, observation: str, info: Mapping[str, Any] | None = None
    ) -> tuple[tuple[int, ...], bool]:
        """Add an observation; return the ids that it adds, and whether they start a new row."""
        actions = listed_actions(info or {})
        reminder = ""
        if self._options.format_reminder and not self._tools:
            reminder = remind(self._options.parser, actions)
        if not self.turn and self._options.format_examples:
            examples = format_example_turns(self._options.parser, actions, self._options.format_examples)
            self._examples = [(_Seen(example.observation), example.reply) for example in examples]
            self._history = list(self._examples)
            self._history_changed = True
        if self._replies:
            # After the observation: members of a group that see the same page share it as a prefix.
            reminder = f"\n\nYour actions so far: {', '.join(self._replies)}.{reminder}"
        try:
            return self._observe(self._seen(observation, info or {}), reminder)
        except UsageError as error:
            raise AgentError(f"The conversation cannot continue: {error}") from error

    def final(self, observation: str) -> tuple[tuple[int, ...], bool]:
        """Add the observation after the last turn, which has no ``info``, as the result of its calls."""
        calls = self.conversation.last_message.tool_calls if self.turn else ()
        results = [Message(role="tool", content="", name=call.name) for call in calls]
        results[:1] = [replace(message, content=observation) for message in results[:1]]
        return self.observe(observation, {"messages": [message.to_openai() for message in results]})

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add the model's reply and return its text."""
        text = self.conversation.reply(token_ids)
        reply = self.conversation.last_reply
        strip = self._options.reasoning == "strip" and has_thinking(reply)
        self._history.append((self._observation, strip_thinking(reply) if strip else reply))
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

    def encode_calls(self, action: str) -> tuple[int, ...] | None:
        """Return an action's tool calls as such ids; ``None`` where the action is not tool calls."""
        try:
            calls = read_calls(action)
        except BadCall:
            return None
        ids = self._chat.codec.encode([clean_text(self._chat.call_text(calls, self._tools))], before="\n")
        end = self._chat.tools.end_id if self._chat.tools.native else None
        return (*ids, self.conversation.stop_ids[0] if end is None else end)

    def _seen(self, observation: str, info: Mapping[str, Any]) -> _Seen:
        """Return an observation with the results of the last reply's calls, if it had any."""
        if not self._tools or not self.turn:
            return _Seen(observation)
        results = read_results(info)
        if self.conversation.last_message.tool_calls and self._options.history == "full":
            return _Seen(observation, results if any(m.role == "tool" for m in results) else ())
        # The environment does not know the model's form of a call, so its own words come first.
        stated = [m.text for m in results if m.role == "user"] or [observation]
        error = self.conversation.call_error
        return _Seen("\n".join([error, *stated] if error else stated))

    def _observe(self, seen: _Seen, reminder: str) -> tuple[tuple[int, ...], bool]:
        restarted = self._history_changed
        if restarted:
            self._restart()
        self._add(seen, reminder)
        while self._options.overflow == "drop_oldest" and self._history and not self._fits:
            self._drop_oldest()
            restarted = True
            self._restart()
            self._add(seen, reminder)
        if self._options.overflow == "truncate_observation" and not self._fits:
            self._truncate(seen, reminder)
        return self.conversation.added_ids, self.turn > 0 and (restarted or self.conversation.new_row)

    @property
    def _fits(self) -> bool:
        """True where the context has room for a reply of ``max_tokens``."""
        return self._context is None or (
            len(self.conversation.prompt_ids) + self._options.max_tokens <= self._context
        )

    def _restart(self) -> None:
        """Start a new conversation with the turns that are kept."""
        history: list[tuple[str | tuple[Message, ...], str]] = []
        for seen, reply in self._history:
            # Results cannot be the first message: the calls that they answer were dropped.
            first = f"{self._lead}{seen.text}"
            history.append(((seen.messages or seen.text) if history else first, reply))
        self.conversation = self._converse(history)
        self._history_changed = False

    def _converse(self, history: Sequence[tuple[str | tuple[Message, ...], str]] = ()) -> Conversation:
        return Conversation(
            self._chat, self._system, history, self._tools, show_tools=self._options.instructions
        )

    def _add(self, seen: _Seen, reminder: str) -> None:
        if seen.messages and self._history:
            self._observation = seen
            self.conversation.observe(seen.messages)
            return
        text = f"{seen.text}{reminder}"
        self._observation = _Seen(text)
        self.conversation.observe(text if self._history else f"{self._lead}{text}")

    def _drop_oldest(self) -> None:
        """Drop the older half of the turns for good: otherwise the next turn would overflow again."""
        count = (len(self._history) + 1) // 2
        del self._history[:count]
        self.dropped_turns += count

    def _truncate(self, seen: _Seen, reminder: str) -> None:
        """Cut out as little of the middle of the observation as makes it fit; all of it if necessary."""
        longest = seen.longest
        low, high = 0, len(longest)
        while low < high:
            middle = (low + high + 1) // 2
            self.conversation.undo_observe()
            self._add(seen.with_longest(_without_middle(longest, middle)), reminder)
            low, high = (middle, high) if self._fits else (low, middle - 1)
        self.conversation.undo_observe()
        self._add(seen.with_longest(_without_middle(longest, low)), reminder)
        self.cut_observations += 1


def _without_middle(text: str, keep: int) -> str:
    """Return the first and last of ``keep`` characters of a text, with a note on how many are missing."""
    tail = keep // 2
    end = text[len(text) - tail :]
    return f"{text[: keep - tail]}\n[{len(text) - keep} characters left out]\n{end}".strip()
