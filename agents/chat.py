"""A language model behind any OpenAI-compatible ``/chat/completions`` endpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollgym.agent import AgentSetup, Briefing, Move
from rollgym.agents.chat_options import ChatOptions, read_options
from rollgym.agents.credentials import find_base_url, find_key
from rollgym.agents.parsing import make_parser, read_action, strip_thinking
from rollgym.agents.prompting import (
    Exchange,
    build_messages,
    fill_template,
    history_limit,
    listed_actions,
    load_template,
)
from rollgym.agents.wire import ChatReply, ContextOverflow, Tokens
from rollgym.errors import AgentError, UsageError
from rollgym.records import clean_text
from rollgym.seeding import derive_rng
from rollgym.text import MAX_ACTION_CHARS
from rollgym.types import Usage

if TYPE_CHECKING:
    from rollgym.agents.endpoint import Endpoint


def make_chat(setup: AgentSetup, **options: Any) -> ChatAgent:
    """The chat agent from plain options; `ChatOptions` lists them."""
    # Imported here, so that looking at this module (for its name or its help) costs no HTTP client.
    from rollgym.agents.endpoint import Endpoint

    checked = read_options(options)
    key = find_key(checked.api_key_env)
    base_url = find_base_url(checked.base_url, checked.api_key_env, key)
    recorded = [base_url, json.dumps(dataclasses.asdict(checked), default=dict, ensure_ascii=False)]
    if any(key.hide(text) != text for text in recorded):
        raise UsageError("An option holds the API key, and options are recorded: leave it to api_key_env.")
    return ChatAgent(checked, Endpoint(base_url, key, checked))


class ChatAgent:
    """Plays by asking a model; its players share the connections, the rate limit and the totals."""

    def __init__(self, options: ChatOptions, endpoint: Endpoint) -> None:
        self.options = options
        self.endpoint = endpoint
        self.template = load_template(options.template)
        self.parser = make_parser(options.parser)
        self.format_misses = 0
        self.dropped_turns = 0

    def player(self, briefing: Briefing) -> ChatPlayer:
        """A player with a conversation of its own."""
        return ChatPlayer(self, briefing)

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()

    def describe(self) -> dict[str, Any]:
        """The settings, for a record of the run; no secret is among them."""
        settings = {
            field.name: getattr(self.options, field.name) for field in dataclasses.fields(ChatOptions)
        }
        settings["base_url"] = self.endpoint.base_url
        settings["extra_body"] = json.loads(json.dumps(self.options.extra_body, default=dict))
        return {"agent": "chat", **settings, "template_text": self.template}

    def totals(self) -> dict[str, Any]:
        """What all episodes so far took, attempts that came to nothing included."""
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


class ChatPlayer:
    """One episode's conversation with the model."""

    def __init__(self, agent: ChatAgent, briefing: Briefing) -> None:
        options = agent.options
        self._agent = agent
        self._prompt = clean_text(fill_template(agent.template, briefing.instructions, options.parser))
        self._request = options.request(briefing.spec.sampling_seed)
        self._keep = history_limit(options.history)
        self._rng = derive_rng("chat waits", briefing.spec.sampling_seed)
        self._turns: list[Exchange] = []

    async def act(self, observation: str, info: Mapping[str, Any]) -> Move:
        """Ask the model, and take the action out of its reply."""
        observation = clean_text(observation)
        reply, tokens = await self._ask(observation)
        action, form = read_action(self._agent.parser, reply.text, listed_actions(info))
        self._agent.format_misses += form is None
        self._remember(observation, reply.text)
        return Move(
            action=action[:MAX_ACTION_CHARS],
            response=reply.text,
            finish_reason=reply.finish_reason,
            usage=tokens and self._usage(tokens),
        )

    async def _ask(self, observation: str) -> tuple[ChatReply, Tokens | None]:
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
        """Forget the older half of the turns, for good: the next turn would overflow again otherwise."""
        count = (len(self._turns) + 1) // 2
        del self._turns[:count]
        self._agent.dropped_turns += count

    def _remember(self, observation: str, reply: str) -> None:
        kept = reply if self._agent.options.reasoning == "keep" else strip_thinking(reply)
        self._turns.append(Exchange(observation, kept))
        if self._keep is not None:
            del self._turns[: max(0, len(self._turns) - self._keep)]

    def _usage(self, tokens: Tokens) -> Usage:
        return Usage(
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            cost=self._agent.options.cost(*tokens),
        )
