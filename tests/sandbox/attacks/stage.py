"""What attacks are after, laid out on the host: secrets, sockets that listen, a process, a file."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import rollgym

NOBODY = 65534
SECRET_VARIABLE = "ROLLGYM_ATTACK_SECRET"


def _listen(family: int, kind: int, address: object) -> socket.socket | None:
    """A socket that waits for the attacker; None where the machine has no such network."""
    sock = socket.socket(family, kind)
    try:
        sock.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            sock.listen(8)
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock


class Stage:
    """Secrets and bait on the host, for as long as attacks are tried."""

    def __init__(self) -> None:
        word = secrets.token_hex(6)
        self.mark = f"rga{word[:8]}"
        """The name of every process of an attack: so the host finds them whatever they do."""
        self.secret = f"secret-{secrets.token_hex(16)}"
        # Not the usual temporary folder: walls often hide it only because they put their own there.
        place = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="rollgym-attack-", dir=place))
        self.folder.chmod(0o777)
        self.file = self.folder / "secret.txt"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self.owned = self.folder / "owned.txt"
        self.owned.write_text("owned by the user that sandboxed code may be")
        self.owned.chmod(0o644)
        if os.getuid() == 0:
            os.chown(self.owned, NOBODY, NOBODY)
        self.home = Path.home() / f".rollgym-attack-{word}"
        with contextlib.suppress(OSError):
            self.home.write_text(self.secret)
        os.environ[SECRET_VARIABLE] = self.secret
        self._inherited = os.open(self.file, os.O_RDONLY)
        os.set_inheritable(self._inherited, True)
        self.process = self._bait_process()
        self.sockets = self._sockets(word)

    def _bait_process(self) -> subprocess.Popen[bytes]:
        """A process of the user that sandboxed code may be, the secret in its words and environment."""
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        command = ["/bin/sh", "-c", "while :; do sleep 5; done", self.secret]
        return subprocess.Popen(command, env={"SECRET": self.secret}, cwd="/", **user)  # type: ignore[call-overload, no-any-return]

    def _sockets(self, word: str) -> dict[str, socket.socket]:
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        path = str(self.folder / "socket")
        wanted = {
            "tcp": (socket.AF_INET, stream, ("127.0.0.1", 0)),
            "tcp6": (socket.AF_INET6, stream, ("::1", 0)),
            "udp": (socket.AF_INET, datagram, ("127.0.0.1", 0)),
            "path": (socket.AF_UNIX, stream, path),
            "abstract": (socket.AF_UNIX, stream, f"\0rollgym-{word}"),
            "abstract_datagram": (socket.AF_UNIX, datagram, f"\0rollgym-dgram-{word}"),
        }
        made = {name: _listen(*what) for name, what in wanted.items()}
        if made["path"]:
            os.chmod(path, 0o777)
        return {name: sock for name, sock in made.items() if sock is not None}

    def facts(self) -> dict[str, object]:
        """What an attacker is told: where things are, and none of the secrets."""
        addresses = {name: sock.getsockname() for name, sock in self.sockets.items()}
        return {
            "mark": self.mark,
            "folder": str(self.folder),
            "file": str(self.file),
            "owned": str(self.owned),
            "home": str(self.home),
            "pid": self.process.pid,
            "rollgym": str(Path(rollgym.__file__).parent),
            **{name: a.decode("latin-1") if isinstance(a, bytes) else a for name, a in addresses.items()},
        }

    def reached(self) -> str | None:
        """Which of the sockets somebody came to."""
        for name, sock in self.sockets.items():
            try:
                if sock.type == socket.SOCK_STREAM:
                    sock.accept()[0].close()
                else:
                    sock.recv(4096)
            except BlockingIOError:
                continue
            return f"the host's {name} socket was reached"
        return None

    def harmed(self) -> str | None:
        """What is no longer as it was."""
        if self.process.poll() is not None:
            self.process = self._bait_process()
            return "a process of the host was killed"
        if not self.file.exists() or self.file.read_text() != self.secret:
            self.file.write_text(self.secret)
            self.file.chmod(0o666)
            return "a file of the host was changed"
        if self.owned.stat().st_mode & 0o777 != 0o644:
            self.owned.chmod(0o644)
            return "the rights of a file of the host were changed"
        ours = ("secret.txt", "owned.txt", "socket")
        planted = sorted(p.name for p in self.folder.iterdir() if p.name not in ours)
        if planted:
            for name in planted:
                (self.folder / name).unlink()
            return f"{planted[0]} was planted on the host"
        return None

    def processes(self) -> list[int]:
        """Living processes of attacks, wherever they hide: their name is the mark."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
                    # A process whose first thread has ended looks dead, and may have others.
                    fields = rest.split()
                    if name == self.mark and (fields[0] not in "ZX" or int(fields[17]) > 1):
                        found.append(int(folder.name))
        return found

    def survivors(self, grace: float = 2.0) -> list[int]:
        """Processes that are still there after what a dying process needs to go."""
        end = time.monotonic() + grace
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def close(self) -> None:
        """Clear the stage."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        self.process.kill()
        self.process.wait()
        for sock in self.sockets.values():
            sock.close()
        os.close(self._inherited)
        os.environ.pop(SECRET_VARIABLE, None)
        self.home.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def staged() -> Iterator[Stage]:
    """A stage that is cleared whatever happens."""
    stage = Stage()
    try:
        yield stage
    finally:
        stage.close()
