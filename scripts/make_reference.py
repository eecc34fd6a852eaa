"""Write docs/reference from the code: a recipe's settings, the commands, the hub's HTTP calls, reasons of verdicts.

.venv/bin/python scripts/make_reference.py            # write
.venv/bin/python scripts/make_reference.py --check    # exit 1 if what is there is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shoal.cli.help import argument_name, leaves, meaning, option_name
from shoal.cli.main import app as cli
from shoal.hub.service.calls import TABLE
from shoal.run.recipe import Recipe
from shoal.trainer.guards import GuardRule, GuardSettings
from shoal.validator import checks, verdicts

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- written by scripts/make_reference.py; change the code, not this page -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    check = parser.parse_args().check
    pages = {
        "recipe.md": recipe_page(),
        "commands.md": commands_page(),
        "http.md": http_page(),
        "reasons.md": reasons_page(),
    }
    stale = [name for name, text in pages.items() if not is_current(REFERENCE / name, text)]
    if check:
        for name in stale:
            sys.stderr.write(f"docs/reference/{name} is out of date: run scripts/make_reference.py\n")
        return 1 if stale else 0
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (REFERENCE / name).write_text(pages[name])
        sys.stdout.write(f"wrote docs/reference/{name}\n")
    return 0


def is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


# ── recipe.md ────────────────────────────────────────────────────────────────────────────────────────────────────


def recipe_page() -> str:
    parts = [
        "# Recipe\n",
        NOTE,
        "A recipe is a TOML file. Every key has a default; an unknown key is refused with the nearest right name. "
        "`shoal run recipe.toml --dry-run` prints the whole of it, "
        "`--set section.key=value` changes one key, `--set section.key=` takes it out of the recipe, "
        "`--set section.key=none` leaves a setting without a value, if it may have none.\n",
    ]
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        assert isinstance(section, type), name
        assert issubclass(section, BaseModel), name
        parts.append(f"## [{name}]\n\n{summary(section)}\n\n| key | default | meaning |\n|---|---|---|")
        parts += [f"| `{key}` | {default_of(info)} | {info.description or ''} |" for key, info in settings(section)]
        parts.append("")
    return "\n".join(parts)


def summary(section: type[BaseModel]) -> str:
    for kind in section.__mro__:
        if issubclass(kind, BaseModel) and kind.__doc__ and kind is not BaseModel:
            return " ".join(kind.__doc__.split())
    return ""


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for key, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings(info.annotation, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", info
    if section is GuardSettings:
        yield from settings(GuardRule, f"{prefix}NAME.")


def default_of(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None else f"`{value!r}`".replace("'", '"')


# ── commands.md ──────────────────────────────────────────────────────────────────────────────────────────────────


BAR = chr(92) + "|"  # in a table


def commands_page() -> str:
    group: Any = typer.main.get_command(cli)
    parts = ["# Commands\n", NOTE]
    for name, command in leaves(group):
        text, example = " ".join((command.help or "").split()), command.epilog.rpartition("Example: ")[2]
        parts.append(f"## shoal {name}\n\n{text}\n\n    {example}\n\n| argument | meaning |\n|---|---|")
        for parameter in command.params:
            named = argument_name if parameter.param_type_name == "argument" else option_name
            cells = (f"`{named(parameter)}`", meaning(parameter))
            parts.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


# ── http.md ──────────────────────────────────────────────────────────────────────────────────────────────────────


HTTP = """\
The hub of a shoal run. Reading is open to anyone; every other call is signed by the caller's Ed25519 key with five
headers: `shoal-node` (the node id), `shoal-time` (milliseconds since 1970), `shoal-nonce` (8 to 64 characters, never
used before), `shoal-body` (SHA-256 of the body, hex) and `shoal-signature`, the signature in hex over these lines
joined by newlines:

    shoal/request/v1
    <method> <newline> <run id> <newline> <path with query> <newline> <node> <newline> <time> <newline> <nonce>
    <SHA-256 of the body, hex>

A time more than two minutes off the hub's is refused with `auth.skew`, and the answer's `clock` is the hub's time: a
`HubClock`, signed for the node and nonce of that very request. `shoal.client.HubClient` does all this for you. What a
call takes and answers are JSON messages of `shoal.protocol`, or bulk bodies: msgpack in a zstd frame. Every refusal is
a `Problem` with a stable `code` and a sentence: 401 `auth.*` (the caller is not proven), 403 (it may not do this), 404,
409 (it contradicts what was said before), 410 `lease.*` (the lease has ended), 413 `body.too_big`, 422 (malformed),
429 `rate.*` (`Retry-After` says for how long to wait), 503 (nothing was promised: try again).
"""
GROUPS = {
    "run": "What anyone may read, unsigned.",
    "nodes": "Taking part: registration and heartbeats.",
    "worker": "Leases and submissions.",
    "validator": "Audits and verdicts.",
    "trainer": "Policies, batches and reports.",
    "owner": "Orders of the owner, and calibrations: documents that are signed themselves.",
}


def http_page() -> str:
    parts = ["# The hub's HTTP calls\n", NOTE, HTTP]
    for name, said in GROUPS.items():
        parts.append(f"## {name}\n\n{said}\n\n| call | takes | answers | what it does |\n|---|---|---|---|")
        for call in TABLE[name]:
            takes = call.takes.__name__ if call.takes else "" if call.method == "GET" else "bulk"
            reply = getattr(call.reply, "__name__", call.reply) or ""
            parts.append(f"| `{call.method} {call.path}` | {takes} | {reply} | {call.what} |")
        parts.append("")
    return "\n".join(parts)


# ── reasons.md ───────────────────────────────────────────────────────────────────────────────────────────────────


def reasons_page() -> str:
    """The table in the docstring of `shoal.validator.checks`, which is where checks are written."""
    table = [line for line in (checks.__doc__ or "").splitlines() if line.startswith("|")]
    after = (checks.__doc__ or "").split(table[-1])[1].strip().split("\n\n")[0]
    return "\n".join(
        [
            "# Reasons\n",
            NOTE,
            "Why a validator rejects a submission, in the order in which it looks. A verdict carries the reason, the "
            "numbers behind it and a sentence. `certain`: one is enough for a ban; `statistical`: two are; `none`: the "
            "submission earns nothing, that is all. [How a rollout is checked](../concepts/checking.md).\n",
            *table,
            "",
            " ".join(after.split()) + "\n",
            "## Unsure\n",
            "The validator could not tell. No credit, no training, no punishment; the unit is given out again.\n",
            "| reason | what it means |\n|---|---|",
            *(f"| {reason} | {meaning} |" for reason, meaning in verdicts.MACHINERY.items()),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
