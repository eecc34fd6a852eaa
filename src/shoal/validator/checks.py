"""Every check of a submission, each one function, cheapest first.

Before the prefill the first that fails decides. After it everything is paid for, so all are made, and of those that
fail the surest decides: wrong weights show in the proofs, and beyond doubt in the dice.

    before the prefill (bytes and integers; a failure is certain)      after it (numbers of the right policy)
    envelope → lease → policy → prompt → shape → progress       ───►   proofs → sampling → logprobs
             → dialogue → termination → duplicate                       → likelihood → record   ───► reward

| reason                | what it means                                                          | severity    |
|-----------------------|------------------------------------------------------------------------|-------------|
| envelope.malformed    | not a submission, or over the codec's caps                             | certain     |
| envelope.format       | another format number                                                  | certain     |
| lease.mismatch        | another run, node, lease or unit than the signed lease                 | certain     |
| policy.mismatch       | claims another policy than the lease's                                 | certain     |
| prompt.mismatch       | other prompt tokens than the lease's                                   | certain     |
| shape.rollouts        | not one rollout per seed                                               | certain     |
| shape.tokens          | no tokens, too many, or not as many as log-probabilities               | certain     |
| shape.vocabulary      | a token that the policy does not have                                  | certain     |
| shape.logprobs        | a log-probability that is no number, or above 0                        | certain     |
| proofs.malformed      | proof bytes of the wrong number, or that no computation gives          | certain     |
| progress.prefix       | not what its node showed of it while it was generated                  | certain     |
| dialogue.malformed    | spans of given tokens that no dialogue has                             | certain     |
| dialogue.missing      | a turn without what the tool says to it                                | certain     |
| dialogue.forged       | tokens given that the tool does not say there                          | certain     |
| dialogue.logprobs     | a log-probability other than 0 for a token that nobody drew            | certain     |
| termination.early     | ended without the end-of-sequence token before the length limit        | certain     |
| termination.past_eos  | went on after the end-of-sequence token                                | certain     |
| termination.finish    | says it ended otherwise than it did                                    | certain     |
| duplicate.rollout     | improbable tokens that another seed gave before                        | certain     |
| duplicate.proof       | a proof that was made of other tokens before                           | statistical |
| proofs.forged         | a proof that would fit almost anything                                 | certain     |
| proofs.mismatch       | activations that are not the policy's                                  | statistical |
| proofs.drift          | activations that are a little off all along, here or of late           | statistical |
| sampling.seed         | tokens that the lease's seeds do not give under its policy             | see below   |
| sampling.drift        | more rounding than honest work shows, in all that was handed in lately | statistical |
| sampling.steered      | better rewards than the seeds' branches, where only tolerance decides  | statistical |
| logprobs.mismatch     | log-probabilities that are not those of the policy                     | statistical |
| likelihood.unlikely   | tokens likelier, or unlikelier, in sum than dice make them             | statistical |
| progress.shape        | shown of a lease at work: tokens or proofs that cannot be              | certain     |
| progress.dialogue     | shown of a lease at work: other words than the tool's                  | certain     |
| progress.proofs       | shown of a lease at work: proofs that no computation gives             | certain     |
| progress.seed         | shown of a lease at work: tokens that the lease's seeds do not give    | certain     |

`sampling.seed` is certain if several tokens lie far outside their intervals (`profiles`), else statistical. A light
audit makes the checks before the prefill and computes the reward. An audit of progress (`progress`) makes a few of
them, and only a certain failure counts.

To add a check: write one function `Case -> Finding`, and put it into one of the two lists at the end of this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shoal.errors import ProofError
from shoal.protocol import SUBMISSION_FORMAT, Audit, Severity, pack_tokens
from shoal.protocol.verdict import Branches
from shoal.sampling.check import distances
from shoal.toploc import check_proofs
from shoal.toploc.check import ProofSums
from shoal.toploc.proofs import decode
from shoal.validator.branches import by_tolerance
from shoal.validator.case import Case, Finding, failed, passed, unsure
from shoal.validator.dialogues import dialogue, ends_as_read
from shoal.validator.evidence import CERTAIN, DOUBT, MOST_POINTS, STRIKE, log_evidence
from shoal.validator.profiles import CHANNELS, Profile
from shoal.validator.progress import progress, talk
from shoal.validator.verdicts import MACHINERY_ACCIDENT, MACHINERY_DISTRUSTED

Check = Callable[[Case], Finding]

LOGPROB_ABOVE_ZERO = 1e-5  # float32 rounding of a probability next to 1


def envelope(case: Case) -> Finding:
    """The body decodes under the caps and is of this format."""
    if case.submission is None:
        return failed("envelope.malformed", f"the submission cannot be read: {case.problem}")
    if case.submission.format != SUBMISSION_FORMAT:
        return failed(
            "envelope.format",
            f"the submission has format {case.submission.format}, this run takes {SUBMISSION_FORMAT}: update shoal",
            format=case.submission.format,
        )
    return passed("envelope")


def lease(case: Case) -> Finding:
    """It is for the run, node, lease and unit that the hub signed: nobody hands in another's work."""
    claimed = (case.claim.run, case.claim.node, case.claim.lease, case.claim.unit)
    given = (case.lease.run, case.lease.node, case.lease.lease, case.lease.unit)
    names = ("run", "node", "lease", "unit")
    wrong = [name for name, ours, theirs in zip(names, given, claimed, strict=True) if ours != theirs]
    if wrong:
        return failed(
            "lease.mismatch", f"the submission names another {', '.join(wrong)} than its lease", fields=",".join(wrong)
        )
    return passed("lease")


def policy(case: Case) -> Finding:
    """It says that the lease's policy produced it. Whether that is true, the prefill will show."""
    wanted = case.lease.policy
    claimed = (case.claim.incarnation, case.claim.version, case.claim.policy_digest)
    if claimed != (wanted.incarnation, wanted.version, wanted.digest):
        return failed(
            "policy.mismatch",
            f"generated by policy {claimed[0]}.{claimed[1]} ({claimed[2][:16]}…), "
            f"but the lease asked for {wanted.label} ({wanted.digest[:16]}…)",
            version=claimed[1],
            wanted_version=wanted.version,
        )
    return passed("policy", version=wanted.version)


def prompt(case: Case) -> Finding:
    """The prompt's token ids are the lease's."""
    if case.claim.prompt != pack_tokens(case.lease.prompt_ids):
        return failed("prompt.mismatch", "the prompt is not the one that the lease gave")
    return passed("prompt", tokens=len(case.lease.prompt_ids))


def shape(case: Case) -> Finding:
    """One rollout per seed, as many log-probabilities as tokens, all within bounds; proofs of the right size."""
    count, wanted = len(case.rollouts), len(case.lease.seeds)
    if count != wanted:
        return failed("shape.rollouts", f"{count} rollouts for {wanted} seeds", rollouts=count, seeds=wanted)
    for look in (_lengths, _vocabulary, _claims, _proof_bytes):
        finding = look(case)
        if finding is not None:
            return finding
    return passed("shape", rollouts=count, tokens=len(case.tokens), proofs=len(case.proofs))


def _lengths(case: Case) -> Finding | None:
    limit = case.lease.sampling.max_new_tokens
    for index, rollout in enumerate(case.rollouts):
        n_bytes, count = len(rollout.tokens), len(rollout.tokens) // 4
        if n_bytes % 4 or len(rollout.logprobs) != n_bytes or not 0 < count <= limit:
            return failed(
                "shape.tokens",
                f"rollout {index} has {count} tokens and {len(rollout.logprobs) // 4} log-probabilities; "
                f"it must have as many of one as of the other, from 1 to {limit}",
                rollout=index,
                tokens=count,
                logprobs=len(rollout.logprobs) // 4,
            )
    return None


def _vocabulary(case: Case) -> Finding | None:
    at = int(np.argmax(case.tokens))
    largest, (rollout, _) = int(case.tokens[at]), case.place(at)
    if largest < case.vocabulary_size:
        return None
    return failed(
        "shape.vocabulary",
        f"rollout {rollout} has token {largest}; the policy knows {case.vocabulary_size} tokens",
        rollout=rollout,
        token=largest,
    )


def _claims(case: Case) -> Finding | None:
    """Written so that what is no number fails too."""
    bad_T = ~((case.claimed <= LOGPROB_ABOVE_ZERO) & (case.claimed > -np.inf))
    if not bad_T.any():
        return None
    rollout, token = case.place(int(np.argmax(bad_T)))
    value = float(case.claimed[np.argmax(bad_T)])
    return failed(
        "shape.logprobs",
        f"rollout {rollout} has the log-probability {value} at token {token}; it must be a number of at most 0",
        rollout=rollout,
        token=token,
        value=value,
    )


def _proof_bytes(case: Case) -> Finding | None:
    """As many proofs as the tokens ask for, each of the size that its rows give, each a polynomial as it must be."""
    try:
        chunks = case.proofs
    except ProofError as error:
        return failed("proofs.malformed", f"the proofs cannot be read: {error}")
    for index, problem in enumerate(decode(chunks, case.points).malformed):
        if problem is not None:
            rollout, token = case.chunk_place(index)
            return failed(
                "proofs.malformed",
                f"the proof of rollout {rollout} from token {token} on is none that a computation gives: {problem}",
                rollout=rollout,
                token=token,
            )
    return None


def termination(case: Case) -> Finding:
    """A rollout ends with the first end-of-sequence token, or at exactly the length limit, and says which.

    Whether the end-of-sequence token was drawn by the lease's dice is for `sampling` to see, as for any token.
    """
    if case.dialogue is not None:
        return ends_as_read(case)
    sampling = case.lease.sampling
    is_end_T = case.tokens == sampling.eos_token_id
    ends = np.add.reduceat(is_end_T, case.starts, dtype=np.int64).tolist()
    last_is_end = is_end_T[case.starts + np.array(case.lengths) - 1].tolist()
    rows = zip(case.rollouts, case.lengths, ends, last_is_end, strict=True)
    for index, (rollout, length, n_ends, is_end) in enumerate(rows):
        if n_ends > is_end:
            first = int(np.argmax(rollout.token_ids == sampling.eos_token_id))
            return failed(
                "termination.past_eos",
                f"rollout {index} goes on for {length - 1 - first} tokens after its end-of-sequence token",
                rollout=index,
                token=first,
            )
        if not is_end and length < sampling.max_new_tokens:
            return failed(
                "termination.early",
                f"rollout {index} stops after {length} tokens without an end-of-sequence token; "
                f"the limit is {sampling.max_new_tokens}",
                rollout=index,
                tokens=length,
            )
        if rollout.finish != ("eos" if is_end else "length"):
            return failed(
                "termination.finish", f"rollout {index} says it ended by {rollout.finish}; it did not", rollout=index
            )
    return passed("termination", eos=sum(last_is_end))


def duplicate(case: Case) -> Finding:
    """Nothing that dice or activations cannot repeat was handed in before, by this node or another (see `seen`)."""
    copied = case.seen.copied(case.marks)
    if copied is None:
        return passed("duplicate", marks=len(case.marks))
    rollout, token = copied.place
    if copied.kind == "rollout":
        return failed(
            "duplicate.rollout",
            f"rollout {rollout} is one that another seed has given before; its log-probability says that dice do not "
            "repeat it, so it was copied",
            rollout=rollout,
        )
    return failed(
        "duplicate.proof",
        f"the proof of rollout {rollout} from token {token} on was handed in before, for other tokens: it was copied",
        Severity.STATISTICAL,
        rollout=rollout,
        token=token,
    )


def proofs(case: Case) -> Finding:
    """The activations that the worker committed to are those of the policy, within the profile's limits."""
    answer, sums = check_proofs(case.replayed.comparisons, case.profile.proofs), case.measures.proofs
    mismatch = log_evidence("accidents", case.accidents(case.odd.proofs))
    drift, channel = case.evidence("exponents", "mantissa")
    evidence = {
        "proofs": answer.chunks, "values": answer.values, "exponent_mismatches": answer.exponent_mismatches,
        "mantissa_mean": answer.mantissa_mean, "mantissa_median": answer.mantissa_median,
        "sign_mismatches": answer.sign_mismatches, "outside_hits": answer.outside_hits, "log_evidence": drift,
    }  # fmt: skip
    reason: str | None = answer.reason
    if reason == "mismatch" and mismatch < STRIKE:
        reason = None  # an accident: counted, see `accident`
    if reason is None and drift >= STRIKE:
        reason = "drift"
    if reason is None:
        return passed("proofs", **evidence)
    rollout, token = case.chunk_place(answer.chunk or 0)
    detail = answer.detail if reason != "drift" else drift_detail(channel, sums, case.profile)
    return failed(
        f"proofs.{reason}",
        f"{PROOF_FAILURES[reason]} policy {case.lease.policy.label}; worst at rollout {rollout} from token "
        f"{token} on: {detail}",
        Severity.CERTAIN if reason in ("malformed", "forged") else Severity.STATISTICAL,
        **evidence,
        rollout=rollout,
        token=token,
    )


def drift_detail(channel: str, sums: ProofSums, profile: Profile) -> str:
    """Which sum is too large."""
    if channel == "exponents":
        limit = profile.noise.exponents.rate
        return f"{sums.exponents / max(1, sums.values):.2%} of {sums.values} exponents differ; honest are {limit:.2%}"
    mean = sums.mantissa / max(1, sums.matches)
    limit = profile.noise.mantissa.rate
    return f"the mean mantissa error over {sums.matches} values is {mean:.3f}; honest are {limit:.3g}"


PROOF_FAILURES = {
    "malformed": "the proofs are none that a computation gives under",
    "forged": "the proofs were made without computing anything under",
    "mismatch": "the proofs are of other activations than those of",
    "drift": "the activations are a little off everywhere (other weights, or another number format?) from those of",
}


def sampling(case: Case) -> Finding:
    """Every token is the one that the lease's seed draws from the policy: no choice was left to the worker."""
    answer, limits, replay = case.seed_check, case.profile.certain, case.replayed
    accidents = log_evidence("accidents", case.accidents(case.odd.unseeded))
    steered = max(case.evidence("outside", "distance")[0], *(case.measures.by_rollout(c, case.profile) for c in SEEDS))
    evidence = {
        "tokens": answer.n_tokens, "outside": answer.n_outside, "max_distance": answer.max_distance,
        "sum_distance": answer.sum_distance, "log_evidence": steered,
    }  # fmt: skip
    distance_T = np.where(case.drawn, distances(replay.uniforms, replay.low, replay.high), 0.0)
    far = int((distance_T > limits.distance).sum())
    # Tokens so far off are no accident, in one rollout or in many: all parts count.
    everywhere = log_evidence("accidents", case.accidents(case.odd.unseeded, most=math.inf))
    is_certain = far >= limits.tokens and everywhere >= CERTAIN
    is_beyond = is_certain or accidents >= STRIKE
    kind = answer.reason or ("beyond" if is_beyond else "steered" if steered >= STRIKE else "")
    if not kind:
        return passed("sampling", **evidence)
    rollout, token = case.place(int(np.argmax(distance_T)))
    return failed(
        "sampling.seed",
        f"{int((distance_T > 0).sum())} of {case.generated} tokens are not those that the lease's seeds give under "
        f"policy {case.lease.policy.label} (the worst is token {token} of rollout {rollout}): "
        "another policy, other seeds, or edited tokens",
        Severity.CERTAIN if is_certain else Severity.STATISTICAL,
        **evidence,
        far_outside=far,
        kind=kind,
        rollout=rollout,
        token=token,
    )


SEEDS = ("outside", "distance")


def logprobs(case: Case) -> Finding:
    """The reported log-probabilities are the policy's, also on average over each rollout: training divides by them."""
    delta_T = np.where(case.drawn, case.claimed - case.replayed.logprobs, 0.0)
    error_T = np.where(np.isfinite(delta_T), np.abs(delta_T), np.inf)
    far = log_evidence("accidents", case.accidents(case.odd.logprobs))
    off, channel = case.evidence("logprobs", "bias")
    scores = case.measures.scores(case.profile.logprobs)
    evidence = {
        "mean_error": float(error_T.sum()) / case.generated, "max_error": float(error_T.max()),
        "worst_rollout": float(np.abs(scores).max()), "log_evidence": off,
    }  # fmt: skip
    if far < STRIKE and off < STRIKE:
        return passed("logprobs", **evidence)
    rollout, token = case.place(int(np.argmax(error_T)))
    how = "the sums over rollouts, up to" if channel == "bias" and far < STRIKE else "up to"
    return failed(
        "logprobs.mismatch",
        f"the log-probabilities differ from those of policy {case.lease.policy.label} by "
        f"{evidence['mean_error']:.2g} on average and {evidence['max_error']:.2g} at most (token {token} of rollout "
        f"{rollout}); {how} {evidence['worst_rollout']:.3g} standard deviations: more than rounding explains",
        Severity.STATISTICAL,
        **evidence,
        rollout=rollout,
        token=token,
    )


def likelihood(case: Case) -> Finding:
    """The tokens are, in sum, as likely as drawn tokens are: neither picked for their likelihood nor against it.

    The log-probability of an honest token has the mean -entropy and the variance varentropy, whatever came before it.
    """
    replay, limits = case.replayed, case.profile.likelihood
    excess = float((replay.logprobs + replay.entropy)[case.drawn].sum())
    variance = float(replay.varentropy[case.drawn].sum())
    deviations = excess / variance**0.5 if variance > 0 else 0.0
    evidence = {"deviations": deviations, "excess": excess, "variance": variance}
    told = case.generated >= limits.tokens and variance >= limits.variance
    if not told or abs(deviations) <= limits.deviations:
        return passed("likelihood", **evidence)
    return failed(
        "likelihood.unlikely",
        f"the tokens are {'likelier' if excess > 0 else 'unlikelier'} than drawn ones by {abs(deviations):.1f} "
        f"standard deviations ({limits.deviations:g} are allowed): another temperature, or picked completions",
        Severity.STATISTICAL,
        **evidence,
    )


def record(case: Case) -> Finding:
    """With what the node handed in before: cheating a little all the time shows where one submission does not."""
    sums = case.record.plus(case.tally)
    found = {name: log_evidence(name, sums.of(name)) for name in CHANNELS if name in case.record.channels}
    worst = max(found, key=lambda name: found[name], default="")
    if not worst or found[worst] < STRIKE:
        return passed("record", tokens=case.record.tokens, log_evidence=found.get(worst, 0.0), channel=worst)
    what = sums.of(worst)
    return failed(
        RECORD_REASONS[worst],
        f"with what this node handed in before, {RECORD_FAILURES[worst]} more than rounding explains "
        f"({what.seen:.4g} units, at most {what.expected:.4g} expected): other weights or number formats than those of "
        f"{case.lease.profile}, or steering",
        Severity.STATISTICAL,
        channel=worst,
        seen=what.seen,
        expected=what.expected,
        log_evidence=found[worst],
    )


RECORD_REASONS = {
    "outside": "sampling.drift", "distance": "sampling.drift", "accidents": "sampling.seed",
    "exponents": "proofs.drift", "mantissa": "proofs.drift", "logprobs": "logprobs.mismatch",
    "bias": "logprobs.mismatch",
}  # fmt: skip
RECORD_FAILURES = {
    "outside": "tokens are beside what its seeds give,", "distance": "tokens are beside what its seeds give,",
    "accidents": "tokens or proofs are quite wrong", "exponents": "activations are off",
    "mantissa": "activations are off", "logprobs": "log-probabilities are off", "bias": "log-probabilities lean",
}  # fmt: skip


BEFORE_PREFILL: Sequence[Check] = (envelope, lease, policy, prompt, shape, progress, dialogue, termination, duplicate)


def bought(case: Case, audit: Audit, branches: Branches) -> Finding:
    """Where only the tolerance lets a token pass, the submission is worth no more than what the seed gives instead."""
    gains = audit.gains.after(branches.differences)
    evidence = {
        "looked": branches.looked, "decoded": branches.tokens, "differing": gains.differing, "gained": gains.gained,
        "evidence": gains.value,
    }  # fmt: skip
    if gains.suffices:
        return failed(
            "sampling.steered",
            f"where rounding alone should decide between two tokens, the ones handed in led to better rewards: by "
            f"{gains.gained:+.3g} in sum over {gains.differing} unequal pairs, which chance does once in "
            f"{gains.value:.2g} nodes",
            Severity.STATISTICAL,
            **evidence,
        )
    if audit.distrusted and case.replay is not None and by_tolerance(case).any():
        return unsure(
            MACHINERY_DISTRUSTED,
            f"some tokens pass only by the tolerance, and the work of {audit.distrusted} shows that such tokens are "
            "chosen for their reward: until it does no more, groups with such tokens are given out again",
            **evidence,
        )
    return passed("branches", **evidence)


def accident(case: Case) -> Finding:
    """Not more is quite wrong than coarse arithmetic gets wrong by itself. One such proof now and then costs nothing;
    where there are a few, nobody can tell. A token, or its log-probability, is trained on: one that is far off could
    have been chosen (an end, an answer, a huge ratio), so a group with one is never accepted. Nor is one with a rollout
    that is off in more parts than count: none of their tokens is in a sum."""
    odd_C, sums = case.odd.worst > 0, case.record.plus(case.tally).of("accidents")
    doubt = max(log_evidence("accidents", sums), log_evidence("accidents", case.tally.of("accidents")))
    is_trained_on = bool(case.odd.seeds.any() or case.odd.logprobs.any())
    is_hidden = bool((np.bincount(case.rollout_of_chunk, case.odd.worst) > MOST_POINTS).any())
    if case.profile.accidents.first == 0 or not odd_C.any() or not (doubt >= DOUBT or is_trained_on or is_hidden):
        return passed("accident", accidents=int(odd_C.sum()))
    rollout, token = case.chunk_place(int(np.argmax(odd_C)))
    return unsure(
        MACHINERY_ACCIDENT,
        f"{int(odd_C.sum())} of {len(odd_C)} parts of rollouts are far off (the first is rollout {rollout} from token "
        f"{token} on), as seldom happens in {case.lease.profile}: it may be nobody's fault",
        accidents=int(odd_C.sum()),
        rollout=rollout,
        token=token,
    )


AFTER_PREFILL: Sequence[Check] = (proofs, sampling, logprobs, likelihood, record, accident)
SHOWN_BEFORE_PREFILL: Sequence[Check] = (lease, policy, prompt, shape, talk)
SHOWN_AFTER_PREFILL: Sequence[Check] = (proofs, sampling, accident)


def run_checks(checks: Sequence[Check], case: Case) -> list[Finding]:
    """The findings up to and including the first failure."""
    findings: list[Finding] = []
    for check in checks:
        findings.append(check(case))
        if not findings[-1].passed:
            break
    return findings


def run_all(checks: Sequence[Check], case: Case) -> list[Finding]:
    """All findings; if there are failures, the one that decides comes last: the surest, an unsure one only alone."""
    findings = [check(case) for check in checks]
    failures = [finding for finding in findings if not finding.passed and not finding.unsure]
    failures = failures or [finding for finding in findings if not finding.passed]
    if not failures:
        return findings
    certain = [finding for finding in failures if finding.severity is Severity.CERTAIN]
    decides = (certain or failures)[0]
    return [*(finding for finding in findings if finding is not decides), decides]
