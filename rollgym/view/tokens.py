"""Text of token ids, decoded with the tokenizer of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.files import read_bounded

FOLDERS = ("final", "model")
FILE = "tokenizer.json"
MOST_BYTES = 200_000_000
LONGEST = 1_000
"""Maximum characters of a token."""


class TokenTexts:
    """Decodes token ids; empty without a tokenizer or the package ``tokenizers``."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._decode = _decoder(folder, manifest)
        self._known: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """Return the text of each id; unknown ids are omitted."""
        if self._decode is None:
            return {}
        found = {}
        for one in sorted(set(ids)):
            if one not in self._known:
                self._known[one] = self._decode(one)
            if self._known[one]:
                found[str(one)] = self._known[one]
        return found


def _decoder(folder: Path, manifest: Mapping[str, Any]) -> Callable[[int], str] | None:
    files: list[tuple[Path, Path | None]] = [(folder / name / FILE, folder) for name in FOLDERS]
    agent = manifest.get("agent")
    options = agent.get("options") if isinstance(agent, dict) else None
    if isinstance(options, dict) and isinstance(options.get("model"), str):
        files.append((Path(options["model"]) / FILE, None))
    found = next(((file, where) for file, where in files if file.is_file()), None)
    if found is None:
        return None
    try:
        from tokenizers import Tokenizer

        said = read_bounded(found[0], MOST_BYTES, found[1])
        decodes = b'"Regex"' not in msgspec.json.encode(msgspec.json.decode(said).get("decoder"))
        tokenizer = Tokenizer.from_str(said.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # no package, or a broken file (a panic is not an Exception): show ids
        return None

    def decode(one: int) -> str:
        try:
            if not decodes:  # an untrusted regular expression may run forever
                return str(tokenizer.id_to_token(one) or "")[:LONGEST]
            text = str(tokenizer.decode([one], skip_special_tokens=False))
            # A partial character has no text: show its vocabulary entry. The same for pieces
            # that a decoder strips to nothing.
            text = text if text and "\ufffd" not in text else str(tokenizer.id_to_token(one) or "")
            return text[:LONGEST]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # an id out of range, a decoder that panics
            return ""

    return decode
