"""`shoal ledger verify --recheck`: units drawn at random are judged again, by the validator's own checks.

Verdict, lease and bytes come from the hub's storage, the policy from the origin, if it is still there.
"""

import queue
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from shoal.engines import EngineShelf, build
from shoal.environments import judges_of
from shoal.errors import BroadcastError, LedgerError, ShoalError, UserError
from shoal.protocol import Lease, LedgerEntry, PolicyRef, Verdict
from shoal.rewards import ScoringPool
from shoal.rewards.panel import panel_of
from shoal.run.folder import RunFolder
from shoal.run.ledger.sources import FolderLedger
from shoal.run.roles import validator_config
from shoal.runtime import StopToken
from shoal.shardcast import Downloader, run_origin
from shoal.validator.judge import Judge, KeptSubmission, Rechecked, SecondEngines, recheck
from shoal.validator.limits import profiles_of
from shoal.validator.profiles import Profiles, load_profiles
from shoal.validator.settings import ValidatorConfig

FETCH_S, START_S = 600.0, 30.0
TRIES = 64  # units drawn for each that is wanted: of a long run only the last policies are kept


def recheck_ledger(path: Path, sample: int, seed: int, stop: StopToken) -> Iterator[str]:
    """A line for each unit, and a summary; `LedgerError` if any verdict was different."""
    folder, reason = RunFolder.open(path), ""
    states: dict[str, int] = {"same": 0, "different": 0, "unknown": 0}
    with closing(FolderLedger(path)) as source, tempfile.TemporaryDirectory() as cache:
        rows: dict[str, LedgerEntry] = {}  # accepted units, one row of each submission
        for entry in source.entries():
            if entry.kind in ("credit", "pending"):
                rows.setdefault(str(entry.body["submission"]), entry)
        if not rows:
            raise UserError("no unit was accepted yet: there is nothing to recheck")
        drawn = random.Random(seed).sample(list(rows.values()), min(TRIES * sample, len(rows)))
        with _machinery(folder, validator_config(folder, 0), Path(cache), stop) as (judge, shelf):

            def limits(digest: str) -> Profiles | None:  # of the calibration that the lease names
                return None if (made := source.calibration(digest)) is None else profiles_of(made)

            judge = replace(judge, calibrations=limits)
            for entry in drawn:
                found = _one(source, entry, judge, shelf)
                states[found.state] += 1
                if found.state == "unknown":
                    reason = f"; of unit {entry.body['unit']} {found.sentence}"
                    continue
                yield f"unit {entry.body['unit']} (row {entry.index}): {found.state}: {found.sentence}"
                if states["same"] + states["different"] == sample:
                    break
    outcome = f"{states['same']} the same, {states['different']} different, {states['unknown']} could not be rechecked"
    yield f"{sum(states.values())} accepted units were drawn (--seed {seed}): {outcome}{reason}"
    if states["different"]:
        raise LedgerError(f"{states['different']} verdicts are others now: they were wrong, or this machine is")
    if not states["same"]:
        raise UserError("nothing could be rechecked, so nothing is shown: see above why")


def _one(source: FolderLedger, entry: LedgerEntry, judge: Judge, shelf: EngineShelf) -> Rechecked:
    if (evidence := source.evidence([entry]).get(entry.index)) is None or evidence.verdict is None:
        return Rechecked("different", "there is no verdict behind it")
    try:
        lease, body = source.kept(str(entry.body["submission"]))
    except (OSError, ShoalError) as error:
        return Rechecked("unknown", f"its bytes are not kept: {error}")
    policy: PolicyRef = Lease.model_validate(lease.document, extra="ignore").policy
    try:
        loaded = shelf.get(policy, FETCH_S)
    except BroadcastError as error:
        return Rechecked("unknown", f"policy {policy.label} is no longer kept ({error})")
    verdict = Verdict.model_validate(evidence.verdict.document, extra="ignore")
    return recheck(judge, KeptSubmission(verdict, lease, body), loaded)


@contextmanager
def _machinery(
    folder: RunFolder, config: ValidatorConfig, cache: Path, stop: StopToken
) -> Iterator[tuple[Judge, EngineShelf]]:
    """A validator's judge, and policies from the run's origin, which is served meanwhile."""
    settings, environment = config.settings, config.environment
    ended, urls = StopToken(), queue.Queue[str]()
    server = threading.Thread(target=run_origin, args=(folder.path / "origin", "127.0.0.1", 0, ended, urls.put))
    server.start()
    try:
        url = urls.get(timeout=START_S)
        downloader = Downloader([url], folder.run_id, folder.trainer_key, cache, stop)
        panel = panel_of(judges_of(environment), stop, settings.device)
        assert config.scored_by is not None, "a run's folder says how it is scored"
        pool = ScoringPool(config.scored_by, environment, stop)
        with closing(downloader), closing(panel), closing(pool):
            pool.start()
            panel.prepare()
            profiles = load_profiles(settings.profiles)
            others = SecondEngines(config.engine, settings.device, downloader.fetch)
            shuffle, machine = config.shuffle_rewards, (settings.device, settings.dtype)
            judge = Judge(environment, profiles, shuffle, scorer=pool, panel=panel, second_engine=others.get)
            yield judge, EngineShelf(downloader.fetch, lambda files: build(config.engine, files, *machine), held=1)
    finally:
        ended.set("rechecked")
        server.join(START_S)
