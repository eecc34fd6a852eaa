"""Every check of a submission, each one function, cheapest first.

Before the prefill the first failure decides. After it all checks are made, because they cost little more, and the most
certain failure decides: wrong weights show in the proofs, and most clearly in the seeds.

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
| shape.logprobs        | a log-probability that is not a number, or above 0                     | certain     |
| proofs.malformed      | proof bytes of the wrong number, or that no computation gives          | certain     |
| progress.prefix       | not what its node showed of it while it was generated                  | certain     |
| dialogue.malformed    | spans of tool tokens that no dialogue has                              | certain     |
| dialogue.missing      | a turn without what the tool says to it                                | certain     |
| dialogue.forged       | tool tokens that the tool does not say there                           | certain     |
| dialogue.logprobs     | a log-probability other than 0 for a tool token                        | certain     |
| termination.early     | ended before the length limit without the end token                    | certain     |
| termination.past_eos  | continued after its end                                                | certain     |
| termination.finish    | says it ended otherwise than it did                                    | certain     |
| duplicate.rollout     | improbable tokens that another seed gave before                        | certain     |
| duplicate.proof       | a proof that was made of other tokens before                           | statistical |
| proofs.forged         | a proof that would fit almost anything                                 | certain     |
| proofs.mismatch       | activations that are not the policy's                                  | statistical |
| proofs.drift          | activations that are a little off all along, here or recently          | statistical |
| sampling.seed         | tokens that the lease's seeds do not give under its policy             | see below   |
| sampling.drift        | more rounding than honest work shows, in all recent submissions        | statistical |
| sampling.steered      | better rewards than the seeds' branches, within the tolerance          | statistical |
| logprobs.mismatch     | log-probabilities that are not the policy's                            | statistical |
| likelihood.unlikely   | tokens likelier, or unlikelier, in sum than drawn tokens               | statistical |
| progress.shape        | shown of a lease at work: tokens or proofs that cannot be              | certain     |
| progress.dialogue     | shown of a lease at work: other words than the tool's                  | certain     |
| progress.proofs       | shown of a lease at work: proofs that no computation gives             | certain     |
| progress.seed         | shown of a lease at work: tokens that the lease's seeds do not give    | certain     |

`sampling.seed` is certain if several tokens lie far outside their intervals (`profiles`), else statistical. A light
audit makes the checks before the prefill and computes the reward. An audit of progress (`progress`) makes a few of
them, and only a certain failure counts.

To add a check: write one function `Case -> Finding`, and put it into one of the lists at the end of this file.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shoal.engines.dialogue import Reading
from shoal.errors import ProofError, ProtocolError
from shoal.protocol import SUBMISSION_FORMAT, Audit, Branches, Severity, pack_tokens, shown_digest, unpack_spans
from shoal.toploc import check_proofs
from shoal.toploc.points import decode
from shoal.validator.branches import by_tolerance
from shoal.validator.case import Case, Finding, failed, passed, unsure
from shoal.validator.evidence import CERTAIN, DOUBT, MOST_POINTS, SEEDS, STRIKE, log_evidence, log_evidence_of_seeds
from shoal.validator.profiles import CHANNELS

Check = Callable[[Case], Finding]

LOGPROB_ABOVE_ZERO = 1e-5  # float32 rounding of a probability next to 1
LEAST_NATS = -1000.0  # a token that cannot be has a log-probability of -inf
NO_DIALOGUE = Reading(given=(), turns=1, finish=None)


def envelope(case: Case) -> Finding:
    """The body decodes within the limits and has the right format."""
    if case.submission is None:
        return failed("envelope.malformed", f"the submission cannot be read: {case.problem}")
    if (number := case.submission.format) != SUBMISSION_FORMAT:
        message = f"the submission has format {number}, this run takes {SUBMISSION_FORMAT}: update shoal"
        return failed("envelope.format", message, format=number)
    return passed("envelope")


def lease(case: Case) -> Finding:
    names = ("run", "node", "lease", "unit")
    wrong = ",".join(name for name in names if getattr(case.claim, name) != getattr(case.lease, name))
    if wrong:
        return failed("lease.mismatch", f"the submission names another {wrong} than its lease", fields=wrong)
    return passed("lease")


def policy(case: Case) -> Finding:
    """It names the lease's policy. Whether that is true, the prefill shows."""
    claim, wanted = case.claim, case.lease.policy
    if (claim.incarnation, claim.version, claim.policy_digest) != (wanted.incarnation, wanted.version, wanted.digest):
        message = (
            f"generated by policy {claim.incarnation}.{claim.version} ({claim.policy_digest[:16]}…), "
            f"but the lease asked for {wanted.label} ({wanted.digest[:16]}…)"
        )
        return failed("policy.mismatch", message, version=claim.version, wanted_version=wanted.version)
    return passed("policy", version=wanted.version)


def prompt(case: Case) -> Finding:
    if case.claim.prompt != pack_tokens(case.lease.prompt_ids):
        return failed("prompt.mismatch", "the prompt is not the one that the lease gave")
    return passed("prompt", tokens=len(case.lease.prompt_ids))


def shape(case: Case) -> Finding:
    """One rollout per seed; as many log-probabilities as tokens, within bounds; as many proofs as the tokens need, each
    of the right size and well-formed."""
    count, wanted, limit = len(case.rollouts), len(case.lease.seeds), case.lease.sampling.max_new_tokens
    if count != wanted:
        return failed("shape.rollouts", f"{count} rollouts for {wanted} seeds", rollouts=count, seeds=wanted)
    for index, each in enumerate(case.rollouts):
        tokens, logprobs = len(each.tokens) // 4, len(each.logprobs) // 4
        if len(each.tokens) % 4 or len(each.logprobs) != len(each.tokens) or not 0 < tokens <= limit:
            message = (
                f"rollout {index} has {tokens} tokens and {logprobs} log-probabilities, not equal and 1 to {limit}"
            )
            return failed("shape.tokens", message, rollout=index, tokens=tokens, logprobs=logprobs)
    at = int(np.argmax(case.tokens))
    if (largest := int(case.tokens[at])) >= case.vocabulary_size:
        rollout, _ = case.place(at)
        message = f"rollout {rollout} has token {largest}; the policy knows {case.vocabulary_size} tokens"
        return failed("shape.vocabulary", message, rollout=rollout, token=largest)
    bad_T = ~((case.claimed <= LOGPROB_ABOVE_ZERO) & (case.claimed > -np.inf))  # written so that NaN fails, too
    if bad_T.any():
        at = int(np.argmax(bad_T))
        (rollout, token), value = case.place(at), float(case.claimed[at])
        message = f"rollout {rollout} has the log-probability {value} at token {token}; it must be a number up to 0"
        return failed("shape.logprobs", message, rollout=rollout, token=token, value=value)
    try:
        malformed = decode(case.proofs, case.points).malformed
    except ProofError as error:
        return failed("proofs.malformed", f"the proofs cannot be read: {error}")
    for chunk, problem in enumerate(malformed):
        if problem is not None:
            rollout, token = case.chunk_place(chunk)
            message = f"no computation gives the proof of rollout {rollout} from token {token}: {problem}"
            return failed("proofs.malformed", message, rollout=rollout, token=token)
    return passed("shape", rollouts=count, tokens=len(case.tokens), proofs=len(case.proofs))


def progress(case: Case) -> Finding:
    """Every rollout begins with what its node showed of it while it was generated."""
    for shown in case.shown:
        rollout = case.rollouts[shown.rollout]
        begins = shown_digest(rollout.tokens[: 4 * shown.tokens], rollout.proofs[: shown.proof_bytes])
        if begins != shown.digest:
            message = (
                f"rollout {shown.rollout} does not begin with the {shown.tokens} tokens or proofs that its node showed"
            )
            at = {"rollout": shown.rollout, "tokens": shown.tokens}
            return failed("progress.prefix", message, Severity.CERTAIN, **at, shown=shown.digest, submitted=begins)
    return passed("progress", rollouts=len(case.shown), tokens=sum(shown.tokens for shown in case.shown))


def dialogue(case: Case) -> Finding:
    """The spans of tool tokens are exactly what the tool says to these turns. Otherwise any token could be claimed to
    be a tool token, which needs no seed. So the whole dialogue is computed again from the turns and the tool, before
    the prefill."""
    for index, (rollout, length) in enumerate(zip(case.rollouts, case.lengths, strict=True)):
        try:
            claimed = unpack_spans(rollout.given, length)
        except ProtocolError as error:
            return failed("dialogue.malformed", f"rollout {index}: its spans cannot be read: {error}", rollout=index)
        reading = NO_DIALOGUE if case.dialogue is None else case.readings[index]
        wrong = sorted(set(claimed) ^ set(reading.given))
        if wrong or reading.problem == "other words":
            at = reading.at if reading.problem == "other words" else wrong[0][0]
            if at in {start for start, _ in claimed}:
                message = f"rollout {index} marks tokens from token {at} on as tool tokens: the tool does not say them"
                return failed("dialogue.forged", message, rollout=index, token=at)
            message = f"rollout {index} lacks the tool tokens that the tool says at token {at}"
            return failed("dialogue.missing", message, rollout=index, token=at)
    if case.claimed[~case.drawn].any():
        index, token = case.place(int(np.argmax(~case.drawn & (case.claimed != 0))))
        message = f"rollout {index} has a log-probability at token {token}, which is a tool token: it must be 0"
        return failed("dialogue.logprobs", message, rollout=index, token=token)
    return passed("dialogue", given=len(case.tokens) - case.generated)


def shown_dialogue(case: Case) -> Finding:
    """Of shown progress: the tool's words are where its turns ask for them, as far as the rollout goes."""
    if case.dialogue is None:
        return passed("dialogue")
    reading = case.dialogue.read(case.rollouts[0].token_ids.tolist(), whole=False)
    if reading.problem:
        message = f"after turn {reading.turns}, at token {reading.at}, is not what the tool says there"
        return failed("dialogue.forged", message, token=reading.at)
    return passed("dialogue", given=sum(length for _, length in reading.given))


def termination(case: Case) -> Finding:
    """A rollout ends with its first end (`models.ending`), a dialogue where `Dialogue.read` says, or at the length
    limit, and says which. Whether the seed drew it is checked by `sampling`."""
    limit, eos = case.lease.sampling.max_new_tokens, case.lease.sampling.eos_token_ids
    if case.dialogue is None:
        stops = np.append(np.flatnonzero(np.isin(case.tokens, eos)), len(case.tokens))
        ends = (stops[np.searchsorted(stops, case.starts)] - case.starts + 1).tolist()  # beyond the length: none
        if case.lease.sampling.stop:
            found = (case.ending.first(rollout.token_ids.tolist()) for rollout in case.rollouts)
            ends = [limit + 1 if end is None else end for end in found]
        cut = ["length" if length == limit else None for length in case.lengths]
        finishes = ["eos" if end <= n else how for end, n, how in zip(ends, case.lengths, cut, strict=True)]
    else:
        ends = [each.at if each.problem == "past end" else len(case.tokens) for each in case.readings]
        finishes = [each.finish for each in case.readings]
    for index, (rollout, length) in enumerate(zip(case.rollouts, case.lengths, strict=True)):
        if ends[index] < length:
            message = f"rollout {index} continues for {length - ends[index]} tokens after its end"
            return failed("termination.past_eos", message, rollout=index, token=ends[index])
        if finishes[index] is None:
            message = f"rollout {index} stops after {length} tokens, before its end; the limit is {limit}"
            return failed("termination.early", message, rollout=index, tokens=length)
        if rollout.finish != finishes[index]:
            message = f"rollout {index} says it ended by {rollout.finish}; it did not"
            return failed("termination.finish", message, rollout=index)
    return passed("termination", eos=finishes.count("eos"))


def duplicate(case: Case) -> Finding:
    """Nothing that seeds or activations cannot repeat was submitted before, by any node (`SeenWork`)."""
    copied = case.seen.copied(case.marks)
    if copied is None:
        return passed("duplicate", marks=len(case.marks))
    rollout, token = copied.place
    if copied.kind == "rollout":
        message = f"rollout {rollout} was given by another seed before and is too improbable to repeat: a copy"
        return failed("duplicate.rollout", message, rollout=rollout)
    message = f"the proof of rollout {rollout} from token {token} on was submitted before, for other tokens: a copy"
    return failed("duplicate.proof", message, Severity.STATISTICAL, rollout=rollout, token=token)


PROOF_FAILURES = {
    "malformed": "no computation gives these proofs under",
    "forged": "the proofs were made without computing anything under",
    "mismatch": "the proofs are of other activations than those of",
    "drift": "the activations are a little off everywhere (other weights, or another number format?) from those of",
}


def proofs(case: Case) -> Finding:
    """The activations that the worker committed to are those of the policy, within the profile's limits."""
    answer = check_proofs(case.replayed.comparisons, case.profile.proofs)
    sums, noise = case.measures.proofs, case.profile.noise
    mismatch = log_evidence("accidents", case.accidents(case.outliers.proofs))
    drift, channel = case.evidence("exponents", "mantissa")
    evidence = {
        "proofs": answer.chunks, "values": answer.values, "exponent_mismatches": answer.exponent_mismatches,
        "mantissa_mean": answer.mantissa_mean, "mantissa_median": answer.mantissa_median,
        "sign_mismatches": answer.sign_mismatches, "outside_hits": answer.outside_hits, "log_evidence": drift,
    }  # fmt: skip
    reason, detail = str(answer.reason or ""), answer.detail
    if reason == "mismatch" and mismatch < STRIKE:
        reason = ""  # an accident: counted, see `accident`
    if not reason and drift >= STRIKE and channel == "exponents":
        share = sums.exponents / max(1, sums.values)
        detail = f"{share:.2%} of {sums.values} exponents differ; honest are {noise.exponents.rate:.2%}"
    elif not reason and drift >= STRIKE:
        mean = sums.mantissa / max(1, sums.matches)
        detail = f"the mean mantissa error of {sums.matches} values is {mean:.3f}; honest is {noise.mantissa.rate:.3g}"
    reason = reason or ("drift" if drift >= STRIKE else "")
    if not reason:
        return passed("proofs", **evidence)
    rollout, token = case.chunk_place(answer.chunk or 0)
    place = f"worst at rollout {rollout} from token {token} on"
    message = f"{PROOF_FAILURES[reason]} policy {case.lease.policy.label}; {place}: {detail}"
    severity = Severity.CERTAIN if reason in ("malformed", "forged") else Severity.STATISTICAL
    return failed(f"proofs.{reason}", message, severity, **evidence, rollout=rollout, token=token)


def sampling(case: Case) -> Finding:
    """Every token is the one that the lease's seed draws from the policy."""
    answer, limits = case.seed_check, case.profile.certain
    accidents, sums = case.accidents(case.outliers.unseeded), [case.tally.of(name) for name in SEEDS]
    by_rollout = (case.measures.by_rollout(name, case.profile) for name in SEEDS)
    steered = max(log_evidence_of_seeds(accidents, *sums), *by_rollout)
    evidence = {
        "tokens": answer.n_tokens, "outside": answer.n_outside, "max_distance": answer.max_distance,
        "sum_distance": answer.sum_distance, "log_evidence": steered,
    }  # fmt: skip
    distance_T = np.where(case.drawn, case.replayed.distance, 0.0)
    far = int((distance_T > limits.distance).sum())
    # Tokens so far off are no accident, so here all parts count.
    everywhere = log_evidence("accidents", case.accidents(case.outliers.unseeded, most=math.inf))
    is_certain = far >= limits.tokens and everywhere >= CERTAIN
    is_beyond = is_certain or log_evidence("accidents", accidents) >= STRIKE
    kind = answer.reason or ("beyond" if is_beyond else "steered" if steered >= STRIKE else "")
    if not kind:
        return passed("sampling", **evidence)
    rollout, token = case.place(int(np.argmax(distance_T)))
    message = (
        f"{int((distance_T > 0).sum())} of {case.generated} tokens are not those that the lease's seeds give under "
        f"policy {case.lease.policy.label} (the worst is token {token} of rollout {rollout}): "
        "another policy, other seeds, or edited tokens"
    )
    severity = Severity.CERTAIN if is_certain else Severity.STATISTICAL
    at = {"rollout": rollout, "token": token}
    return failed("sampling.seed", message, severity, **evidence, far_outside=far, kind=kind, **at)


def logprobs(case: Case) -> Finding:
    """The reported log-probabilities are the policy's, also on average over each rollout: training divides by them."""
    error_T = np.where(case.drawn, np.abs(case.logprob_errors), 0.0)
    far = log_evidence("accidents", case.accidents(case.outliers.logprobs))
    off, channel = case.evidence("logprobs", "bias")
    mean, most = float(error_T.sum()) / case.generated, float(error_T.max())
    worst = float(np.abs(case.measures.scores(case.profile.logprobs)).max())
    evidence = {"mean_error": mean, "max_error": most, "worst_rollout": worst, "log_evidence": off}
    if far < STRIKE and off < STRIKE:
        return passed("logprobs", **evidence)
    rollout, token = case.place(int(np.argmax(error_T)))
    how = "the sums over rollouts, up to" if channel == "bias" and far < STRIKE else "up to"
    message = (
        f"the log-probabilities differ from those of policy {case.lease.policy.label} by {mean:.2g} on average and "
        f"{most:.2g} at most (token {token} of rollout {rollout}); {how} {worst:.3g} standard deviations: more than "
        "rounding explains"
    )
    return failed("logprobs.mismatch", message, Severity.STATISTICAL, **evidence, rollout=rollout, token=token)


def likelihood(case: Case) -> Finding:
    """The tokens are in sum as likely as drawn tokens. The log-probability of an honest token has the mean -entropy and
    the variance varentropy. A nearly certain policy draws a token of 20 nats now and then, and two of these are not
    normally distributed: on the unlikely side the largest token widens the limit, as in Bernstein's inequality."""
    replay, limits = case.replayed, case.profile.likelihood
    excess_T = np.maximum((replay.logprobs + replay.entropy)[case.drawn], LEAST_NATS)
    excess, variance = float(excess_T.sum()), float(replay.varentropy[case.drawn].sum())
    rare = -float(excess_T.min(initial=0.0)) * max(0.0, -excess) / 3
    deviations = excess / (variance + rare) ** 0.5 if variance > 0 else 0.0
    evidence = {"deviations": deviations, "excess": excess, "variance": variance}
    is_enough = case.generated >= limits.tokens and variance >= limits.variance
    if not is_enough or abs(deviations) <= limits.deviations:
        return passed("likelihood", **evidence)
    message = (
        f"the tokens are {'likelier' if excess > 0 else 'unlikelier'} than drawn ones by {abs(deviations):.1f} "
        f"standard deviations ({limits.deviations:g} are allowed): another temperature, or picked completions"
    )
    return failed("likelihood.unlikely", message, Severity.STATISTICAL, **evidence)


RECORDED: Mapping[str, tuple[str, str]] = {
    "outside": ("sampling.drift", "tokens are next to those that its seeds give,"),
    "distance": ("sampling.drift", "tokens are next to those that its seeds give,"),
    "accidents": ("sampling.seed", "tokens or proofs are far off"),
    "exponents": ("proofs.drift", "activations are off"),
    "mantissa": ("proofs.drift", "activations are off"),
    "logprobs": ("logprobs.mismatch", "log-probabilities are off"),
    "bias": ("logprobs.mismatch", "log-probabilities lean"),
}
"""By channel: the reason for a record that is too large, and what to call it."""


def record(case: Case) -> Finding:
    """With what the node submitted before: small cheating all the time shows even if one submission does not."""
    sums = case.record.plus(case.tally)
    found = {name: log_evidence(name, sums.of(name)) for name in CHANNELS if name in case.record.channels}
    worst = max(found, key=lambda name: found[name], default="")
    if not worst or found[worst] < STRIKE:
        return passed("record", tokens=case.record.tokens, log_evidence=found.get(worst, 0.0), channel=worst)
    what, (reason, words) = sums.of(worst), RECORDED[worst]
    message = (
        f"with what this node submitted before, {words} more than rounding explains ({what.seen:.4g} units, at most "
        f"{what.expected:.4g} expected): other weights or formats than those of {case.lease.profile}, or steering"
    )
    evidence = {"seen": what.seen, "expected": what.expected, "log_evidence": found[worst]}
    return failed(reason, message, Severity.STATISTICAL, channel=worst, **evidence)


def reward_steering(case: Case, audit: Audit, branches: Branches) -> Finding:
    """Where only the tolerance lets a token pass, the submission must not earn more than what the seed gives
    instead."""
    gains = audit.gains.after(branches.differences)
    evidence = {
        "looked": branches.looked, "decoded": branches.tokens, "differing": gains.differing, "gained": gains.gained,
        "evidence": gains.value,
    }  # fmt: skip
    if gains.suffices:
        message = (
            "where rounding alone should decide between two tokens, the submitted ones led to better rewards, by "
            f"{gains.gained:+.3g} over {gains.differing} unequal pairs, as chance does once in {gains.value:.2g} nodes"
        )
        return failed("sampling.steered", message, Severity.STATISTICAL, **evidence)
    if audit.distrusted and case.replay is not None and by_tolerance(case).any():
        message = (
            f"some tokens pass only by the tolerance, and the work of {audit.distrusted} shows that such tokens are "
            "chosen for their reward: groups with such tokens are issued again until that ends"
        )
        return unsure("sampling.distrusted", message, **evidence)
    return passed("branches", **evidence)


def accident(case: Case) -> Finding:
    """Not more parts are far off than coarse arithmetic causes. One such proof now and then costs nothing; several
    cannot be decided. A token (or its log-probability) that is far off could have been chosen and would be trained on,
    so a group with one is never accepted; nor is one with a rollout that is off in more parts than count, because its
    tokens are in no sum."""
    outlier_C, sums = case.outliers.worst > 0, case.record.plus(case.tally).of("accidents")
    doubt = max(log_evidence("accidents", sums), log_evidence("accidents", case.tally.of("accidents")))
    is_trained_on = bool(case.outliers.seeds.any() or case.outliers.logprobs.any())
    is_hidden = bool((np.bincount(case.rollout_of_chunk, case.outliers.worst) > MOST_POINTS).any())
    count = int(outlier_C.sum())
    if case.profile.accidents.first == 0 or not count or not (doubt >= DOUBT or is_trained_on or is_hidden):
        return passed("accident", accidents=count)
    rollout, token = case.chunk_place(int(np.argmax(outlier_C)))
    message = (
        f"{count} of {len(outlier_C)} parts of rollouts are far off, the first at rollout {rollout}, token {token}, "
        f"as seldom happens in {case.lease.profile}: it may be nobody's fault"
    )
    return unsure("sampling.accident", message, accidents=count, rollout=rollout, token=token)


BEFORE_PREFILL: Sequence[Check] = (envelope, lease, policy, prompt, shape, progress, dialogue, termination, duplicate)
AFTER_PREFILL: Sequence[Check] = (proofs, sampling, logprobs, likelihood, record, accident)
SHOWN_BEFORE_PREFILL: Sequence[Check] = (lease, policy, prompt, shape, shown_dialogue)
SHOWN_AFTER_PREFILL: Sequence[Check] = (proofs, sampling, accident)


def run_checks(checks: Sequence[Check], case: Case) -> list[Finding]:
    findings: list[Finding] = []
    for check in checks:
        findings.append(check(case))
        if not findings[-1].passed:
            break
    return findings


def run_all(checks: Sequence[Check], case: Case) -> list[Finding]:
    """All findings. If there are failures, the deciding one comes last: the most certain; an unsure one only alone."""
    findings = [check(case) for check in checks]
    failures = [each for each in findings if not each.passed]
    decides = max(failures, key=lambda each: (each.severity is Severity.CERTAIN, not each.unsure), default=None)
    if decides is None:
        return findings
    return [*(each for each in findings if each is not decides), decides]
