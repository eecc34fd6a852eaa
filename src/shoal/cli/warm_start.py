"""What `shoal sft` does: find everything, choose demonstrations, train on them, say the numbers.

    FOLDER.work/   chosen.json (what was asked for, what was chosen), corpus/, checkpoints/, metrics.jsonl; .shoal-sft
                   marks it, so that no folder of somebody else's is taken for one
    FOLDER/        appears whole at the end: a Hugging Face folder with sft.json and metrics.jsonl

The same command goes on from FOLDER.work; any other is told what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.evaluate import STOPPED_CODE
from shoal.cli.imitation import Prepared, SftRequest
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cli.sources import ModelSource, TaskSource
    from shoal.environments import Environment
    from shoal.runtime.stop import StopToken
    from shoal.trainer.demonstrations.corpus import Corpus
    from shoal.trainer.demonstrations.training import WarmStartParts

CHOSEN, ABOUT, MARK = "chosen.json", "sft.json", ".shoal-sft"


def run_sft(request: SftRequest, stop: StopToken) -> int:
    """Returns the exit code. What can be refused is refused before anything is loaded."""
    from shoal.cli.sources import model_source
    from shoal.trainer.demonstrations.reading import Demonstrations
    from shoal.trainer.demonstrations.settings import Interrupted
    from shoal.trainer.tracking import require_trackers

    request.choice.refuse_mistakes(request.env)
    _refuse_place(request)
    require_trackers(request.settings.tracking)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("shoal sft trains in one process: start it without torchrun")
    prepared = Prepared(request, Demonstrations(request.data), _environment(request.source, request.choice.verify))
    with model_source(request.model) as model:
        try:
            if stop.is_set():
                raise Interrupted
            return _select(prepared, model, stop) if request.select_only else _train(prepared, model, stop)
        except Interrupted:
            typer.echo("stopped before training; to go on, give the same command again", err=True)
            return STOPPED_CODE


def _refuse_place(request: SftRequest) -> None:
    from shoal.trainer.destination import refuse_foreign

    if request.report is not None and request.report.suffix != ".parquet":
        raise ConfigError(f"--report {request.report}: it is a Parquet file; let its name end in .parquet")
    if not request.select_only:
        refuse_foreign(request.out)
        return _refuse_foreign_work(request.work)
    if request.out.suffix != ".jsonl":
        raise ConfigError(f"--out {request.out}: chosen rows are JSON lines; let its name end in .jsonl")
    if request.out.exists():
        raise ConfigError(f"{request.out} is there already: choose another --out, or move it away")
    return None


def _refuse_foreign_work(work: Path) -> None:
    """The work folder is emptied in the end, so that it must be marked, empty, or not there."""
    if not work.exists() and not work.is_symlink():
        return
    if work.is_dir() and ((work / MARK).is_file() or {path.name for path in work.iterdir()} <= {".lock"}):
        return
    raise ConfigError(f"{work} is there and is not of a warm start: move it away, or choose another --out")


def _environment(source: TaskSource | None, scoring: bool) -> Environment | None:
    from shoal.cli.evaluate import scorable
    from shoal.environments import build

    return None if source is None else scorable(source) if scoring else build(source.settings)


def _say(lines: Sequence[str]) -> None:
    typer.echo("demonstrations:")
    for line in lines:
        typer.echo(line)


def _select(prepared: Prepared, model: ModelSource, stop: StopToken) -> int:
    """Write the rows that stay, as they are in the data."""
    from shoal.runtime.files import ensure_folder, write_atomically

    out = prepared.request.out
    with tempfile.TemporaryDirectory(prefix="shoal-sft-") as scratch:
        with prepared.choosing(prepared.encoder(model), stop) as choosing:
            _corpus, outcome = choosing.run(Path(scratch) / "corpus")
        _say(prepared.lines(outcome))
    ensure_folder(out.absolute().parent)
    rows = prepared.demonstrations.originals(outcome.kept)
    write_atomically(out, b"".join(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n" for row in rows))
    typer.echo(f"wrote {out}: {len(outcome.kept):,} demonstrations")
    return 0


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _train(prepared: Prepared, model: ModelSource, stop: StopToken) -> int:
    from rich.console import Console

    from shoal.cli.counting import counted
    from shoal.runtime.files import write_atomically
    from shoal.runtime.lock import FolderLock
    from shoal.trainer.demonstrations.training import WarmStart

    request, about = prepared.request, prepared.about(model)
    if _is_done(request.out, about):
        typer.echo(f"this is done already: {request.out}", err=True)
        return 0
    with FolderLock(request.work).acquire(stop):
        _refuse_foreign_work(request.work)
        write_atomically(request.work / MARK, b"")
        corpus = _chosen(prepared, model, about, stop)
        run = WarmStart(_parts(prepared, model, about, corpus), stop)
        with counted("training", Console(stderr=True), unit="steps") as report:
            finished = run.run(report)
        if finished:
            _clear(request)
    if not finished:
        typer.echo(f"stopped; what is done is kept in {request.work}, and the same command goes on", err=True)
        return STOPPED_CODE
    _tell(request)
    return 0


def _is_done(out: Path, about: dict[str, Any]) -> bool:
    from shoal.evaluation.journal import difference

    if not (out / ABOUT).is_file():
        return False
    stored = json.loads((out / ABOUT).read_bytes())
    if stored != about:
        raise ConfigError(f"{out} is another warm start: {difference(stored, about)}")
    return True


def _chosen(prepared: Prepared, model: ModelSource, about: dict[str, Any], stop: StopToken) -> Corpus:
    """The corpus of this very request, if it was chosen before; else it is chosen now."""
    from shoal.evaluation.journal import difference
    from shoal.runtime.files import write_atomically
    from shoal.trainer.demonstrations.corpus import Corpus

    work, encoder = prepared.request.work, prepared.encoder(model)
    if (work / CHOSEN).is_file():
        stored = json.loads((work / CHOSEN).read_bytes())
        if stored["about"] == about:
            _say(stored["lines"])
            return Corpus(work / "corpus")
        if any((work / "checkpoints").glob("*")):  # else nothing was learnt, and nothing is lost
            raise ConfigError(f"{work} is of another warm start: {difference(stored['about'], about)}")
        (work / CHOSEN).unlink()
    with prepared.choosing(encoder, stop) as choosing:
        corpus, outcome = choosing.run(work / "corpus")
    lines = prepared.lines(outcome)
    write_atomically(work / CHOSEN, json.dumps({"about": about, "lines": lines}, indent=2).encode())
    _say(lines)
    return corpus


def _parts(prepared: Prepared, model: ModelSource, about: dict[str, Any], corpus: Corpus) -> WarmStartParts:
    from shoal.trainer.card import ModelCard, hub_name, training_facts
    from shoal.trainer.checkpoint import Progress
    from shoal.trainer.demonstrations.training import WarmStartParts
    from shoal.trainer.learner import make_deterministic, new_learner, starting_model
    from shoal.trainer.tracking import Tracked, open_trackers

    request, settings = prepared.request, prepared.request.settings
    make_deterministic(settings)
    loaded = starting_model(str(model.where), settings)
    text = json.dumps(about, indent=2).encode() + b"\n"
    run = f"sft-{hashlib.sha256(text).hexdigest()[:12]}"
    card = ModelCard(
        Progress(run, 0), base_model=hub_name(model.name if model.run else model.where),
        environment=request.source.label if request.source else "", datasets=[hub_name(path) for path in request.data],
        training=training_facts(settings, **{key: said for key, said in about["course"].items() if said is not None}),
        trained_on="demonstrations",
    )  # fmt: skip
    return WarmStartParts(
        folder=request.work, out=request.out, run=run, learner=new_learner(loaded.model, settings), files=loaded.files,
        corpus=corpus, course=request.course, card=card, extra={ABOUT: text},
        trackers=open_trackers(settings.tracking, Tracked(request.work, run, about)),
    )  # fmt: skip


def _clear(request: SftRequest) -> None:
    """The model is written: what was needed to go on is not any more. What trackers wrote stays."""
    if not request.settings.tracking:
        return shutil.rmtree(request.work, ignore_errors=True)
    (request.work / CHOSEN).unlink(missing_ok=True)
    for name in ("corpus", "checkpoints"):
        shutil.rmtree(request.work / name, ignore_errors=True)
    return None


def _tell(request: SftRequest) -> None:
    from shoal.cli.program import shoal_command
    from shoal.runtime.metrics import MetricsLog
    from shoal.trainer.demonstrations.training import VALIDATION

    rows = MetricsLog(request.out / "metrics.jsonl").rows()
    for name, word in (("loss", "loss"), (VALIDATION, "validation loss")):
        values = [row[name] for row in rows if name in row]
        if values:
            typer.echo(f"{word}: {values[0]:.4g} at the beginning, {values[-1]:.4g} at the end")
    env = f" --env {request.env}" if request.env else " --env …"
    typer.echo(f"wrote {request.out}; to measure it: {shoal_command()} eval {request.out}{env}")
