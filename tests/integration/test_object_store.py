"""A run whose submissions are in a bucket behind a real S3 server (moto's)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from test_loop_scripted import DEADLINE_S, Run, check_accounts

from kit import Patch
from kit.s3 import KEYS, Shop, s3_server
from shoal.hub import HubConfig, RunSettings

SETTINGS = RunSettings(name="loop", steps=2, groups_per_step=3, group_size=4, max_new_tokens=6)


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with s3_server() as found:
        yield found


@dataclass
class StoreRun(Run):
    """The scripted run with a bucket in the place of its folder."""

    shop: Shop | None = None

    def hub_config(self) -> HubConfig:
        config, shop = super().hub_config(), self.shop
        changes = {"storage": shop.url, "storage_endpoint": shop.endpoint}
        return replace(config, settings=config.settings.model_copy(update=changes))


@pytest.fixture
def run(shop: Shop, tmp_path: Path, monkeypatch: Patch) -> Iterator[StoreRun]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    own = replace(shop, bucket=f"shoal-{secrets.token_hex(4)}")
    shop.client.create_bucket(Bucket=own.bucket)
    made = StoreRun(tmp_path, SETTINGS, shop=own)
    yield made
    made.close()


def test_the_bucket_holds_every_submission_of_the_run(run: StoreRun) -> None:
    """Two steps with one worker, to the end."""
    run.publish(0)
    roles = [run.worker("worker-0"), run.validator()]
    for step in range(SETTINGS.steps):
        assert len(run.train(step).groups) == SETTINGS.groups_per_step
    for role in roles:
        role.result(DEADLINE_S)
    check_accounts(run)
    assert run.shop is not None
    keys = run.shop.keys()
    judged = sum(node.accepted + node.rejected for node in run.nodes().values())
    assert len(keys) >= judged >= 6
    assert all(key.startswith("runs/one/blobs/") for key in keys)
