"""Starts programs, each in separate namespaces. A `ProgramSandbox` runs this script inside its sandbox.

The launcher imports a Python program once, and then forks for every start, so that an import of seconds is
paid once. A fork enters new user, mount, network, process and IPC namespaces, gets empty folders (``/work``
and ``/tmp``), and loses its rights before the program runs. Its only network is a loopback interface with one
listening socket, which is handed to the host: whatever connects to it talks to the host.

A script that uses the standard library only, because it runs with the Python of the program.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import importlib.util
import inspect
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, host name, IPC, users, processes, network."""
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
BACKLOG = 128
REAP_SECONDS = 1.0
MESSAGE = 1 << 20


@dataclass(frozen=True)
class ProgramEpisode:
    """What a Python function that plays an episode receives.

    Example:
        >>> async def play(episode: ProgramEpisode) -> float:
        ...     client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        ...     ...
        ...     return 1.0
    """

    task: dict[str, Any]
    """The task: ``task``, ``split``, ``env_id``, ``env_kwargs``, ``env_seed``, ``episode_id``; with
    reward=environment also ``instructions``, ``observation`` and ``tools``."""
    base_url: str
    """Base URL for OpenAI's client."""
    api_key: str
    """The key of the episode's session."""
    model: str
    session_url: str
    """Address of the episode's own routes, such as ``/reward`` and ``/env``."""


def main() -> None:
    """Serve orders from the socket on descriptor 0 until it is closed."""
    control = socket.socket(fileno=os.dup(0))
    _replace(0, os.devnull, os.O_RDONLY)
    spec = json.loads(control.recv(MESSAGE))
    function = None
    if spec["function"] is not None:
        try:
            function = load_function(spec["function"], spec["path"])
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
            return
    sys.stdout.flush()
    for number in (1, 2):
        _replace(number, os.devnull, os.O_WRONLY)
    control.send(json.dumps({"ready": True}).encode())
    while True:
        _reap()
        if not select.select([control], [], [], REAP_SECONDS)[0]:
            continue
        data, fds, _, _ = socket.recv_fds(control, MESSAGE, 4)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            start_episode(spec, json.loads(data), fds, function)
        for descriptor in fds:
            os.close(descriptor)


def load_function(name: str, path: list[str]) -> Callable[..., Any]:
    """Import ``module:function`` or ``file.py:function``, with these folders in front of the path."""
    sys.path[:0] = path
    module_name, _, attribute = name.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("__program__", module_name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["__program__"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function  # type: ignore[no-any-return]


def start_episode(
    spec: dict[str, Any], order: dict[str, Any], fds: list[int], function: Callable[..., Any] | None
) -> NoReturn:
    """In a fork: enter new namespaces, report to the host, and run the program to its end."""
    code = 1
    try:
        channel = socket.socket(fileno=fds[3])
        try:
            listener, work = _isolate(spec, order["port"])
        except OSError as error:
            channel.send(json.dumps({"error": str(error)}).encode())
            os._exit(1)
        socket.send_fds(channel, [json.dumps({"ready": True}).encode()], [listener.fileno(), work])
        listener.close()
        os.close(work)
        if channel.recv(1) == b"g":  # the host has counted this process
            code = _supervise(spec, order, fds[:3], channel.fileno(), function)
            channel.send(json.dumps({"exit": code}).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _isolate(spec: dict[str, Any], port: int) -> tuple[socket.socket, int]:
    """Enter new namespaces; returns the listening socket and the working folder."""
    uid, gid = os.getuid(), os.getgid()
    _check("unshare", _libc.unshare(NAMESPACES))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    folders = [(os.open(path, os.O_PATH), path) for path in spec["kept"] if os.path.isdir(path)]
    files = [(_content(path), path) for path in spec["kept"] if os.path.isfile(path)]
    for folder, size_mb in (("/dev/shm", 16), ("/tmp", spec["disk_mb"]), ("/work", spec["disk_mb"])):
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mb << 20},mode=1777")
    for descriptor, path in folders:
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)
    for content, path in files:  # copied: the kernel does not bind a file that has no name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    fcntl.ioctl(listener, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    listener.bind(("127.0.0.1", port))
    listener.listen(BACKLOG)
    return listener, os.open("/work", os.O_RDONLY | os.O_DIRECTORY)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _supervise(
    spec: dict[str, Any],
    order: dict[str, Any],
    stdio: list[int],
    channel: int,
    function: Callable[..., Any] | None,
) -> int:
    """Run the program below an init process; returns its exit code, negative for a signal."""
    begin, begun = os.pipe()
    read, write = os.pipe()
    if os.fork() == 0:  # process 1 of the new namespace: with it everything inside ends
        try:
            os.close(channel)
            os.close(begun)
            os.close(read)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.read(begin, 1) != b"b":  # the parent died before the line above
                os._exit(1)
            _prctl(PR_SET_DUMPABLE, 0)
            program = os.fork()
            if program == 0:
                _become(spec, order, stdio, function)
            for descriptor in stdio:
                os.close(descriptor)
            status = _wait_for(program)
            os.write(write, struct.pack("i", os.waitstatus_to_exitcode(status)))
        finally:
            os._exit(0)
    for descriptor in (write, *stdio):
        os.close(descriptor)
    os.write(begun, b"b")
    data = os.read(read, 4)
    os.wait()  # whatever the program left behind is gone now
    return int(struct.unpack("i", data)[0]) if len(data) == 4 else -int(signal.SIGKILL)


def _wait_for(pid: int) -> int:
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status


def _become(
    spec: dict[str, Any], order: dict[str, Any], stdio: list[int], function: Callable[..., Any] | None
) -> NoReturn:
    """Turn this process into the program."""
    code = 126
    try:
        os.setsid()
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/work")
        for name, value in spec["rlimits"].items():
            _limit(getattr(resource, name), value)
        os.environ.clear()
        os.environ.update(order["environment"])
        _prctl(PR_SET_DUMPABLE, 1)
        _drop_rights(bytes.fromhex(spec["filter"]))
        if function is None:
            os.execv(spec["command"][0], spec["command"])
        code = run_function(function)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def run_function(function: Callable[..., Any]) -> int:
    """Call a function with the episode on standard input; what it returns becomes the last line of output."""
    with open(0, encoding="utf-8", closefd=False) as lines:
        task = json.loads(lines.readline())
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    episode = ProgramEpisode(
        task=task,
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model=os.environ["OPENAI_MODEL"],
        session_url=os.environ["ROLLGYM_SESSION"],
    )
    try:
        value = function(episode)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    if value is not None:
        line = value if isinstance(value, dict) else {"reward": value}
        print(f"\n{json.dumps(line, default=str)}")
    return 0


async def _awaited(value: Any) -> Any:
    return await value


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _replace(number: int, path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    os.dup2(descriptor, number)
    os.close(descriptor)


# System calls that Python 3.11 does not have.

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))


def _check(name: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    data = None if options is None else options.encode()
    _check(f"mount {target}", _libc.mount(*words, ctypes.c_ulong(flags), data))


def _prctl(option: int, value: int, argument: Any = 0) -> None:
    _check(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), argument, 0, 0))


def _drop_rights(program: bytes) -> None:
    """Give up all capabilities, and install a seccomp filter."""
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    number = SYS_CAPSET[os.uname().machine]
    _check("capset", _libc.syscall(ctypes.c_long(number), header, bytes(24)))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(program, len(program))
    shape = _Filter(len(program) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, 2, ctypes.byref(shape))
    # io_uring_setup has this number everywhere; unfiltered, it answers EFAULT or ENOSYS to these arguments.
    if _libc.syscall(ctypes.c_long(425), 0, 0) != -1 or ctypes.get_errno() != 1:
        raise OSError("the seccomp filter is not active")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:  # without a sandbox
        called = load_function(sys.argv[2], sys.argv[3:])
        status = run_function(called)
        _flush()
        sys.exit(status)
    main()
