"""Inverse-CDF sampling in numpy, the reference for the torch sampler. B: rows, V: vocabulary."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def cumulative(logits_BV: npt.NDArray[np.float32], temperature: float) -> tuple[Floats, Floats]:
    """Probabilities of softmax(logits / T) and their running sums, in float64; each last sum is exactly 1."""
    scaled_BV = logits_BV.astype(np.float32).astype(np.float64) / temperature
    weights_BV = np.exp(scaled_BV - scaled_BV.max(axis=1, keepdims=True))
    sums_BV = np.cumsum(weights_BV, axis=1)
    total_B1 = sums_BV[:, -1:]
    return weights_BV / total_B1, sums_BV / total_B1


def sample(
    logits_BV: npt.NDArray[np.float32], uniforms_B: Floats, temperature: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    probabilities_BV, cdf_BV = cumulative(logits_BV, temperature)
    tokens_B = (cdf_BV <= uniforms_B[:, None]).sum(axis=1)
    chosen_B = np.take_along_axis(probabilities_BV, tokens_B[:, None], axis=1)[:, 0]
    return tokens_B.astype(np.int64), np.log(chosen_B).astype(np.float32)


def intervals(
    logits_BV: npt.NDArray[np.float32], tokens_B: npt.NDArray[np.int64], temperature: float
) -> tuple[Floats, Floats, npt.NDArray[np.float32]]:
    probabilities_BV, cdf_BV = cumulative(logits_BV, temperature)
    column_B1 = tokens_B[:, None]
    high_B = np.take_along_axis(cdf_BV, column_B1, axis=1)[:, 0]
    before_B = np.take_along_axis(cdf_BV, np.maximum(column_B1 - 1, 0), axis=1)[:, 0]
    low_B = np.where(tokens_B == 0, 0.0, before_B)
    with np.errstate(divide="ignore"):
        logprobs_B = np.log(np.take_along_axis(probabilities_BV, column_B1, axis=1)[:, 0])
    return low_B, high_B, logprobs_B.astype(np.float32)
