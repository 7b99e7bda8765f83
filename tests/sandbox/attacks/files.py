"""Files of the host: read, written, named, led to by links."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import Attack, Step, attack, run, survived, unfetched

_F = "files"

FILES: tuple[Attack, ...] = (
    attack(
        _F,
        "read-host-file",
        "any file of the host",
        'attempt(lambda: open(STAGE["file"]).read())',
        control=True,
    ),
    attack(
        _F,
        "read-host-file-dotdot",
        "any file of the host",
        'attempt(lambda: open("../" * 30 + STAGE["file"][1:]).read())',
        control=True,
    ),
    attack(
        _F,
        "read-proc-self-root",
        "the root before the walls",
        'attempt(lambda: open("/proc/self/root" + STAGE["file"]).read())',
        control=True,
    ),
    attack(
        _F,
        "read-proc-1-root",
        "the root of pid 1",
        """
for pid in (1, os.getppid()):
    for way in ("root", "cwd"):
        attempt(lambda: open(f"/proc/{pid}/{way}" + "/.." * 9 + STAGE["file"]).read())
""",
    ),
    attack(
        _F,
        "read-password-hashes",
        "accounts of the host",
        """
for name in ("shadow", "shadow-", "gshadow", "sudoers"):
    attempt(lambda: len(open("/etc/" + name).read()))
""",
    ),
    attack(
        _F,
        "read-home",
        "keys and tokens in home folders",
        """
seen = [STAGE["home"]]
for top in ("/root", "/home"):
    for here, _, names in os.walk(top):
        seen += [os.path.join(here, n) for n in names]
        if len(seen) > 2000: break
hidden = [n for n in seen if "rollgym-attack" in n or ".ssh" in n or ".netrc" in n or ".bash_history" in n]
for name in hidden: attempt(lambda: open(name).read() if name == STAGE["home"] else len(open(name).read()))
""",
        control=True,
    ),
    attack(
        _F,
        "stat-host-file",
        "which files the host has",
        """
attempt(lambda: os.stat(STAGE["file"]).st_size)
""",
        control=True,
    ),
    attack(
        _F,
        "write-host-file",
        "files changed or planted on the host",
        """
attempt(lambda: open(STAGE["file"], "w").write("changed"))
attempt(lambda: open(STAGE["folder"] + "/planted", "w").write("x"))
attempt(lambda: os.rename(STAGE["file"], STAGE["folder"] + "/moved"))
""",
        control=True,
    ),
    attack(
        _F,
        "change-rights-of-host-file",
        "files of the host opened to others",
        """
attempt(lambda: os.chmod(STAGE["owned"], 0o666))
attempt(lambda: os.utime(STAGE["owned"], (1, 1)))
attempt(lambda: os.setxattr(STAGE["owned"], "user.rollgym", b"x"))
""",
        control=True,
    ),
    attack(
        _F,
        "write-system-folders",
        "programs and settings of the host changed",
        """
for folder in ("/", "/usr", "/usr/lib", "/usr/bin", "/etc", "/lib", "/bin", "/opt", "/root", "/home",
    "/sys", "/dev",
               os.path.dirname(os.__file__), os.path.dirname(sys.executable or "/usr/bin/x")):
    name = folder + "/rollgym-attack-" + STAGE["mark"]
    def plant(): open(name, "x").close(); os.unlink(name); return name
    attempt(plant)
""",
    ),
    attack(
        _F,
        "change-python",
        "the interpreter of the next execution",
        """
for name in (os.__file__, sys.executable or "/usr/bin/python3", "/usr/bin/python3"):
    attempt(lambda: os.close(os.open(name, os.O_WRONLY)) or name)
    attempt(lambda: os.chmod(name, 0o777) or name)
""",
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "endless-writable-place",
        "memory or disk without a limit",
        """
try: mounts = open("/proc/self/mountinfo").readlines()
except OSError as error: mounts = []; held(error)
for line in mounts:
    place = line.split()[4].encode().decode("unicode_escape")
    name = place + "/probe-" + STAGE["mark"]
    try: open(name, "x").close(); os.unlink(name)
    except OSError: held(place); continue
    size = os.statvfs(place).f_blocks * os.statvfs(place).f_frsize
    pwned(place, size) if not size or size > 1 << 30 else held(place, size)
""",
    ),
    attack(
        _F,
        "open-devices",
        "memory, disks and machines of the host",
        """
for name in ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "vda", "sda", "nvme0n1", "loop0",
    "loop-control", "net/tun",
             "vsock", "vhost-vsock", "vhost-net", "cpu/0/msr", "mapper/control", "snapshot", "rtc0"):
    attempt(lambda: os.close(os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK)) or name)
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "make-device-nodes",
        "disks of the host",
        """
import stat
for kind, number in ((stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFCHR,
    os.makedev(1, 3))):
    def node():
        os.mknod("node", kind | 0o666, number)
        try: return os.close(os.open("node", os.O_RDONLY))
        finally: os.unlink("node")
    attempt(node)
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "hardlink-host-file",
        "a file of the host inside the working folder",
        run('attempt(lambda: (os.link(STAGE["file"], "link"), open("link").read()))'),
        Step("read", "link"),
        judge=unfetched,
    ),
    attack(
        _F,
        "fetch-symlink",
        "the host's own `read` follows a link",
        run('os.symlink(STAGE["file"], "out.txt"); say("TRIED")'),
        Step("read", "out.txt"),
        judge=unfetched,
    ),
    attack(
        _F,
        "fetch-through-linked-folder",
        "the host's own `read` follows a link on the way",
        run('os.symlink(STAGE["folder"], "folder"); os.symlink("/", "root"); say("TRIED")'),
        Step("read", "folder/secret.txt"),
        Step("read", "root/FOLDER/secret.txt"),
        judge=unfetched,
    ),
    attack(
        _F,
        "fetch-proc-link",
        "the environment of the reading process",
        run('os.symlink("/proc/self/environ", "env"); os.symlink("/proc/self/fd/0", "fd"); say("TRIED")'),
        Step("read", "env"),
        judge=unfetched,
    ),
    attack(
        _F,
        "fetch-by-path",
        "files outside by a name with dots or a slash",
        run('say("TRIED")'),
        Step("read", "FOLDER/secret.txt"),
        Step("read", "../../../../../../FOLDER/secret.txt"),
        judge=unfetched,
    ),
    attack(
        _F,
        "fetch-pipe",
        "the host hangs in `read`",
        run('os.mkfifo("out"); say("TRIED")'),
        Step("read", "out"),
        judge=unfetched,
    ),
    attack(
        _F,
        "fetch-endless-file",
        "the memory of the host",
        run('os.symlink("/dev/zero", "zero"); say("TRIED")'),
        Step("read", "zero"),
        judge=unfetched,
    ),
    attack(
        _F,
        "store-through-symlink",
        "the host's own `write` follows a link",
        run('os.symlink(STAGE["file"], "in.txt"); os.symlink(STAGE["folder"], "folder"); say("TRIED")'),
        Step("write", "in.txt"),
        Step("write", "folder/planted"),
        judge=unfetched,
    ),
    attack(
        _F,
        "store-into-pipe",
        "the host hangs in `write`",
        run('os.mkfifo("in.txt"); os.mkdir("folder"); say("TRIED")'),
        Step("write", "in.txt"),
        Step("write", "folder"),
        judge=unfetched,
    ),
    attack(
        _F,
        "swap-working-folder",
        "later executions work elsewhere",
        """
say("TRIED")
here = os.getcwd()
wait = lambda: time.sleep(0.2)
for change in (lambda: os.rename(here, here + "-gone"), wait, lambda: os.symlink("/usr", here), wait):
    try: change()
    except OSError as error: held(error)
""",
        judge=survived,
    ),
)
