"""System calls denied to untrusted code: name, number on x86_64, number on aarch64. Data only.

All numbers below `FIRST_UNKNOWN` were reviewed; a call that is not named here is allowed. Those from there
on, and those between the two blocks of numbers in use (`GAP`), do not exist for the code.
"""

from __future__ import annotations

FIRST_UNKNOWN = 463
"""The first number that does not exist inside: calls from here on came after Linux 6.12. Before this is
raised, each new call must be reviewed."""
GAP: tuple[tuple[int, int], tuple[int, int]] = ((335, 424), (295, 424))
"""Of each machine: numbers that no call had when this was written, the first and the one after the last."""

NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # Inspection or control of other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "perf_event_open": (298, 241), "cachestat": (451, 451),
    # Slowing down others, the worker among them.
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    # Kernel interfaces with a history of vulnerabilities.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "lookup_dcookie": (212, 18),
    "personality": (135, 92), "vhangup": (153, 58), "uselib": (134, None), "lsm_get_self_attr": (459, 459),
    "lsm_set_self_attr": (460, 460), "lsm_list_modules": (461, 461),
    # Mounts and namespaces.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457),
    "listmount": (458, 458), "setns": (308, 268), "unshare": (272, 97), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # The machine itself.
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "sync": (162, 81),
    # What the kernel counts for each user, or for all of them: the host's processes need it too. A timer
    # could also wake a session that was stopped.
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0),
    "timer_create": (222, 107),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # Objects of other processes, by id.
    "shmat": (30, 196), "shmctl": (31, 195), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "mq_unlink": (241, 181),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
"""Denied everywhere."""

SHARED: dict[str, tuple[int | None, int | None]] = {
    # Landlock does not look at these, and the file or process may be the host's.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "inotify_add_watch": (254, 27),
    "connect": (42, 203), "bind": (49, 200),
    # A file that is on its way through a socket is held, and nothing shows it.
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
"""Denied where the code shares the host's files, processes and sockets."""

SIGNALS: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
"""Denied where nothing else scopes signals."""

CHECKED: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "socketpair": (53, 199),
    "prlimit64": (302, 261), "ioctl": (16, 29), "mmap": (9, 222), "fcntl": (72, 25),
    "rt_sigaction": (13, 134), "fallocate": (285, 47),
}  # fmt: skip
"""Filtered by their arguments."""
