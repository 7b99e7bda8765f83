"""Task folders in the form of Harbor, read without running anything.

A task folder holds ``task.toml``, ``instruction.md``, ``environment/Dockerfile`` and its files,
``tests/test.sh`` and perhaps ``solution/solve.sh``. Tests write the reward to ``/logs/verifier/reward.txt``
or ``reward.json``.

A task whose Dockerfile only copies files and sets variables on a plain base image needs no image: the sandbox
has the programs of this machine. `read_dockerfile` decides that by reading. Others need an image, which is
looked up or built when the task is played (`rollgym.envs.terminal.images`), if that is allowed.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice
from rollgym.envs.terminal.harness import MAX_TREE_BYTES, MAX_TREE_FILES, make_entry
from rollgym.envs.terminal.types import EPOCH, FolderTask, TaskImage, Tree, file

UNSUPPORTED = ("error", "skip")
_COMPOSE = "asks for several containers or settings of Docker Compose, and a task has one sandbox"
UNSUPPORTED_FILES = {
    "docker-compose.yaml": _COMPOSE,
    "docker-compose.yml": _COMPOSE,
    ".dockerignore": "changes which files an image gets, and is not read",
}
"""Files of ``environment/`` with which a task cannot be played, and why."""
IMAGES = ("none", "use", "build")
"""Rules for tasks that need an image: refused; an image of the engine is used; or it is also built."""
BUILT_IMAGE = "rollgym-task"
"""Name of images built from task folders; a digest of the folder follows."""
PLAIN_IMAGES = re.compile(r"(?:debian|ubuntu|python|bash)(?::[\w.-]+)?")
"""Base images whose programs the machine has too."""
IGNORED = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")
TAKEN = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/logs",
    "/proc",
    "/sbin",
    "/sys",
    "/tests",
    "/tmp",
    "/usr",
    "/work",
)
"""Folders that a task cannot have as its working folder."""
DEFAULT_SECONDS = 600.0
SPLIT = "test"
MAX_DEPTH = 4
"""Levels of folders in which task folders are searched."""


class NeedsImage(Exception):
    """A task cannot run without an image; the message says why."""


class Unsupported(Exception):
    """A task cannot be played, not even with an image; the message says why."""


class TaskFolders:
    """The tasks of a folder of task folders, or of one task folder."""

    def __init__(self, folder: str, unsupported: str = "error", images: str = "none") -> None:
        check_choice("value of unsupported", unsupported, UNSUPPORTED)
        check_choice("value of images", images, IMAGES)
        top = Path(folder).expanduser()
        if not top.is_dir():
            raise UsageError(f"folder must be a folder of task folders; {folder} is none.")
        loaded: list[FolderTask] = []
        need_image: list[str] = []
        not_supported: list[str] = []
        for path in sorted(find_tasks(top)):
            try:
                task = read_task(path, str(path.relative_to(top)) if path != top else path.name)
            except Unsupported as reason:
                not_supported.append(f"{path.name}: {reason}")
                continue
            if task.image is not None and images == "none":
                need_image.append(f"{path.name}: {task.needs}")
            else:
                loaded.append(task)
        reasons = [*not_supported, *need_image]
        of = f"of {len(reasons) + len(loaded)} tasks in {folder}"
        if not_supported and unsupported == "error":
            raise UsageError(
                f"{len(not_supported)} {of} cannot be played, with or without Docker ({not_supported[0]}). "
                "Leave them out with unsupported='skip', or run them with Harbor."
            )
        if need_image and unsupported == "error":
            raise UsageError(
                f"{len(need_image)} {of} need a container image ({need_image[0]}). Play them in Docker with "
                "images='use' or images='build' (docs: Terminal), or leave them out with unsupported='skip'."
            )
        if not loaded:
            left_out = f"; {len(reasons)} were left out ({reasons[0]})" if reasons else ""
            raise UsageError(
                f"{folder} has no usable task folder (with task.toml and instruction.md){left_out}."
            )
        self._loaded = loaded
        content = stable_digest(*(repr((task.name, task.instruction, task.tests)) for task in loaded))
        self.tasks = TaskSet(f"Terminal-folder-{content.hex()[:12]}", {SPLIT: len(loaded)})

    @property
    def roots(self) -> tuple[str, ...]:
        """The working folders inside."""
        return tuple(sorted({task.root for task in self._loaded if task.image is None}))

    @property
    def has_images(self) -> bool:
        """Whether any task needs an image."""
        return any(task.image is not None for task in self._loaded)

    def load(self, task: Task) -> FolderTask:
        """Return the task at this place."""
        return self._loaded[task.index]


def find_tasks(top: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Find task folders; links are not followed."""
    if (top / "task.toml").is_file():
        yield top
    elif depth:
        for path in top.iterdir():
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from find_tasks(path, depth - 1)


def read_task(path: Path, name: str) -> FolderTask:
    """Read one task folder.

    Raises:
        Unsupported: It cannot be played, not even with an image.
        UsageError: It is not a valid task folder.
    """
    settings = _settings(path)
    if (path / "steps").is_dir():
        raise Unsupported("it has several steps")
    instruction = _text(path, "instruction.md")
    tests = _read_files(path / "tests")
    if "test.sh" not in tests:
        raise UsageError(f"The task folder {path} has no tests/test.sh.")
    environment = _table(settings, "environment", path)
    named = environment.get("docker_image")
    if named is not None and not (isinstance(named, str) and named):
        raise UsageError(f"docker_image in {path / 'task.toml'} must be the name of an image, not {named!r}.")
    if named is None and not (path / "environment" / "Dockerfile").is_file():
        raise Unsupported("it has no environment/Dockerfile and no docker_image in task.toml")
    for unsupported, why in UNSUPPORTED_FILES.items():
        if os.path.lexists(path / "environment" / unsupported):
            raise Unsupported(f"environment/{unsupported} {why}")
    context = _read_files(path / "environment")
    root, tree, env, image, needs = "", Tree(), dict[str, str](), None, ""
    if named is not None:
        image, needs = TaskImage(name=named), f"its image is {named}"
    else:
        text = context["Dockerfile"]["content"].decode("utf-8", "replace")
        try:
            root, tree, env = read_dockerfile(text, context)
        except NeedsImage as reason:
            needs = str(reason)
            digest = stable_digest(*sorted(context.items())).hex()[:16]
            image = TaskImage(
                name=f"{BUILT_IMAGE}:{digest}",
                context=context,
                seconds=_seconds(environment, path, "build_timeout_sec"),
                source=str(path / "environment"),
            )
    verifier = _table(settings, "verifier", path)
    solution = path / "solution" / "solve.sh"
    return FolderTask(
        name=name,
        instruction=instruction,
        root=root,
        tree=tree,
        env=env,
        tests=tests,
        tests_env=_variables(verifier.get("env", {})),
        agent_seconds=_seconds(_table(settings, "agent", path), path),
        verifier_seconds=_seconds(verifier, path),
        solution=_text(path, "solution/solve.sh") if solution.is_file() else None,
        image=image,
        needs=needs,
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path / 'task.toml'} is not TOML: {error}") from None


def _table(settings: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{name} in {path / 'task.toml'} must be a table, not {table!r}.")
    return table


def _seconds(table: Mapping[str, Any], path: Path, name: str = "timeout_sec") -> float:
    seconds = table.get(name, DEFAULT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise UsageError(f"{name} in {path / 'task.toml'} must be a number above 0, not {seconds!r}.")
    return float(seconds)


def _variables(values: Any) -> dict[str, str]:
    """Return fixed values only: those that refer to variables of the host stay unknown inside."""
    if not isinstance(values, dict):
        return {}
    return {str(name): str(value) for name, value in values.items() if "$" not in str(value)}


def _text(path: Path, name: str) -> str:
    file_path = path / name
    if not file_path.is_file() or file_path.is_symlink():
        raise UsageError(f"The task folder {path} has no file {name}.")
    if file_path.stat().st_size > MAX_TREE_BYTES:
        raise UsageError(f"{file_path} is larger than {MAX_TREE_BYTES >> 20} MB.")
    return file_path.read_text(encoding="utf-8", errors="replace")


def _read_files(folder: Path) -> Tree:
    """Read the files of a folder; links are left out."""
    tree: Tree = {}
    size = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_symlink() or not path.is_file():
            continue
        state = path.stat()
        size += state.st_size
        if size > MAX_TREE_BYTES or len(tree) >= MAX_TREE_FILES:
            raise UsageError(
                f"{folder} has more than {MAX_TREE_BYTES >> 20} MB or {MAX_TREE_FILES:,} files, the most "
                "that "
                "rollgym/Terminal-v0 takes."
            )
        mode = 0o755 if state.st_mode & 0o100 else 0o644
        name = path.relative_to(folder).as_posix()
        tree[name] = make_entry("file", mode, EPOCH, path.read_bytes())
    return tree


def read_dockerfile(text: str, context: Tree) -> tuple[str, Tree, dict[str, str]]:
    """Return working folder, files and variables of a Dockerfile that only copies and sets.

    Args:
        text: The Dockerfile.
        context: The files beside it.

    Raises:
        NeedsImage: It does more.
    """
    root, based = PurePosixPath("/app"), False
    copies: list[tuple[PurePosixPath, Tree]] = []
    env: dict[str, str] = {}
    here = PurePosixPath("/")
    for word, rest in _instructions(text):
        if word == "FROM":
            if based or not PLAIN_IMAGES.fullmatch(rest):
                raise NeedsImage(f"its Dockerfile says FROM {rest}")
            based = True
        elif word == "WORKDIR":
            root = here = here / _filled(rest.strip("\"'"), env)
        elif word == "ENV":
            env |= _env(rest, env)
        elif word in ("COPY", "ADD"):
            copies += _copied(word, rest, here, env, context)
        elif word not in IGNORED:
            raise NeedsImage(f"its Dockerfile has the instruction {word} {rest[:60]}".rstrip())
    if not based:
        raise NeedsImage("its Dockerfile has no FROM")
    return _place(root, copies), _joined(root, copies), env


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    if re.search(r"^\s*#\s*escape\s*=", text, re.IGNORECASE | re.MULTILINE) or "<<" in text:
        raise NeedsImage("its Dockerfile has an escape directive or a here-document")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _filled(text: str, env: Mapping[str, str]) -> str:
    """Insert variables that the Dockerfile has set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in env:
            raise NeedsImage(f"its Dockerfile uses the variable {name} of the image")
        return env[name]

    filled = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    if "$" in filled:
        raise NeedsImage(f"its Dockerfile has {text[:60]}")
    return filled


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise NeedsImage(f"its Dockerfile has {text[:60]!r} ({error})") from None


def _env(rest: str, env: Mapping[str, str]) -> dict[str, str]:
    name, _, value = rest.partition(" ")
    pairs = [word.partition("=") for word in _words(rest)] if "=" in name else [(name, "=", value.strip())]
    return {key: _filled(text, env) for key, _, text in pairs}


def _copied(
    word: str, rest: str, here: PurePosixPath, env: Mapping[str, str], context: Tree
) -> Iterator[tuple[PurePosixPath, Tree]]:
    """Return folders and the files to put there."""
    words = _words(rest)
    if len(words) < 2 or words[0].startswith(("--", "[")):
        raise NeedsImage(f"its Dockerfile says {word} {rest[:60]}")
    *sources, target = (_filled(each, env) for each in words)
    several = len(sources) > 1 or target.endswith("/") or target in (".", "./")
    folder = here / target
    for source in sources:
        name = str(PurePosixPath(source.lstrip("/")))
        if word == "ADD" and "://" in source:
            raise NeedsImage(f"its Dockerfile adds {source}")
        if name in context:
            entry = context[name]
            if word == "ADD" and (unpacked := _unpacked(entry["content"])) is not None:
                yield folder, unpacked
            elif several:
                yield folder, {PurePosixPath(name).name: entry}
            else:
                yield folder.parent, {folder.name: entry}
            continue
        below = "" if name == "." else f"{name}/"
        found = {path[len(below) :]: entry for path, entry in context.items() if path.startswith(below)}
        if not found:
            raise NeedsImage(f"its Dockerfile copies {source}, which environment/ does not have")
        yield folder, found


def _unpacked(content: bytes) -> Tree | None:
    """Return the files of a tar archive; ``None`` if it is none."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            return read_archive(archive)
    except (tarfile.TarError, EOFError, OSError, ValueError):
        return None


def read_archive(archive: tarfile.TarFile, below: str = "") -> Tree:
    """Return the files of an archive below a folder; devices, and names outside it, are left out.

    Raises:
        NeedsImage: They are too many or too large.
    """
    tree: Tree = {}
    size = 0
    for member in archive:
        name = str(PurePosixPath(member.name))
        if below:
            inside = name.startswith(f"{below}/")
            name = name[len(below) + 1 :] if inside else "."
        mtime, mode = int(member.mtime), member.mode & 0o777
        if name.startswith("/") or ".." in name.split("/") or name == ".":
            continue
        if member.isdir():
            tree[name] = make_entry("folder", mode, mtime)
        elif member.issym():
            tree[name] = make_entry("link", mode, mtime, target=member.linkname)
        elif member.isfile() or member.islnk():
            try:
                stream = archive.extractfile(member)
            except KeyError:  # linked to a file outside
                continue
            assert stream is not None
            content = stream.read(MAX_TREE_BYTES + 1)
            size += len(content)
            tree[name] = file(content, mode=mode, mtime=mtime)
        if size > MAX_TREE_BYTES or len(tree) > MAX_TREE_FILES:
            raise NeedsImage("an archive of its environment is too large")
    return tree


def check_root(root: PurePosixPath) -> str:
    """Return the path of a working folder that a task can have."""
    path = str(root)
    if ".." in root.parts or not re.fullmatch(r"(?:/[\w.-]+){1,3}", path):
        raise NeedsImage(f"its working folder is {path}")
    if any(path == taken or path.startswith(f"{taken}/") for taken in TAKEN):
        raise NeedsImage(f"its working folder is {path}")
    return path


def _place(root: PurePosixPath, copies: list[tuple[PurePosixPath, Tree]]) -> str:
    """Return the working folder, after a look at where files go."""
    path = check_root(root)
    for folder, _ in copies:
        if ".." in folder.parts or not folder.is_relative_to(root):
            raise NeedsImage(f"it puts files into {folder}, outside its working folder {path}")
    return path


def _joined(root: PurePosixPath, copies: list[tuple[PurePosixPath, Tree]]) -> Tree:
    tree: Tree = {}
    for folder, files in copies:
        below = folder.relative_to(root)
        tree |= {str(below / path): entry for path, entry in files.items()}
    if len(tree) > MAX_TREE_FILES or sum(len(entry["content"]) for entry in tree.values()) > MAX_TREE_BYTES:
        raise NeedsImage("its files are too many or too large")
    return tree
