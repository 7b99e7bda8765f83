"""Conversations as token ids: the prompt of an engine, and the ids that each turn adds.

Sampled ids stay as they are: nothing that was decoded is encoded again within a row. Each turn renders and
tokenizes only what is new::

    template = ChatTemplate(tokenizer)  # once; rejects a template that cannot be used this way
    conversation = Conversation(template, system="You play a game.")
    conversation.observe("The door is shut.")
    text = conversation.reply(sample(conversation.prompt_ids))  # ids in, ids out

With tools, `Conversation.last_message` has the calls of a reply, and `observe` takes their results.

Nothing here imports torch or transformers, except `load_tokenizer` when it is called.
"""

from rollgym.chat.conversation import BranchingConversation, Conversation
from rollgym.chat.template import ChatTemplate
from rollgym.chat.template_probe import Rewrite, TemplateFacts
from rollgym.chat.tokenizer import Tokenizer, load_tokenizer
from rollgym.chat.tool_formats import ParsedReply, ToolFormat
from rollgym.chat.tool_probe import ToolFacts

__all__ = [
    "BranchingConversation", "ChatTemplate", "Conversation", "ParsedReply", "Rewrite", "TemplateFacts",
    "Tokenizer", "ToolFacts", "ToolFormat", "load_tokenizer",
]  # fmt: skip
