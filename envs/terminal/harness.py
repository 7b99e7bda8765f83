"""Program that runs beside the agent's files: packs and unpacks them, runs commands, decides checks.

Its source is sent into sandboxes and written into exported task folders, so it imports the standard library
only. Entry points:

- `start` and `execute`: the agent's shell, in the session of a sandbox. Its state is the agent's to forge.
- `pack_to_stdout`: a copy of the agent's files, in a separate execution after the agent's processes ended.
- `holds`: whether a check holds for a tree of files. In the environment it runs outside every sandbox.
- `verify`: all checks in place, for exported task folders.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import stat
import subprocess
import sys
import zlib
from typing import Any

MAX_TREE_BYTES = 32 << 20
MAX_TREE_FILES = 5_000
MAX_STATE = 256 << 10
HOLD_SECONDS = 20.0

Entry = dict[str, Any]
"""``{"kind": "file" | "folder" | "link", "mode": int, "mtime": int, "content": bytes, "target": str}``."""


def pack(tree: dict[str, Entry]) -> bytes:
    """Encode a tree of files: a line of JSON, then the contents, compressed."""
    listed = [
        [path, entry["kind"], entry["mode"], entry["mtime"], len(entry["content"]), entry["target"]]
        for path, entry in sorted(tree.items())
    ]
    contents = [entry["content"] for _, entry in sorted(tree.items())]
    return zlib.compress(b"".join([json.dumps(listed).encode(), b"\n", *contents]), 6)


def unpack(data: bytes) -> dict[str, Entry]:
    """Decode a tree; `ValueError` if it is malformed or too large."""
    try:
        stream = zlib.decompressobj()
        head, _, rest = stream.decompress(data, MAX_TREE_BYTES + (4 << 20)).partition(b"\n")
        if not stream.eof:
            raise ValueError("it is too large or incomplete")
        tree, at = {}, 0
        for path, kind, mode, mtime, size, target in json.loads(head):
            if kind not in ("file", "folder", "link") or not _is_beneath(path) or size < 0:
                raise ValueError(f"the entry {path!r} is malformed")
            tree[path] = make_entry(kind, mode, mtime, rest[at : at + size], str(target))
            at += size
        if at != len(rest):
            raise ValueError("the contents have another length")
        return tree
    except (zlib.error, TypeError, LookupError, RecursionError, AttributeError) as error:
        raise ValueError(f"it cannot be decoded: {error!r}") from None


def make_entry(kind: str, mode: int, mtime: int, content: bytes = b"", target: str = "") -> Entry:
    """Make an entry of a tree."""
    return {"kind": kind, "mode": mode, "mtime": mtime, "content": content, "target": target}


def _is_beneath(path: str) -> bool:
    return bool(path) and not any(part in ("", ".", "..") for part in path.split("/")) and "\0" not in path


def read_tree(root: str) -> dict[str, Entry]:
    """Read the files below a folder without following links; `ValueError` if there are too many."""
    tree: dict[str, Entry] = {}
    size, folders = 0, [""]
    while folders:
        folder = folders.pop()
        try:
            names = os.listdir(os.path.join(root, folder))
        except OSError:  # The agent closed this folder: what is inside does not count.
            continue
        for name in names:
            path = f"{folder}/{name}" if folder else name
            entry = _read_entry(os.path.join(root, path))
            if entry is None:
                continue
            tree[path] = entry
            size += len(entry["content"])
            if entry["kind"] == "folder":
                folders.append(path)
            if size > MAX_TREE_BYTES or len(tree) > MAX_TREE_FILES:
                raise ValueError(f"more than {MAX_TREE_BYTES >> 20} MB or {MAX_TREE_FILES:,} files")
    return tree


def _read_entry(path: str) -> Entry | None:
    try:
        state = os.lstat(path)
        mode, mtime = stat.S_IMODE(state.st_mode), int(state.st_mtime)
        if stat.S_ISLNK(state.st_mode):
            return make_entry("link", mode, mtime, target=os.readlink(path))
        if stat.S_ISDIR(state.st_mode):
            return make_entry("folder", mode, mtime)
        if not stat.S_ISREG(state.st_mode):
            return None
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as stream:
            return make_entry("file", mode, mtime, stream.read(MAX_TREE_BYTES + 1))
    except OSError:
        return None


def write_tree(root: str, tree: dict[str, Entry]) -> None:
    """Write a tree below a folder."""
    for path, entry in sorted(tree.items()):
        here = os.path.join(root, path)
        if entry["kind"] == "folder":
            os.makedirs(here, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(here), exist_ok=True)
        if os.path.lexists(here):
            os.unlink(here)
        if entry["kind"] == "link":
            os.symlink(entry["target"], here)
            continue
        with open(here, "wb") as file:
            file.write(entry["content"])
    # Last, from the deepest: a read-only folder, and times that writing would change.
    for path, entry in sorted(tree.items(), reverse=True):
        here = os.path.join(root, path)
        if entry["kind"] != "link":
            os.chmod(here, entry["mode"])
            os.utime(here, (entry["mtime"], entry["mtime"]))


def pack_to_stdout(root: str) -> None:
    """Print the files below a folder, encoded."""
    with contextlib.suppress(OSError):
        if not os.path.islink(root):
            os.chmod(root, 0o700)
    sys.stdout.write(base64.b64encode(pack(read_tree(root))).decode())
    sys.stdout.flush()


# The shell. A new bash starts for each command and gets the state of the last one.

# One line: bash counts lines from here in its messages.
WRAPPER = (
    "__rg_command=$1 __rg_out=$3 __rg_saved= __rg_code=0; shopt -s expand_aliases; . /dev/fd/$2 2>/dev/null; "
    "set --; trap '__rg_save 2>/dev/null' EXIT; eval \"$__rg_command\"; __rg_code=$?; "
    "__rg_save 2>/dev/null; exit $__rg_code"
)
SAVE = r"""
__rg_save() {
  [ -n "$__rg_saved" ] && return
  __rg_saved=1
  {
    printf 'cd -- %q\n' "$PWD"
    compgen -A variable | while IFS= read -r __rg_name; do
      case $__rg_name in
        __rg_*|BASH*|_|DIRSTACK|EUID|UID|PPID|FUNCNAME|GROUPS|LINENO|PIPESTATUS|RANDOM|SRANDOM) continue ;;
        SECONDS|EPOCH*|SHELLOPTS|HISTCMD|COMP_*|OPT*|SHLVL|PWD) continue ;;
      esac
      [[ ${!__rg_name@a} == *r* ]] || declare -p "$__rg_name"
    done
    declare -f
    alias -p
    echo '# end'
  } >"/dev/fd/$__rg_out"
}
"""
BASH = "/bin/bash"
GIT_ENV = {
    "GIT_PAGER": "cat",
    "GIT_EDITOR": "true",
    # The same commands make the same commits.
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}
_shell: dict[str, Any] = {"state": b"", "env": {}, "root": "/"}


def start(root: str, packed: str, env: dict[str, str]) -> None:
    """Unpack the files of a task and make the first state of its shell."""
    if not os.path.exists(BASH):
        raise SystemExit("there is no /bin/bash")
    write_tree(root, unpack(base64.b64decode(packed)))
    home = {"HOME": root, "PWD": root, "TERM": "dumb", "PAGER": "cat", **GIT_ENV}
    path = os.environ.get("PATH", "/usr/bin:/bin")
    if not any(os.path.exists(f"{folder}/python3") for folder in path.split(":")):
        path = f"{path}:{os.path.dirname(sys.executable)}"
    _shell.update(state=b"", env={**os.environ, "PATH": path, **home, **env}, root=root)


def execute(command: str, merged: bool = True) -> None:
    """Run a command in the shell and exit with its code; ``merged``: stderr goes to stdout."""
    before, after = _unnamed_file(), _unnamed_file()
    if before is not None:
        os.write(before, SAVE.encode() + _shell["state"])
    words = [BASH, "--noprofile", "--norc", "-c", WRAPPER, "bash", command, str(before), str(after)]
    descriptors = tuple(file for file in (before, after) if file is not None)
    code = subprocess.call(
        words,
        cwd=_shell["root"] if os.path.isdir(_shell["root"]) else "/",
        env=_shell["env"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT if merged else None,
        pass_fds=descriptors,
    )
    if after is not None:
        state = os.pread(after, MAX_STATE, 0)
        if state.endswith(b"# end\n"):
            _shell["state"] = state
    for file in descriptors:
        os.close(file)
    raise SystemExit(code if code >= 0 else 128 - code)


def _unnamed_file() -> int | None:
    try:
        return os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # The agent filled the disk.
        return None


# Checks.

Check = dict[str, Any]
"""See `rollgym.envs.terminal.types.Check`, whose fields these are."""


def holds(check: Check, tree: dict[str, Entry]) -> bool:
    """Whether a check on files holds; not for kind ``run``."""
    kind, path, expected = check["kind"], check["path"], check["expected"]
    entry = tree.get(path)
    if kind == "absent":
        return entry is None
    if kind == "listing":
        below = f"{path}/" if path else ""
        files = [name[len(below) :] for name, each in tree.items() if _listed(name, each, below)]
        return bool("\n".join(sorted(files)) == expected)
    if entry is None or entry["kind"] != "file":
        return False
    if kind == "mode":
        return bool(f"{entry['mode']:o}" == expected)
    if kind == "same":
        return bool(hashlib.sha256(entry["content"]).hexdigest() == expected)
    return kind == "text" and same_text(entry["content"].decode("utf-8", "replace"), expected)


def _listed(name: str, entry: Entry, below: str) -> bool:
    return entry["kind"] != "folder" and name.startswith(below) and ".git" not in name.split("/")


def same_text(text: str, expected: str) -> bool:
    """Whether two texts are equal up to white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]


def verify(
    root: str, checks: list[Check], seconds: float = HOLD_SECONDS, prefix: tuple[str, ...] = ()
) -> list[bool]:
    """Decide all checks on the files below a folder, in place; ``prefix`` starts the command of a check."""
    tree = read_tree(root)
    results = [check["kind"] != "run" and holds(check, tree) for check in checks]
    for number, check in enumerate(checks):
        if check["kind"] == "run":
            _restore(root, tree, check["files"])
            results[number] = _run_holds(root, check, seconds, prefix)
    return results


def _restore(root: str, tree: dict[str, Entry], files: dict[str, str]) -> None:
    """Set a folder back to a tree, with more files."""
    for name in os.listdir(root):
        subprocess.run(["rm", "-rf", "--", os.path.join(root, name)], check=False)
    write_tree(root, {**tree, **text_files(files)})


def text_files(files: dict[str, str]) -> dict[str, Entry]:
    """Return files of these texts as a tree."""
    return {path: make_entry("file", 0o644, 0, text.encode()) for path, text in files.items()}


def _run_holds(root: str, check: Check, seconds: float, prefix: tuple[str, ...]) -> bool:
    env = {**os.environ, "GIT_PAGER": "cat", "HOME": root}
    try:
        ran = subprocess.run(
            [*prefix, BASH, "--noprofile", "--norc", "-c", check["command"]],
            cwd=root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=seconds,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return False
    return not ran.returncode and same_text(ran.stdout.decode("utf-8", "replace"), check["expected"])


def main() -> int:
    """Check a folder from the command line: ``check.py FOLDER CHECKS``."""
    root, path = sys.argv[1:3]
    untrusted = os.path.join(os.path.dirname(os.path.abspath(__file__)), "untrusted.py")
    with open(path, encoding="utf-8") as file:
        results = verify(root, json.load(file), prefix=(sys.executable, "-E", "-s", untrusted, root))
    print(f"{sum(results)} of {len(results)} checks hold")
    return 0 if all(results) else 1
