"""The command line of bubblewrap, which decides what a program in the sandbox sees.

    /usr/lib, /lib, /lib64, the interpreter    read only; installed packages are hidden
    /dev                        null, zero, urandom, and the program's own input and output
    /proc                       of the sandbox's own processes
    nothing else                no writable place, no /etc, no home, no network, no environment

If root starts it, the sandbox is made with root's rights and the program runs as an unused user, because limits do not
apply to root. Any other user's sandbox is made in a user namespace.
"""

import os
import secrets
import shutil
import sys
from functools import cache
from pathlib import Path

from shoal.errors import EnvironmentSetupError

INSTALL = "install bubblewrap (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
STREAMS = {"/dev/fd": "", "/dev/stdin": "/0", "/dev/stdout": "/1", "/dev/stderr": "/2"}
STACK_KB = 65_536  # for deep recursion; it counts as memory once it is used
SHELL = f'ulimit -c 0; ulimit -S -s {STACK_KB} 2>/dev/null; exec "$@"'

ISOLATED = (
    "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent",
    "--new-session", "--as-pid-1", "--hostname", "sandbox", "--cap-drop", "ALL",
)  # fmt: skip
_AS_ROOT = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
ENVIRON = {
    "PATH": "/nowhere",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets have the same order for every validator
    "MALLOC_ARENA_MAX": "1",  # otherwise each thread reserves address space, which is limited
}
# -S: no installed packages. Integers of any length may be printed, as in older Python versions.
PYTHON_OPTIONS = ("-s", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")


@cache
def interpreter() -> tuple[Path, Path]:
    """The Python for programs, and its prefix: this process's, without its virtual environment."""
    executable = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    return executable, Path(os.path.realpath(sys.base_prefix))


def bubblewrap() -> str:
    if not sys.platform.startswith("linux"):
        raise EnvironmentSetupError(f"programs cannot be run safely on {sys.platform}: the sandbox needs Linux")
    found = shutil.which("bwrap")
    if found is None:
        raise EnvironmentSetupError(f"programs cannot be run safely here: bwrap is not on the PATH; {INSTALL}")
    return found


def spare_uid() -> int:
    """An unused user id for a sandbox that root starts; 0 if we are not root. Each sandbox has its own: the kernel
    counts processes per user, and programs must not share the limit."""
    if os.geteuid() != 0:
        return 0
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    first, _outside, count = max((list(map(int, line.split())) for line in lines), key=lambda row: row[0] + row[2])
    last = min(first + count, 1 << 31) - 2
    return last - secrets.randbelow(max(1, min((last - first) // 2, 1 << 24)))


def command(inside: list[str], *, uid: int) -> list[str]:
    """The whole command line; `inside` are the interpreter's arguments, `uid` comes from `spare_uid`."""
    executable, _prefix = interpreter()
    return [
        *("/bin/sh", "-c", SHELL, "sandbox", bubblewrap()),
        *ISOLATED,
        # as root: only the capabilities to change the user; they are dropped after that
        *(_AS_ROOT if uid else ("--unshare-user", "--uid", "65534", "--gid", "65534")),
        *_files(),
        *("--proc", "/proc", "--remount-ro", "/proc", "--perms", "0755", "--dir", "/dev"),
        *(option for device in DEVICES for option in ("--dev-bind", device, device)),
        *(option for name, fd in STREAMS.items() for option in ("--symlink", f"/proc/self/fd{fd}", name)),
        *("--remount-ro", "/", "--chdir", "/", "--"),
        *(str(executable), *PYTHON_OPTIONS, *inside),
    ]


def mounted(path: Path) -> list[str]:
    link = path.is_symlink()
    return ["--symlink", str(path.readlink()), str(path)] if link else ["--ro-bind", str(path), str(path)]


@cache
def _files() -> tuple[str, ...]:
    executable, prefix = interpreter()
    options = ["--perms", "0755", "--dir", "/usr"]
    places = [path for path in SYSTEM_LIBRARIES if Path(path).is_dir()]
    for path in places:
        options += mounted(Path(path))
    own = [str(path) for path in (prefix / "lib", executable) if str(path) not in places]
    # Parent folders may be private (a home); inside they contain nothing else.
    for folder in sorted({str(parent) for path in own for parent in Path(path).parents}, key=len)[1:]:
        if folder not in ("/usr", *places):
            options += ["--perms", "0755", "--dir", folder]
    for path in own:
        options += ["--ro-bind", path, path]
    # Hide installed packages: programs have the standard library only, the same for every validator.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    bases = {prefix / "lib", prefix / "lib64", Path("/usr/lib"), Path("/usr/lib64")}
    names = ("site-packages", "dist-packages")
    folders = [base / name / packages for base in bases for name in ("python3", version) for packages in names]
    for path in sorted({os.path.realpath(folder) for folder in folders if folder.is_dir()}):
        options += ["--tmpfs", path, "--remount-ro", path]
    return tuple(options)
