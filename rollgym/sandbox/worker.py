"""Worker: a persistent process inside the sandbox that forks for every execution.

The host sends it its own source (see `rollgym.sandbox.client`), so it needs no file inside, and its
configuration in one frame. The forks run untrusted code: they hold none of its descriptors, and their
output is validated.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import json
import os
import platform
import select
import signal
import sys
import time
from typing import Any

from rollgym.sandbox import protocol, worker_child, worker_confinement, worker_files, worker_limits
from rollgym.sandbox.worker_watch import HostGone, Watch, pipe

BACK_SECONDS = 5.0
"""Seconds for a head to report a killed turn."""
READY_SECONDS = 30.0
"""Seconds for the first head to apply its confinement."""


class Session:
    """Session head and pipes to it."""

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        self._turn = 0
        self._back = False
        """Whether the head reported the death of this turn's process."""
        self.out, out = pipe()
        self.err, err = pipe()
        orders, self._orders = os.pipe()
        self._status, status = pipe()
        os.set_blocking(self._orders, False)
        self.head = os.fork()
        if not self.head:
            worker_child.session(config, folder, out, err, orders, status)
        for descriptor in (out, err, orders, status):
            os.close(descriptor)
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(READY_SECONDS * 1000) or "ready" not in self._said():
            self.close()
            raise OSError("the confinement of a session failed")

    def turn(self, code: bytearray, watch: Watch) -> tuple[str, int | None, str]:
        """Run code; return how it ended, its exit code and the state of the session."""
        self._turn += 1
        self._back = False
        order = json.dumps({"turn": self._turn, "code": len(code), "limits": watch.limits}).encode()
        whole = bytearray(len(order).to_bytes(4, "big") + order) + code
        worker_limits.send(self.head, signal.SIGCONT)
        try:
            ended, exit_code, head = self._until_said(whole, watch)
        finally:
            whole[:] = bytes(len(whole))
        pids = worker_limits.family()
        if ended == "exit" and head in pids:
            # Usage since the last check counts too, and must not grow meanwhile.
            worker_limits.send(head, signal.SIGSTOP)
            if broken := watch.broken(pids, (head,)):
                ended, exit_code, head = broken, None, self.head
        if ended not in ("exit", "lost") and head is not None and not self._gone_back():
            head = None
        if head is None or head not in pids or not worker_limits.alive(head):
            return ("lost" if ended == "exit" else ended), None, "lost"
        state = "rolled_back" if head == self.head else "committed"
        self.head = head
        return ended, exit_code, state

    def _until_said(self, order: bytearray, watch: Watch) -> tuple[str, int | None, int | None]:
        """Return how the turn ended, its exit code and the new head process."""
        rest = memoryview(order)
        try:
            handle = os.pidfd_open(self.head)
        except OSError:
            return "lost", None, None
        try:
            while True:
                try:
                    rest = rest[os.write(self._orders, rest) :] if rest else rest
                except BlockingIOError:
                    pass
                except OSError:
                    return "lost", None, None
                broken, ready = watch.wait(self._status, handle)
                if broken:
                    # A partially read order would be mistaken for the next one.
                    return broken, None, None if rest else self.head
                status = self._said() if self._status in ready else {}
                if "pid" in status and "code" in status:
                    return "exit", status["code"] & 255, status["pid"]
                if "died" in status:
                    by_limit = status["died"] == -signal.SIGXCPU
                    self._back = True
                    return ("cpu_limit" if by_limit else "lost"), None, self.head
                if handle in ready:
                    return "lost", None, None
        finally:
            os.close(handle)

    def _gone_back(self) -> bool:
        """End a turn that broke a limit; return whether the head reported it.

        On a busy machine the turn may not have started yet: it must not start later.
        """
        poll, until = select.poll(), time.monotonic() + BACK_SECONDS
        poll.register(self._status, select.POLLIN)
        while not self._back and worker_limits.alive(self.head) and time.monotonic() < until:
            worker_limits.sweep((self.head,))
            self._back = bool(poll.poll(20)) and "died" in self._said()
        return self._back

    def _said(self) -> dict[str, int]:
        """Read the status of this turn: integers or nothing. Untrusted code may write to this pipe."""
        try:
            words = json.loads(os.read(self._status, 4096).splitlines()[-1])
            if words["turn"] == self._turn and all(type(value) is int for value in words.values()):
                return dict(words)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        return {}

    def close(self) -> None:
        """Close the pipes."""
        for descriptor in (self.out, self.err, self._orders, self._status):
            os.close(descriptor)


LOOKED_AT = 50
"""Number of files of a hidden folder that are probed."""
OURS = 3
"""Processes besides the code's: worker, session head and waiter."""


class Worker:
    """Reads orders, forks executions and answers."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.config: dict[str, Any] = {}
        self.session: Session | None = None
        self._home = ""

    def start(self, config: dict[str, Any]) -> None:
        """Apply the confinement and report it; on failure report the reason and exit."""
        try:
            _set_up(config)
            self.config, self._home = config, os.path.join(config["work"], "session")
            os.makedirs(self._home, 0o700, exist_ok=True)
        except BaseException as error:
            self.send({"error": f"{type(error).__name__}: {error}"}, [])
            os._exit(1)
        self.send({"python": platform.python_version(), "uid": os.getuid(), "pid": os.getpid()}, [])

    def fill(self, view: memoryview) -> None:
        """Fill a buffer with data from the host."""
        while view:
            size = os.readv(self.source, [view])
            if not size:
                raise HostGone
            view = view[size:]

    def send(self, header: dict[str, Any], parts: list[memoryview]) -> None:
        """Send a frame to the host."""
        for part in (memoryview(protocol.prefix(header, sum(map(len, parts)))), *parts):
            while part:
                part = part[os.write(self.sink, part) :]

    def serve(self) -> None:
        """Answer until the host disconnects; then end all processes."""
        try:
            while True:
                self._answer(*protocol.receive(self.fill))
        finally:
            worker_limits.sweep()
            if not self.config["scratch"]:  # A folder on the host, which may have been killed.
                worker_files.empty(self.config["work"])
                with contextlib.suppress(OSError):
                    os.rmdir(self.config["work"])

    def _answer(self, request: dict[str, Any], body: bytearray) -> None:
        watches: list[Watch] = []
        try:
            operation = {
                "exec": self._exec,
                "run": self._run,
                "write": self._write,
                "read": self._read,
                "reset": self._reset,
            }[request["op"]]
            header, parts = operation(request, body, watches)
            self.send(header, parts)
            for part in parts:
                part[:] = bytes(len(part))
        except HostGone:
            raise
        except Exception as error:
            missing = isinstance(error, FileNotFoundError) or getattr(error, "errno", 0) in (20, 40)
            if request["op"] in ("exec", "run"):
                self._reset(request, body, watches)
            self.send({"error": f"{type(error).__name__}: {error}", "missing": missing}, [])
        finally:
            body[:] = bytes(len(body))
            for watch in watches:
                watch.wipe()

    def _exec(self, request: dict[str, Any], body: bytearray, watches: list[Watch]) -> Any:
        # The session is stopped, so it cannot access this execution.
        scratch: dict[str, list[str]] = {}
        try:
            # An unpredictable name.
            folder = request["folder"] = os.path.join(self.config["work"], f"run-{os.urandom(8).hex()}")
            os.mkdir(folder, 0o700)
            scratch = {path: os.listdir(path) for path in self.config["scratch"]}
            return self._execute(request, body, watches)
        finally:
            # The code owns these folders and may have moved, closed or replaced them.
            worker_files.empty(self.config["work"], ["session"])
            worker_files.renew(self._home)
            for path, names in scratch.items():
                worker_files.empty(path, names)

    def _execute(self, request: dict[str, Any], body: bytearray, watches: list[Watch]) -> Any:
        (out, out_end), (err, err_end), (ready, ready_end) = pipes = pipe(), pipe(), pipe()
        try:
            watch = self._watch(request, out, err, request["folder"], ready)
            watches.append(watch)
            watch.given = request["stdin"]
            pid = os.fork()
            if not pid:
                worker_child.program(self.config, request, body, out_end, err_end, ready_end)
            broken, status = self._until_exit(pid, watch)
            self._park()
            if not broken and not _any(ready):
                raise OSError("the confinement of an execution failed")
            return watch.reply(*_ending(broken, status), "fresh")
        finally:
            for ends in pipes:
                os.close(ends[0])
                os.close(ends[1])

    def _until_exit(self, pid: int, watch: Watch) -> tuple[str | None, int]:
        try:
            handle: tuple[int, ...] = (os.pidfd_open(pid),)
        except OSError:  # Unsupported on some systems: then every tick polls.
            handle = ()
        try:
            while True:
                broken, _ = watch.wait(*handle)
                if broken:
                    os.kill(pid, signal.SIGKILL)
                    return broken, os.waitpid(pid, 0)[1]
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    return None, status
        finally:
            for descriptor in handle:
                os.close(descriptor)

    def _run(self, request: dict[str, Any], body: bytearray, watches: list[Watch]) -> Any:
        if self.session is None:
            self.session = Session(self.config, self._home)
        watch = self._watch(request, self.session.out, self.session.err, self._home)
        watches.append(watch)
        ended, code, state = self.session.turn(body, watch)
        # Between turns the session must not run: no limits are checked.
        if state == "lost" or not self._park():
            worker_limits.sweep()
            ended, code, state = ("lost" if ended == "exit" else ended), None, "lost"
        reply = watch.reply(ended, code, state)
        if state == "lost":
            self._drop()
        return reply

    def _park(self) -> bool:
        """Stop the session head and end all other processes; return whether there is a head."""
        if self.session is None:
            worker_limits.sweep()
            return False
        return worker_limits.park(self.session.head)

    def _watch(
        self, request: dict[str, Any], out: int, err: int, folder: str, ready: int | None = None
    ) -> Watch:
        # Before an execution only the stopped session exists, with exited children.
        below = [self.session.head, *worker_limits.descendants(self.session.head)] if self.session else []
        before = worker_limits.cpu_total(below)
        return Watch(self.source, self.config, request["limits"], before, out, err, folder, ready)

    def _drop(self) -> None:
        if self.session:
            self.session.close()
            self.session = None

    def _write(self, request: dict[str, Any], body: bytearray, watches: list[Watch]) -> Any:
        worker_files.write(self._home, request["name"], body)
        return {}, []

    def _read(self, request: dict[str, Any], body: bytearray, watches: list[Watch]) -> Any:
        return {}, [memoryview(worker_files.read(self._home, request["name"], protocol.MAX_BODY))]

    def _reset(self, request: dict[str, Any], body: bytearray, watches: list[Watch]) -> Any:
        worker_limits.sweep()
        self._drop()
        for path in (self.config["work"], *self.config["scratch"]):
            worker_files.empty(path)
        worker_files.renew(self._home)
        return {}, []


def _any(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return False


def _ending(broken: str | None, status: int) -> tuple[str, int | None]:
    code = os.waitstatus_to_exitcode(status)
    if broken or code == -signal.SIGXCPU:
        return broken or "cpu_limit", None
    return ("lost", None) if code == -signal.SIGKILL else ("exit", code)


def _set_up(config: dict[str, Any]) -> None:
    """Set up this process, apply the confinement and remove everything untrusted code must not find."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # With Python's handler any process could interrupt pid 1.
    os.umask(0o022)
    if uid := config.get("uid"):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.environ.clear()
    os.environ.update(config["env"])
    config["init"] = os.getpid() == 1
    if not config["init"]:
        worker_confinement.prctl(worker_confinement.PR_SET_CHILD_SUBREAPER, 1)
    _preload(config["preload"])
    # Large rule sets are built once and applied per execution.
    config["rules"] = None
    if config["confinement"] == "child" and config["listed"]:
        rules = config["opened"], [config["work"], *config["write"]], config["listed"]
        config["rules"] = worker_confinement.make_rules(*rules)[0]
    worker_confinement.prctl(worker_confinement.PR_SET_NO_NEW_PRIVS, 1)
    worker_confinement.prctl(worker_confinement.PR_SET_DUMPABLE, 0)
    tasks = {"own": OURS, "shared": worker_limits.tasks_of_user(), "none": -1}[config["processes"]]
    config["base"] = {"address_space": worker_limits.address_space(), "tasks": tasks}
    if config["confinement"] != "none" and config["machine"] != platform.machine():
        raise OSError(f"the filter is for {config['machine']}, this is {platform.machine()}")
    if config["confinement"] == "worker":
        worker_confinement.install_filter(bytes.fromhex(config["filter"]))
        _check_hidden(config)
    elif config["confinement"] == "child":
        _try_walls(config)
    for name in [name for name in sys.modules if name.split(".")[0] == "rollgym"]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def _try_walls(config: dict[str, Any]) -> None:
    """Test the confinement of an execution in a short-lived process."""
    pid = os.fork()
    if not pid:
        try:
            worker_child.raise_walls(config, config["work"])
            _check_hidden(config)
            os._exit(0)
        except Visible:
            os._exit(2)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        raise Visible("rollgym can be read inside, and with it the solutions of its tasks")
    if code:
        raise OSError("the confinement of an execution cannot be applied")


class Visible(Exception):
    """A hidden path is readable inside."""


class _NotHere:
    """Denies importing rollgym: each execution inherits the worker's memory."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "rollgym":
            raise ImportError("rollgym cannot be imported in a sandbox")


def _preload(names: list[str]) -> None:
    refuse = _NotHere()
    sys.meta_path.insert(0, refuse)
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.meta_path.remove(refuse)


def _check_hidden(config: dict[str, Any]) -> None:
    """Verify that no rollgym file is readable, even unknown ones."""
    folders = {*sys.path, "/usr/lib/python3/dist-packages"}
    for prefix in {sys.prefix, sys.base_prefix, "/usr", "/usr/local"}:
        folders |= set(glob.glob(f"{glob.escape(prefix)}/lib*/py*/*-packages"))
    for path in (*config["hidden"], *(os.path.join(folder, "rollgym") for folder in folders)):
        if _readable(path):
            raise Visible(f"{path} can be read inside, and with it the solutions of tasks")


def _readable(path: str) -> bool:
    """Whether a file, or one of the first files of a folder, is readable."""
    files = [path] if not os.path.isdir(path) else []
    for folder, _, names in os.walk(path):
        files += [os.path.join(folder, name) for name in names]
        if len(files) >= LOOKED_AT:
            break
    for name in files[:LOOKED_AT]:
        try:
            with open(name, "rb") as file:
                if file.read(1):
                    return True
        except OSError:
            continue
    return False


def main() -> None:
    """Move the control channel out of reach of the code, then serve."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    worker = Worker(source, sink)
    try:
        worker.start(protocol.receive(worker.fill)[0])
        worker.serve()
    except HostGone:
        os._exit(0)
