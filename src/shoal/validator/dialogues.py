"""Checks of dialogues: the tool's words are where the turns ask for them, and nowhere else.

    tokens ─► Dialogue.read (by turns and tool alone) ─► spans that must be ──┐
    rollout.given ─► spans that are claimed ─────────────────────────────────┴─ equal? ─► these tokens are not drawn

Who could say of any token that it was given would never have to roll dice again. So nothing is believed: every dialogue
is computed once more, before the prefill, for it costs little.
"""

from __future__ import annotations

import numpy as np

from shoal.engines.dialogue import Reading
from shoal.errors import ProtocolError
from shoal.protocol.submission import Spans, unpack_spans
from shoal.validator.case import Case, Finding, failed, passed

NOBODY_ANSWERS = Reading(given=(), turns=1, finish=None)


def ends_as_read(case: Case) -> Finding:
    """A dialogue, whose turns end in the middle too, ends where `Dialogue.read` says, and says how."""
    for index, (rollout, reading) in enumerate(zip(case.rollouts, case.readings, strict=True)):
        length = case.lengths[index]
        if reading.problem == "past end":
            return failed(
                "termination.past_eos",
                f"rollout {index} goes on for {length - reading.at} tokens after turn {reading.turns}, its last one",
                rollout=index,
                token=reading.at,
            )
        if reading.finish is None:
            return failed(
                "termination.early",
                f"rollout {index} stops after {length} tokens in the middle of turn {reading.turns}; the limit is "
                f"{case.lease.sampling.max_new_tokens}",
                rollout=index,
                tokens=length,
            )
        if rollout.finish != reading.finish:
            return failed(
                "termination.finish", f"rollout {index} says it ended by {rollout.finish}; it did not", rollout=index
            )
    return passed("termination", eos=sum(reading.finish == "eos" for reading in case.readings))


def dialogue(case: Case) -> Finding:
    """What is said to be given is what the tool says to these turns, all of it, and nothing else.

    Given tokens are not held against the dice: so this is decided by computing the whole dialogue again.
    """
    for index, (rollout, length) in enumerate(zip(case.rollouts, case.lengths, strict=True)):
        try:
            claimed = unpack_spans(rollout.given, length)
        except ProtocolError as error:
            return failed("dialogue.malformed", f"rollout {index}: its spans cannot be read: {error}", rollout=index)
        finding = _unlike_the_tool(case, index, claimed)
        if finding is not None:
            return finding
    if case.claimed[~case.drawn].any():
        index, token = case.place(int(np.argmax(~case.drawn & (case.claimed != 0))))
        return failed(
            "dialogue.logprobs",
            f"rollout {index} has a log-probability at token {token}, which was given: it must be 0",
            rollout=index,
            token=token,
        )
    return passed("dialogue", given=len(case.tokens) - case.generated)


def _unlike_the_tool(case: Case, index: int, claimed: Spans) -> Finding | None:
    """Where the spans of one rollout are not those that its tokens and the tool give."""
    reading = NOBODY_ANSWERS if case.dialogue is None else case.readings[index]
    wrong = sorted(set(claimed) ^ set(reading.given))
    if reading.problem == "other words":
        at, what = reading.at, f"what the tool says to turn {reading.turns}, at token {reading.at}"
        forged, missing = f"has other words than {what}", f"is without {what}"
    elif wrong:
        at, what = wrong[0][0], f"{wrong[0][1]} tokens from token {wrong[0][0]} on were given"
        forged, missing = f"claims that {what}: they were for the model to draw", f"does not say that {what}"
    else:
        return None
    if at in {start for start, _ in claimed}:
        return failed("dialogue.forged", f"rollout {index} {forged}", rollout=index, token=at)
    return failed("dialogue.missing", f"rollout {index} {missing}", rollout=index, token=at)
