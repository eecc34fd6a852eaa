"""What `--help` prints: the same plain layout for every command, an example last, the commands grouped by reader."""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        arguments = [each for each in self.params if each.param_type_name == "argument"]
        sections = {"Arguments": [(argument_name(each), meaning(each)) for each in arguments]}
        write_help(
            self, ctx, formatter, " ".join(["[OPTIONS]", *(name for name, _ in sections["Arguments"])]), sections
        )


class CommandGroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            sentence = " ".join((command.help or "").split()).partition(". ")[0].rstrip(".") + "."
            sections.setdefault(panel if isinstance(panel, str) else "Commands", []).append((name, sentence))
        write_help(self, ctx, formatter, "COMMAND …", sections)


def write_help(command: Any, ctx: Any, formatter: Any, words: str, sections: dict[str, list[tuple[str, str]]]) -> None:
    formatter.write_usage(ctx.command_path, words)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(" ".join((command.help or "").split()))
    options = [each for each in command.params if each.param_type_name == "option"]
    sections["Options"] = [*((option_name(each), meaning(each)) for each in options), ("-h, --help", "Show this help.")]
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, col_max=26)
    for paragraph in (command.epilog or "").split("\n\n"):
        formatter.write_paragraph()
        for line in paragraph.splitlines():
            formatter.write_text(line)


def argument_name(parameter: Any) -> str:
    name = parameter.metavar + ("…" if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def option_name(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def meaning(parameter: Any) -> str:
    """Its help, with the default, unless the help has it in words."""
    text, default = parameter.help or "", parameter.default
    if parameter.required:
        return text if parameter.param_type_name == "argument" else f"{text} (required)"
    if default is None or default is False or default == "" or "(default:" in text:
        return text
    return f"{text} (default: {parameter.opts[0] if default is True else default})"


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its full name; those of `shoal cast` are `cast publish`, …"""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command
