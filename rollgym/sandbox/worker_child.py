"""Processes that run untrusted code: set up, run, exit. Runs inside."""

from __future__ import annotations

# The wrapper module builds enums, which costs 10 % of each execution.
import _signal  # type: ignore[import-not-found]
import atexit
import contextlib
import io
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from rollgym.sandbox import worker_confinement, worker_files, worker_limits

PIPE = 1 << 16


def raise_walls(config: dict[str, Any], folder: str) -> None:
    """Confine one process, where the worker is not confined because it reads /proc."""
    if config["confinement"] == "child":
        worker_confinement.restrict(config["read"], [folder, *config["write"]])
        if config["rules"] is not None:
            worker_confinement.enforce(config["rules"])
            os.close(config["rules"])
        worker_confinement.install_filter(bytes.fromhex(config["filter"]))


def prepare(config: dict[str, Any], folder: str, out: int, err: int, keep: tuple[int, ...] = ()) -> None:
    """Detach this process from the worker: own output, folder and confinement, no other descriptors."""
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        first = 3
        rules = () if config["rules"] is None else (config["rules"],)
        for descriptor in sorted((*keep, *rules)):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        os.chdir(folder)
        if not config["init"]:
            worker_confinement.prctl(worker_confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
        worker_confinement.prctl(worker_confinement.PR_SET_DUMPABLE, 1)
        _offer_to_the_kernel()
        raise_walls(config, folder)
    except BaseException:
        os._exit(1)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    os.environ["HOME"] = folder
    if not config["scratch"]:
        os.environ["TMPDIR"] = folder
    sys.path.insert(0, folder)
    sys.argv = ["main.py"]
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8", "replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "replace", line_buffering=True
    )
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "replace", write_through=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    _reseed()


def _offer_to_the_kernel() -> None:
    """Make the OOM killer prefer this process over the worker."""
    with contextlib.suppress(OSError):
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(file, b"1000")
        os.close(file)


def _reseed() -> None:
    """Reseed numpy after a fork; ``random`` reseeds itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def main_module() -> types.ModuleType:
    """Create a new ``__main__`` module."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    return module


def run(code: str, name: str, module: types.ModuleType) -> int:
    """Run code as Python does and return its exit code."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        return 1


def flush() -> None:
    """Flush the streams, even if the code replaced or closed them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue


def program(
    config: dict[str, Any], request: dict[str, Any], body: bytearray, out: int, err: int, ready: int
) -> NoReturn:
    """Run one program: files, input, code, exit code."""
    code = 1
    try:
        folder = request["folder"]
        prepare(config, folder, out, err, (ready,))
        os.write(ready, b".")
        os.close(ready)
        view, at = memoryview(body), request["code"]
        source = bytes(view[:at]).decode("utf-8", "replace")
        given = view[at : (at := at + request["stdin"])]
        for name, size in request["files"]:
            worker_files.write(folder, name, view[at : at + size])
            at += size
        _feed(given)
        worker_limits.limit(request["limits"], config["base"])
        code = run(source, "main.py", main_module())
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        flush()
        os._exit(code)


def _feed(given: memoryview) -> None:
    """Provide these bytes as standard input; data that exceeds the pipe goes to an unnamed file.

    The pipe capacity is not known beforehand: the kernel reduces it for users with many pipes.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    try:
        fits = len(given) <= PIPE and os.write(sink, given) == len(given) if given else True
    except BlockingIOError:
        fits = False
    os.close(sink)
    if not fits:
        os.close(source)
        source = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
        while given:
            given = given[os.write(source, given) :]
        os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.close(source)


def session(config: dict[str, Any], folder: str, out: int, err: int, orders: int, status: int) -> NoReturn:
    """Session head: for each turn a fork runs the code and becomes the new head while this one waits.

    The worker kills the old head when the turn succeeds. If the fork dies, the old head keeps the state.
    """
    try:
        prepare(config, folder, out, err, (orders, status))
        worker_limits.limit(config["limits"], config["base"])
        module, stream = main_module(), os.fdopen(orders, "rb", buffering=0, closefd=False)
        _show(config, 0)
        _say(status, turn=0, ready=1)
        while True:
            order = json.loads(_exactly(stream, int.from_bytes(_exactly(stream, 4), "big")))
            _show(config, 1)
            source = _exactly(stream, order["code"]).decode("utf-8", "replace")
            if child := os.fork():
                died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                _show(config, 0)
                _say(status, turn=order["turn"], died=died)
                continue
            _turn(config, order, source, module, status)
    finally:
        os._exit(1)


def _turn(
    config: dict[str, Any], order: dict[str, Any], source: str, module: types.ModuleType, status: int
) -> None:
    """Run one turn in this process, which then becomes the head."""
    # Otherwise the kernel sends SIGHUP to the stopped group when its parent, the last head, exits.
    os.setsid()
    worker_limits.limit(order["limits"], config["base"], hard=False)
    code = run(source, f"<turn {order['turn']}>", module)
    flush()
    # Threads of a turn end with it: a fork has only one.
    if threading.active_count() > 1 and (child := os.fork()):
        os.waitpid(child, 0)
        os._exit(1)
    _show(config, 0)
    _say(status, turn=order["turn"], code=code, pid=os.getpid())


def _show(config: dict[str, Any], whether: int) -> None:
    """Set whether other executions may inspect this process through /proc."""
    # Only in a PID namespace: elsewhere /proc is hidden, and the worker must read its files.
    if config["init"]:
        worker_confinement.prctl(worker_confinement.PR_SET_DUMPABLE, whether)


def _exactly(stream: Any, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = stream.read(size - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts


def _say(status: int, **words: int) -> None:
    os.write(status, json.dumps(words).encode() + b"\n")
