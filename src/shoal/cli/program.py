"""How the person at the terminal calls this program again; see `shoal.runtime.text`."""

from __future__ import annotations

from shoal.runtime.text import python_command, shoal_command

__all__ = ["python_command", "shoal_command"]
