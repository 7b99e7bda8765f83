"""What token ids say, by the tokenizer that the run was made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDERS = ("final", "model")
FILE = "tokenizer.json"


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
    files = [folder / name / FILE for name in FOLDERS]
    agent = manifest.get("agent")
    options = agent.get("options") if isinstance(agent, dict) else None
    if isinstance(options, dict) and isinstance(options.get("model"), str):
        files.append(Path(options["model"]) / FILE)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the package may be missing or the file broken: ids are shown instead
        return None

    def decode(one: int) -> str:
        try:
            text = str(tokenizer.decode([one], skip_special_tokens=False))
            # A piece of a character is no text: its name in the vocabulary says more. So it is with pieces
            # that a decoder strips to nothing.
            return text if text and "\ufffd" not in text else str(tokenizer.id_to_token(one) or "")
        except OverflowError:
            return ""

    return decode
