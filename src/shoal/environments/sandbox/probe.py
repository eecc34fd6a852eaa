"""Whether this machine can run programs safely: by running one."""

from __future__ import annotations

from shoal.environments.sandbox import view
from shoal.environments.sandbox.limits import Limits
from shoal.environments.sandbox.process import Sandbox
from shoal.errors import EnvironmentSetupError, ScoringFailure

# Two threads: kernels before 5.14 count a user's processes across namespaces, and a limit on them is then none of ours.
HELLO = b"""
import threading
words = []
threads = [threading.Thread(target=words.append, args=(word,)) for word in ("hello", "there")]
for thread in threads:
    thread.start()
    thread.join()
print(*words, input())
"""


def require_sandbox() -> None:
    """Runs one program. An `EnvironmentSetupError` says what is missing and how to get it."""
    view.bubblewrap()
    try:
        with Sandbox(HELLO, Limits()) as sandbox:
            ran = sandbox.run(b"world\n")
    except ScoringFailure as failure:
        raise EnvironmentSetupError(f"programs cannot be run safely here: {failure}. {advice(str(failure))}") from None
    if ran.output != b"hello there world\n":
        said = ran.errors.decode(errors="replace").strip().splitlines()
        raise EnvironmentSetupError(
            f"programs cannot be run safely here: one that starts a thread and says hello ended with {ran.ended!r}"
            f" ({said[-1] if said else 'it said nothing'}); this needs Linux 5.14 or later"
        )


def advice(failure: str) -> str:
    """What to do where bubblewrap fails with these words."""
    if "namespace" in failure or "not permitted" in failure or "Permission denied" in failure:
        return (
            "bubblewrap may not make namespaces: allow user namespaces"
            " (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1,"
            " kernel.apparmor_restrict_unprivileged_userns=0), or, in a container, start it with them allowed"
        )
    return "See docs/guides/code-rewards.md"
