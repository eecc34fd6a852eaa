"""What `--help` prints: the same plain layout for every command, an example last, the commands grouped by reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

HELP_OPTIONS = ("-h", "--help")
CONTEXT = {"help_option_names": [*HELP_OPTIONS], "max_content_width": 100}


class Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        parameters = [each for each in self.params if not getattr(each, "hidden", False)]
        arguments = [each for each in parameters if each.param_type_name == "argument"]
        options = [each for each in parameters if each.param_type_name == "option"]
        words = " ".join(["[OPTIONS]", *map(argument_name, arguments)])
        _begin(self, ctx, formatter, words)
        _section(formatter, "Arguments", [(argument_name(each), meaning(each)) for each in arguments])
        shown = [(option_name(each), meaning(each)) for each in options]
        _section(formatter, "Options", [*shown, (", ".join(HELP_OPTIONS), "Show this help.")])
        _end(self, formatter)


class Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _begin(self, ctx, formatter, "COMMAND …")
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                panels.setdefault(panel if isinstance(panel, str) else "Commands", []).append((name, _summary(command)))
        for panel, rows in panels.items():
            _section(formatter, panel, rows)
        options = [(option_name(each), meaning(each)) for each in self.params]
        _section(formatter, "Options", [*options, (", ".join(HELP_OPTIONS), "Show this help, or that of a command.")])
        _end(self, formatter)


def argument_name(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper()) + ("…" if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def option_name(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def meaning(parameter: Any) -> str:
    """Its help, with the default, unless the help has it in words."""
    text, default = " ".join((parameter.help or "").split()), parameter.default
    if parameter.required:
        return text if parameter.param_type_name == "argument" else f"{text} (required)"
    if default is True:
        default = parameter.opts[0]
    if default is None or default is False or default == "" or "(default:" in text:
        return text
    return f"{text} (default: {default})"


def _summary(command: Any) -> str:
    """The first sentence."""
    return " ".join((command.help or "").split()).partition(". ")[0].rstrip(".") + "."


def _begin(command: Any, ctx: Any, formatter: Any, words: str) -> None:
    formatter.write_usage(ctx.command_path, words)
    for paragraph in (command.help or "").split("\n\n"):
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(" ".join(paragraph.split()))


def _section(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=26)


def _end(command: Any, formatter: Any) -> None:
    for paragraph in (command.epilog or "").split("\n\n"):
        formatter.write_paragraph()
        for line in paragraph.splitlines():
            formatter.write_text(line)


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its full name; those of `shoal cast` are `cast publish`, …"""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command
