"""Arguments and options that several commands have, so that they are named, read and explained the same everywhere.

A run is `RUN`, positional: a folder, a name under runs/, or a URL where the command takes one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from shoal.errors import UserError

MAX_SEED = 2**31
DAY_S = 86_400


def value(name: str, metavar: str, text: str) -> Any:
    return Option(name, metavar=metavar, help=text)


def whole(name: str, text: str, least: int = 0, most: int | None = None, metavar: str = "N") -> Any:
    """An option whose value is a whole number. A wrong value gets a message in words."""
    return Option(name, metavar=metavar, help=text, parser=_parser(int, least, most))


def number(name: str, metavar: str, text: str, least: float, most: float | None = None) -> Any:
    return Option(name, metavar=metavar, help=text, parser=_parser(float, least, most))


def _parser(kind: Callable[[str], float], least: float, most: float | None) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(str(text))
        except ValueError:
            value = float("nan")
        if value >= least and (most is None or value <= most):
            return value
        bounds = f"from {least:,.15g} to {most:,.15g}" if most is not None else f"of at least {least:,.15g}"
        raise BadParameter(f"{str(text)!r} is not a {'whole ' if kind is int else ''}number {bounds}")

    return parse


def run_folder(text: str) -> Path:
    from shoal.run.folder import run_path

    if "://" in str(text):
        raise UserError(f"{text} is a URL: this command needs the run's folder, or its name under runs/")
    return run_path(str(text))


def run_place(text: str) -> str:
    return text if "://" in text else str(run_folder(text))


def ledger_place(text: str) -> str:
    """A file is meant as it is given, also one that is not there."""
    return place if Path(place := run_place(text)).exists() else text


def disk_bytes(text: str) -> int:
    from shoal.runtime.limits import parse_size

    return parse_size(str(text), "--max-disk")


FOLDER_HELP = "The run: its folder, or its name under runs/."
PLACE_HELP = "The run: its folder, its name under runs/, or its hub's URL."
LEDGER_HELP = "The ledger: a run's folder, its name under runs/, its hub's URL, or an exported file."
DEFAULT_RUN = "(default: the run in this folder, or the only one in runs/)"
Run = Annotated[Path, Argument(metavar="RUN", parser=run_folder, help=FOLDER_HELP)]
Place = Annotated[str, Argument(metavar="RUN", parser=run_place, help=PLACE_HELP)]
OptionalPlace = Annotated[str | None, Argument(metavar="RUN", parser=run_place, help=f"{PLACE_HELP} {DEFAULT_RUN}")]
Ledger = Annotated[str, Argument(metavar="RUN", parser=ledger_place, help=LEDGER_HELP)]
OptionalLedger = Annotated[
    str | None, Argument(metavar="RUN", parser=ledger_place, help=f"{LEDGER_HELP} {DEFAULT_RUN}")
]
Index = Annotated[int, whole("--index", "Which one of several to start, counted from 0.")]
WAIT_HELP = "How long to try to reach a server that does not answer."
Wait = Annotated[float, number("--wait", "SECONDS", WAIT_HELP, 0, DAY_S)]
PATIENCE_HELP = "Stop after this long without progress."
Patience = Annotated[float, number("--patience", "SECONDS", PATIENCE_HELP, 1, 6_000_000)]
DERIVED_PATIENCE_HELP = f"{PATIENCE_HELP} (default: 600, of large models more: `shoal plan`)"
DerivedPatience = Annotated[float | None, number("--patience", "SECONDS", DERIVED_PATIENCE_HELP, 1, 6_000_000)]
Json = Annotated[bool, Option("--json", help="Print everything as JSON, for programs.")]

SPEC_HELP = "The tasks: an environment's name, a recipe, a run, a reward file, a data file or ORG/NAME, or FORMAT:FILE."
SET_HELP = "Change a setting; KEY= removes it from the recipe, KEY=none gives it no value. Repeatable."
SET_ENVIRONMENT_HELP = "Change a setting of the environment. Repeatable."
Settings = Annotated[list[str] | None, value("--set", "SECTION.KEY=VALUE", SET_HELP)]
EnvironmentSettings = Annotated[list[str] | None, value("--set", "environment.KEY=VALUE", SET_ENVIRONMENT_HELP)]
Device = Annotated[str, value("--device", "DEVICE", "Compute on cpu, cuda, or auto.")]
Dtype = Annotated[str, value("--dtype", "FORMAT", "Compute in float32, bfloat16, or auto.")]
Engine = Annotated[str, value("--engine", "ENGINE", "Generate with torch, vllm or scripted (for tests).")]

MODEL = Argument(metavar="MODEL", help="The model: tiny (built in), a Hugging Face folder or ORG/NAME, or a run.")
Model = Annotated[str, MODEL]
OptionalModel = Annotated[str | None, MODEL]
Samples = Annotated[int, whole("--samples", "Completions per task.", 1, 4096)]
Tasks = Annotated[int, whole("--tasks", "How many tasks to use, chosen by the seed; 0 means all.")]
HEAT_HELP = "Sampling temperature; 0 is greedy. (default: 0 for one sample, else the recipe's, or 1)"
Temperature = Annotated[float | None, number("--temperature", "T", HEAT_HELP, 0, 10)]
TOKENS_HELP = "Longest completion in tokens. (default: the recipe's, or 1024)"
MaxTokens = Annotated[int | None, whole("--max-new-tokens", TOKENS_HELP, 1, 131_072)]
STOP_HELP = "End completions whose text has this. Repeatable; '' for none. (default: the recipe's)"


def stops(given: list[str] | None) -> tuple[str, ...] | None:
    """None: those of the recipe; one empty text: none."""
    return None if not given else () if given == [""] else tuple(given)


Stop = Annotated[list[str] | None, value("--stop", "TEXT", STOP_HELP)]
Seed = Annotated[int, whole("--seed", "Another seed draws other samples and other tasks.", 0, MAX_SEED)]
BatchRows = Annotated[int, whole("--batch-rows", "Completions that are generated together.", 1, 65_536)]

Host = Annotated[str, value("--host", "ADDRESS", "The address to listen on.")]
Port = Annotated[int, whole("--port", "The port to listen on; 0 takes a free one.", 0, 65_535, metavar="PORT")]
KeepVersions = Annotated[int, whole("--keep-versions", "How many of the newest versions to keep.", 1, 500)]
UPSTREAM_HELP = "A server to mirror from. Repeatable."
PEER_HELP = "Exchange chunks with this relay of the same level. Repeatable."
Peers = Annotated[list[str] | None, value("--peer", "URL", PEER_HELP)]
DISK_HELP = "Most disk for weights, for example 40GB. (default: 80 % of the free)"
MIRROR_DISK_HELP = "Most disk for versions, for example 40GB. (default: no limit; of a run elsewhere 80 % of the free)"
MaxDisk = Annotated[int | None, Option("--max-disk", metavar="SIZE", help=MIRROR_DISK_HELP, parser=disk_bytes)]
