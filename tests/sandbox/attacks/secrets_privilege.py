"""Secrets of the host, and rights that the code was not given."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import Attack, attack, told_or_killed

_S, _P = "secrets", "privilege"

SECRETS: tuple[Attack, ...] = (
    attack(
        _S,
        "own-environment",
        "keys in the environment of the host",
        """
say(dict(os.environ)); held("judged by the host")
LIBC.getenv.restype = ctypes.c_char_p
say(LIBC.getenv(b"ROLLGYM_ATTACK_SECRET"))
say(open("/proc/self/environ", "rb").read() if os.path.exists("/proc/self/environ") else "")
""",
    ),
    attack(
        _S,
        "environment-of-others",
        "keys in the environment of the host",
        """
held("judged by the host")
for pid in neighbors():
    try: say(pid, open(f"/proc/{pid}/environ", "rb").read()[:9000])
    except OSError as error: held(error)
""",
        control=True,
    ),
    attack(
        _S,
        "command-lines",
        "keys on command lines of the host",
        """
held("judged by the host")
for pid in neighbors():
    try: say(pid, open(f"/proc/{pid}/cmdline", "rb").read()[:2000])
    except OSError as error: held(error)
""",
        control=True,
    ),
    attack(
        _S,
        "inherited-descriptors",
        "files the host has open",
        """
held("judged by the host")
for fd in range(3, 1024):
    try: os.set_blocking(fd, False); os.lseek(fd, 0, 0); say(fd, os.read(fd, 4000))
    except OSError: pass
    try: say(fd, os.pread(fd, 4000, 0))
    except OSError: pass
for name in ("self", "thread-self"):
    try: say([os.readlink(f"/proc/{name}/fd/{n}") for n in os.listdir(f"/proc/{name}/fd")[:3]])
    except OSError as error: held(error)
""",
    ),
    attack(
        _S,
        "mounts",
        "where the host keeps its secrets",
        """
for name in ("mountinfo", "mounts", "mountstats"):
    try: text = open("/proc/self/" + name).read()
    except OSError as error: held(error); continue
    disk = " / / " in text and "/dev/" in text.split(" / / ")[1][:80]
    pwned("the host's disks") if disk or STAGE["folder"] in text else held("only its own mounts")
""",
        control=True,
    ),
    attack(
        _S,
        "host-processes",
        "what else runs on the host",
        """
try: name = open(f"/proc/{STAGE['pid']}/comm").read()
except OSError as error: held(error)
else: pwned(name) if name.strip() == "sh" and len(others()) > 20 else held(name)
count = len([p for p in others() if p > 1]) if os.path.isdir("/proc/1") else 0
pwned(count, "processes seen") if count > 20 else held(count, "processes seen")
""",
        control=True,
    ),
    attack(
        _S,
        "worker-program",
        "the interpreter's arguments and modules of the host",
        """
text = repr((sys.argv, getattr(sys, "orig_argv", ""), sys.path, sys.prefix))
say(text)
pwned("modules of the host:", [m for m in ("rollgym", "gymnasium", "pytest") if m in sys.modules]) \\
    if {"rollgym", "gymnasium", "pytest"} & set(sys.modules) else held("no module of the host is loaded")
""",
    ),
    attack(
        _S,
        "rollgym-itself",
        "reference solutions and experts of the environments",
        """
import glob, importlib
places = [STAGE["rollgym"]]
for prefix in {sys.prefix, sys.base_prefix, "/usr", "/usr/local"}:
    places += glob.glob(prefix + "/lib*/py*/*-packages/*roll" + "gym*")
places += [os.path.join(path, "roll" + "gym") for path in sys.path]
for place in places:
    for name in ("envs/code/expert.py", "sandbox/worker.py", "__init__.py", "METADATA", ""):
        path = os.path.join(place, name).rstrip("/")
        try: pwned(path, open(path, "rb").read(20))
        except OSError as error: held(error)
    sys.path.insert(0, os.path.dirname(place))
    try: pwned(importlib.import_module("rollgym.envs.code.expert"))
    except Exception as error: held(error)
""",
        control=True,
    ),
    attack(
        _S,
        "kernel-log",
        "what the kernel says of the host",
        """
attempt(lambda: open("/proc/kmsg").read(10))
attempt(lambda: open("/proc/kcore", "rb").read(10))
def addresses():
    for line in open("/proc/kallsyms").readlines()[:50]:
        if int(line.split()[0], 16): return line
    raise OSError("all addresses are zero")
attempt(addresses)
""",
        needs=Level.LANDLOCK,
    ),
)

_WRITABLE = """
for name in {names}:
    attempt(lambda: os.close(os.open(name, os.O_WRONLY)) or name)
"""

PRIVILEGE: tuple[Attack, ...] = (
    attack(
        _P,
        "become-root",
        "root",
        """
if os.getuid() == 0: pwned("the code runs as root")
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgid(0),
    lambda: os.setresgid(0, 0, 0),
               lambda: os.setgroups([0]), lambda: os.setuid(os.getuid() + 1)):
    attempt(change)
""",
    ),
    attack(
        _P,
        "capabilities",
        "rights of root one by one",
        """
class Head(ctypes.Structure): _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
head, data = Head(0x20080522, 0), (ctypes.c_uint32 * 6)()
LIBC.capget(ctypes.byref(head), data)
pwned("capabilities", hex(data[0]), hex(data[1])) if any(data[:6]) else held("none")
full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
try: pwned("capset", call("capset", ctypes.byref(Head(0x20080522, 0)), full))
except OSError as error: held(error)
pwned("ambient") if LIBC.prctl(47, 2, 21, 0, 0) == 0 else held("no ambient ones")
""",
    ),
    attack(
        _P,
        "setuid-programs",
        "root by a program that has it",
        """
import subprocess
held("trying")
for words in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["newgrp", "root"], ["mount"],
    ["pkexec", "id", "-u"],
              ["newuidmap", str(os.getpid()), "0", "0", "1"], ["fusermount", "-V"], ["bwrap",
                  "--dev-bind", "/", "/", "id", "-u"]):
    try: ran = subprocess.run(words, capture_output=True, text=True, timeout=3, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error: held(words[0], error); continue
    pwned(words, ran.stdout) if ran.stdout.strip() == "0" else held(words[0], ran.returncode)
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _P,
        "own-setuid-file",
        "root by a file that the code marks itself",
        """
import shutil, subprocess
try:
    shutil.copy("/usr/bin/id", "id"); os.chmod("id", 0o6755)
    ran = subprocess.run(["./id", "-u"], capture_output=True, text=True)
    pwned("id says 0") if ran.stdout.strip() == "0" else held("id says", ran.stdout.strip(),
        ran.stderr.strip())
except OSError as error: held(error)
""",
    ),
    attack(
        _P,
        "core-pattern",
        "code started by the kernel as root",
        _WRITABLE.format(
            names=["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/sys/kernel/uevent_helper"]
        ),
    ),
    attack(
        _P,
        "settings-of-the-kernel",
        "the machine as a whole",
        _WRITABLE.format(
            names=[
                "/proc/sys/vm/overcommit_memory",
                "/proc/sys/fs/file-max",
                "/proc/sys/vm/drop_caches",
                "/proc/sys/kernel/randomize_va_space",
                "/proc/sys/kernel/hostname",
                "/proc/sysrq-trigger",
                "/proc/sys/kernel/pid_max",
                "/proc/sys/user/max_user_namespaces",
                "/proc/sys/net/ipv4/ip_forward",
                "/proc/sys/kernel/ns_last_pid",
                "/proc/sys/fs/binfmt_misc/register",
                "/sys/power/state",
                "/proc/irq/0/smp_affinity",
            ]  # fmt: skip
        ),
    ),
    attack(
        _P,
        "control-groups",
        "limits lifted, or a program started by the kernel",
        """
held("looking")
for top in ("/sys/fs/cgroup",):
    for here, folders, names in os.walk(top):
        if here.count("/") > 6: folders.clear()
        for name in names:
            if name in ("cgroup.procs", "tasks", "release_agent", "notify_on_release",
                "memory.limit_in_bytes", "memory.max"):
                attempt(lambda: os.close(os.open(os.path.join(here, name),
                    os.O_WRONLY)) or os.path.join(here, name))
    attempt(lambda: os.mkdir(top + "/rollgym-attack") or os.rmdir(top + "/rollgym-attack"))
""",
    ),
    attack(
        _P,
        "lift-own-limits",
        "limits lifted",
        """
import resource
held("trying")
for name in ("NOFILE", "FSIZE", "AS", "CORE"):
    which = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(which)
    top = soft * 4 + 4096 if soft != -1 else -1
    if soft == -1: pwned(name, "has no limit"); continue
    try: resource.setrlimit(which, (top, max(hard, top) if hard != -1 else -1)); pwned(name, soft,
        resource.getrlimit(which))
    except (OSError, ValueError) as error: held(name, error)
""",
        control=True,
    ),
    attack(
        _P,
        "map-user-ids",
        "root in its own user namespace",
        """
for name in ("uid_map", "gid_map", "setgroups", "projid_map"):
    attempt(lambda: os.write(os.open("/proc/self/" + name, os.O_WRONLY), b"0 0 1"))
""",
    ),
    attack(
        _P,
        "type-into-terminal",
        "commands in the shell that started it",
        """
import fcntl
for fd in (0, 1, 2):
    for request in (0x5412, 0x541C, 0x5413): attempt(lambda: fcntl.ioctl(fd, request, b"#"))
attempt(lambda: os.open("/dev/tty", os.O_RDWR))
attempt(lambda: os.open("/dev/console", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
""",
        judge=told_or_killed,
    ),
)
