"""Conversations as token ids: the prompt of an engine, and the ids that each turn adds.

Sampled ids stay as they are: nothing that was decoded is encoded again within a row. Each turn renders and
tokenizes only what is new::

    template = ChatTemplate(tokenizer)  # once; rejects a template that cannot be used this way
    conversation = Conversation(template, system="You play a game.")
    conversation.observe("The door is shut.")
    text = conversation.reply(sample(conversation.prompt_ids))  # ids in, ids out

Nothing here imports torch or transformers, except `load_tokenizer` when it is called.
"""

from rollgym.chat.conversation import BranchingConversation, Conversation
from rollgym.chat.template import ChatTemplate
from rollgym.chat.template_probe import Rewrite, TemplateFacts
from rollgym.chat.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "BranchingConversation", "ChatTemplate", "Conversation", "Rewrite", "TemplateFacts", "Tokenizer",
    "load_tokenizer",
]  # fmt: skip
