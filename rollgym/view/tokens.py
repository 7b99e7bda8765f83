"""What token ids say, by the tokenizer that the run was made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollgym.files import read_bounded

FOLDERS = ("final", "model")
FILE = "tokenizer.json"
MOST_BYTES = 200_000_000
LONGEST = 1_000
"""Characters of a token."""


class TokenTexts:
    """Texts of ids; none where there is no tokenizer, or the package ``tokenizers`` is not installed."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._decode = _decoder(folder, manifest)
        self._known: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """Each id's text; an id that the tokenizer does not know is left out."""
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
    except BaseException:  # the package is missing or the file broken (a panic is no Exception): ids do
        return None

    def decode(one: int) -> str:
        try:
            if not decodes:  # an expression of a stranger's may take forever
                return str(tokenizer.id_to_token(one) or "")[:LONGEST]
            text = str(tokenizer.decode([one], skip_special_tokens=False))
            # A piece of a character is no text: its name in the vocabulary says more. So it is with pieces
            # that a decoder strips to nothing.
            text = text if text and "\ufffd" not in text else str(tokenizer.id_to_token(one) or "")
            return text[:LONGEST]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # an id that is too great, a decoder that panics
            return ""

    return decode
