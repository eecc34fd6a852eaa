"""`shoal`: the commands. A `ShoalError` is one line on stderr and its exit code; any other exception is a bug.

Tracebacks are shown with --debug or SHOAL_DEBUG=1; that of a bug is also in the log of a role that `shoal run` started.
"""

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

from typer import Exit, Option, Typer, echo

from shoal import __version__
from shoal.cli.admin import EPILOG, admin, key
from shoal.cli.cast import cast
from shoal.cli.data import data
from shoal.cli.eval import compare, evaluate, filter_tasks, sft
from shoal.cli.help import CONTEXT, Command, CommandGroup
from shoal.cli.ledger import ledger
from shoal.cli.plan import plan
from shoal.cli.rollouts import plot, rollouts
from shoal.cli.run import demo, hub, init, join, leave, relay, run, trainer, validator
from shoal.cli.upkeep import backup, dashboard, doctor, export, restore, status
from shoal.cli.why import why
from shoal.errors import ShoalError, UserError
from shoal.runtime import SUPERVISED, crash, is_verbose, printable, visible
from shoal.runtime.stop import end_at_start

EXTEND = (
    "Begin with: shoal demo. RUN is a run's folder, its name under runs/, or its hub's URL. Your own reward is one "
    "Python file: shoal init mine writes one."
)
app = Typer(
    name="shoal", help="Reinforcement learning of language models on machines nobody has to trust.", cls=CommandGroup,
    epilog=EXTEND, pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    given = [*given[1:], "--help"] if given[0] == "help" else given
    if arguments is None and not end_at_start(given):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)  # what a command has begun to write is removed
    debug = "--debug" in given or is_verbose()
    return guarded(lambda: app(args=given, prog_name="shoal", standalone_mode=False), debug)


def guarded(command: Callable[[], object], debug: bool) -> int:
    for stream in (sys.stdout, sys.stderr):  # what is not UTF-8 gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        crash.arm()
        code = command()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the top
        line, code = explain(error)
        from shoal.trainer.settings import report_to_agent

        report_to_agent(line)
        with contextlib.suppress(OSError):  # the disk that its log is on may be what is full
            known = isinstance(error, ShoalError) or hasattr(error, "format_message")  # its line says all there is
            if debug or (SUPERVISED in os.environ and not known):  # a supervised role's stderr is its log
                for text in traceback.format_exc().splitlines():
                    echo(visible(text), err=True)
            if line:
                echo(f"shoal: {line}", err=True)
        return code
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # let go of: the interpreter would try it again and end with a code of its own
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, ShoalError):
        return printable(str(error)), error.exit_code
    format_message = getattr(error, "format_message", None)  # a mistake on the command line, as typer reports it
    if format_message is not None:
        text = printable(format_message())
        command = getattr(getattr(error, "ctx", None), "command_path", "shoal")
        return f"{text} (see: {command} --help)", UserError.exit_code
    return f"this is a bug: {type(error).__name__}: {printable(str(error))} (--debug shows where)", 1


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"shoal {__version__}")
        raise Exit()


@app.callback()
def _options(
    debug: Annotated[bool, Option("--debug", help="Show tracebacks and a more detailed log.")] = False,
    _wants_version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Reinforcement learning of language models on machines nobody has to trust."""
    if debug:
        os.environ["SHOAL_DEBUG"] = "1"


READERS: dict[str, dict[str, tuple[Callable[..., object], str] | Typer]] = {
    "Try it": {"demo": (demo, "shoal demo")},
    "Train": {
        "init": (init, "shoal init mine"),
        "run": (run, "shoal run tiny mine --set run.steps=60"),
        "plan": (plan, "shoal plan intellect2 --parameters 32e9 --memory 141"),
        "data": data,
        "filter": (filter_tasks, "shoal filter tiny sort --samples 8 --max-new-tokens 10 --out kept.parquet"),
        "sft": (sft, "shoal sft tiny --data demos.jsonl --out models/begun"),
        "eval": (evaluate, "shoal eval runs/demo --env sort --tasks 128 --samples 4 --out results/demo"),
        "compare": (compare, "shoal compare results/tiny results/demo"),
        "rollouts": (rollouts, "shoal rollouts demo --order worst"),
        "plot": (plot, "shoal plot demo mine --out report.svg"),
        "export": (export, "shoal export demo models/demo"),
    },
    "Contribute a machine": {
        "join": (join, "shoal join http://HOST:8470/#KEY --sandbox --max-disk 40GB"),
        "leave": (leave, "shoal leave http://HOST:8470/#KEY --pause"),
        "doctor": (doctor, "shoal doctor http://HOST:8470/#KEY"),
        "key": key,
    },
    "Operate a run": {
        "status": (status, "shoal status demo"),
        "dashboard": (dashboard, "shoal dashboard demo"),
        "admin": (admin, "shoal admin ban demo worker-2 --reason 'wrong weights'"),
        "backup": (backup, "shoal backup demo demo.tar"),
        "restore": (restore, "shoal restore demo.tar runs/again"),
        "hub": (hub, "shoal hub demo"),
        "trainer": (trainer, "shoal trainer demo"),
        "validator": (validator, "shoal validator demo --index 0"),
        "relay": (relay, "shoal relay http://HOST:8470/#KEY --folder mirror --port 8480"),
    },
    "Verify": {"why": (why, "shoal why 17 demo"), "ledger": ledger},
    "Extend": {"cast": cast},
}
EPILOGS = {"admin": EPILOG}

for reader, commands in READERS.items():
    for name, each in commands.items():
        if isinstance(each, Typer):
            app.add_typer(each, rich_help_panel=reader)
        else:
            function, example = each
            epilog = "\n\n".join(filter(None, [EPILOGS.get(name, ""), f"Example: {example}"]))
            app.command(name=name, cls=Command, epilog=epilog, rich_help_panel=reader)(function)
