"""Ways to the network, and to sockets of the host, by every family."""

from __future__ import annotations

from .model import Attack, attack

_F = "network"

_CONNECT = """
def reach():
    with socket.socket(socket.{family}, socket.SOCK_STREAM) as s:
        s.settimeout(2); s.connect(where); s.send(b"out"); return where
where = STAGE.get("{name}")
if isinstance(where, list): where = tuple(where)
held("the host has no such network") if where is None else attempt(reach)
"""
_SEND = """
where = STAGE["{name}"]
attempt(lambda: socket.socket(socket.{family}, socket.SOCK_DGRAM).sendto(b"out", where))
"""
_FAMILY = """
made = []
for family in {numbers}:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for protocol in (0, 3, 1):
            try: socket.socket(family, kind, protocol).close(); made.append((family, kind))
            except OSError as error: last = error
pwned("socket families and types:", made[:6]) if made else held(last)
"""
_FAMILIES = {
    "vsock": ("the hypervisor beside the virtual machine", [40]),
    "netlink": ("settings of the kernel's network", [16]),
    "packet": ("raw frames on every wire", [17]),
    "alg": ("the kernel's cryptography, and its bugs", [38]),
    "bluetooth": ("radio", [31]),
    "other": ("rare socket families", [f for f in range(46) if f not in (1, 2, 10, 16, 17, 31, 38, 40)]),
}


def _family(name: str) -> Attack:
    gain, numbers = _FAMILIES[name]
    return attack(_F, f"socket-{name}", gain, _FAMILY.format(numbers=numbers), control=name == "netlink")


NETWORK: tuple[Attack, ...] = (
    attack(
        _F,
        "tcp-loopback",
        "services of the host",
        _CONNECT.format(family="AF_INET", name="tcp"),
        control=True,
    ),
    attack(_F, "tcp6-loopback", "services of the host", _CONNECT.format(family="AF_INET6", name="tcp6")),
    attack(
        _F, "udp-loopback", "services of the host", _SEND.format(family="AF_INET", name="udp"), control=True
    ),
    attack(
        _F,
        "tcp-fast-open",
        "a connection without connect()",
        """
s = socket.socket
attempt(lambda: s(socket.AF_INET, socket.SOCK_STREAM).sendto(b"out", 0x20000000, tuple(STAGE["tcp"])))
""",
        control=True,
    ),
    attack(
        _F,
        "route-outside",
        "the internet",
        """
def route(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((address, 53)); return s.getsockname()
attempt(lambda: route(socket.AF_INET, "192.0.2.1"))
attempt(lambda: route(socket.AF_INET6, "2001:db8::1"))
""",
    ),
    attack(
        _F,
        "resolve-name",
        "words carried out in names",
        """
try: pwned(socket.getaddrinfo("rollgym.invalid", 80))
except socket.gaierror as error:
    pwned("a server answered:",
        error) if error.errno == socket.EAI_NONAME and os.path.exists("/etc/resolv.conf") \\
        else held(error)
except OSError as error: held(error)
""",
    ),
    attack(
        _F,
        "ping",
        "hosts of the network",
        """
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).fileno())
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1).fileno())
""",
    ),
    attack(
        _F,
        "unix-abstract",
        "services of the host without a file",
        _CONNECT.format(family="AF_UNIX", name="abstract"),
        control=True,
    ),
    attack(
        _F,
        "unix-abstract-datagram",
        "services of the host without a file",
        _SEND.format(family="AF_UNIX", name="abstract_datagram"),
        control=True,
    ),
    attack(
        _F,
        "unix-path",
        "services of the host",
        _CONNECT.format(family="AF_UNIX", name="path"),
        control=True,
    ),
    attack(
        _F,
        "engine-sockets",
        "a container engine, which is root",
        """
def reach(name):
    with socket.socket(socket.AF_UNIX) as s: s.connect(name); return name
names = [r + n for r in ("/run/", "/var/run/") for n in
         ("docker.sock", "containerd/containerd.sock", "podman/podman.sock", "dbus/system_bus_socket",
             "systemd/private")]
for name in names: attempt(lambda: reach(name))
""",
    ),
    attack(
        _F,
        "see-host-connections",
        "who the host talks to",
        """
port = "%04X" % STAGE["tcp"][1]
def look():
    lines = open("/proc/net/tcp").readlines()[1:]
    if any(line.split()[1].endswith(":" + port) for line in lines): return port
    raise OSError("the host's port is not listed")
attempt(look)
def interfaces():
    names = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
    if set(names) - {"lo"}: return names
    raise OSError(f"only {names}")
attempt(interfaces)
""",
        control=True,
    ),
    *map(_family, _FAMILIES),
)
