"""Which of its extras (`pip install 'shoal-rl[worker]'`) this installation has, by the package's own metadata."""

import re
from importlib import metadata

from shoal.errors import UserError
from shoal.runtime.text import count_of, install_command

DISTRIBUTION = "shoal-rl"
REQUIREMENT = re.compile(r"([\w.-]+).*?;.*\bextra == ['\"]([\w-]+)['\"]")


def require(extra: str, what: str) -> None:
    """Raise `UserError`, which says how to install it, if a package of `extra` is not installed that `what` needs."""
    if absent := missing(extra):
        more = f" and {count_of(len(absent) - 1, 'other package')}" if len(absent) > 1 else ""
        is_not = f"{absent[0]}{more}, which {'is' if len(absent) == 1 else 'are'} not installed"
        raise UserError(f"{what} needs {is_not}: {install_command(of_extra(extra))}")


def of_extra(extra: str) -> str:
    return f"'{DISTRIBUTION}[{extra}]'"


def missing(extra: str) -> list[str]:
    try:
        found = map(REQUIREMENT.match, metadata.requires(DISTRIBUTION) or ())
    except metadata.PackageNotFoundError:  # a clone on PYTHONPATH: what is missing is seen at its import
        return []
    return [match[1] for match in found if match and match[2] == extra and not _is_installed(match[1])]


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
