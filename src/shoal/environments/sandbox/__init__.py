"""Programs that nobody has read, run where they can do no harm: Linux namespaces, limits, a filter of system calls.

    view       what a program sees: the command line of bubblewrap
    seccomp    which system calls it may make
    runner     what runs inside: one fork per test (stands alone)
    process    Sandbox, Limits, Ran: a program, test by test; require_sandbox: whether this machine has what it takes

Where there is no bubblewrap or no namespaces there is no sandbox, and no score: never a weaker one.
"""

from shoal.environments.sandbox.process import Limits, Ran, Sandbox, require_sandbox

__all__ = ["Limits", "Ran", "Sandbox", "require_sandbox"]
