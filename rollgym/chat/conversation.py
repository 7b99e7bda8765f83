"""One episode's conversation as token ids: what to send to an engine, and what each turn adds."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollgym.chat.template import REASONING_KEYS, ChatTemplate, Rendered
from rollgym.chat.template_probe import TemplateMessage, difference
from rollgym.chat.tokenizer import MIDDLE
from rollgym.chat.tool_formats import ParsedReply
from rollgym.chat.tool_probe import template_call
from rollgym.core.errors import UsageError
from rollgym.core.messages import ImagePart, Message, ToolCall, ToolSpec
from rollgym.core.serialization import clean_text, jsonable

Observation = str | Sequence[Message]
"""A user message as text, or the messages that follow a reply, such as tool results."""


@dataclass(slots=True)
class _Row:
    """A token sequence that grows turn by turn."""

    ids: list[int] = field(default_factory=list)
    reply_end: int = 0
    """Where the last reply ends; 0 before the first."""


class Conversation:
    """Observations and replies in alternation, as token ids.

    A row grows as long as the template leaves earlier messages unchanged. Where it rewrites them, a new row
    starts with the whole conversation rendered again. A tool call stays as it was sampled, also where the
    template would write it with other spaces or keys.

    Args:
        template: Renders and encodes messages.
        system: System message; empty for none.
        history: Earlier (observation, reply) pairs, rendered as text.
        tools: Tools that the model may call.
        show_tools: Whether the prompt shows them; a policy trained on one environment may not need that.
            Results are user messages where it does not.
        keep_reasoning: Whether reasoning stays in its row where the template drops it from earlier replies.
            It is lost where the template rewrites anything else.
    """

    def __init__(
        self,
        template: ChatTemplate,
        system: str = "",
        history: Sequence[tuple[Observation, str]] = (),
        tools: Sequence[ToolSpec] = (),
        *,
        show_tools: bool = True,
        keep_reasoning: bool = False,
    ) -> None:
        self._keep_reasoning = keep_reasoning
        self._as_sampled = False
        """Whether the template's text of the last reply may differ from the sampled one."""
        self.template = template
        self.tools = tuple(tools)
        shown = self.tools if show_tools else ()
        self._variables = template.tool_variables([_clean_spec(spec) for spec in shown])
        self._system = clean_text(system)
        if shown and not template.tools.native:
            described = clean_text(template.tools.format.describe(self.tools))
            self._system = f"{self._system}\n\n{described}" if self._system else described
        self._messages: list[TemplateMessage] = []
        self._parsed = ParsedReply()
        """The parts of the last reply."""
        self._num_calls = 0
        self._last_reply = ""
        for observation, reply in history:
            self._add(observation)
            self._add_reply(reply, reply, reply)
        self._undo = (0, 0, "", 0)
        """Number of rows, length of the last one, its text, and number of messages, before the last
        observation."""
        self._rows: list[_Row] = []
        self._prompt_text = ""
        """The rendered row when the last reply was requested."""
        self._reply_text = ""
        """The last reply without the token that ended it."""
        self._end_id: int | None = None
        """The token that ended the last reply; ``None`` where it was cut off."""
        self._awaits_reply = False
        self._begun: tuple[int, ...] = ()
        """Ids at the end of the row with which the next reply starts, though they are not sampled."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply."""
        facts = self.template.facts
        if self._variables or self.template.tools.format.channels:
            return (*facts.stop_ids, *self.template.tools.stop_ids)
        return facts.stop_ids

    @property
    def last_reply(self) -> str:
        """The last reply as text, as `history` takes it."""
        return self._last_reply

    @property
    def last_message(self) -> Message:
        """The last reply by its parts: content, reasoning and, with tools, calls."""
        parsed = self._parsed
        return Message(
            role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=parsed.calls
        )

    @property
    def reply_text(self) -> str:
        """The last reply as it was sampled, with special tokens and without the token that ended it."""
        return self._reply_text

    @property
    def last_parsed(self) -> ParsedReply:
        """The last reply as it was parsed."""
        return self._parsed

    @property
    def call_error(self) -> str:
        """The problem with malformed tool calls in the last reply, as a sentence; empty without one."""
        return self._parsed.error

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The whole row so far, to be sent to the engine."""
        return tuple(self._rows[-1].ids) if self._rows else ()

    @property
    def added_ids(self) -> tuple[int, ...]:
        """The ids after the last reply in this row: all of them in a new row."""
        return tuple(self._rows[-1].ids[self._rows[-1].reply_end :]) if self._rows else ()

    @property
    def new_row(self) -> bool:
        """Whether the last observation started a new row because the template changed earlier messages."""
        return len(self._rows) > 1 and not self._rows[-1].reply_end

    def observe(self, observation: Observation) -> None:
        """Add an observation to `prompt_ids`: a user message as text, or messages such as tool results.

        Results belong to the calls of the last reply by their ids, or in order.
        """
        if self._awaits_reply:
            raise UsageError("Observations and replies alternate: call reply() before the next observe().")
        num_messages = len(self._messages)
        self._undo = len(self._rows), len(self.prompt_ids), self._prompt_text, num_messages
        self._add(observation)
        if not num_messages:
            self._prompt_text, ids = self.template.opening(self._messages, self._variables)
            self._rows.append(_Row(list(ids)))
        else:
            num_new = len(self._messages) - num_messages
            rendered = self.template.render(self._messages, self._variables)
            continuation = self._continuation(rendered.text, num_new) if self._rows else None
            if continuation is None:
                self._rows.append(_Row())
            self._write(rendered, *(continuation or (0, "")), num_new)
        self._awaits_reply = True

    def begin_reply(self, token_ids: Sequence[int]) -> None:
        """Start the next reply with ids that are not sampled, such as those of a call that is forced.

        They belong to `prompt_ids` and to the text of the reply, and not to the ids given to `reply`.
        """
        if not self._awaits_reply or self._begun:
            raise UsageError("A reply begins once, after observe().")
        self._begun = tuple(token_ids)
        self._rows[-1].ids += self._begun

    def undo_observe(self) -> None:
        """Remove the last observation, which has no reply yet."""
        if not self._awaits_reply:
            raise UsageError("No observation to undo: a reply has followed it.")
        num_rows, length, self._prompt_text, num_messages = self._undo
        del self._rows[num_rows:]
        if self._rows:
            del self._rows[-1].ids[length:]
        del self._messages[num_messages:]
        self._awaits_reply, self._begun = False, ()

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add the sampled ids, unchanged, and return the text of the reply without special tokens."""
        if not self._awaits_reply:
            raise UsageError("Observations and replies alternate: call observe() before reply().")
        codec, ids = self.template.codec, [int(number) for number in token_ids]
        row = self._rows[-1]
        ended = bool(ids) and ids[-1] in self.stop_ids
        self._end_id = ids[-1] if ended else None
        text_ids = [*self._begun, *(ids[:-1] if ended else ids)]
        start = len(row.ids) - len(self._begun)
        self._reply_text = codec.decode(text_ids, after=row.ids[start - 1] if start else None)
        row.ids += ids
        row.reply_end = len(row.ids)
        facts = self.template.facts
        content = self._reply_text.removeprefix(facts.lead).removesuffix(facts.tail)
        plain = codec.decode(text_ids, special=False)
        self._add_reply(self._reply_text, content, plain)
        self._awaits_reply, self._begun = False, ()
        return plain

    # Messages as the template takes them.

    def _add_reply(self, text: str, content: str, plain: str) -> None:
        """Add a reply: its text, the text without the template's white space, and without special tokens."""
        facts, opened = self.template.tools, self.template.opens_reasoning
        self._last_reply = content
        if self.tools:
            parsed = facts.format.parse(text, opened=opened)
            self._parsed = replace(parsed, calls=self._with_ids(parsed.calls))
        elif facts.format.channels:
            parsed = facts.format.parse(text, opened=opened)
            self._parsed = replace(parsed, calls=(), error="")
        else:
            reasoning, rest = facts.format.split(content, opened)
            thought = rest is not content
            self._parsed = ParsedReply(
                content=rest.strip() if thought else rest, reasoning=reasoning, rest=rest, in_parts=thought
            )
        message: TemplateMessage = {"role": "assistant", "content": content}
        if facts.native and (self._variables or facts.format.channels) and not facts.verbatim:
            if self._parsed.error:
                message["content"] = plain
            elif self._parsed.calls or facts.format.channels:
                message = _template_reply(self.last_message)
        self._as_sampled = "tool_calls" in message
        if self._keep_reasoning and self._parsed.reasoning:
            self._as_sampled = True
            if "tool_calls" not in message:
                message = {
                    "role": "assistant",
                    "content": facts.format.split(message["content"], opened)[1].strip(),
                }
        self._messages.append(message)

    def _with_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return calls with an id each, of nine characters as Mistral's template demands."""
        named = []
        for call in calls:
            named.append(replace(call, id=call.id or f"call{self._num_calls:05d}"))
            self._num_calls += 1
        return tuple(named)

    def _add(self, observation: Observation) -> None:
        if isinstance(observation, str):
            self._add_user_message(clean_text(observation))
            return
        if any(message.role == "assistant" for message in observation):
            raise UsageError("An observation cannot contain a message of the assistant.")
        self._add_messages(observation)

    def _add_messages(self, messages: Sequence[Message]) -> None:
        """Add messages of any role but the assistant's, which answer the last reply."""
        if not self._variables:
            self._add_user_message(clean_text("\n\n".join(_described(message) for message in messages)))
            return
        calls = {call.id: call for call in self._parsed.calls}
        in_order = iter(self._parsed.calls)
        for message in messages:
            content = clean_text(_text(message))
            if message.role != "tool":
                self._add_user_message(content)
                continue
            call = next(in_order, None)
            call = calls.get(message.tool_call_id, call)
            self._messages.append(
                {
                    "role": "tool",
                    "content": content,
                    "tool_call_id": _template_id(call.id if call else message.tool_call_id),
                    "name": clean_text(message.name or (call.name if call else "")),
                }
            )

    def _add_user_message(self, text: str) -> None:
        if not self._messages and self._system:
            if self.template.facts.system_role:
                self._messages.append({"role": "system", "content": self._system})
            else:
                text = f"{self._system}\n\n{text}"
        self._messages.append({"role": "user", "content": text})

    # Rows.

    def _write(self, rendered: Rendered, start: int, before: str, num_new: int) -> None:
        """Append what is rendered from ``start`` on to the last row."""
        self._rows[-1].ids += self.template.encode(
            self._messages, rendered, self._variables, start=start, before=before, num_new=num_new
        )
        self._prompt_text = rendered.text

    def _continuation(self, text: str, num_new: int) -> tuple[int, str] | None:
        """Return where the new text starts and what it follows; ``None`` where earlier messages changed."""
        if self._as_sampled:
            return self._continuation_as_sampled(text, num_new)
        past = self._prompt_text + self._reply_text
        if not text.startswith(past):
            self._check_deterministic(num_new)
            return None
        if self._end_id is not None:
            token = self.template.codec.decode([self._end_id])
            if text.startswith(token, len(past)):
                return len(past) + len(token), token
            if self._end_id == self.template.facts.end_of_turn_id:
                return None
        return len(past), MIDDLE

    def _continuation_as_sampled(self, text: str, num_new: int) -> tuple[int, str] | None:
        """Return the same after a reply whose calls the template writes itself, perhaps in other words.

        Everything else must be unchanged: the text before the reply, and its content; and its reasoning,
        unless that is to be kept.
        """
        closed = self.template.apply(self._messages[:-num_new], generation=False, tools=self._variables)
        if not closed.startswith(self._prompt_text) or not text.startswith(closed):
            self._check_deterministic(num_new)
            return None
        written = closed[len(self._prompt_text) :]
        reasoning = "" if self._keep_reasoning else self._parsed.reasoning
        if any(part not in written for part in (reasoning, self._parsed.content)):
            return None
        body = closed.rstrip()
        tokens = [token for token in self.template.codec.added if token.strip() and body.endswith(token)]
        end = max(tokens, key=len, default="")
        if self._end_id is None or not end:
            return len(body) - len(end), MIDDLE
        return (len(body), end) if self.template.codec.decode([self._end_id]) == end else None

    def _check_deterministic(self, num_new: int) -> None:
        """Check that the template changed earlier messages because of the new ones, not at random."""
        again = self.template.render(self._messages[: -1 - num_new], self._variables).text
        if again != self._prompt_text:
            raise UsageError(
                "The chat template does not write the same text twice for the same messages "
                f"({difference(self._prompt_text, again)})."
            )


class BranchingConversation(Conversation):
    """A `Conversation` that can be forked and can start in the middle, for clients that send all messages."""

    @classmethod
    def begin(
        cls,
        template: ChatTemplate,
        system: str,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
    ) -> BranchingConversation:
        """Return a conversation with one row that holds all messages; the last one is the user's or a tool's.

        Messages may be given in OpenAI's form.
        """
        conversation = cls(template, system, tools=tools)
        given = [m if isinstance(m, Message) else Message.from_openai(m) for m in messages]
        if given[0].role != "user" and conversation._system and template.facts.system_role:
            conversation._messages.append({"role": "system", "content": conversation._system})
        pending: list[Message] = []
        for message in given:
            if message.role == "tool":
                pending.append(message)
                continue
            conversation._flush(pending)
            if message.role == "assistant":
                conversation._add_given_reply(message)
            elif message.role == "user":
                conversation._add_user_message(clean_text(_text(message)))
            else:
                conversation._messages.append({"role": message.role, "content": clean_text(_text(message))})
        conversation._flush(pending)
        # Not `opening`: that caches what it renders, and here hardly anything occurs twice.
        conversation._rows.append(_Row())
        rendered = template.render(conversation._messages, conversation._variables)
        conversation._write(rendered, 0, "", len(conversation._messages))
        conversation._awaits_reply = True
        return conversation

    def fork(self) -> BranchingConversation:
        """Return an independent copy."""
        other = copy.copy(self)
        row = self._rows[-1]
        other._messages, other._rows = list(self._messages), [_Row([*row.ids], row.reply_end)]
        return other

    def _flush(self, pending: list[Message]) -> None:
        """Add the tool results that were collected."""
        if pending:
            self._add_messages(pending)
            pending.clear()

    def _add_given_reply(self, message: Message) -> None:
        """Add a message of the assistant that was not sampled here."""
        self._parsed = ParsedReply(
            content=message.text, reasoning=message.reasoning, calls=self._with_ids(message.tool_calls)
        )
        self._last_reply = message.text
        given = _template_reply(replace(message, tool_calls=self._parsed.calls))
        if message.tool_calls and not self._variables:
            written = self.template.tools.format.write(self._parsed.calls)
            content = f"{given['content']}\n\n{written}" if given["content"] else written
            given = {"role": "assistant", "content": clean_text(content)}
        self._messages.append(given)


def _template_reply(message: Message) -> TemplateMessage:
    """Return a message of the assistant with its parts, as templates take it."""
    reply: TemplateMessage = {"role": "assistant", "content": clean_text(_text(message))}
    if message.reasoning:
        reply |= dict.fromkeys(REASONING_KEYS, clean_text(message.reasoning))
    if message.tool_calls:
        reply["tool_calls"] = [
            template_call(
                ToolCall(
                    name=clean_text(call.name), arguments=jsonable(call.arguments), id=_template_id(call.id)
                )
            )
            for call in message.tool_calls
        ]
    return reply


def _template_id(identifier: str) -> str:
    """Return an id of nine letters and digits, which Mistral's template demands."""
    if len(identifier) == 9 and identifier.isalnum() and identifier.isascii():
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "replace")).hexdigest()[:9]


def _clean_spec(spec: ToolSpec) -> ToolSpec:
    return ToolSpec(
        name=clean_text(spec.name),
        description=clean_text(spec.description),
        parameters=jsonable(spec.parameters, lenient=True),
    )


def _text(message: Message) -> str:
    if not isinstance(message.content, str) and any(isinstance(p, ImagePart) for p in message.content):
        raise UsageError("Images in messages are not supported yet: send text.")
    return message.text


def _described(message: Message) -> str:
    """Return a message as a part of a user message, for templates without tool results."""
    if message.role != "tool":
        return _text(message)
    return f"Result of {message.name}:\n{_text(message)}" if message.name else f"Result:\n{_text(message)}"
