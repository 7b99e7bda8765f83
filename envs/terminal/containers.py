"""Containers of tasks that need an image: one for the agent, another one for the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rollgym.core.errors import RunError, UsageError
from rollgym.envs.code.sandbox_handle import SandboxHandle, open_handle
from rollgym.envs.terminal.images import ImageContent, prepare_image
from rollgym.envs.terminal.shell import FOLDERS
from rollgym.envs.terminal.types import FolderTask
from rollgym.sandbox.types import Level, Sandbox

T = TypeVar("T")


class ContainerHandle(SandboxHandle):
    """The containers of an episode. None is used twice: each is removed when its work is done.

    A container has no network, a read-only image, an unprivileged user and the limits of the sandbox; only
    the working folder, ``/tests``, ``/logs`` and ``/tmp`` are writable, all in memory. Its worker needs
    ``python3`` in the image, and the shell ``/bin/bash``.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, *, build: bool = False) -> None:
        """Settings as plain values; ``build``: images may be built from task folders."""
        super().__init__(values)
        self.settings = replace(self.settings, backend="docker", links=())
        self._build = build
        self._content: dict[str, ImageContent] = {}
        """Contents of images, by name."""
        self._weaknesses: tuple[str, ...] = ()

    def select(self, task: FolderTask) -> FolderTask:
        """Use the image of a task from now on; return the task with what the image has."""
        assert task.image is not None
        if task.image.name not in self._content:
            self._content[task.image.name] = prepare_image(task.image, build=self._build)
        content = self._content[task.image.name]
        self.settings = replace(self.settings, image=content.identifier, folders=(content.root, *FOLDERS))
        return replace(task, root=content.root, tree=content.tree, env=content.env)

    def facts(self) -> dict[str, Any]:
        """Isolation facts for the record."""
        return {"backend": "docker", "level": Level.NAMESPACES.name.lower()}

    def weaknesses(self) -> list[str]:
        """Limitations of the isolation, as the last container reported them."""
        return list(self._weaknesses)

    def fresh(self) -> None:
        """Remove the container, so that the next use gets a fresh one."""
        self._give()

    def use(self, work: Callable[[Sandbox], T]) -> T | None:
        """Run ``work`` in the container of this episode; ``None`` if that broke it."""
        if self._sandbox is None:
            self._sandbox = self._open()
        try:
            return work(self._sandbox)
        except (RunError, OSError):
            self._give()
            return None

    def once(self, work: Callable[[Sandbox], T], *, unused: bool = False) -> T | None:
        """Run ``work`` in another container, which is always a new one; ``None`` if that broke it."""
        sandbox = self._open()
        try:
            return work(sandbox)
        except (RunError, OSError):
            return None
        finally:
            sandbox.close()

    def close(self) -> None:
        """Remove the container."""
        self._give()

    def _open(self) -> Sandbox:
        try:
            sandbox = open_handle(self.settings)
        except UsageError as error:
            if "python3" not in str(error):
                raise
            raise UsageError(
                f"The image of a task needs python3, for rollgym's worker, and /bin/bash: {error}"
            ) from None
        self._weaknesses = sandbox.weaknesses
        return sandbox

    def _give(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()
