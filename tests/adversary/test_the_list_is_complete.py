"""Every attack that an untrusted worker, a stranger or a relay can make, and where it fails: the list, held by a test.

`cheat NAME` is a worker that cheats (`shoal join --cheat NAME`), tried in a real run by test_cheats_are_caught or,
where that needs more tokens, test_trials (those that lie about progress: integration/test_shown_progress); `miner NAME`
is one of test_miners; the others are tests of this folder.
"""

import re
from pathlib import Path

import pytest
from test_miners import BANNED_BY

from shoal.adversary import CHEATS

HERE = Path(__file__).parent

ATTACKS: dict[str, tuple[str, ...]] = {
    "forged reward": ("test_hub_attacks::test_a_forged_reward",),
    "edited completion": ("cheat edit", "cheat answer"),
    "edited log-probabilities": ("cheat logprobs",),
    "another (smaller) model": ("cheat small-model",),
    "a quantised model": ("cheat int8", "cheat int4"),
    "stale weights": ("cheat stale",),
    "small model decodes and right model only prefills": ("cheat small-decodes", "cheat int4-decodes"),
    "prompt swapped": ("cheat swap-prompt", "cheat claim-prompt"),
    "seed ignored": ("cheat own-seeds", "cheat greedy", "cheat cold"),
    "best-of-n cherry-picking": ("cheat best-of",),
    "seed grinding": ("cheat grind", "test_hub_attacks::test_seed_grinding"),
    "early termination": ("cheat cut-short", "cheat early-end"),
    "padding to length": ("cheat pad", "cheat run-on"),
    "copied rollouts (own or others')": ("cheat copy", "cheat replay", "cheat steal"),
    "replayed request": ("test_hub_attacks::test_a_replayed_request",),
    "request of another time": ("test_hub_attacks::test_a_request_of_another_time",),
    "forged identity": ("cheat claim-node", "test_hub_attacks::test_a_forged_identity",
        "test_hub_attacks::test_work_in_the_name_of_another",
        "test_hub_attacks::test_a_stranger_and_a_role_that_is_not_ones_own"),
    "request for another run": ("test_hub_attacks::test_a_request_for_another_run",),
    "oversize body": ("test_hub_attacks::test_an_oversized_body",),
    "truncated body": ("test_hub_attacks::test_a_truncated_body", "cheat few"),
    "bomb": ("test_hub_floods::test_bombs_refused_in_bounded_memory",),
    "NaN": ("cheat nan",),
    "out-of-vocabulary tokens": ("cheat vocabulary",),
    "flood of requests": ("test_hub_floods::test_a_flood_of_one_address",),
    "lease hoarding": ("test_hub_attacks::test_hoarding_leases",),
    "sybil keys after a ban": ("test_hub_attacks::test_sybil_keys_after_a_ban",
        "test_cheats_are_caught::test_banned_key_is_refused_when_it_returns"),
    "sleeper (honest for long, then cheats)": ("cheat sleeper",
        "test_sleepers::test_first_full_audit_bans_a_sleeper_pulls_its_groups_and_voids_its_pending_credit"),
    "lying relay (corrupt, truncated, stale, endless chunk)": (
        "test_cast_chunks::test_a_client_gets_the_right_bytes_beside_a_liar",
        "test_cast_chunks::test_a_relay_never_passes_a_lie_on",
        "test_cast_documents::test_a_client_that_has_seen_the_new_refuses_the_old_also_after_a_restart"),
    "tampered manifest": (
        "test_cast_documents::test_forged_or_endless_document_is_refused_and_another_source_is_asked",),
    "a ledger filled by throwaway keys": (
        "test_hub_attacks::test_throwaway_keys_that_register_and_cheat_leave_nothing_in_the_ledger",),
    "rolled-back ledger": ("test_hub_attacks::test_a_ledger_that_is_rolled_back_or_changed",),
    # and beyond the usual list
    "proofs made without computing anything": ("cheat constant-proofs", "cheat modulus-one", "cheat null-proofs",
        "cheat random-proofs", "cheat no-proofs"),
    "proofs of something else": ("cheat swapped-proofs", "cheat replayed-proofs"),
    "proofs of another size": ("cheat half-proofs", "cheat long-proofs"),
    "steering inside the tolerance": ("cheat steer",
        "test_trials::test_steering_inside_the_tolerance_is_caught_by_sums"),
    "buying reward with tolerance": ("cheat branch",
        "test_steered_branches::test_steered_groups_pass_unchecked_and_honest_groups_pass_the_check_of_branches",
        "test_steered_branches::test_steering_is_struck_when_branches_are_checked",
        "test_steered_branches::test_evidence_of_fresh_keys_is_added_up",
        "test_steered_branches::test_hub_suspends_a_steering_node_by_its_evidence",
        "test_steered_branches::test_hub_distrusts_newcomers_when_keys_change_every_four_groups"),
    "claiming the profile that forgives most": ("cheat loose",
        "test_trials::test_claim_of_the_widest_profile_is_caught_by_sums",
        "test_hub_attacks::test_a_profile_that_nobody_has_measured"),
    "claiming another version of the policy": ("cheat claim-policy",),
    "uniforms avoided by calling tokens the tool's": ("cheat claim-given",
        "test_dialogue_attacks::test_drawn_tokens_declared_as_tool_tokens_are_rejected"),
    "forged dialogue (words, places or turns that are not the tool's)": (
        "test_dialogue_attacks::test_forged_dialogue_is_rejected",
        "test_dialogue_attacks::test_malformed_spans_are_rejected",
        "test_dialogue_attacks::test_tool_tokens_in_a_run_without_tool_are_rejected",
        "test_dialogue_attacks::test_log_probability_of_a_tool_token_is_rejected",
        "test_dialogue_attacks::test_wrong_finish_is_rejected"),
    "progress that is said, or made up, to keep a lease": ("cheat show-random", "cheat show-other", "cheat show-swap",
        "test_hub_attacks::test_progress_that_is_only_said"),
    # what miners of live networks did
    "end-of-sequence padding": ("miner repeated-ends",),
    "ends that no seed drew": ("miner early-ends", "miner one-early-end-in-each-group",
        "test_miners::test_group_with_one_wrong_end_is_not_accepted"),
    "the length cap forced": ("miner one-end-suppressed-in-each-group",),
    "tokens split into more": ("test_miners::test_same_text_in_more_tokens_is_rejected",),
    "a loss mask, or another field, that says what is trained on": (
        "test_miners::test_every_declared_field_is_checked_or_unused",
        "test_miners::test_loss_mask_by_tool_spans_without_tool_refused"),
    "one log-probability that is far off": ("test_miners::test_one_wrong_log_probability_is_not_accepted",),
    "a coarser key-value cache": ("miner int8-cache", "miner int8-cache-with_honest_proofs-for", "miner fp8-cache",
        "miner fp8-cache-with_honest_proofs-for",
        "test_miners::test_shortcuts_coarser_than_bfloat16_are_banned",
        "test_miners::test_int8_cache_of_a_bfloat16_worker_passes"),
    "early exit of the last layers": ("miner early-exit",
        "test_miners::test_shortcuts_coarser_than_bfloat16_are_banned"),
    "speculative decoding with a wrong acceptance rule": ("miner speculative-above-0.3", "miner speculative-typical",
        "test_miners::test_miner_is_banned_and_what_passed_equals_honest_work",
        "test_miners::test_speculative_decoding_of_the_seeds_tokens_is_accepted",
        "test_miners::test_wrong_acceptance_of_a_bfloat16_worker_is_banned_or_passes_only_within_the_tolerance"),
    "proofs of a shared prefix, or of some chunks only": ("test_miners::test_proofs_of_other_chunks_are_rejected",
        "test_miners::test_equal_rollouts_may_have_equal_proofs"),
    "a canary that cannot be told from honest work": ("test_miners::test_no_canary_of_long_rollouts_is_accepted",),
    "another answer after the first": ("test_hub_attacks::test_another_answer_after_the_first",),
}  # fmt: skip


PLACES = [where for places in ATTACKS.values() for where in places]
COMPLETE = ("test_hub_attacks", "test_miners")  # files of which every test is an attack


@pytest.mark.parametrize("where", [each for each in PLACES if "::" in each])
def test_where_it_is_tried_exists(where: str) -> None:
    file, _, name = where.partition("::")
    assert re.search(rf"^def {name}\(", (HERE / f"{file}.py").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("kind", "known"), [("cheat ", set(CHEATS)), ("miner ", set(BANNED_BY))])
def test_list_names_every_cheat_and_miner_and_no_other(kind: str, known: set[str]) -> None:
    assert {each.removeprefix(kind) for each in PLACES if each.startswith(kind)} == known


@pytest.mark.parametrize("file", COMPLETE)
def test_every_test_of_an_attack_is_in_the_list(file: str) -> None:
    tests = set(re.findall(r"^def (test_\w+)", (HERE / f"{file}.py").read_text(), re.MULTILINE))
    assert {each.partition("::")[2] for each in PLACES if each.startswith(f"{file}::")} == tests


def test_every_attack_is_tried() -> None:
    assert all(ATTACKS.values())
