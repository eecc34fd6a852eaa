"""The groups of leases: what an engine draws under their prompts, seeds and terms, and how it is submitted."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from shoal.engines.dialogue import dialogue_for
from shoal.engines.protocol import Completion, GenerationRequest, OnChunks
from shoal.engines.shelf import LoadedPolicy
from shoal.errors import ProtocolError, ResourceError
from shoal.models.ending import decoding
from shoal.protocol import SUBMISSION_FORMAT, Lease, Rollout, Submission, pack_logprobs, pack_spans, pack_tokens


def is_finite(group: Sequence[Completion]) -> bool:
    return all(bool(np.isfinite(completion.logprobs).all()) for completion in group)


def generate(
    loaded: LoadedPolicy, leases: Sequence[Lease], on_tokens: Callable[[str, int], None] | None = None,
    on_chunks: Callable[[Lease], OnChunks | None] | None = None, check: Callable[[], None] | None = None,
    proves: bool = True,
) -> list[list[Completion]]:  # fmt: skip
    """The groups of leases of one policy, with the leases' proofs. `on_tokens` gets the number of tokens of a lease now
    and then; `on_chunks` returns the receiver of a lease's finished chunks. `proves`: make proofs. Failures of the
    engine become one-line errors."""
    groups: dict[str, list[Completion]] = {}
    try:
        for proof in dict.fromkeys(lease.proof for lease in leases):
            alike = [lease for lease in leases if lease.proof == proof]
            requests = []
            for lease in alike:
                terms = (lease.prompt_ids, lease.seed_numbers, lease.sampling)
                heard = partial(on_tokens, lease.lease) if on_tokens is not None else None
                on_own = on_chunks(lease) if on_chunks is not None else None
                talk = dialogue_for(lease, loaded.files)
                respond = None if talk is None else talk.respond
                decode = decoding(lease.sampling, loaded.files)
                requests.append(GenerationRequest(*terms, heard, on_own, respond, check=check, decode=decode))
            drawn = loaded.engine.generate(requests, proof if proves else None)
            groups.update(zip((lease.lease for lease in alike), drawn, strict=True))
        return [groups[lease.lease] for lease in leases]
    except ResourceError as error:
        raise ResourceError(
            f"{error}; free some of it, compute elsewhere or in another format (--device, --dtype), or leave this run "
            "to larger machines"
        ) from error
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(
            f"the engine {loaded.engine.name} failed while generating {len(leases)} groups: {error}; "
            "`shoal doctor --selftest` tells whether this machine computes rightly"
        ) from error
    except ValueError as error:
        raise ProtocolError(f"the leased prompts do not fit policy {loaded.ref.label}: {error}") from error


def submission_of(lease: Lease, completions: Sequence[Completion], engine: str) -> Submission:
    return Submission(
        format=SUBMISSION_FORMAT, run=lease.run, node=lease.node, lease=lease.lease, unit=lease.unit,
        incarnation=lease.policy.incarnation, version=lease.policy.version, policy_digest=lease.policy.digest,
        prompt=pack_tokens(lease.prompt_ids), rollouts=[rollout_of(completion) for completion in completions],
        engine=engine,
    )  # fmt: skip


def rollout_of(completion: Completion) -> Rollout:
    tokens, logprobs = pack_tokens(completion.token_ids), pack_logprobs(completion.logprobs)
    return Rollout(tokens, logprobs, completion.finish, completion.proofs, pack_spans(completion.given))
