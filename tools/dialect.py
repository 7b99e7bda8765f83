"""Find phrases of the old dialect in messages, help texts, docstrings, comments and docs.

    python tools/dialect.py                 # the whole repository; exit code 1 if any phrase is unexplained
    python tools/dialect.py trainer docs    # some paths
    python tools/dialect.py --count         # numbers per file only

A phrase that is right where it stands is listed in tools/dialect_allow.txt with a reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCOPE = ("rollgym", "envs", "agents", "trainer", "docs", "README.md", "CONTRIBUTING.md", "Makefile")
ALLOW_FILE = ROOT / "tools" / "dialect_allow.txt"
SUFFIXES = (".py", ".md", ".html", ".js", ".toml", ".yaml", ".yml")
LINKS = (ROOT / "rollgym" / "envs", ROOT / "rollgym" / "agents", ROOT / "rollgym" / "trainer")

PHRASES = {
    "is no X": r"\b(?:is|are|was|were) no (?!longer\b|more than\b|less than\b|fewer than\b)[a-z]+",
    "anew": r"\banew\b",
    "of its own": r"\bof (?:one's|its|his|her|their|our|your) own\b",
    "whoever": r"\b(?:whoever|whomever|nobody|somebody|everybody|anybody)\b",
    "is told": r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)",
    "not to be had": r"\b(?:not to be had|can be had)\b",
    "the way of": r"\bthe way of\b",
    "processor": r"\bprocessors?\b",
    "gone through": r"\bgone through\b",
    "becomes of": r"\bbecomes? of\b",
    "under way": r"\bunder way\b",
    "is of X": r"\b(?:is|are|was|were) of (?!equal|the same|this|type|shape|size|length|use)[a-z]+",
    "in whose": r"\b(?:in|on|at|for|with|of|to|by) (?:whose|whom)\b",
    "by itself alone": r"\bby itself alone\b",
    "for ever": r"\bfor ever\b",
    "goes on": r"\b(?:goes|going|went) on\b(?! (?:the|a|an|this|each|which|gpu|device))",
    "what it says": r"\b(?:what it says|how it is done)\b",
}
"""By name: the pattern; a space matches any white space."""
CLAUSE = re.compile(
    r"(?:What|Who|Whom|Whose|Where|When|How)\b[^?]*?\b(?:is|are|was|were|does|do|did|can|may|has|have|will)\b[^?]*\Z",
    re.DOTALL,
)
"""A noun clause as the first line of a docstring, or as a heading: write a noun or a verb instead."""
_PATTERNS = {name: re.compile(text.replace(" ", r"\s+"), re.IGNORECASE) for name, text in PHRASES.items()}
_UNLESS_AFTER = {
    "is no X": re.compile(r"\bthere\s+\Z", re.IGNORECASE),
    "the way of": re.compile(r"\bin\s+\Z", re.IGNORECASE),
}
"""By name: words before a phrase that make it plain English ("there is no", "in the way of")."""


@dataclass(frozen=True)
class Hit:
    """A phrase found in a file."""

    path: str
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.name}] {self.text}"


@dataclass(frozen=True)
class Allowed:
    """A line of the allow-list: a phrase that is right in some files, and why."""

    pattern: str
    text: str
    reason: str

    def covers(self, hit: Hit) -> bool:
        """Return whether this entry explains a hit."""
        return fnmatch(hit.path, self.pattern) and self.text.lower() in hit.text.lower()


def read_allow_list(path: Path = ALLOW_FILE) -> list[Allowed]:
    """Read ``path pattern | text | reason`` lines; blank lines and ``#`` comments are skipped."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parts = [part.strip() for part in line.split("|", 2)]
            if len(parts) != 3 or not all(parts):
                raise ValueError(
                    f"{path.name}:{number}: expected `path pattern | text | reason`, got {line!r}"
                )
            entries.append(Allowed(*parts))
    return entries


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the text files under some paths; the symlinks inside ``rollgym/`` are skipped."""
    for path in paths:
        if path.is_file():
            yield path
            continue
        for file in sorted(path.rglob("*")):
            if (
                (file.suffix in SUFFIXES or "templates" in file.parts)
                and file.is_file()
                and not any(link in file.parents for link in LINKS)
            ):
                yield file


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield ``(line, text, is_title)``; a title is a docstring's first line or a heading."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python_texts(source)
    elif path.suffix == ".md":
        yield from _markdown_texts(source)
    else:
        yield 1, source, False


def _python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(source)
    docstrings = {id(node) for node in _docstrings(tree)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(parts), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value, False
            if id(node) in docstrings:
                yield node.lineno, node.value.strip().split("\n\n")[0], True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield docstrings, and the strings below fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value


def _markdown_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    blank = lambda match: "\n" * match[0].count("\n")  # noqa: E731  (keeps line numbers)
    text = re.sub(r"^(`{3,}).*?^\1$", blank, source, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL))
    yield 1, text, False
    for number, line in enumerate(text.splitlines(), 1):
        if heading := re.match(r"#+ (.*)", line):
            yield number, heading[1], True


def find(paths: list[Path]) -> list[Hit]:
    """Find all phrases in some files or folders."""
    hits = set()
    for path in files(paths):
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
        for line, text, is_title in texts(path):
            if is_title and CLAUSE.match(text):
                hits.add(Hit(name, line, "clause as a title", " ".join(text.split())))
            if is_title:
                continue
            for phrase, pattern in _PATTERNS.items():
                for match in pattern.finditer(text):
                    if phrase in _UNLESS_AFTER and _UNLESS_AFTER[phrase].search(text[: match.start()]):
                        continue
                    start = text.rfind("\n", 0, match.start()) + 1
                    end = text.find("\n", match.end())
                    excerpt = " ".join(text[start : end if end >= 0 else None].split())
                    hits.add(Hit(name, line + text.count("\n", 0, match.start()), phrase, excerpt))
    return sorted(hits, key=lambda hit: (hit.path, hit.line, hit.name))


def unexplained(hits: list[Hit], allowed: list[Allowed]) -> list[Hit]:
    """Return the hits that no entry of the allow-list covers."""
    return [hit for hit in hits if not any(entry.covers(hit) for entry in allowed)]


def main() -> int:
    """Print the unexplained phrases; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help=f"default: {', '.join(SCOPE)}")
    parser.add_argument(
        "--count", action="store_true", help="print the number per file instead of each phrase"
    )
    options = parser.parse_args()
    paths = [path.resolve() for path in options.paths] or [ROOT / name for name in SCOPE]
    hits = find(paths)
    found = unexplained(hits, read_allow_list())
    if options.count:
        for path, number in Counter(hit.path for hit in found).most_common():
            print(f"{number:5} {path}")
    else:
        for hit in found:
            print(hit if len(str(hit)) < 200 else f"{str(hit)[:197]}...")
    print(f"{len(found)} unexplained, {len(hits) - len(found)} explained")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
