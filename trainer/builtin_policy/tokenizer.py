"""A tokenizer for the text of given environments: one token per word, one per cell of a grid.

Small models need short and regular token sequences. Text is split into these pieces:

- a word (``Up``, ``higher``) is one token if it is common in these environments; other words are spelled out;
- everything else is split into single characters: the cells of a grid, digits, capitals, newlines;
- a space belongs to the piece after it: a common word (`` left``), or a single character (`` #``, as
  in grids with spaces). But a word that occurs in an action is the same token everywhere, so that
  a word that was read can be played;
- a space after punctuation belongs to it (``, ``); other runs of spaces are one token.

All 256 bytes are tokens, too, so that any text can be encoded and decoded exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TYPE_CHECKING, Any, cast

from rollgym.trainer.builtin_policy.corpus import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT)
"""The special tokens, with the ids 0 to 4."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('There is no role ' + message['role'] + ' here.') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Three tokens around an exchange, none between: ``<|user|>observation<|assistant|>reply<|end|>``."""

COMMON = 3
"""Number of tasks in which a piece must occur to become a token."""
_WORD = "[A-Z]?[a-z]+(?:[0-9](?![0-9]))?"  # b3 is a word, too: objects have such names
_ALONE = r" [^ \n](?![^ \n])"
_AFTER = r"(?<=[A-Za-z0-9)])[.,:;!?] (?=[^ \n][^ \n])"


def pattern(glued: Sequence[str]) -> str:
    """The regular expression that splits text into pieces; ``glued`` words include the space before them.

    Python and the tokenizers library interpret it in the same way.
    """
    words = [f" (?:{'|'.join(glued)})(?![a-z0-9])"] if glued else []
    return "|".join([_AFTER, _ALONE, *words, _WORD, f" +(?={_ALONE})", " +", r"[\s\S]"])


def make_tokenizer(
    corpora: Sequence[Corpus], context: int, texts: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a chat template for these environments and texts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(set(_words(texts)).union(*map(_common_words, corpora)))
    played = {word for corpus in corpora for word in _words(corpus.actions)}
    glued = [word for word in words if word not in played]
    cut = pattern(glued)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {*words, *(f" {word}" for word in glued)}.union(*(_common_others(c, cut) for c in corpora))
    written = [as_bytes.pre_tokenize_str(piece)[0][0] for piece in sorted(pieces)]
    vocabulary = dict.fromkeys([*SPECIAL, *sorted(as_bytes.alphabet()), *written])
    ids = {token: number for number, token in enumerate(vocabulary)}
    # Without merges, a piece is one token if it is in the vocabulary and bytes if it is not.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(cut), "isolated"), as_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    made: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=context,
    )
    return made


def _words(texts: Iterable[str]) -> Iterator[str]:
    """The words in the texts, without single letters."""
    return (word for text in texts for word in re.findall(_WORD, text) if len(word) > 1)


def _common_words(corpus: Corpus) -> set[str]:
    counts = Counter(word for texts in corpus.tasks for word in set(_words(texts)))
    named = _words([corpus.instructions, *corpus.complaints, *corpus.declared, *corpus.words])
    return {word for word, count in counts.items() if count >= COMMON}.union(named)


def _common_others(corpus: Corpus, cut: str) -> set[str]:
    """The common pieces that are not words, longer than a byte: characters, runs of spaces, symbols."""
    scissors = re.compile(cut)
    counts = Counter(p for texts in corpus.tasks for p in {p for t in texts for p in scissors.findall(t)})
    named = {p for text in (corpus.instructions, *corpus.complaints) for p in scissors.findall(text)}
    common = {piece for piece, count in counts.items() if count >= COMMON}.union(named)
    others = {p for p in common if not re.search("[A-Za-z]{2}", p) and len(p.encode()) > 1}
    for kind in (digits, ascii_uppercase, ascii_lowercase):
        # If half an alphabet occurs in grids, the other half will occur, too.
        alone = {f" {char}" for char in kind}
        if 2 * len(alone & others) >= len(alone):
            others |= alone
    return others


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTokens:
    """Token counts of one environment."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    instruction_tokens: int
    observation_tokens: float
    """Mean over the turns of the corpus."""
    action_tokens: float
    turn_tokens: float
    """An observation, an action and the template's tokens around them."""


def count_tokens(tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> EnvTokens:
    """Count the tokens of an environment's text."""

    def mean(texts: Sequence[str]) -> float:
        # Not verbose: transformers would warn that a text exceeds the context, and none is run here.
        return sum(map(len, tokenizer(list(texts), verbose=False)["input_ids"])) / len(texts)

    observation, action = (mean(texts) for texts in zip(*corpus.turns, strict=True))
    return EnvTokens(
        id=corpus.env_id,
        kwargs=dict(corpus.env_kwargs),
        instruction_tokens=round(mean([corpus.instructions])),
        observation_tokens=round(observation, 1),
        action_tokens=round(action, 1),
        turn_tokens=round(observation + action + 3, 1),
    )
