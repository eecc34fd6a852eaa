"""TOPLOC: small proofs that a model was run. Anyone who can run the model can check them.

    points    the largest values of chunks of activations; one polynomial through them for each chunk
    check     proofs against the verifier's own points: malformed, forged, mismatch, or passed
    package   the functions of the published package
    plain     the arithmetic in numpy; kernels: the same compiled (`backend` chooses); device: selection on GPUs

Activations are the last hidden states after the final norm, one row for each token. Prover and verifier:

>>> import numpy as np
>>> hidden_states = np.random.default_rng(0).standard_normal((70, 64), dtype=np.float32)
>>> proofs = commit(top_points(hidden_states, lengths=[70], topk=128, rows=32))
>>> mine = top_points(hidden_states * np.float32(1 + 1e-6), lengths=[70], topk=128, rows=32)
>>> check_proofs(compare(mine, proofs)).passed, check_proofs(compare(mine, [proofs[1], proofs[0], proofs[2]])).reason
(True, 'mismatch')

torch and numba are imported on first use.
"""

from shoal.toploc.check import Comparisons, ProofCheck, ProofTolerance, check_proofs, compare
from shoal.toploc.package import (
    ProofPoly,
    VerificationResult,
    build_proofs,
    build_proofs_base64,
    build_proofs_bytes,
    verify_proofs,
    verify_proofs_base64,
    verify_proofs_bytes,
)
from shoal.toploc.points import PointBatch, chunk_rows, chunk_topk, commit, split_proofs, top_points

__all__ = [
    "Comparisons", "PointBatch", "ProofCheck", "ProofPoly", "ProofTolerance", "VerificationResult", "build_proofs",
    "build_proofs_base64", "build_proofs_bytes", "check_proofs", "chunk_rows", "chunk_topk", "commit", "compare",
    "split_proofs", "top_points", "verify_proofs", "verify_proofs_base64", "verify_proofs_bytes",
]  # fmt: skip
