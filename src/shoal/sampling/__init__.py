"""Seeded sampling: the lease gives the seed, so the worker cannot choose tokens, and anyone can check them.

    stream        uniforms, uniforms_at, philox4x32: one uniform per (seed, position), by integer arithmetic
    inverse       sample, intervals: inverse-CDF sampling in numpy, the reference implementation
    sampler       sample, token_statistics, uniforms_of: the same in torch (imports it; not re-exported here)
    kernels       the sampler on CUDA: one read of the logits, float64 sums (triton_kernels: its Triton code)
    check         SeedTolerance, SeedCheck, check_seeded: does a sequence follow its seed?

The token at position t is the one whose interval [CDF(k-1), CDF(k)) of softmax(logits / T), in vocabulary order,
contains u[t]. The end-of-sequence token is a token like any other.
"""

from shoal.sampling.check import SeedCheck, SeedTolerance, check_seeded
from shoal.sampling.stream import philox4x32, uniforms, uniforms_at

__all__ = ["SeedCheck", "SeedTolerance", "check_seeded", "philox4x32", "uniforms", "uniforms_at"]
