"""Programs that nobody has read, run where they can do no harm: Linux namespaces, limits, a filter of system calls.

Where there is no bubblewrap or no namespaces there is no sandbox, and no score: never a weaker one.
"""

from shoal.environments.sandbox.process import Limits, Ran, Sandbox, require_sandbox

__all__ = ["Limits", "Ran", "Sandbox", "require_sandbox"]
