"""Seeded sampling: the lease gives the seed, so the worker cannot choose tokens, and anyone can check them.

`inverse` is the reference implementation in numpy, `sampler` the same in torch (`kernels`: on CUDA), not imported here.
The token at position t is the one whose interval [CDF(k-1), CDF(k)) of softmax(logits / T), in vocabulary order,
contains u[t]. The end-of-sequence token is a token like any other.
"""

from shoal.sampling.check import SeedCheck, SeedTolerance, check_seeded
from shoal.sampling.stream import philox4x32, uniforms, uniforms_at

__all__ = ["SeedCheck", "SeedTolerance", "check_seeded", "philox4x32", "uniforms", "uniforms_at"]
