"""Builds git repositories without git: objects, references and index as files of a tree.

Hashes depend on the content only, so a task can ask for them; no program has to run to make one.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence

from rollgym.envs.terminal.types import EPOCH, Tree, file, folder

AUTHOR = "Robin Reed <robin@example.com>"
CONFIG = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
[user]
\tname = Robin Reed
\temail = robin@example.com
[advice]
\tdetachedHead = false
"""

Files = Mapping[str, str]
"""Texts by path, in a commit."""


class Repo:
    """A repository that is built commit by commit."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._files: dict[str, dict[str, str]] = {}
        """Files of each commit."""
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}

    def commit(self, files: Files, message: str, parents: Sequence[str] = ()) -> str:
        """Add a commit of these files and return its hash."""
        when = f"{EPOCH + 3600 * (len(self._files) + 1)} +0000"
        lines = [f"tree {self._tree(files)}", *(f"parent {parent}" for parent in parents)]
        lines += [f"author {AUTHOR} {when}", f"committer {AUTHOR} {when}", "", message, ""]
        hashed = self._add("commit", "\n".join(lines).encode())
        self._files[hashed] = dict(files)
        return hashed

    def files(self, commit: str) -> dict[str, str]:
        """Return the files of a commit."""
        return dict(self._files[commit])

    def tree(self, top: str, branch: str = "main") -> Tree:
        """Return the repository in a folder, with this branch checked out."""
        files = self._files[self.branches[branch]]
        git: dict[str, bytes] = {
            "HEAD": f"ref: refs/heads/{branch}\n".encode(),
            "config": CONFIG.encode(),
            "index": self._index(files),
        }
        git |= {f"refs/heads/{name}": f"{commit}\n".encode() for name, commit in self.branches.items()}
        git |= {f"refs/tags/{name}": f"{commit}\n".encode() for name, commit in self.tags.items()}
        git |= {f"objects/{name[:2]}/{name[2:]}": packed for name, packed in self._objects.items()}
        tree: Tree = {f"{top}/.git/{path}": file(content) for path, content in git.items()}
        tree[f"{top}/.git/refs/tags"] = folder()
        return tree | {f"{top}/{path}": file(text) for path, text in files.items()}

    def _add(self, kind: str, content: bytes) -> str:
        whole = f"{kind} {len(content)}\0".encode() + content
        hashed = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
        self._objects[hashed] = zlib.compress(whole)
        return hashed

    def _tree(self, files: Files) -> str:
        """Add a tree object; folders sort as if their names ended in a slash."""
        entries: dict[str, tuple[str, str]] = {}
        below: dict[str, dict[str, str]] = {}
        for path, text in files.items():
            top, slash, rest = path.partition("/")
            if slash:
                below.setdefault(top, {})[rest] = text
            else:
                entries[top] = ("100644", self._add("blob", text.encode()))
        for top, inner in below.items():
            entries[f"{top}/"] = ("40000", self._tree(inner))
        body = b"".join(
            f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(hashed)
            for name, (mode, hashed) in sorted(entries.items())
        )
        return self._add("tree", body)

    def _index(self, files: Files) -> bytes:
        """Return the index of these files; git compares their content, as no times are recorded."""
        body = b"DIRC" + struct.pack(">II", 2, len(files))
        for path, text in sorted(files.items(), key=lambda item: item[0].encode()):
            name, content = path.encode(), text.encode()
            blob = bytes.fromhex(self._add("blob", content))
            entry = struct.pack(">10I", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, len(content))
            entry += blob + struct.pack(">H", min(len(name), 0xFFF)) + name
            body += entry + b"\0" * (8 - len(entry) % 8)
        return body + hashlib.sha1(body, usedforsecurity=False).digest()
