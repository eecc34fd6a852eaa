"""Dialogues that are not the tool's, each submitted with the right policy's proofs and log-probabilities.

The real engine, the real judge, the calculator: an honest group passes every check, and what differs from it in one
thing is rejected for that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from kit.trial import audit_job
from shoal import protocol
from shoal.engines import GenerationRequest, PrefillRequest, build
from shoal.engines.dialogue import Dialogue, dialogue_for
from shoal.engines.groups import submission_of
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol.submission import drawn_mask, pack_spans, unpack_spans
from shoal.toploc import commit, split_proofs
from shoal.validator import checks
from shoal.validator.bands import Bands
from shoal.validator.case import Case, replay_all
from shoal.validator.judge import Judge
from shoal.validator.profiles import AccidentLimits, load_profiles
from shoal.worker.loop import generate

EOS = 1
REF = protocol.PolicyRef(incarnation=0, version=3, digest="d" * 64)
ENVIRONMENT = build_environment(EnvironmentSettings(name="calculator", options={"number_credit": 0.1}))
LIMIT = 28


@cache
def tiny() -> LoadedModel:
    return load_model("tiny")


@cache
def loaded() -> LoadedPolicy:
    engine = build("torch", tiny().files)
    engine.load_policy(REF, policy_views(tiny().model))
    return LoadedPolicy(REF, engine, tiny().files)


def lease(unit: int = 0, seeds: int = 12, tool: bool = True, limit: int = LIMIT, max_turns: int = 3) -> protocol.Lease:
    newline = tiny().tokenizer.encode("\n")
    terms = protocol.DialogueTerms(tool="calculator", max_turns=max_turns, before=newline, after=newline)
    task = ENVIRONMENT.tasks("train")[unit]
    return protocol.Lease(
        run="demo", lease=f"lease-{unit}", node="n" * 32, unit=unit, attempt=0, policy=REF, task=task.id,
        prompt_ids=tiny().tokenizer.encode(task.prompt), seeds=tuple(f"{100 * unit + i:016x}" for i in range(seeds)),
        sampling=protocol.SamplingParameters(temperature=1.0, max_new_tokens=limit, eos_token_ids=(EOS,)),
        environment_digest=ENVIRONMENT.digest, issued_at_ms=0, deadline_ms=1, dialogue=terms if tool else None,
    )  # fmt: skip


@cache
def honest(of: protocol.Lease) -> protocol.Submission:
    [group] = generate(loaded(), [of])
    return submission_of(of, group, "torch")


def dialogue_of(of: protocol.Lease) -> Dialogue:
    found = dialogue_for(of, tiny().files)
    assert found is not None
    return found


def verdicts(of: protocol.Lease, what: protocol.Submission, depth: Any) -> list[protocol.Verdict]:
    made = audit_job(of, what)
    made = replace(made, audit=made.audit.model_copy(update={"depth": depth}))
    return Judge(ENVIRONMENT, load_profiles()).verdicts([made], loaded())


def judged(of: protocol.Lease, what: protocol.Submission, depth: Any = "full") -> protocol.Verdict:
    [verdict] = verdicts(of, what, depth)
    return verdict


def vouched(of: protocol.Lease, ids: Sequence[int], spans: Sequence[tuple[int, int]], finish: Any) -> protocol.Rollout:
    """A rollout of these tokens with the right policy's log-probabilities and proofs, as a cheater would make it."""
    request = PrefillRequest(of.prompt_ids, np.array(ids, np.int32), 1.0)
    [seen] = loaded().engine.prefill([request], of.proof)
    assert seen.points is not None
    logprobs = np.array(seen.logprobs)
    for start, length in spans:
        logprobs[start : start + length] = 0.0
    return protocol.Rollout(
        tokens=protocol.pack_tokens(ids), logprobs=protocol.pack_logprobs(logprobs), finish=finish,
        proofs=b"".join(commit(seen.points)), given=pack_spans(spans),
    )  # fmt: skip


def with_rollout(group: protocol.Submission, index: int, **fields: Any) -> protocol.Submission:
    """The group with one rollout changed."""
    rollouts = list(group.rollouts)
    rollouts[index] = msgspec.structs.replace(rollouts[index], **fields)
    return msgspec.structs.replace(group, rollouts=rollouts)


Span = tuple[int, int]
Change = Callable[[list[int], list[Span]], tuple[Sequence[int], Sequence[Span]]]


def changed(of: protocol.Lease, change: Change, finish: Any = None) -> protocol.Submission:
    """The honest group with its first rollout that has a dialogue made another one."""
    group = honest(of)
    index = next(i for i, rollout in enumerate(group.rollouts) if rollout.given and rollout.finish == "eos")
    rollout = group.rollouts[index]
    ids = rollout.token_ids.tolist()
    made = vouched(of, *change(ids, list(unpack_spans(rollout.given, len(ids)))), finish or rollout.finish)
    return with_rollout(group, index, **msgspec.structs.asdict(made))


def rejected(of: protocol.Lease, what: protocol.Submission, reason: str) -> None:
    verdict = judged(of, what)
    assert (verdict.outcome, verdict.reason) == (protocol.Outcome.REJECTED, reason)
    assert verdict.severity is protocol.Severity.CERTAIN
    assert judged(of, what, depth="light").reason == reason, "it costs no prefill to see"


@pytest.mark.parametrize(("limit", "max_turns"), [(LIMIT, 3), (11, 3), (8, 2), (LIMIT, 1), (64, 64)])
def test_honest_dialogue_passes_every_check(limit: int, max_turns: int) -> None:
    of = lease(1, limit=limit, max_turns=max_turns)
    group = honest(of)
    verdict = judged(of, group)
    assert (verdict.outcome, verdict.reason) == (protocol.Outcome.ACCEPTED, "")
    if (limit, max_turns) == (LIMIT, 3):
        assert sum(bool(rollout.given) for rollout in group.rollouts) > 6
        assert next(check for check in verdict.checks if check.check == "dialogue").evidence["given"] > 20
    if limit == 8:
        assert {rollout.finish for rollout in group.rollouts} == {"eos", "length"}


def test_tool_tokens_earn_nothing_and_are_in_no_tally_and_no_measured_limit() -> None:
    of = lease(1)
    verdict = judged(of, honest(of))
    masks = [drawn_mask(rollout.given, len(rollout.token_ids)) for rollout in honest(of).rollouts]
    drawn, everything = sum(int(mask.sum()) for mask in masks), sum(map(len, masks))
    assert drawn < everything - 20
    assert verdict.generated_tokens == drawn == verdict.tally.tokens
    assert judged(of, honest(of), depth="light").generated_tokens == drawn
    # what the tool said is far from any uniform: one such token would widen a profile beyond use
    case = replayed(lease(1))
    bands = Bands.of([case])
    assert bands.tokens == case.generated < len(case.tokens)
    assert bands.distance_max < 1e-4
    assert bands.logprob_max < 1e-3


def test_last_turn_is_scored() -> None:
    of = lease(1)
    verdict = judged(of, honest(of))
    task = ENVIRONMENT.task(of.task)
    for rollout, reward in zip(honest(of).rollouts, verdict.rewards, strict=True):
        ids = rollout.token_ids.tolist()
        for start, length in unpack_spans(rollout.given, len(ids))[-1:]:
            ids = ids[start + length :]
        assert reward.value == ENVIRONMENT.score(task, tiny().tokenizer.decode(ids)).value
    assert len({reward.value for reward in verdict.rewards}) > 1, "else this test would hold of anything"


def replayed(of: protocol.Lease, **profile: Any) -> Case:
    limits = load_profiles()[of.profile].model_copy(update=profile)
    case = Case(of, honest(of), "", 96, 64, limits, dialogue=dialogue_of(of))
    [replay] = replay_all(loaded().engine, [case])
    assert not isinstance(replay, Exception)
    case.replay = replay
    return case


def test_uniforms_are_checked_for_drawn_tokens_only() -> None:
    """One drawn token that is far off stands out: the tool's words, far from any uniform, are not counted with it."""
    clean, odd = replayed(lease(1)), replayed(lease(1))
    coarse = replayed(lease(1), accidents=AccidentLimits(first=1e-4))
    width_T = np.where(clean.drawn, clean.replayed.high - clean.replayed.low, 1.0)
    at = int(np.argmin(width_T))  # an unlikely token: most uniforms do not give it
    for case in (odd, coarse):
        case.replayed.uniforms[at] = 0.0 if case.replayed.low[at] > 0.5 else 1.0 - 1e-9
    found = checks.sampling(odd)
    assert (found.reason, found.result.evidence["far_outside"]) == ("sampling.seed", 1)
    assert found.severity is protocol.Severity.STATISTICAL, "it takes several to be certain"
    assert (found.result.evidence["tokens"], found.result.evidence["outside"]) == (odd.generated, 1)
    assert np.flatnonzero(coarse.outliers.seeds).tolist() == [coarse.chunk_of[at]]


def test_validator_without_the_tool_is_unsure() -> None:
    of = lease(1)
    other = of.model_copy(update={"dialogue": of.dialogue.model_copy(update={"tool": "abacus"})})
    verdict = judged(other, honest(of))
    assert (verdict.outcome, verdict.reason) == (protocol.Outcome.UNSURE, "machinery.environment")
    assert "abacus" in verdict.message
    assert "upgrade" in verdict.message


def test_drawn_tokens_declared_as_tool_tokens_are_rejected() -> None:
    """To choose them freely: no uniforms are checked where tokens are of the tool."""
    of = lease(1)
    other = lease(1).model_copy(update={"seeds": tuple(f"{9999 + i:016x}" for i in range(12))})
    [group] = generate(loaded(), [other])
    submission = submission_of(of, group, "torch")
    assert judged(of, submission).reason == "sampling.seed", "without the claim the seeds show it"

    def claim(rollout: protocol.Rollout) -> protocol.Rollout:
        ids = rollout.token_ids.tolist()
        spans = [(1, len(ids) - 2)] if len(ids) > 2 else []
        return vouched(of, ids, spans, rollout.finish)

    forged = msgspec.structs.replace(submission, rollouts=[claim(rollout) for rollout in submission.rollouts])
    rejected(of, forged, "dialogue.forged")


def bumped(token: int) -> int:
    return token + 1 if token < 14 else token - 1


def with_token(ids: list[int], at: int, token: int) -> list[int]:
    return [*ids[:at], token, *ids[at + 1 :]]


def answer_of_others(ids: list[int], spans: list[Span]) -> tuple[list[int], list[Span]]:
    words = (3, *tiny().tokenizer.encode("12345"), 3)
    return [*ids[: spans[0][0]], *words, *ids[sum(spans[0]) :]], [(spans[0][0], len(words))]


def one_turn_too_many(_ids: list[int], _spans: list[Span]) -> tuple[list[int], list[Span]]:
    digits = list(tiny().tokenizer.encode("1+1"))
    turn = [*digits, EOS, 3, *tiny().tokenizer.encode("2"), 3]
    return [*turn, *turn, *digits, EOS], [(len(turn) - 3, 3), (2 * len(turn) - 3, 3)]


FORGED: dict[str, tuple[Change, str]] = {
    "the turn before is called the tool's": (lambda ids, spans: (ids, [(spans[0][0] - 1, spans[0][1] + 1), *spans[1:]]),
        "dialogue.forged"),
    "a token of the turn is called the tool's": (lambda ids, spans: (ids, [(1, 1), *spans]), "dialogue.forged"),
    "its words are changed": (lambda ids, spans: (with_token(ids, spans[0][0] + 1, bumped(ids[spans[0][0] + 1])),
        spans), "dialogue.forged"),
    "the turn is called the last one": (lambda ids, spans: (ids[: spans[0][0]], []), "dialogue.missing"),
    "the model resumes at once": (lambda ids, spans: ([*ids[: spans[0][0]], 6, *ids[sum(spans[0]) :]], []),
        "dialogue.missing"),
    "its words are not called the tool's": (lambda ids, _spans: (ids, []), "dialogue.missing"),
    "its last word is left out": (lambda ids, spans: ([*ids[: sum(spans[0]) - 1], *ids[sum(spans[0]) :]], [(spans[0][0],
        spans[0][1] - 1), *spans[1:]]), "dialogue.forged"),
    "the turn is edited after the tool has answered": (lambda ids, spans: (with_token(ids, spans[0][0] - 2,
        bumped(ids[spans[0][0] - 2])), spans), "dialogue.forged"),
    "the answer is another rollout's": (answer_of_others, "dialogue.forged"),
    "an end token in its words": (lambda ids, spans: (with_token(ids, spans[0][0], EOS), spans), "dialogue.forged"),
    "special tokens before its words": (lambda ids, spans: ([*ids[: spans[0][0]], 0, 2, *ids[spans[0][0] :]], spans),
        "dialogue.forged"),
    "one turn too many": (one_turn_too_many, "dialogue.forged"),
    "one turn too many, not called the tool's": (lambda ids, spans: (one_turn_too_many(ids, spans)[0],
        one_turn_too_many(ids, spans)[1][:1]), "termination.past_eos"),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_dialogue_is_rejected(forgery: str) -> None:
    change, reason = FORGED[forgery]
    of = lease(1, max_turns=2) if forgery.startswith("one turn") else lease(1)
    rejected(of, changed(of, change), reason)


@pytest.mark.parametrize("given", [
    b"\1", b"\1\0\0\0", pack_spans([(0, 2)]), pack_spans([(2, 0)]), pack_spans([(2, 10**6)]),
    pack_spans([(2, 3), (3, 2)]), pack_spans([(5, 1), (2, 1)]), pack_spans([(2**32 - 1, 2**32 - 1)]),
])  # fmt: skip
def test_malformed_spans_are_rejected(given: bytes) -> None:
    rejected(lease(1), with_rollout(honest(lease(1)), 0, given=given), "dialogue.malformed")


def test_tool_tokens_in_a_run_without_tool_are_rejected() -> None:
    of = lease(1, tool=False)
    [group] = loaded().engine.generate([GenerationRequest(of.prompt_ids, of.seed_numbers, of.sampling)], of.proof)
    plain = submission_of(of, group, "torch")
    assert judged(of, plain).outcome is protocol.Outcome.ACCEPTED
    long = next(i for i, rollout in enumerate(plain.rollouts) if len(rollout.token_ids) > 3)
    rejected(of, with_rollout(plain, long, given=pack_spans([(1, 1)])), "dialogue.forged")
    rejected(of, submission_of(of, generate(loaded(), [lease(1)])[0], "torch"), "dialogue.forged")


def test_log_probability_of_a_tool_token_is_rejected() -> None:
    of = lease(1)
    group = honest(of)
    index = next(i for i, rollout in enumerate(group.rollouts) if rollout.given)
    rollout = group.rollouts[index]
    logprobs = rollout.logprob_values
    logprobs[unpack_spans(rollout.given, len(logprobs))[0][0]] = -3.0
    rejected(of, with_rollout(group, index, logprobs=protocol.pack_logprobs(logprobs)), "dialogue.logprobs")


def test_wrong_finish_is_rejected() -> None:
    of = lease(1)
    rejected(of, changed(of, lambda ids, spans: (ids, spans), finish="length"), "termination.finish")

    early = changed(of, lambda ids, spans: ([*ids[: sum(spans[0])], 6], spans[:1]), finish="length")
    rejected(of, early, "termination.early")


def shown_verdicts(of: protocol.Lease, index: int, ids: Sequence[int], proofs: bytes) -> list[protocol.Verdict]:
    """What a validator says of a lease at work of which these tokens were shown."""
    nothing = protocol.Rollout(tokens=b"", logprobs=b"", finish="length")
    empty = msgspec.structs.replace(honest(of), rollouts=[nothing] * len(of.seeds))
    return verdicts(of, with_rollout(empty, index, tokens=protocol.pack_tokens(ids), proofs=proofs), "progress")


def test_shown_dialogue_passes_up_to_any_chunk_and_changed_words_fail() -> None:
    of = lease(1).model_copy(update={"proof": protocol.ProofParameters(topk=16, rows=4)})
    caught = 0
    for index, rollout in enumerate(honest(of).rollouts):
        ids = rollout.token_ids.tolist()
        proofs = split_proofs(rollout.proofs, len(ids), loaded().engine.hidden_size, 16, 4)
        for chunks in range(1, len(proofs)):
            assert shown_verdicts(of, index, ids[: 4 * chunks], b"".join(proofs[:chunks])) == []
        for start, _ in unpack_spans(rollout.given, len(ids))[:1]:
            chunks = start // 4 + 1
            if chunks < len(proofs):
                forged = [*ids[:start], ids[start] + 1, *ids[start + 1 :]]
                [verdict] = shown_verdicts(of, index, forged[: 4 * chunks], b"".join(proofs[:chunks]))
                assert (verdict.reason, verdict.severity) == ("progress.dialogue", protocol.Severity.CERTAIN)
                caught += 1
    assert caught > 3
