"""Conversations as token ids: what an engine is sent, what it sampled, and which ids to train on.

Ids that were sampled stay as they are: nothing that was decoded is encoded again in the same row. Each turn
only what is new is rendered and tokenised, and a mask says who wrote each id::

    template = ChatTemplate(tokenizer)          # once; refuses a template that cannot be used this way
    talk = Conversation(template, system="You play a game.")
    talk.observe("The door is shut.")
    text = talk.reply(sample(talk.prompt_ids))  # ids in, ids out
    talk.rows                                   # ids, mask and log-probs for training

Nothing here imports torch or transformers, but for `load_tokenizer` when it is called.
"""

from rollgym.chat.conversation import Conversation, Row
from rollgym.chat.facts import Facts, Rewrite
from rollgym.chat.template import ChatTemplate
from rollgym.chat.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Conversation", "Facts", "Rewrite", "Row", "Tokenizer", "load_tokenizer"]
