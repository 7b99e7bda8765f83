"""A language model behind any OpenAI-compatible ``/chat/completions`` endpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollgym.agents.chat.credentials import find_base_url, find_key
from rollgym.agents.chat.openai_protocol import ChatReply, ContextOverflow, Tokens, ToolsRefused
from rollgym.agents.chat.options import ChatOptions, read_options
from rollgym.agents.parsing import make_parser, read_action, strip_thinking
from rollgym.agents.prompting import (
    TOOL_CALL,
    ChatMessage,
    fill_template,
    history_limit,
    listed_actions,
    load_template,
    read_results,
)
from rollgym.chat.tool_formats import ParsedReply, find_format, split_reasoning
from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, Player
from rollgym.core.env import MAX_ACTION_CHARS
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.messages import Message, ToolCall
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import clean_text
from rollgym.core.tools import write_calls
from rollgym.core.types import Usage

if TYPE_CHECKING:
    from rollgym.agents.chat.endpoint import Endpoint

_PROMPTED = find_format("json")
"""The form of calls that the prompt asks for, where the endpoint has none."""


def make_chat(setup: AgentSetup, **options: Any) -> ChatAgent:
    """Make the chat agent from plain options; `ChatOptions` lists them."""
    # Imported here: importing this module for its help must not import an HTTP client.
    from rollgym.agents.chat.endpoint import Endpoint

    checked = read_options(options)
    key = find_key(checked.api_key_env)
    base_url = find_base_url(checked.base_url, checked.api_key_env, key)
    recorded = [base_url, json.dumps(dataclasses.asdict(checked), default=dict, ensure_ascii=False)]
    if any(key.hide(text) != text for text in recorded):
        raise UsageError("An option contains the API key, which would be recorded: use api_key_env.")
    return ChatAgent(checked, Endpoint(base_url, key, checked))


class ChatAgent(Agent):
    """Plays by calling an endpoint; its players share the connections, the rate limits and the totals."""

    def __init__(self, options: ChatOptions, endpoint: Endpoint) -> None:
        self.options = options
        self.endpoint = endpoint
        self.template = load_template(options.template)
        self.native_tools = options.tools != "prompted"
        """Whether tools are sent in requests; with ``auto`` until the endpoint refuses them."""
        self.format_misses = 0
        self.dropped_turns = 0

    def player(self, briefing: Briefing) -> ChatPlayer:
        """Return a player with its own conversation."""
        return ChatPlayer(self, briefing)

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()

    def describe(self) -> dict[str, Any]:
        """Return the settings, for the record of a run; they hold no secret."""
        settings = dataclasses.asdict(self.options)
        settings["base_url"] = self.endpoint.base_url
        settings["extra_body"] = json.loads(json.dumps(self.options.extra_body, default=dict))
        return {"agent": "chat", **settings, "template_text": self.template}

    def totals(self) -> dict[str, Any]:
        """Return requests, tokens and cost of all episodes so far, failed attempts included."""
        tokens = self.endpoint.tokens
        return {
            "requests": self.endpoint.requests,
            "retries": self.endpoint.retries,
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.completion,
            "cost": self.options.cost(*tokens),
            "format_misses": self.format_misses,
            "dropped_turns": self.dropped_turns,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _ChatTurn:
    """One earlier turn, as the conversation shows it."""

    observation: str
    results: tuple[Message, ...]
    """The observation as the results of the tool calls before it; empty where it is text."""
    reply: str
    calls: tuple[ToolCall, ...] = ()


class ChatPlayer(Player):
    """One episode's conversation with the model."""

    def __init__(self, agent: ChatAgent, briefing: Briefing) -> None:
        options = agent.options
        self._agent = agent
        self._tools = briefing.tools
        self._instructions = briefing.instructions
        self._free_text = briefing.free_text
        self._parser_name = options.parser_for(free_text=briefing.free_text)
        self._parser = make_parser(self._parser_name)
        self._request = options.request(briefing.spec.sampling_seed)
        self._history_limit = history_limit(options.history)
        self._rng = derive_rng("chat waits", briefing.spec.sampling_seed)
        self._turns: list[_ChatTurn] = []
        self._call_error = ""
        """The problem with the calls of the last reply, as a sentence."""

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Request a reply and parse the action out of it."""
        seen = self._seen(clean_text(observation), info)
        reply, tokens = await self._complete(seen)
        parsed = self._parse(reply)
        if self._tools:
            action, form = parsed.content, None
            if parsed.calls:
                action, form = write_calls(parsed.calls), TOOL_CALL
        else:
            action, form = read_action(self._parser, reply.text, listed_actions(info))
        self._agent.format_misses += form is None
        self._call_error = parsed.error
        self._add_turn(seen, reply, parsed)
        return AgentAction(
            action=action[:MAX_ACTION_CHARS],
            response=reply.text,
            message=Message(
                role="assistant",
                content=parsed.content,
                reasoning=parsed.reasoning,
                tool_calls=parsed.calls,
            )
            if self._tools
            else None,
            finish_reason=reply.finish_reason,
            usage=tokens and self._usage(tokens),
        )

    @property
    def _native(self) -> bool:
        """Whether tools are sent in the request; the first refusal of an endpoint changes it."""
        return bool(self._tools) and self._agent.native_tools

    def _parse(self, reply: ChatReply) -> ParsedReply:
        """Return the parts of a reply to a request with tools."""
        if not self._tools:
            return ParsedReply(content=reply.text)
        if not self._native:
            return _PROMPTED.parse(reply.text)
        reasoning, content = split_reasoning(reply.text)
        return ParsedReply(
            content=content.strip(), reasoning=reasoning, calls=reply.calls, error=reply.call_error
        )

    def _seen(self, observation: str, info: Mapping[str, Any]) -> _ChatTurn:
        """Return an observation, as results where the last reply had calls; its reply is still empty."""
        if not self._tools or not self._turns:
            return _ChatTurn(observation, (), "")
        calls = self._turns[-1].calls
        results = read_results(info)
        if calls:
            tool = [message for message in results if message.role == "tool"]
            pairs = zip(tool, calls, strict=False)
            paired = tuple(dataclasses.replace(message, tool_call_id=call.id) for message, call in pairs)
            return _ChatTurn(observation, paired if len(paired) == len(calls) else (), "")
        stated = [message.text for message in results if message.role == "user"] or [observation]
        return _ChatTurn("\n".join([self._call_error, *stated] if self._call_error else stated), (), "")

    async def _complete(self, seen: _ChatTurn) -> tuple[ChatReply, Tokens | None]:
        while True:
            body = {**self._request, "messages": self._messages(seen)}
            if self._native:
                body["tools"] = [spec.to_openai() for spec in self._tools]
            try:
                return await self._agent.endpoint.complete(body, self._rng)
            except ToolsRefused:
                if not self._native or self._agent.options.tools != "auto":
                    raise
                self._agent.native_tools = False
            except ContextOverflow as error:
                if not self._turns:
                    raise AgentError(
                        f"The conversation does not fit the model's context, with no earlier turns: {error}"
                    ) from None
                self._drop_oldest()

    def _messages(self, seen: _ChatTurn) -> list[ChatMessage]:
        """Return the conversation so far, which ends with an observation."""
        messages: list[ChatMessage] = []
        for turn in (*self._turns, seen):
            # Results cannot be the first message: the calls that they answer were dropped.
            if turn.results and messages and self._native:
                messages += [result.to_openai() for result in turn.results]
            else:
                messages.append({"role": "user", "content": turn.observation})
            messages.append(self._assistant_message(turn))
        del messages[-1]
        prompt = self._prompt()
        if prompt and self._agent.options.system:
            messages.insert(0, {"role": "system", "content": prompt})
        elif prompt:
            messages[0]["content"] = f"{prompt}\n\n{messages[0]['content']}"
        return messages

    def _assistant_message(self, turn: _ChatTurn) -> ChatMessage:
        if turn.calls and self._native:
            return Message(role="assistant", content=turn.reply, tool_calls=turn.calls).to_openai()
        content = turn.reply
        if turn.calls and not content.strip():
            content = _PROMPTED.write(turn.calls)
        return {"role": "assistant", "content": content}

    def _prompt(self) -> str:
        prompt = fill_template(
            self._agent.template,
            self._instructions,
            self._parser_name,
            tools=bool(self._tools),
            free_text=self._free_text,
        )
        if self._tools and not self._native:
            prompt = f"{prompt}\n\n{_PROMPTED.describe(self._tools)}"
        return clean_text(prompt)

    def _drop_oldest(self) -> None:
        """Drop the older half of the turns for good: otherwise the next turn would overflow again."""
        count = (len(self._turns) + 1) // 2
        del self._turns[:count]
        self._agent.dropped_turns += count

    def _add_turn(self, seen: _ChatTurn, reply: ChatReply, parsed: ParsedReply) -> None:
        kept = reply.text if self._agent.options.reasoning == "keep" else strip_thinking(reply.text)
        self._turns.append(dataclasses.replace(seen, reply=kept, calls=parsed.calls))
        if self._history_limit is not None:
            del self._turns[: max(0, len(self._turns) - self._history_limit)]

    def _usage(self, tokens: Tokens) -> Usage:
        return Usage(
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            cost=self._agent.options.cost(*tokens),
        )
