"""The filter, instruction by instruction for both machines, and for real on this one."""

import errno
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rollgym.core.errors import UsageError
from rollgym.sandbox.seccomp import ALLOW, ARCHITECTURES, KILL, X32, Profile, program
from rollgym.sandbox.syscalls import CHECKED, GAP, NUMBERS, SHARED, SIGNALS

MACHINES = sorted(ARCHITECTURES)
ORDINARY = {
    "read": (0, 63),
    "write": (1, 64),
    "openat": (257, 56),
    "close": (3, 57),
    "futex": (202, 98),
    "execve": (59, 221),
    "wait4": (61, 260),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
    "munmap": (11, 215),
    "landlock_create_ruleset": (444, 444),
    "pidfd_open": (434, 434),
}
PROFILES = [
    Profile(),
    Profile(shared_host=True, no_signals=True, no_shared_memory=True),
]


def verdict(code: bytes, number: int, *arguments: int, audit: int) -> int:
    """What the kernel would do: a small machine for the instructions that the filter uses."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *(arguments + (0,) * 6)[:6])
    steps = list(struct.iter_unpack("HBBI", code))
    at = accumulator = 0
    while True:
        operation, true, false, constant = steps[at]
        at += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            accumulator &= constant
        else:
            holds = {
                0x15: accumulator == constant,
                0x45: bool(accumulator & constant),
                0x35: accumulator >= constant,
            }[operation]
            at += true if holds else false


def asked(machine: str, name: str, *arguments: int, profile: Profile | None = None) -> int:
    column, audit = ARCHITECTURES[machine]
    tables = NUMBERS | SHARED | SIGNALS | CHECKED | ORDINARY
    number = tables[name][column]
    assert number is not None
    return verdict(program(profile, machine), number, *arguments, audit=audit)


def refused(why: int = errno.EPERM) -> int:
    return 0x00050000 | why


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_of_the_list_is_refused(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    names = [name for name, numbers in NUMBERS.items() if numbers[column] is not None]
    assert len(names) > 55
    assert {name: asked(machine, name) for name in names} == dict.fromkeys(names, refused())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_what_every_program_needs_is_allowed(machine: str, profile: Profile) -> None:
    answers = {name: asked(machine, name, profile=profile) for name in ORDINARY}
    assert answers == dict.fromkeys(ORDINARY, ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_number_gets_an_answer(machine: str, profile: Profile) -> None:
    code, (_, audit) = program(profile, machine), ARCHITECTURES[machine]
    answers = {verdict(code, number, 1, 1, audit=audit) for number in range(600)}
    known = (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
    assert answers <= {ALLOW, *map(refused, known)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_number_that_was_not_looked_at_does_not_exist(machine: str, profile: Profile) -> None:
    code, (column, audit) = program(profile, machine), ARCHITECTURES[machine]
    # file_getattr, file_setattr and listns are the last ones of Linux 6.19.
    unknown = [*range(*GAP[column]), 463, 464, 465, 466, 467, 468, 469, 470, 471, 600, 10_000, X32 - 1]
    assert {verdict(code, number, audit=audit) for number in unknown} == {refused(errno.ENOSYS)}
    assert verdict(code, GAP[column][0] - 2, audit=audit) == ALLOW
    assert verdict(code, 462, audit=audit) == ALLOW  # mseal


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "name",
    ["io_setup", "timer_create", "inotify_init1", "shmat", "msgrcv", "semtimedop", "mq_unlink", "sync"],
)
def test_what_the_user_of_the_host_shares_is_refused(machine: str, name: str) -> None:
    assert asked(machine, name) == refused()


@pytest.mark.parametrize("machine", MACHINES)
def test_no_process_may_ignore_its_children(machine: str) -> None:
    assert asked(machine, "rt_sigaction", 17, 0x7FFF_0000_1000) == refused()
    assert asked(machine, "rt_sigaction", 17, 0x7FFF_0000_0000) == refused()  # the lower half is 0
    assert asked(machine, "rt_sigaction", 17, 0x1000) == refused()
    assert asked(machine, "rt_sigaction", 17, 0) == ALLOW  # only asks
    assert asked(machine, "rt_sigaction", 10, 0x7FFF_0000_1000) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_nothing_may_wake_a_session_that_was_stopped(machine: str, profile: Profile) -> None:
    setsig, setlease, notify = 10, 1024, 1026
    for command in (setsig, setlease, notify):
        assert asked(machine, "fcntl", 3, command, 18, profile=profile) == refused()
    setown, setown_ex = 8, 15  # SIGIO may go to a process of the host
    for command in (setown, setown_ex):
        answer = asked(machine, "fcntl", 3, command, 1, profile=profile)
        assert answer == (refused() if profile.shared_host else ALLOW)
    for command in (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031):
        assert asked(machine, "fcntl", 3, command, profile=profile) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_attributes_of_files_and_huge_pages_are_the_host_s(machine: str, profile: Profile) -> None:
    for request in (0x40086602, 0x401C5820, 0x40087602, 0x40806685, 0x800C6613):
        assert asked(machine, "ioctl", 3, request, profile=profile) == refused()
    assert asked(machine, "mmap", 0, 4096, 3, 0x40022, profile=profile) == refused(errno.ENOMEM)
    assert asked(machine, "mmap", 0, 4096, 3, 0x22, profile=profile) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_on_a_shared_host_disk_cannot_be_taken_unseen(machine: str) -> None:
    shared = Profile(shared_host=True)
    assert asked(machine, "fallocate", profile=shared) == refused(errno.EOPNOTSUPP)
    assert asked(machine, "sendmsg", profile=shared) == refused()  # a file may be on its way in it
    assert asked(machine, "fallocate") == asked(machine, "sendmsg") == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_another_machine_s_calls_kill(machine: str) -> None:
    other = next(audit for name, (_, audit) in ARCHITECTURES.items() if name != machine)
    assert verdict(program(None, machine), 0, audit=other) == KILL
    assert verdict(program(None, machine), 0, audit=0x40000003) == KILL  # 32-bit x86


def test_the_other_numbers_of_x86_64_kill() -> None:
    audit = ARCHITECTURES["x86_64"][1]
    assert verdict(program(None, "x86_64"), 0x40000000 | 101, audit=audit) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 1 << 28, 1 << 29, 1 << 30])
def test_a_clone_may_not_make_a_namespace(machine: str, flag: int) -> None:
    assert asked(machine, "clone", flag | 17) == refused()
    assert asked(machine, "clone", 0x3D0F00) == ALLOW  # a thread
    assert asked(machine, "clone", 0x1200011) == ALLOW  # a fork


@pytest.mark.parametrize("machine", MACHINES)
def test_clone3_is_unknown_so_that_the_c_library_takes_clone(machine: str) -> None:
    assert asked(machine, "clone3") == refused(errno.ENOSYS)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_of_46_socket_families_one_is_left(machine: str, call: str) -> None:
    allowed = [family for family in range(46) if asked(machine, call, family, 1) == ALLOW]
    assert allowed == [1]
    assert asked(machine, call, 40, 1) == refused(errno.EAFNOSUPPORT)  # vsock: no namespace holds it


@pytest.mark.parametrize("machine", MACHINES)
def test_on_a_shared_host_only_connected_pairs_are_left(machine: str) -> None:
    shared = Profile(shared_host=True)
    assert asked(machine, "socket", 1, 1, profile=shared) == refused(errno.EAFNOSUPPORT)
    assert asked(machine, "socketpair", 1, 1 | 0x80000, profile=shared) == ALLOW
    assert asked(machine, "socketpair", 1, 5, profile=shared) == ALLOW
    assert asked(machine, "socketpair", 1, 2, profile=shared) == refused()  # could send to any address
    assert asked(machine, "socketpair", 2, 1, profile=shared) == refused(errno.EAFNOSUPPORT)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_shared_host_s_files_keep_their_rights(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    names = [name for name, numbers in SHARED.items() if numbers[column] is not None]
    shared = Profile(shared_host=True)
    assert {asked(machine, name, profile=shared) for name in names} == {refused()}
    assert {asked(machine, name) for name in names} == {ALLOW}


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_are_refused_only_where_asked(machine: str) -> None:
    assert {asked(machine, name, 1, 9) for name in SIGNALS} == {ALLOW}
    assert {asked(machine, name, 1, 9, profile=Profile(no_signals=True)) for name in SIGNALS} == {refused()}


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_of_others_and_typing_for_others_are_refused(machine: str) -> None:
    assert asked(machine, "prlimit64", 0) == ALLOW
    assert asked(machine, "prlimit64", 1) == refused()
    assert asked(machine, "ioctl", 0, 0x5412) == refused()
    assert asked(machine, "ioctl", 0, 0x541C) == refused()
    assert asked(machine, "ioctl", 0, 0x5401) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_shared_memory_without_a_name_is_refused_where_nothing_counts_it(machine: str) -> None:
    counted, uncounted = Profile(), Profile(no_shared_memory=True)
    for flags, hidden in ((0x21, True), (0x23, True), (0x22, False), (0x01, False), (0x02, False)):
        assert asked(machine, "mmap", 0, 4096, 3, flags, profile=counted) == ALLOW
        answer = asked(machine, "mmap", 0, 4096, 3, flags, profile=uncounted)
        assert answer == (refused() if hidden else ALLOW), hex(flags)


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_are_those_of_the_kernel_s_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not here")
    column = ARCHITECTURES[machine][0]
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    real = {name: int(number) for name, number in found}
    ours = {name: pair[column] for name, pair in (NUMBERS | SHARED | SIGNALS | CHECKED).items()}
    wrong = {name: (number, real[name]) for name, number in ours.items() if real.get(name, number) != number}
    assert not wrong
    assert len(ours.keys() & real.keys()) > 80


def test_an_unknown_machine_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="No seccomp filter for riscv64; supported: x86_64 or aarch64"):
        program(None, "riscv64")


REAL = """
import ctypes, errno, os, socket, subprocess, sys, threading
from rollgym.sandbox.seccomp import Profile, program
from rollgym.sandbox.worker_confinement import install_filter
install_filter(program(Profile(no_shared_memory=True)))
libc = ctypes.CDLL(None, use_errno=True)
def refused(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "allowed"
def clone():
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "")
import mmap, resource
print(refused(lambda: socket.socket(socket.AF_INET)))
print(refused(lambda: socket.socket(socket.AF_UNIX).close()))
print(refused(clone))
print(refused(lambda: os.memfd_create("x")))
print(refused(lambda: mmap.mmap(-1, 4096)))
print(refused(lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)))
print(refused(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU)))
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout.strip())
"""


def test_a_process_behind_the_real_filter() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [
        "EAFNOSUPPORT",
        "allowed",
        "EPERM",
        "EPERM",
        "EPERM",
        "allowed",
        "EPERM",
        "thread",
        "child",
    ], done.stderr


def test_a_filter_that_does_not_hold_is_noticed() -> None:
    code = (
        "import struct; from rollgym.sandbox.worker_confinement import install_filter;"
        "install_filter(struct.pack('HBBI', 0x06, 0, 0, 0x7FFF0000))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "the seccomp filter is not active" in done.stderr
