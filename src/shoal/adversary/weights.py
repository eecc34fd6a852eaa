"""Cheats that compute with other weights than the lease's: cheaper ones, or older ones."""

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from shoal.adversary import base
from shoal.adversary.base import OTHER_TOKENS, OTHER_WEIGHTS, Cheat, CheatContext, EngineWrapper, cheating
from shoal.engines import Engine, Fetch, GenerationRequest, Groups
from shoal.models.quantize import INT4, INT8, Quantization, quantized
from shoal.protocol import Lease, PolicyRef, ProofParameters, Submission, TensorView
from shoal.shardcast import Payload

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def always_the_first(fetch: Fetch) -> Fetch:
    first: list[Payload] = []

    def pretend(ref: PolicyRef, deadline_s: float) -> Payload:
        if not first:
            first.append(fetch(ref, deadline_s))
        manifest = first[0].manifest.model_copy(update={"policy": ref})
        return dataclasses.replace(first[0], manifest=manifest, applied=None)

    return pretend


class Rounded(EngineWrapper):
    def __init__(self, engine: Engine, how: Quantization) -> None:
        super().__init__(engine)
        self._how = how

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._engine.load_policy(ref, quantized(tensors, self._how))


class Shallow(EngineWrapper):
    """The policy cut off after the first third of its layers; the given engine is not used."""

    def __init__(self, _engine: Engine, context: CheatContext) -> None:
        super().__init__(context.build(shallow_files(context.files)))
        self._layers = layers_kept(context.files)

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        layers = {name: LAYER.search(name) for name in tensors}
        kept = [name for name, layer in layers.items() if layer is None or int(layer[1]) < self._layers]
        self._engine.load_policy(ref, {name: tensors[name] for name in kept})


def layers_kept(files: Mapping[str, bytes]) -> int:
    layers: int = json.loads(files.get("config.json", b"{}")).get("num_hidden_layers", 1)
    return max(1, layers // 3)


def shallow_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    config, kept = json.loads(files.get("config.json", b"{}")), layers_kept(files)
    cut = {"num_hidden_layers": kept, "layer_types": (config.get("layer_types") or [])[:kept] or None}
    return {**files, "config.json": json.dumps(config | {key: cut[key] for key in cut if key in config}).encode()}


class DecodedByOther(EngineWrapper):
    """A cheaper engine draws the tokens by the lease's seeds; the right policy makes log-probabilities and proofs."""

    def __init__(self, engine: Engine, cheaper: Engine) -> None:
        def draw(engine: Engine, requests: Sequence[GenerationRequest], proof: ProofParameters | None) -> Groups:
            return base.with_honest_proofs(engine, requests, cheaper.generate(requests, None), proof)

        super().__init__(engine, draw)
        self._cheaper = cheaper

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._engine.load_policy(ref, tensors)
        self._cheaper.load_policy(ref, tensors)


FIELD = 65_497
MODAL = 0x4040  # 3.0 as bfloat16: the size that the largest activations after a norm often have
OTHERS = {"duplicate.proof", "proofs.malformed", "proofs.mismatch"}  # another size, or another's content


def chunks_of(proofs: bytes, full_bytes: int) -> list[bytes]:
    """Only the last one can be shorter."""
    return [proofs[start : start + full_bytes] for start in range(0, len(proofs), full_bytes)]


def with_proofs(given: Submission, proofs: Iterable[bytes]) -> Submission:
    pairs = zip(given.rollouts, proofs, strict=True)
    return replace(given, rollouts=[replace(rollout, proofs=each) for rollout, each in pairs])


def forged(given: Submission, lease: Lease, forge: Callable[[bytes], bytes]) -> Submission:
    """With every proof replaced by a function of the honest one."""
    full = 2 + 2 * lease.proof.topk
    return with_proofs(given, (b"".join(map(forge, chunks_of(each.proofs, full))) for each in given.rollouts))


def forging(name: str, what: str, forge: Callable[[bytes], bytes], reason: str = "proofs.malformed") -> type[Cheat]:
    return cheating(name, what, {reason}, submission=lambda given, lease: forged(given, lease, forge))


def swapped(given: Submission, _lease: Lease) -> Submission:
    return with_proofs(given, (each.proofs for each in (*given.rollouts[1:], given.rollouts[0])))


def _random(honest: bytes) -> bytes:
    noise = hashlib.shake_128(honest).digest(len(honest))
    numbers = struct.unpack(f">{len(honest) // 2}H", noise)
    return struct.pack(f">{len(numbers)}H", FIELD, *(number % FIELD for number in numbers[1:]))


class ReplayedProofs(Cheat):
    name = "replayed-proofs"
    what = "submits its first proof of each size for ever"
    reasons = frozenset(OTHERS)

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}

    def submission(self, submission: Submission, lease: Lease, /) -> Submission:
        return forged(submission, lease, lambda honest: self._kept.setdefault(len(honest), honest))


CHEATS = (
    cheating("stale", "keeps one policy, and claims every later one", OTHER_WEIGHTS, fetch=always_the_first),
    cheating("small-model", "generates and proves with a third of the policy's layers", OTHER_WEIGHTS, engine=Shallow),
    cheating("int8", "rounds the weights to 8 bits", OTHER_WEIGHTS,
        engine=lambda engine, _context: Rounded(engine, INT8)),
    cheating("int4", "rounds the weights to 4 bits", OTHER_WEIGHTS,
        engine=lambda engine, _context: Rounded(engine, INT4)),
    cheating("small-decodes", "decodes with a third of the layers, proves with the right policy", OTHER_TOKENS,
        engine=lambda engine, context: DecodedByOther(engine, Shallow(engine, context))),
    cheating("int4-decodes", "decodes with 4-bit weights, proves with the right policy", OTHER_TOKENS,
        engine=lambda engine, made: DecodedByOther(engine, Rounded(made.build(made.files), INT4))),
    forging("no-proofs", "submits no proofs", lambda _honest: b""),
    forging("null-proofs", "submits proofs of zeros", lambda honest: bytes(len(honest))),
    forging("constant-proofs", "submits polynomials with one plausible value everywhere",
        lambda honest: struct.pack(">HH", FIELD, MODAL).ljust(len(honest), b"\0"), "proofs.forged"),
    forging("modulus-one", "submits proofs with the modulus 1",
        lambda honest: struct.pack(">HH", 1, MODAL) + honest[4:]),
    forging("random-proofs", "submits well-formed proofs of random numbers", _random, "proofs.mismatch"),
    forging("half-proofs", "submits half of every proof", lambda honest: honest[: len(honest) // 2]),
    forging("long-proofs", "submits more proofs than chunks", lambda honest: honest * 2),
    cheating("swapped-proofs", "submits the proofs of another rollout", OTHERS, submission=swapped),
    ReplayedProofs,
)  # fmt: skip
