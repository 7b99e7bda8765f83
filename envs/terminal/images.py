"""Container images of task folders: looked up or built in the Docker engine, and read.

Nothing here runs before a task is played. Images are never pulled. A build runs the instructions of the
task's Dockerfile in the engine, without a network; it happens only where the user allows it
(``images="build"``).
"""

from __future__ import annotations

import io
import re
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rollgym.core.errors import RunError, UsageError
from rollgym.envs.terminal.harbor import NeedsImage, check_root, read_archive
from rollgym.envs.terminal.harness import MAX_TREE_BYTES
from rollgym.envs.terminal.types import TaskImage, Tree

MAX_ARCHIVE_BYTES = 2 * MAX_TREE_BYTES
"""Bytes of the working folder as an archive, with its headers."""
BUILD_MEMORY_MB = 2048
LOG_LINES = 5
"""Last lines of a failed build that are shown."""
_STARTED = re.compile(r"Running in ([0-9a-f]{12,})")
"""Line of a build with the id of a container."""
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageContent:
    """What a task needs to know of its image."""

    identifier: str
    root: str
    """Working folder."""
    env: dict[str, str]
    tree: Tree
    """Files of the working folder."""


def prepare_image(image: TaskImage, *, build: bool) -> ImageContent:
    """Return an image that the engine has, built from the task folder if need be.

    Args:
        image: The image of a task.
        build: Whether it may be built.

    Raises:
        UsageError: The engine does not have it, or it cannot be used for a task.
        RunError: The engine does not answer, or the build failed.
    """
    from rollgym.sandbox import docker_engine  # the docker package is optional

    with docker_engine.connected() as api:
        try:
            found = _find(api, image, build)
            return _read(api, image.name, found)
        except NeedsImage as reason:
            raise UsageError(f"The image {image.name} cannot be used: {reason}.") from None
        except docker_engine.failures() as error:
            raise RunError(f"the Docker engine failed: {docker_engine.explain(error)}") from None


def _find(api: Any, image: TaskImage, build: bool) -> dict[str, Any]:
    from rollgym.sandbox import docker_engine

    errors = docker_engine.library().errors
    try:
        found: dict[str, Any] = api.inspect_image(image.name)
    except errors.ImageNotFound:
        if image.context is None:
            raise UsageError(
                f"The Docker engine has no image {image.name}, and images are never pulled: docker pull "
                f"{image.name}"
            ) from None
        if not build:
            raise UsageError(
                f"The image of {image.source} is not built. Allow that with images='build' (without a "
                f"network), or build it: docker build -t {image.name} {image.source}"
            ) from None
        _build(api, image)
        found = api.inspect_image(image.name)
    return found


def _build(api: Any, image: TaskImage) -> None:
    """Build an image in the engine, without a network and with limits."""
    from urllib3.exceptions import HTTPError  # what the docker package lets through

    from rollgym.sandbox import docker_engine

    assert image.context is not None
    for base in base_images(image.context["Dockerfile"]["content"].decode("utf-8", "replace")):
        docker_engine.find_image(api, base)
    limits = {"memory": BUILD_MEMORY_MB << 20, "memswap": BUILD_MEMORY_MB << 20}
    lines: list[str] = []
    deadline = time.monotonic() + image.seconds
    log = api.build(
        fileobj=_context(image.context),
        custom_context=True,
        tag=image.name,
        network_mode="none",
        container_limits=limits,
        rm=True,
        forcerm=True,
        pull=False,
        decode=True,
        labels={docker_engine.LABEL: "task"},
        timeout=image.seconds,
        use_config_proxy=False,
    )
    late = RunError(f"The image of {image.source} was not built within {image.seconds:g} seconds.")
    try:
        for entry in log:
            lines += str(entry.get("stream") or entry.get("error") or "").splitlines()
            if "error" in entry:
                shown = " | ".join(line.strip() for line in lines[-LOG_LINES:] if line.strip())
                raise RunError(f"The image of {image.source} was not built: {shown}")
            if time.monotonic() > deadline:
                raise late
    except (OSError, HTTPError):  # it was silent for that long
        raise late from None
    except BaseException:
        log.close()
        raise
    finally:
        # The engine removes its containers, but not at once where a build is given up.
        for line in lines:
            if started := _STARTED.search(line):
                docker_engine.remove(api, started[1])


def base_images(dockerfile: str) -> list[str]:
    """Return the images that a Dockerfile starts from, without its own stages."""
    joined = re.sub(r"\\[ \t]*\n", " ", dockerfile)
    stages = {"scratch"}
    bases = []
    for match in _FROM.finditer(joined):
        if match[1].lower() not in stages:
            bases.append(match[1])
        stages.add((match[2] or "").lower())
    if any("$" in base for base in bases):
        raise UsageError("A Dockerfile whose FROM has a variable is not supported: build the image yourself.")
    return list(dict.fromkeys(bases))


def _context(tree: Tree) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, entry in sorted(tree.items()):
            member = tarfile.TarInfo(path)
            member.mode, member.mtime, member.size = entry["mode"], entry["mtime"], len(entry["content"])
            archive.addfile(member, io.BytesIO(entry["content"]))
    buffer.seek(0)
    return buffer


def _read(api: Any, name: str, found: dict[str, Any]) -> ImageContent:
    """Read working folder and variables from a container that is never started."""
    from rollgym.sandbox import docker_engine

    config = found.get("Config") or {}
    root = PurePosixPath(config.get("WorkingDir") or "/")
    path = check_root(root)
    variables = (line.partition("=") for line in config.get("Env") or ())
    # Any command will do: it does not run.
    container = api.create_container(
        found["Id"], command=["true"], labels=docker_engine.labels(), network_disabled=True
    )["Id"]
    try:
        chunks, _ = api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(_bounded(chunks))) as archive:
            tree = read_archive(archive, root.name)
    except docker_engine.library().errors.NotFound:
        tree = {}  # the engine makes the folder when a container starts
    except tarfile.TarError as error:
        raise RunError(f"The working folder of the image {name} cannot be read: {error}") from None
    finally:
        docker_engine.remove(api, container)
    return ImageContent(
        identifier=found["Id"], root=path, env={key: value for key, _, value in variables}, tree=tree
    )


def _bounded(chunks: Iterator[bytes]) -> bytes:
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > MAX_ARCHIVE_BYTES:
            raise NeedsImage("the files of its working folder are too large")
    return bytes(data)
