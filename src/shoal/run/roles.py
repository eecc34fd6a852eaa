"""The roles of a run folder, for `shoal hub RUN` and for the children of `shoal run` alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.protocol import fingerprint
from shoal.run.folder import RunFolder, port_of
from shoal.runtime import SUPERVISED, UNLIMITED_BYTES, MachineLimits, StopToken, logs, stop_on_signals
from shoal.runtime.supervise import close_standard_input, follow_supervisor

if TYPE_CHECKING:
    from shoal.environments import Environment
    from shoal.hub import HubConfig
    from shoal.validator.settings import ValidatorConfig

log = logging.getLogger(__name__)


def role_names(folder: RunFolder) -> list[str]:
    relays, validators, workers = (
        [f"{role}-{index}" for index in range(getattr(folder.recipe, role).count)]
        for role in ("relay", "validator", "worker")
    )
    return ["hub", "origin", *relays, "trainer", *validators, *workers]


def run_role(folder: RunFolder, name: str, stop: StopToken, cheat: str | None = None) -> None:
    """A worker may have any number, also one that the recipe does not start, and may `cheat`."""
    role, _, index = name.partition("-")
    if role not in _ROLES:
        raise ConfigError(f"there is no role {role!r}; there are {', '.join(_ROLES)}")
    if cheat is not None and role != "worker":
        raise ConfigError(f"only a worker can be told to cheat, not the {role}")
    be = _ROLES[role] if cheat is None else partial(_worker, cheat=cheat)
    be(folder, int(index or 0), stop)


def command_of(path: Path, name: str, cheat: str | None = None) -> list[str]:
    role, _, index = name.partition("-")
    command = {"origin": ["relay", "--origin"], "worker": ["join"]}.get(role, [role])
    options = [*(["--index", index] if index else []), *(["--cheat", cheat] if cheat is not None else [])]
    return [*command, str(path), *options]


def start_role(name: str, folder: Path | None, verbose: bool) -> StopToken:
    """Standard input is closed, so nothing that is loaded can ask a person. A supervisor keeps the log file."""
    supervised, stop = SUPERVISED in os.environ, stop_on_signals()
    follow_supervisor(stop)  # takes SUPERVISED away
    close_standard_input()
    file = None if supervised or folder is None else folder / "logs" / f"{name}.log"
    logs.setup(name, file, verbose)
    return stop


def hub_config(folder: RunFolder, environment: Environment) -> HubConfig:
    """How a hub of this run draws and decides, without whom it serves, and what is taken from them."""
    from shoal.engines.asking import Asking
    from shoal.environments import has_dialogues
    from shoal.hub import EvaluationPlan, HubConfig
    from shoal.hub.state.rows import PoolRules
    from shoal.models import model_folder, read_files
    from shoal.run.estimate import announced_size

    recipe, trainer, retire_after = folder.recipe, folder.recipe.trainer, folder.recipe.environment.retire_after
    asking = Asking(read_files(model_folder(recipe.model.path, weights=False)), environment, recipe.run.max_new_tokens)
    evaluation = EvaluationPlan(trainer.evaluate_every, trainer.evaluate_tasks) if trainer.evaluate_every > 0 else None
    return HubConfig(
        folder=folder.path / "hub", run_id=folder.run_id, run=recipe.run, settings=recipe.hub, environment=environment,
        encode=asking.ids, frame=asking.encoder.frame() if has_dialogues(environment) else ((), ()),
        eos_token_ids=asking.encoder.tokenizer.eos_token_ids, texts=asking.encoder.tokenizer.decode_many,
        key=folder.key("hub"), root_key=folder.root_key, evaluation=evaluation,
        pools=None if retire_after is None else PoolRules(retire_after), model=announced_size(recipe),
    )  # fmt: skip


def _hub(folder: RunFolder, _index: int, stop: StopToken) -> None:
    from shoal.dashboard.site import Site
    from shoal.environments import build
    from shoal.hub.http.server import run_hub
    from shoal.records import FOLDER
    from shoal.run.folder import without_passwords
    from shoal.runtime.config import dump_config
    from shoal.validator.settings import measurable_kinds, profile_keys

    recipe, endpoints = folder.recipe, folder.endpoints
    kinds, scripted = profile_keys(recipe.validator), recipe.worker.checked_with == "scripted"
    config = replace(
        hub_config(folder, build(recipe.environment)),
        settings=recipe.hub.model_copy(update={"port": port_of(endpoints.hub)}),
        certificates=folder.certificates, sources=endpoints.sources, last_resort=endpoints.last_resort,
        profiles=tuple(kind for kind in kinds if scripted or not kind.startswith("scripted/")),
        measurable=measurable_kinds(recipe.validator, recipe.trainer.publish_dtype) if not scripted else (),
    )  # fmt: skip
    records = config.folder / FOLDER if recipe.hub.records_gb else None
    shown = dump_config(without_passwords(recipe))
    run_hub(config, stop, _ready("the hub"), lambda hub: Site(hub, recipe.dashboard, shown, records))


def _origin(folder: RunFolder, _index: int, stop: StopToken) -> None:
    from shoal.shardcast import run_origin

    endpoints = folder.endpoints
    run_origin(folder.path / "origin", endpoints.bind, port_of(endpoints.origin), stop, _ready("the origin"))


def _relay(folder: RunFolder, index: int, stop: StopToken) -> None:
    from shoal.shardcast import RelayConfig, run_relay

    endpoints = folder.endpoints
    if index >= len(endpoints.relays):
        raise ConfigError(f"this run has {len(endpoints.relays)} relays; there is no --index {index}")
    config = RelayConfig(
        folder=folder.path / f"relay-{index}", upstreams=(endpoints.origin,), run=folder.run_id,
        trusted_key=folder.key("trainer").public_key, host=endpoints.bind, port=port_of(endpoints.relays[index]),
        peers=endpoints.relays,
    )  # fmt: skip
    run_relay(config, stop, _ready("the relay"))


def _trainer(folder: RunFolder, _index: int, stop: StopToken) -> None:
    from shoal.trainer.settings import own_rank

    recipe = folder.recipe
    if recipe.trainer.processes > 1 and own_rank() is None:  # the same in several processes, which this one watches
        from shoal.trainer.ranks import run_group

        return run_group(command_of(folder.path, "trainer"), recipe.trainer.processes, stop)
    from shoal.trainer.loop import run_trainer
    from shoal.trainer.settings import TrainerConfig

    config = TrainerConfig(
        folder=folder.path / "trainer", settings=recipe.trainer, model=recipe.model.path,
        origin_folder=folder.path / "origin", hub_url=folder.endpoints.hub,
        root_fingerprint=fingerprint(folder.root_key), key=folder.key("trainer"),
        certificate=folder.certificate("trainer"), seed=recipe.run.seed,
    )  # fmt: skip
    return run_trainer(config, stop)


def _validator(folder: RunFolder, index: int, stop: StopToken) -> None:
    from shoal.validator.loop import run_validator

    run_validator(validator_config(folder, index), stop)


def validator_config(folder: RunFolder, index: int) -> ValidatorConfig:
    from shoal.environments import build
    from shoal.validator.settings import ValidatorConfig

    recipe, name = folder.recipe, f"validator-{index}"
    if name not in folder.trusted_roles:
        raise ConfigError(f"this run has {recipe.validator.count} validators; there is no --index {index}")
    return ValidatorConfig(
        folder=folder.path / name, settings=recipe.validator, environment=build(recipe.environment),
        engine=recipe.worker.checked_with, hub_url=folder.endpoints.hub, root_fingerprint=fingerprint(folder.root_key),
        key=folder.key(name), certificate=folder.certificate(name),
        shuffle_rewards=recipe.environment.shuffle_rewards, scored_by=recipe.environment,
    )  # fmt: skip


def _worker(folder: RunFolder, index: int, stop: StopToken, cheat: str | None = None) -> None:
    from shoal.worker.loop import run_worker
    from shoal.worker.settings import WorkerConfig

    recipe, name = folder.recipe, f"worker-{index}"
    config = WorkerConfig(
        folder=folder.path / name, settings=recipe.worker, engine=recipe.worker.engine, name=name, cheat=cheat,
        hub_url=folder.endpoints.hub, root_fingerprint=fingerprint(folder.root_key),
        limits=MachineLimits(memory_bytes=UNLIMITED_BYTES),  # of the same owner as the trainer
    )  # fmt: skip
    run_worker(config, stop)


def _ready(what: str) -> Callable[[str], None]:
    return lambda url: log.info("%s listens at %s", what, url)


_ROLES: dict[str, Callable[[RunFolder, int, StopToken], None]] = {
    "hub": _hub, "origin": _origin, "relay": _relay, "trainer": _trainer, "validator": _validator,
    "worker": _worker,
}  # fmt: skip
