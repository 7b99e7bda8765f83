"""A language model behind any OpenAI-compatible ``/chat/completions`` endpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollgym.agents.chat.credentials import find_base_url, find_key
from rollgym.agents.chat.openai_protocol import ChatReply, ContextOverflow, Tokens
from rollgym.agents.chat.options import ChatOptions, read_options
from rollgym.agents.parsing import make_parser, read_action, strip_thinking
from rollgym.agents.prompting import (
    Exchange,
    build_messages,
    fill_template,
    history_limit,
    listed_actions,
    load_template,
)
from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, Player
from rollgym.core.env import MAX_ACTION_CHARS
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import clean_text
from rollgym.core.types import Usage

if TYPE_CHECKING:
    from rollgym.agents.chat.endpoint import Endpoint


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
        self.parser = make_parser(options.parser)
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


class ChatPlayer(Player):
    """One episode's conversation with the model."""

    def __init__(self, agent: ChatAgent, briefing: Briefing) -> None:
        options = agent.options
        self._agent = agent
        self._prompt = clean_text(fill_template(agent.template, briefing.instructions, options.parser))
        self._request = options.request(briefing.spec.sampling_seed)
        self._history_limit = history_limit(options.history)
        self._rng = derive_rng("chat waits", briefing.spec.sampling_seed)
        self._turns: list[Exchange] = []

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Request a reply and parse the action out of it."""
        observation = clean_text(observation)
        reply, tokens = await self._complete(observation)
        action, form = read_action(self._agent.parser, reply.text, listed_actions(info))
        self._agent.format_misses += form is None
        self._add_turn(observation, reply.text)
        return AgentAction(
            action=action[:MAX_ACTION_CHARS],
            response=reply.text,
            finish_reason=reply.finish_reason,
            usage=tokens and self._usage(tokens),
        )

    async def _complete(self, observation: str) -> tuple[ChatReply, Tokens | None]:
        system = self._agent.options.system
        while True:
            messages = build_messages(self._prompt, self._turns, observation, system=system)
            try:
                return await self._agent.endpoint.complete({**self._request, "messages": messages}, self._rng)
            except ContextOverflow as error:
                if not self._turns:
                    raise AgentError(
                        f"The conversation does not fit the model's context, with no earlier turns: {error}"
                    ) from None
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the older half of the turns for good: otherwise the next turn would overflow again."""
        count = (len(self._turns) + 1) // 2
        del self._turns[:count]
        self._agent.dropped_turns += count

    def _add_turn(self, observation: str, reply: str) -> None:
        history_reply = reply if self._agent.options.reasoning == "keep" else strip_thinking(reply)
        self._turns.append(Exchange(observation, history_reply))
        if self._history_limit is not None:
            del self._turns[: max(0, len(self._turns) - self._history_limit)]

    def _usage(self, tokens: Tokens) -> Usage:
        return Usage(
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            cost=self._agent.options.cost(*tokens),
        )
