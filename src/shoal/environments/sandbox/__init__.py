"""Runs untrusted programs in Linux namespaces, with limits and a filter of system calls.

Without bubblewrap or namespaces there is no sandbox and no score, never a weaker sandbox.
"""

from shoal.environments.sandbox.process import Limits, Ran, Sandbox, require_sandbox

__all__ = ["Limits", "Ran", "Sandbox", "require_sandbox"]
