"""Text-only stand-in for conversations of structured messages."""

from __future__ import annotations

from collections.abc import Sequence

from rollgym.chat import BranchingConversation as TextConversation
from rollgym.chat import ChatTemplate
from rollgym.core.messages import Message, ToolSpec
from rollgym.serve.requests import ApiError


class BranchingConversation(TextConversation):
    """A conversation of messages without tools."""

    _last = ""

    @classmethod
    def begin(  # type: ignore[override]
        cls, template: ChatTemplate, system: str, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> BranchingConversation:
        if tools or any(message.tool_calls or message.role == "tool" for message in messages):
            raise ApiError(400, "tools are not supported yet.", param="tools")
        return super().begin(  # type: ignore[return-value]
            template, system, [{"role": message.role, "content": message.text} for message in messages]
        )

    def observe(self, messages: str | Sequence[Message]) -> None:
        text = messages if isinstance(messages, str) else "\n\n".join(message.text for message in messages)
        super().observe(text)

    def reply(self, token_ids: Sequence[int]) -> str:
        self._last = super().reply(token_ids)
        return self._last

    @property
    def last_message(self) -> Message:
        return Message(role="assistant", content=self._last)
