"""New weights in a running engine: over real sockets, only what changed, while the old ones generate."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import Patch
from kit.cast import Running
from shoal.engines import GenerationRequest
from shoal.engines.shelf import EngineShelf
from shoal.engines.torch import TorchEngine
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import PolicyManifest, SamplingParameters, SigningKey
from shoal.runtime.stop import StopToken
from shoal.shardcast import ChangedValues, Content, Downloader, Origin, OriginSettings, Prefetch, digest_of, run_origin

KEY = SigningKey.from_seed(b"\x05" * 32)
RUN = "in-place"
WITHIN_S = 30.0


class Spied(TorchEngine):
    """An engine that remembers how its weights came."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.came: list[str] = []
        self.touched = 0

    def load_policy(self, ref: Any, tensors: Any) -> None:
        self.came.append("load")
        super().load_policy(ref, tensors)

    def update_policy(self, ref: Any, changes: Iterable[ChangedValues]) -> None:
        self.came.append("update")
        super().update_policy(ref, self._counted(changes))

    def _counted(self, changes: Iterable[ChangedValues]) -> Iterator[ChangedValues]:
        for change in changes:
            self.touched += change.where.size
            yield change


@dataclass
class Run:
    """A trainer's weights, published over HTTP, and a client's folder."""

    loaded: LoadedModel
    origin: Origin
    downloader: Downloader
    stop: StopToken

    def step(self, version: int, rate: float = 2e-6) -> PolicyManifest:
        """As training does: every weight moves by about `rate`; in bf16 few of them become another number."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight in self.loaded.model.parameters():
                moved = weight.float() + rate * torch.randn(weight.shape, generator=generator)
                weight.copy_(moved)
        views = list(policy_views(self.loaded.model).values())
        return self.origin.publish(version, Content.of(self.loaded.files, views))

    def request(self) -> GenerationRequest:
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=10, eos_token_ids=(1,))
        return GenerationRequest(self.loaded.tokenizer.encode("314159="), (1, 2, 3), sampling)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    server = Running(partial(run_origin, tmp_path / "origin", "127.0.0.1", 0))
    origin = Origin(tmp_path / "origin", RUN, KEY, settings=OriginSettings(delta_from_bytes=0))
    stop = StopToken()
    downloader = Downloader([server.url], RUN, KEY.public_key, tmp_path / "cache", stop)
    yield Run(load_model("tiny", dtype="bfloat16"), origin, downloader, stop)
    stop.set("the test is over")
    downloader.close()
    server.end()


class Shelf(EngineShelf):
    """Of engines that are spied on."""

    def __init__(self, run: Run, held: int = 1, dtype: str = "bfloat16") -> None:
        super().__init__(run.downloader.fetch, partial(Spied, dtype=dtype), held=held)

    def engine(self, manifest: PolicyManifest) -> Spied:
        engine = self.get(manifest.policy, WITHIN_S).engine
        assert engine.policy == manifest.policy
        return engine


def digest(engine: Spied, manifest: PolicyManifest, files: Any) -> str:
    return digest_of(files, list(policy_views(engine.model).values()), manifest.chunk_size_bytes)


def test_next_policy_is_written_in_place(run: Run) -> None:
    shelf = Shelf(run)
    first = run.step(1)
    engine = shelf.engine(first)
    before = engine.generate([run.request()])
    for version in range(2, 6):
        manifest = run.step(version)
        assert shelf.engine(manifest) is engine
        assert digest(engine, manifest, run.loaded.files) == manifest.policy.digest
    assert engine.came == ["load", "update", "update", "update", "update"]
    values = sum(weight.numel() for weight in engine.model.parameters())
    assert 0 < engine.touched < values
    assert len(engine.generate([run.request()])[0]) == len(before[0])


def test_bfloat16_weights_are_computed_in_float32(run: Run) -> None:
    """Widened exactly, whether they come as a whole or as changes."""
    shelf = Shelf(run, dtype="float32")
    for version in range(1, 4):
        manifest = run.step(version)
        engine = shelf.engine(manifest)
    assert engine.came == ["load", "update", "update"]
    for ours, theirs in zip(engine.model.parameters(), run.loaded.model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


def test_several_deltas_give_exactly_the_new_weights(run: Run) -> None:
    shelf = Shelf(run)
    engine = shelf.engine(run.step(1))
    for version in range(2, 8):
        manifest = run.step(version)
    shelf.engine(manifest)
    assert (engine.came, digest(engine, manifest, run.loaded.files)) == (["load", "update"], manifest.policy.digest)


def test_large_change_costs_a_full_load(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.shardcast.delta.REMEMBERED_SHARE", 0.0001)
    shelf = Shelf(run)
    engine = shelf.engine(run.step(1))
    manifest = run.step(2)
    shelf.engine(manifest)
    assert (engine.came, digest(engine, manifest, run.loaded.files)) == (["load", "load"], manifest.policy.digest)


def test_two_held_engines_keep_their_own_weights(run: Run) -> None:
    """A validator keeps older policies too; none of them is spoilt by a newer one."""
    shelf = Shelf(run, held=2)
    manifests = [run.step(version) for version in (1, 2)]
    engines = [shelf.engine(manifest) for manifest in manifests]
    for engine, manifest in zip(engines, manifests, strict=True):
        assert digest(engine, manifest, run.loaded.files) == manifest.policy.digest


def test_new_version_is_fetched_during_generation(run: Run, tmp_path: Path) -> None:
    shelf = Shelf(run)
    first = run.step(1)
    engine = shelf.engine(first)
    with Prefetch(run.downloader, run.stop):
        second = run.step(2)
        whole = tmp_path / "cache" / f"{second.policy.digest}.bin"
        begun = time.monotonic()
        while not whole.exists():
            engine.generate([run.request()])
            assert engine.policy == first.policy
            assert time.monotonic() - begun < WITHIN_S
    assert shelf.engine(second) is engine
    run.stop.set("the test is over")


def test_prefetch_gives_way_to_a_waiting_fetch(run: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    """A version that never completes in the background must not keep another one from a lease."""
    first, second = run.step(1), run.step(2)
    missing = [tmp_path / "origin" / "chunks" / c.hash[:2] / c.hash for d in second.deltas for c in d.chunks]
    for path in missing:
        path.rename(tmp_path / path.name)
    failed: list[Exception] = []

    def background() -> None:
        try:
            run.downloader.fetch(second.policy, WITHIN_S, background=True)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    begun = time.monotonic()
    while not list((tmp_path / "cache").glob("*.part")):
        assert time.monotonic() - begun < WITHIN_S
    assert run.downloader.fetch(first.policy, WITHIN_S).manifest == first
    thread.join(WITHIN_S)
    assert [type(error).__name__ for error in failed] == ["Superseded"]
