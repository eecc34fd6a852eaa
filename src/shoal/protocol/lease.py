"""Leases: what a worker is asked to generate. Prompt, seeds, policy and sampling are given; it chooses nothing.

Calibrations: how far honest work of each kind may deviate, measured by trusted machines for one policy.

    validator ── measures ──► Calibration, signed ──► hub: the newest is in force ──► Lease ──► Verdict: name it
    owner     ── signs ─────► a calibration of kinds that no validator's machine has
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from shoal.protocol.policy import HEX_256, PolicyRef
from shoal.protocol.signing import Document, Message, Milliseconds, SignedDocument

PROFILE = r"^[a-z0-9_.\-]{1,32}/[a-z0-9_.\-]{1,32}/[a-z0-9_.\-]{1,32}$"
DEFAULT_PROFILE = "torch/cpu/float32"  # engine, device, number format: what rounding may explain depends on them

# What others say is shown in terminals: no control characters, none that turn or break a line, none that are invisible.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*$"

MAX_GROUP = 1024
MAX_PROMPT_TOKENS = 131_072
MAX_NEW_TOKENS = 131_072
MAX_LEASES_PER_REQUEST = 256
MAX_HELD = 4096
MAX_END_TOKENS = 16
MAX_STOPS, MAX_STOP_LENGTH = 8, 64


EndToken = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class SamplingParameters(Message):
    """How tokens are drawn, and what ends a completion: any of `eos_token_ids`, or a text with any of the strings
    `stop`. Temperature only: top-p and top-k would bias the ratio that training relies on."""

    temperature: float = Field(gt=0, le=10)
    max_new_tokens: int = Field(gt=0, le=MAX_NEW_TOKENS)
    eos_token_ids: tuple[EndToken, ...] = Field(min_length=1, max_length=MAX_END_TOKENS)
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOPS)


def stop_problem(stop: Sequence[str]) -> str:
    """Why these cannot be stop strings; empty if they can."""
    if len(stop) > MAX_STOPS:
        return f"{len(stop)} stop strings are given; at most {MAX_STOPS} are allowed"
    bad = next((each for each in stop if not 0 < len(each) <= MAX_STOP_LENGTH or "\ufffd" in each), None)
    what = f"a stop string has 1 to {MAX_STOP_LENGTH} characters, none of them U+FFFD"
    return "" if bad is None else f"{what}; {ascii(bad)[:80]} has {len(bad)}"


class ProofParameters(Message):
    """How activations are committed to: one TOPLOC proof for every `rows` tokens, of their `topk` largest values."""

    topk: int = Field(default=128, ge=8, le=1024)
    rows: int = Field(default=32, ge=1, le=1024)


class DialogueTerms(Message):
    """The environment answers the model's turns: the tool, the most turns, and the tokens around its text. A turn ends
    with the end-of-sequence token. `before`, the tool's text in the policy's own tokens, and `after` follow; these are
    tool tokens, not drawn. The last turn is the one without an answer of the tool."""

    tool: str = Field(max_length=64)
    max_turns: int = Field(ge=1, le=64)
    before: tuple[int, ...] = Field(default=(), max_length=1024)
    after: tuple[int, ...] = Field(default=(), max_length=1024)


class Lease(Document):
    """One unit of work for one node. A unit keeps its prompt and seeds when it is issued again. `deadline_ms` moves
    with every heartbeat that shows progress, up to `hard_deadline_ms`. `calibration` is the one that the work is judged
    by; empty: built-in limits."""

    kind: ClassVar[str] = "lease"
    run: str
    lease: str = Field(max_length=64)
    node: str
    unit: int = Field(ge=0)
    attempt: int = Field(ge=0)
    policy: PolicyRef
    task: str = Field(max_length=256)
    prompt_ids: tuple[int, ...] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    seeds: tuple[str, ...] = Field(min_length=1, max_length=MAX_GROUP)
    sampling: SamplingParameters
    proof: ProofParameters = ProofParameters()
    profile: str = Field(default=DEFAULT_PROFILE, pattern=PROFILE)
    environment_digest: str = Field(pattern=HEX_256)
    issued_at_ms: Milliseconds
    deadline_ms: Milliseconds
    hard_deadline_ms: Milliseconds = Field(default=0)
    environment: str = Field(default="", max_length=256)
    environment_version: int = Field(default=0, ge=0)
    data_digest: str = Field(default="", max_length=64)
    length_target: int | None = Field(default=None, ge=1)
    dialogue: DialogueTerms | None = Field(default=None)
    calibration: str = Field(default="", pattern=rf"^$|{HEX_256}")

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """Seeds are 64-bit; they travel as 16 hex digits because JSON readers may round large integers."""
        return tuple(int(seed, 16) for seed in self.seeds)


class LeaseRequest(Message):
    """Ask for up to `max_units` leases, waiting up to `wait_s`. The same `request` gets the same answer. `held`: the
    leases that the worker still knows; its others end at once (None: nothing ends). `profile`: engine/device/number
    format. `policy`: what it has loaded (None: the newest). If a newer policy is out, there are no leases, and the
    reply names it; a worker that cannot fetch it soon says `behind`."""

    request: str = Field(min_length=8, max_length=64, pattern=PRINTABLE)
    max_units: int = Field(default=1, ge=1, le=MAX_LEASES_PER_REQUEST)
    wait_s: float = Field(default=0, ge=0, le=60)
    held: tuple[str, ...] | None = Field(default=None, max_length=MAX_HELD)
    profile: str = Field(default=DEFAULT_PROFILE, pattern=PROFILE)
    policy: PolicyRef | None = None
    behind: bool = False


class LeaseReply(Message):
    """The leases, or none with the reason (`waiting`). `held_back`: the reason is about this node (its window, the
    share of newcomers, a suspension). `policy` is the newest one."""

    leases: tuple[SignedDocument, ...] = Field(default=(), max_length=MAX_LEASES_PER_REQUEST)
    waiting: str = Field(default="", max_length=2000)
    finished: bool = False
    policy: PolicyRef | None = None
    held_back: bool = Field(default=False)


class LeaseRelease(Message):
    leases: tuple[str, ...] = Field(max_length=MAX_LEASES_PER_REQUEST)
    reason: str = Field(default="", max_length=200, pattern=PRINTABLE)


Kind = Annotated[str, Field(pattern=PROFILE)]
Words = Annotated[str, Field(max_length=500, pattern=PRINTABLE)]
MAX_KINDS = 64
DIGEST_OR_NONE = rf"^$|{HEX_256}"


class MeasuredKind(Message):
    """Limits of one kind of worker, the share of blocks that they catch by cheat, and the honest tokens measured.
    `untested`: cheats that could not be tried, because the policy's tokens have too little entropy."""

    limits: dict[str, Any] = Field(max_length=64)
    caught: dict[Words, float] = Field(default={}, max_length=64)
    untested: tuple[Words, ...] = Field(default=(), max_length=64)
    tokens: int = Field(default=0, ge=0)


class Calibration(Document):
    """What was measured with `policy`, signed by a validator or the run's owner; named by `document_hash`. It is
    refused unless the one that it `replaces` is in force. `machines`: what the validators computed with
    (device/format). `refused`: kinds whose limits would let cheats pass: nobody may work so."""

    kind: ClassVar[str] = "calibration"
    run: str
    policy: PolicyRef
    replaces: str = Field(default="", pattern=DIGEST_OR_NONE)
    kinds: dict[Kind, MeasuredKind] = Field(default={}, max_length=MAX_KINDS)
    refused: dict[Kind, Words] = Field(default={}, max_length=MAX_KINDS)
    machines: tuple[Annotated[str, Field(max_length=64)], ...] = Field(default=(), max_length=MAX_KINDS)
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    made_at_ms: Milliseconds = Field(ge=0)


def format_of(kind: str) -> str:
    """The number format of a kind of worker: `bfloat16` of `torch/cuda/bfloat16`."""
    return kind.rpartition("/")[2]


def permute(position: int, size: int, key: str, rounds: int) -> int:
    """A keyed permutation, one position at a time, which says what task a unit has, in a run and in a mixture.

    The image of `position` under a permutation of `range(size)` that `key` determines: a Feistel network over the next
    power of four, applied until the result is inside. It leaves the range at most 3 times out of 4 on average, and
    ends, because it is one cycle."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for turn in range(rounds):
            digest = hashlib.sha256(f"{key}\n{turn}\n{right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        position = (left << half_bits) | right
        if position < size:
            return position
