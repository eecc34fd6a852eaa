"""Settings that follow from the size of a run: built-in values for small models, hand-computed ones for a large."""

from __future__ import annotations

import pytest

from shoal.hub.settings import HubSettings
from shoal.runtime.sizing import Derived, RunSize, Speeds, derive, open_settings, settle
from shoal.trainer.settings import TrainerSettings
from shoal.validator.settings import ValidatorSettings

LARGE = RunSize(32 * 10**9, 64 * 10**9, group_size=16, max_new_tokens=32_768, max_staleness=2)


@pytest.mark.parametrize(
    "size",
    [
        RunSize(),
        RunSize(172_672, 18_000_000, group_size=16, max_new_tokens=10),
        RunSize(135 * 10**6, 594 * 10**6, group_size=16, max_new_tokens=8000),
        RunSize(600 * 10**6, 1_320 * 10**6, group_size=16, max_new_tokens=4096, max_staleness=4),
    ],
)
def test_small_models_keep_the_built_in_values(size: RunSize) -> None:
    assert derive(size) == Derived()


def test_a_large_model_gets_what_its_transfers_and_computations_take() -> None:
    """64 GB over 1 Gbit/s / 1.2 take 614.4 s, into the engine at 2.7 GB/s 23.7 s, by a delta at 1 GB/s 64 s.

    A group of 32,768 tokens at 64 GB / 330 GB/s a token takes 6,354.9 s. Its 524,288 tokens of 2 x 32e9 operations
    take 209.7 s at 160 TFLOP/s. A checkpoint has 384 GB.
    """
    assert derive(LARGE) == Derived(
        lease_s=1590.0,  # 6354.9 / 4 = 1588.7, in tens; applying is 1.5 x (64 + 23.7) = 131.6
        lease_hard_s=7950.0,  # 1590 + 6354.9 = 7944.9
        audit_s=1280.0,  # 960 + 1.5 x 209.7 = 1274.6
        policy_wait_s=960.0,  # 1.5 x (614.4 + 23.7) = 957.2
        max_audits=1,  # 20 s do for none
        keep_versions=3,  # max_staleness + 1
        checkpoint_every=7,  # 384 s, 60 of them a step
        keep_checkpoints=1,  # two are 768 GB, above 240
    )


def test_with_short_completions_a_lease_covers_applying_a_version() -> None:
    short = RunSize(32 * 10**9, 64 * 10**9, group_size=16, max_new_tokens=256, max_staleness=0)
    assert derive(short).lease_s == 140.0  # 131.6
    assert derive(short).keep_versions == 2  # the one at work, and the next
    assert derive(short).max_audits == 12  # 4,096 tokens take 1.64 s, and 20 s are for one claim


def test_slower_links_give_policies_more_time() -> None:
    assert derive(LARGE, Speeds(link_mbit=100)).policy_wait_s == 9260.0  # 1.5 x (6144 + 23.7) = 9251.6


def test_what_is_set_wins_and_the_rest_is_derived() -> None:
    chosen = settle(HubSettings(lease_s=5, audit_s=7), LARGE)
    assert (chosen.lease_s, chosen.audit_s, chosen.lease_hard_s) == (5, 7, 7950.0)
    assert settle(TrainerSettings(checkpoint_every=1), LARGE).checkpoint_every == 1


def test_every_derived_setting_is_one_of_a_recipe() -> None:
    sections = (HubSettings(), ValidatorSettings(), TrainerSettings())
    derived = set(Derived.__dataclass_fields__) - {"policy_wait_s"}  # which nobody sets
    assert {name for section in sections for name in open_settings(section)} == derived
    assert "lease_s" not in open_settings(HubSettings(lease_s=60))
