"""A seccomp filter of the system calls that a program may make, for x86_64 and aarch64.

The filter closes ways around the namespaces: new processes (without fork and exec nothing outlives a test), access to
other processes, objects that stay for the next test, and parts of the kernel that test programs do not need and that
had most of its security bugs, all sockets but local ones among them. A refused call returns EPERM; a call newer than
the list returns ENOSYS, as on an older kernel.
"""

import struct
from functools import cache
from typing import Final

from shoal.errors import EnvironmentSetupError

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _RETURN, _EQUAL, _GREATER, _ANY_BIT = 0x20, 0x06, 0x15, 0x25, 0x45
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # arguments have eight bytes, the lower half first

CLONE_THREAD, AF_UNIX, SIGABRT, RLIMIT_STACK, F_SETSIG = 0x10000, 1, 6, 3, 10

NEWEST: Final = 450  # the newest call that was considered; from 424 on all architectures have the same numbers
ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); None where there is no such call.
DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "timer_create": (222, 107),  # may send any signal: a program could feign that it was killed from outside
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "setrlimit": (160, 164),
    # objects that would stay for the next test
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_notify": (244, 184),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # corners of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "syslog": (103, 116), "vhangup": (153, 58), "personality": (135, 92), "modify_ldt": (154, None),
    "iopl": (172, None), "ioperm": (173, None), "uselib": (134, None), "lookup_dcookie": (212, 18),
    "mbind": (237, 235), "migrate_pages": (256, 238), "move_pages": (279, 239), "set_mempolicy": (238, 237),
    "memfd_secret": (447, 447),
}  # fmt: skip

# Calls that depend on their arguments.
_CLONE, _CLONE3, _SOCKET, _TGKILL = (56, 220), (435, 435), (41, 198), (234, 131)
_PRLIMIT64, _FCNTL = (302, 261), (72, 25)

Instruction = tuple[int, int, int, int]


@cache
def assemble(machine: str) -> bytes:
    """The filter for the kernel, eight bytes per instruction. `machine` as in `uname -m`."""
    if machine not in ARCHITECTURES:
        raise EnvironmentSetupError(f"there is no filter of system calls for {machine}: no program is run here")
    column = list(ARCHITECTURES).index(machine)
    program = [  # the check of the newest number also refuses x86_64's second numbering, which begins at 2³⁰
        _load(_ARCHITECTURE_AT), (_EQUAL, 1, 0, ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL),
        _load(_NUMBER_AT), (_GREATER, 0, 1, NEWEST), _refuse(ENOSYS),
    ]  # fmt: skip
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), _refuse()]
    for call, judged in _judged():
        program += [(_EQUAL, 0, len(judged), call[column]), *judged]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _judged() -> list[tuple[tuple[int, int], list[Instruction]]]:
    """Calls that are allowed with some arguments only. Each list ends with a return."""
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    return [
        (_CLONE, [_load(_ARGUMENTS_AT), (_ANY_BIT, 0, 1, CLONE_THREAD), allow, _refuse()]),
        # a filter cannot read its flags, which are in memory; the C library falls back to clone
        (_CLONE3, [_refuse(ENOSYS)]),
        (_SOCKET, [_load(_ARGUMENTS_AT), (_EQUAL, 0, 1, AF_UNIX), allow, _refuse()]),
        # abort() and nothing else
        (_TGKILL, [_load(_ARGUMENTS_AT + 16), (_EQUAL, 0, 1, SIGABRT), allow, _refuse()]),
        (_FCNTL, [_load(_ARGUMENTS_AT + 8), (_EQUAL, 0, 1, F_SETSIG), _refuse(), allow]),
        # limits may be read; only one's own stack's may be set, which programs do that recurse deeply
        (_PRLIMIT64, [
            _load(_ARGUMENTS_AT + 16), (_EQUAL, 0, 3, 0), _load(_ARGUMENTS_AT + 20), (_EQUAL, 0, 1, 0), allow,
            _load(_ARGUMENTS_AT), (_EQUAL, 0, 3, 0), _load(_ARGUMENTS_AT + 8), (_EQUAL, 0, 1, RLIMIT_STACK), allow,
            _refuse(),
        ]),
    ]  # fmt: skip


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _refuse(errno: int = EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | errno)
