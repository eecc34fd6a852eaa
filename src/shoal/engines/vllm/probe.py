"""Before any work is leased: does vLLM compute this model as a validator will?

    vLLM ── one short generation ──► torch's engine, same weights, on the processor ── prefill ──► three differences
                              └────► if memory does not suffice for that: vLLM's own prefill

vLLM built the model with other weights before these were written, so this also finds a layer that still computes with
its first weights.
"""

import logging
from collections.abc import Mapping

import numpy as np

from shoal.engines import memory
from shoal.engines.protocol import Engine, GenerationRequest, PrefillRequest
from shoal.errors import ModelError
from shoal.models.folder import read_config
from shoal.protocol import ProofParameters, SamplingParameters, TensorView
from shoal.sampling import uniforms
from shoal.toploc import PointBatch, compare, split_proofs

log = logging.getLogger(__name__)

SEEDS, TOKENS = (0, 1, 2), 40  # of the prompt, and as many new ones
PROOF = ProofParameters(topk=64, rows=16)
COPIES = 3  # of the weights in float32: the memory of another engine while it loads them
EDGE = 0.01  # a uniform may lie so far outside the interval of its token and still count as inside
# Limits: mean difference of log-probabilities; share of tokens outside; share of values with another exponent. Rounding
# stays far below, other weights are far above.
BOUNDS = {"float32": (1e-3, 0.0, 0.01), "bfloat16": (0.1, 0.1, 0.15)}


def check_model(engine: Engine, files: Mapping[str, bytes], tensors: Mapping[str, TensorView]) -> None:
    """Raise `ModelError` if what `engine` generates differs from a prefill with the same weights."""
    tokens = min(TOKENS, int(read_config(files).get("max_position_embeddings") or 2 * TOKENS) // 2)
    prompt = tuple(7 * n % engine.vocabulary_size for n in range(1, tokens + 1))
    sampling = SamplingParameters.model_construct(temperature=1.0, max_new_tokens=tokens, eos_token_ids=())
    try:
        [group] = engine.generate([GenerationRequest(prompt, SEEDS, sampling)], PROOF)
    except RuntimeError as error:
        if memory.is_out_of_memory(error):
            raise
        raise ModelError(f"vLLM does not compute this model: {error}; generate with --engine torch") from error
    judge = _judge(engine, files, tensors)
    seen = judge.prefill([PrefillRequest(prompt, each.token_ids, 1.0) for each in group], PROOF)

    gaps = [np.abs(each.logprobs - by.logprobs) for each, by in zip(group, seen, strict=True)]
    outside = [
        np.maximum(by.cdf_low - u_T, u_T - by.cdf_high) > EDGE
        for u_T, by in ((uniforms(seed, 0, tokens), by) for seed, by in zip(SEEDS, seen, strict=True))
    ]
    proofs = [
        proof
        for each in group
        for proof in split_proofs(each.proofs, tokens, engine.hidden_size, PROOF.topk, PROOF.rows)
    ]
    compared = compare(PointBatch.concat([by.points for by in seen if by.points is not None]), proofs)
    found = (
        float(np.mean(gaps)), float(np.mean(outside)), float(compared.exp_mismatches.sum() / max(1, compared.k.sum()))
    )  # fmt: skip
    said = f"log-probabilities {found[0]:.2g} off, {found[1]:.1%} of tokens and {found[2]:.1%} of activations others"
    if not all(value <= bound for value, bound in zip(found, BOUNDS[engine.kind.rpartition("/")[2]], strict=True)):
        raise ModelError(
            f"vLLM does not compute this model as {judge.kind} does ({said}): generate with --engine torch"
        )
    log.info("vLLM was probed: %s computes the same (%s)", judge.kind, said)


def _judge(engine: Engine, files: Mapping[str, bytes], tensors: Mapping[str, TensorView]) -> Engine:
    values = sum(int(np.prod(view.shape or ())) for view in tensors.values())
    if 4 * values * COPIES > memory.free_bytes("cpu"):
        log.warning("the memory does not suffice to compare vLLM with torch's engine: it is compared with itself")
        return engine
    from shoal.engines.torch import TorchEngine

    judge = TorchEngine(files, "float32", "cpu")
    judge.load_policy(None, tensors)
    return judge
