"""Options and arguments that several commands have, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

HELP = {"help_option_names": ["-h", "--help"]}
SPEC_HELP = "An environment by name, a recipe, a run's folder, a reward file, a data file, or FORMAT:FILE (aime, …)."
UPSTREAM = "Where to mirror from; may be repeated."

RunDir = Annotated[Path, Option("--dir", metavar="RUN", help="The run's folder.")]
OptionalRunDir = Annotated[Path | None, Option("--dir", metavar="RUN", help="The run's folder.")]
Index = Annotated[int, Option("--index", min=0, help="Which of several.")]
LONG = "End a run without progress for so long."
PatienceMin = Annotated[float, Option("--patience-min", min=0.1, max=100_000, help=LONG)]
Wait = Annotated[float, Option("--wait", min=0, max=86_400, help="Seconds to try to reach the other side.")]
Json = Annotated[bool, Option("--json", help="All of it, for programs.")]
HubOrRun = "A hub's address or a run's folder"
DefaultRun = "(default: the run in this folder, or in runs/)"

SET = "Change a setting (KEY= takes it out of the recipe, KEY=none: no value); may be repeated."
SET_ENVIRONMENT = "Change the environment; may be repeated."
Settings = Annotated[list[str] | None, Option("--set", metavar="SECTION.KEY=VALUE", help=SET)]
EnvironmentSettings = Annotated[
    list[str] | None, Option("--set", metavar="environment.KEY=VALUE", help=SET_ENVIRONMENT)
]
Device = Annotated[str, Option("--device", help="Where to compute: cpu, cuda or auto.")]
Dtype = Annotated[str, Option("--dtype", help="What to compute in: float32, bfloat16 or auto.")]
Engine = Annotated[str, Option("--engine", help="What to generate with.")]

MODEL = Argument(metavar="MODEL", help="A built-in name, a Hugging Face folder, or a run's folder.")
Model = Annotated[str, MODEL]
OptionalModel = Annotated[str | None, MODEL]
Samples = Annotated[int, Option("--samples", help="Completions per task.")]
Tasks = Annotated[int, Option("--tasks", min=0, help="How many tasks, chosen by the seed; 0: all.")]
HEAT = "0: greedy. (default: 0 for one sample, else the recipe's or 1)"
LONGEST = "Longest completion. (default: the recipe's, or 1024)"
Temperature = Annotated[float | None, Option("--temperature", min=0, max=10, help=HEAT)]
MaxTokens = Annotated[int | None, Option("--max-new-tokens", min=1, max=131_072, help=LONGEST)]
Seed = Annotated[int, Option("--seed", min=0, max=2**31, help="Other seeds, another choice of tasks.")]
BatchRows = Annotated[int, Option("--batch-rows", min=1, max=65_536, help="Completions drawn together.")]

Host = Annotated[str, Option("--host", help="Address to listen on.")]
Port = Annotated[int, Option("--port", min=0, max=65_535, help="Port to listen on.")]
Keep = Annotated[int, Option("--keep", min=1, max=500, help="Newest versions kept.")]
PEER = "Trade chunks with this relay of the same level; may be repeated."
BUDGET = "Keep fewer versions rather than use more. (default: no limit; of a run elsewhere 80 % of the free)"
Peers = Annotated[list[str] | None, Option("--peer", metavar="URL", help=PEER)]
DiskBudget = Annotated[float | None, Option("--disk-budget-gb", min=1e-6, help=BUDGET)]
