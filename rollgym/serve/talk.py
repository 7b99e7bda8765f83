"""A conversation that can begin in the middle and go on in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollgym.chat import ChatTemplate, Conversation
from rollgym.chat.conversation import _Open
from rollgym.chat.facts import Message

__all__ = ["Talk"]


class Talk(Conversation):
    """A `Conversation` of which copies can be made, so that a reply that nobody wanted changes nothing."""

    @classmethod
    def begin(cls, template: ChatTemplate, system: str, messages: Sequence[Message]) -> Talk:
        """A row with all of this written anew; the last message is the user's."""
        talk = cls(template, system)
        first, *rest = messages
        if first["role"] == "user":
            talk._add_message(first["content"])
        else:
            if system and template.facts.system_role:
                talk._messages.append({"role": "system", "content": system})
            talk._messages.append(dict(first))
        talk._messages += [dict(message) for message in rest]
        # Not `opening`: that remembers what it writes, and here hardly anything comes twice.
        rendered = template.render(talk._messages)
        talk._rows.append(_Open())
        talk._write(rendered, 0, "")
        talk._shown = rendered.text
        talk._asked = True
        return talk

    def fork(self) -> Talk:
        """A copy that goes on by itself."""
        other = Talk(self.template, self._system)
        other._messages = list(self._messages)
        row = self._rows[-1]
        other._rows = [replace(row, ids=[*row.ids], mask=[*row.mask], logprobs=[*row.logprobs])]
        other._shown, other._said, other._end = self._shown, self._said, self._end
        return other
