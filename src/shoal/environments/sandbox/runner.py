"""The first process inside the sandbox: forks once for each test. Uses the standard library only, nothing of shoal.

    python -c RUNNER CONTROL FILTER UID MEMORY THREADS MODULES

The socket CONTROL first carries the program: eight bytes of length, then its text. The answer is one byte: ready. Then
follows a message for each test: S (standard input) or C (a call), the processor seconds, and the descriptors of input,
output, errors and, for a call, result. The answer is the status from the kernel and the microseconds of processor time,
eight bytes each. While a test runs, any byte asks how long the program has waited for a processor.

This process never holds the input or output of a test, so the next test, forked from it, cannot find them. Signals of a
program do not reach it, the first process of its namespace; when it ends, all processes inside end.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself takes long to load
import _socket
import _thread
import builtins
import ctypes
import gc
import os
import resource
import select
import sys

TYPE_CHECKING = False  # as typing says it, which takes long to load
if TYPE_CHECKING:
    import types
    from typing import Any

SEALED = 3  # the first descriptor that a program does not get; a call gets one more, for the return value
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
KILL, FILTER_MODE = 9, 2
MEGABYTE = 1 << 20
INT_BYTES = 4
ASKED = b"\xff" * 8  # in place of a status: an answer to a question follows
RECURSION, DEEPEST_VALUE = 600_000, 1000
# Names that programs use without an import: LeetCode defines them, and so do other graders.
MODULES = {
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "io", "itertools", "json", "math", "operator",
    "random", "re", "statistics", "string", "sys", "typing",
}  # fmt: skip
GRANTED = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping"
    " NamedTuple Optional Sequence Set Text Tuple Type TypeVar Union cast overload",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict UserDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile"
    " filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "math": "acos acosh asin asinh atan atan2 atanh ceil comb copysign cos cosh degrees dist e erf exp expm1 fabs"
    " factorial floor fmod frexp fsum gamma gcd hypot inf isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10"
    " log1p log2 modf nan perm pi prod radians sin sinh sqrt tan tanh tau trunc",
    "operator": "add itemgetter mul sub xor",
    "random": "choice randint randrange shuffle",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "sys": "maxsize setrecursionlimit stdin stdout",
}


def main() -> None:
    control, filter_, uid, memory, threads, modules = sys.argv[1:]
    os.dup2(int(control), SEALED)
    os.closerange(SEALED + 1, int(control) + 1)
    channel = _socket.socket(fileno=SEALED)
    libc = ctypes.CDLL(None, use_errno=True)
    confine(libc, int(uid))
    instructions = bytes.fromhex(filter_)
    program = Filter(len(instructions) // 8, instructions)
    code = exactly(channel, int.from_bytes(exactly(channel, 8), "little"))
    for name in filter(None, modules.split(",")):
        __import__(name)
    # the parent may have changed these
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    _signal.signal(_signal.SIGXCPU, _signal.SIG_DFL)
    # the stack limit is for the first thread; other threads get less, so that they fit into the memory
    _thread.stack_size(8 * MEGABYTE)
    gc.freeze()
    channel.sendall(b"R")
    # also of data: the parent may have set another limit for it
    limits = {kind: int(memory) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)}
    limits[resource.RLIMIT_NPROC] = int(threads) + 2
    while True:
        message, given = next_test(channel)
        if not message:
            return
        child = os.fork()
        if child == 0:
            try:
                take(given)
                forbid(libc, program, {**limits, resource.RLIMIT_CPU: message[1] + 1})
            except BaseException:  # noqa: BLE001
                os.kill(os.getpid(), KILL)  # a failure of the machinery, not of the program
            run(code, called=message[:1] == b"C")
        for descriptor in given:
            os.close(descriptor)
        until_ended(child, channel)
        _, status, usage = os.wait4(child, 0)
        used = int((usage.ru_utime + usage.ru_stime) * 1e6)
        channel.sendall(status.to_bytes(8, "little") + used.to_bytes(8, "little"))


def confine(libc: ctypes.CDLL, uid: int) -> None:
    """Drop root's rights, forbid tracing, and end together with the parent."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_PDEATHSIG, KILL), (PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def exactly(channel: _socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), MEGABYTE))
        if not part:
            raise SystemExit(0)
        parts += part
    return bytes(parts)


def next_test(channel: _socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _flags, _address = channel.recvmsg(2, _socket.CMSG_SPACE(4 * INT_BYTES))
    data = b"".join(part for _level, _type, part in ancillary)
    starts = range(0, len(data), INT_BYTES)
    return message, [int.from_bytes(data[start : start + INT_BYTES], sys.byteorder) for start in starts]


def until_ended(child: int, channel: _socket.socket) -> None:
    """Wait for the child; end everything if the parent is gone. Any byte asks how long the child waited to run."""
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(channel, select.POLLIN)
    while watched not in dict(poll.poll()):
        if not channel.recv(1):
            os._exit(0)
        waited_us = 0  # time in which the program was ready to run and did not, if the kernel reports it
        try:
            with open(f"/proc/{child}/schedstat", "rb") as file:  # noqa: PTH123
                waited_us = int(file.read().split()[1]) // 1000
        except (OSError, IndexError, ValueError):
            pass  # contextlib takes long to load
        channel.sendall(ASKED + waited_us.to_bytes(8, "little"))
    os.close(watched)


def take(given: list[int]) -> None:
    """Make the test's descriptors 0, 1, 2 (and 3), and close all others, also the socket."""
    # Copy them first: a descriptor with number 3 would be overwritten before it is used.
    spare = [os.dup(descriptor) for descriptor in given]
    for number, descriptor in enumerate(spare):
        os.dup2(descriptor, number)
    os.closerange(len(given), 256)


class Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("first", ctypes.c_char_p))


def forbid(libc: ctypes.CDLL, program: Filter, limits: dict[int, int]) -> None:
    """Set the limits, then the filter of system calls, which cannot be removed."""
    fixed = {
        resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }  # fmt: skip
    for kind, value in (fixed | limits).items():
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # At the limit of time the program gets a signal that nothing else sends; a second later it is killed.
        least = max(1, bound - 1) if kind == resource.RLIMIT_CPU else bound
        resource.setrlimit(kind, (least, bound))
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(FILTER_MODE), ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


def run(code: bytes, *, called: bool) -> None:
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(RECURSION)
    status = 0
    try:
        if called:
            call(code)
        else:
            main_module(code)
    except SystemExit as end:  # what a script would end with
        status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001  (whatever a program raises is its end)
        status = 1
        sys.excepthook(*sys.exc_info())
    finish(status)


def main_module(code: bytes) -> dict[str, Any]:
    """Runs the program as `__main__`; its names. Granted names are builtins: they do not pass for its own functions."""
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    compiled = compile(code, "solution.py", "exec", dont_inherit=True)
    names = mentioned(compiled)
    for name in names & MODULES:
        setattr(builtins, name, __import__(name))
    for granting, granted in GRANTED.items():
        for name in names.intersection(granted.split()):
            setattr(builtins, name, getattr(__import__(granting), name))
    exec(compiled, module.__dict__)
    return module.__dict__


def call(code: bytes) -> None:
    """Calls a function of the program, or a method of its class Solution, and says what it returned, as JSON."""
    import json

    wanted = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    names, name = main_module(code), wanted["function"]
    # a method of Solution first: beside it, a function of that name is often one that the program only imported
    own = name in names and not hasattr(names.get("Solution"), name)
    value = (names[name] if own else getattr(names["Solution"](), name))(*wanted["arguments"])
    sys.setrecursionlimit(DEEPEST_VALUE)
    returned = json.dumps(value).encode()
    view = memoryview(returned)
    while view:
        view = view[os.write(SEALED, view) :]


def mentioned(code: types.CodeType) -> set[str]:
    inner = (mentioned(constant) for constant in code.co_consts if isinstance(constant, type(code)))
    return set(code.co_names).union(*inner)


def finish(status: int) -> None:
    """The end of a script, without taking the interpreter down: threads, exit functions, buffers."""
    import atexit

    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        # as at the end of a script: a stream that the program has closed or taken away is no error
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except BaseException:  # noqa: BLE001
        status = status or 1
    os._exit(status)


if __name__ == "__main__":
    main()
