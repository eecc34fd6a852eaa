"""What the ranks of a crew do beside rank 0, which alone talks to the hub, and how they are told.

    rank 0 (`loop`)                       the others (`follow`)
    Begin(settings, config, folder) ────► build the model, take their rows
    Train(work) ────────────────────────► the same `train_step`, on their share of it
    Look(work) ─────────────────────────► the same `look_back`, once, when the last step is done
    Copy(token, with training) ─────────► send their rows, write their part of a checkpoint
    Restore(folder) ────────────────────► read their rows of a checkpoint
    (over) ─────────────────────────────► end

Commands are msgpack of known structures, never pickles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import CodecError, ShoalError
from shoal.models.load import LoadedModel
from shoal.runtime.stop import StopToken
from shoal.trainer.checkpoint import StoredCheckpoint
from shoal.trainer.crew import Crew
from shoal.trainer.hands import Hands
from shoal.trainer.learner import Learner, choose_device, make_deterministic, new_learner
from shoal.trainer.memory import out_of_memory_in_words
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.sharding import spread
from shoal.trainer.shares import SharedCopies, ShareWriter, restore_share
from shoal.trainer.step import StepWork, Stopped, look_back, train_step
from shoal.trainer.together import COLLECTIVE_S, Together, join_crew, lost_peer

log = logging.getLogger(__name__)

WAITS = 4  # rank 0 waits for a batch, for a publication, for the hub: each at most `batch_deadline_s`


class Begin(msgspec.Struct, frozen=True, tag=True):
    settings: str
    files: dict[str, bytes]
    checkpoints: str


class Train(msgspec.Struct, frozen=True, tag=True):
    work: StepWork


class Look(msgspec.Struct, frozen=True, tag=True):
    work: StepWork


class Copy(msgspec.Struct, frozen=True, tag=True):
    token: str
    with_training: bool


class Restore(msgspec.Struct, frozen=True, tag=True):
    folder: str


Command = Begin | Train | Look | Copy | Restore


def announce(crew: Crew, command: Callable[[], Command]) -> None:
    """Rank 0: let the others do the same next. Costs nothing if there are none."""
    if crew.world > 1:
        crew.tell(msgspec.msgpack.encode(command()))


def lead(loaded: LoadedModel, settings: TrainerSettings, checkpoints: Path, crew: Together) -> Learner:
    """Rank 0: a learner whose weights, those of `loaded`, are spread over the crew."""
    crew.use(choose_device(settings.device))
    files = dict(loaded.files)
    announce(crew, lambda: Begin(settings.model_dump_json(), files, str(checkpoints)))
    return _learner(loaded.model, settings, files, crew)


def leading_hands(crew: Together, checkpoints: Path) -> Hands:
    """Rank 0: what it does with the learner, the others do as well."""

    def train(learner: Learner, work: StepWork, *arguments: Any) -> dict[str, float]:
        announce(crew, lambda: Train(work))
        return train_step(learner, work, *arguments)

    def look(learner: Learner, work: StepWork, *arguments: Any) -> dict[str, float]:
        announce(crew, lambda: Look(work))
        return look_back(learner, work, *arguments)

    def restore(learner: Learner, stored: StoredCheckpoint) -> None:
        announce(crew, lambda: Restore(str(stored.folder)))
        restore_share(learner, stored.folder, crew)

    def tell(token: str, with_training: bool) -> None:
        announce(crew, lambda: Copy(token, with_training))

    return Hands(train, look, restore, SharedCopies(crew, checkpoints, tell))


def run_follower(stop: StopToken) -> None:
    """Be one of the other ranks, until rank 0 says that it is over, or `stop` is set."""
    crew = join_crew()
    try:
        follow(crew, stop)
        crew.leave()
    except Stopped:
        log.info("rank %d stopped (%s)", crew.rank, stop.reason or "told by another")
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        raise ShoalError(f"rank {crew.rank} has lost another trainer process: {error}") from error


def follow(crew: Together, stop: StopToken) -> None:
    begin = _heard(crew, stop, COLLECTIVE_S)
    if begin is None:
        return
    if not isinstance(begin, Begin):
        raise CodecError(f"rank 0 began with {type(begin).__name__}; do all ranks run the same version of shoal?")
    settings = TrainerSettings.model_validate_json(begin.settings)
    make_deterministic(settings)
    crew.use(choose_device(settings.device))
    with (
        out_of_memory_in_words(settings, begin.files, crew.world),
        closing(ShareWriter(Path(begin.checkpoints))) as writer,
    ):
        learner = _learner(None, settings, begin.files, crew)
        while (command := _heard(crew, stop, WAITS * settings.batch_deadline_s)) is not None:
            _obey(command, learner, writer, crew, stop)
        writer.check()


def _obey(command: Command, learner: Learner, writer: ShareWriter, crew: Together, stop: StopToken) -> None:
    match command:
        case Train(work=work):
            train_step(learner, work, stop.is_set)
        case Look(work=work):
            look_back(learner, work, stop.is_set)
        case Copy(token=token, with_training=with_training):
            writer.copy(learner, crew, token, with_training)
        case Restore(folder=folder):
            restore_share(learner, Path(folder), crew)
        case _:
            raise CodecError(f"rank 0 said {type(command).__name__} in the middle of a run")


def _heard(crew: Together, stop: StopToken, silence_s: float) -> Command | None:
    message = crew.hear(stop, silence_s)
    if message is None:
        return None
    command: Command = msgspec.msgpack.decode(message, type=Command)
    return command


def _learner(whole: Any, settings: TrainerSettings, files: Mapping[str, bytes], crew: Together) -> Learner:
    precision, reference = settings.memory.precision, None
    model = spread(whole, files, precision, crew)
    if settings.objective.kl > 0 and settings.lora is None:  # else it is the model without its adapters
        reference = spread(whole, files, precision, crew).requires_grad_(False)
    return new_learner(model, settings, crew, reference)
