"""The APIs that the endpoint speaks, one module each, over one core."""

from rollgym.serve.dialects.anthropic_messages import AnthropicMessages
from rollgym.serve.dialects.base import (
    Delta,
    Dialect,
    DialectRequest,
    Replies,
    Reply,
    ReplyStream,
    StreamHead,
)
from rollgym.serve.dialects.openai_chat import OpenAIChat
from rollgym.serve.dialects.openai_responses import OpenAIResponses

__all__ = [
    "AnthropicMessages",
    "Delta",
    "Dialect",
    "DialectRequest",
    "OpenAIChat",
    "OpenAIResponses",
    "Replies",
    "Reply",
    "ReplyStream",
    "StreamHead",
]
