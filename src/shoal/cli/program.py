"""How the person at the terminal calls this program again; see `shoal.runtime.program`."""

from __future__ import annotations

from shoal.runtime.program import python_command, shoal_command

__all__ = ["python_command", "shoal_command"]
