"""The conformance vectors of tests/data/toploc_vectors.json as arrays, and chunks to try things on."""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.toploc import PointBatch, commit
from shoal.toploc.plain import PRIME, bfloat16_bits

VECTORS = Path(__file__).parents[2] / "data" / "toploc_vectors.json"
DTYPES = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}

Array = npt.NDArray[Any]


@cache
def vectors() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(VECTORS.read_text())
    return loaded


def by_name(section: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(vector for vector in vectors()[section] if vector["name"] == name)
    return found


def activations(vector: dict[str, Any]) -> Any:
    """One array [tokens, hidden] or a list of arrays; bfloat16 as its bits. None: the file does not have them."""
    if "inputs" in vector:
        arrays = [_array(item) for item in vector["inputs"]]
        return arrays[0] if vector["form"] == "tensor" else arrays
    recipe = vector["recipe"]
    if recipe.startswith("bits = planted("):
        arguments = recipe.split("(")[1].split(")")[0].split(",")
        bits = planted(*map(int, arguments))
        assert hashlib.sha256(bits.tobytes()).hexdigest() == vector["sha256"]
        return bits
    name = next((other["name"] for other in vectors()["activations"] if other["name"] in recipe), None)
    return activations(by_name("activations", name)) if name else None


def _array(item: dict[str, Any]) -> Array:
    data = base64.b64decode(item["data_b64"])
    assert hashlib.sha256(data).hexdigest() == item["sha256"]
    return np.frombuffer(data, dtype=DTYPES[item["dtype"]]).reshape(item["shape"])


def splitmix64(seed: int, count: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def planted(seed: int, tokens: int, hidden: int, rows: int, k: int) -> npt.NDArray[np.uint16]:
    """The recipe of the vectors' `meta`: in each chunk exactly k values with exponents above all others."""
    r = splitmix64(seed, tokens * hidden)
    sign = ((r >> np.uint64(60)) & np.uint64(1)) << np.uint64(15)
    exponent = (np.uint64(100) + (r >> np.uint64(8)) % np.uint64(28)) << np.uint64(7)
    bits = (sign | exponent | (r & np.uint64(0x7F))).astype(np.uint16).reshape(tokens, hidden)
    for chunk, begin in enumerate(range(0, tokens, rows)):
        flat = bits[begin : begin + rows].reshape(-1)
        order = np.argsort(splitmix64(seed * 1000003 + chunk + 1, flat.size), kind="stable")[:k]
        v = splitmix64(seed * 1000003 + chunk + 500009, k)
        sign = ((v >> np.uint64(40)) & np.uint64(1)) << np.uint64(15)
        exponent = (np.uint64(130) + (v >> np.uint64(20)) % np.uint64(4)) << np.uint64(7)
        flat[order] = (sign | exponent | (v & np.uint64(0x7F))).astype(np.uint16)
    return bits


def normal(seed: int, tokens: int, hidden: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((tokens, hidden), dtype=np.float32)


def tied(seed: int, tokens: int, hidden: int, levels: int = 4) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of a few levels only, both signs: nearly everything is a tie."""
    values = np.random.default_rng(seed).integers(-levels, levels + 1, (tokens, hidden)).astype(np.float32)
    return bfloat16_bits(values)


def packed(coefficients: npt.ArrayLike, modulus: int = PRIME) -> bytes:
    """A proof with these numbers, whatever they are."""
    return np.concatenate([[modulus], np.asarray(coefficients, np.int64)]).astype(">u2").tobytes()


def unpacked(proof: bytes) -> tuple[int, list[int]]:
    """The modulus and the coefficients."""
    modulus, *coefficients = np.frombuffer(proof, ">u2").tolist()
    return modulus, coefficients


def through(x: npt.ArrayLike, y: npt.ArrayLike, size: int = 2**20) -> bytes:
    """The proof of one chunk with these points."""
    indices, bits = np.array(x, np.int64), np.array(y, np.uint16)
    return commit(PointBatch(indices, bits, np.array([len(indices)]), np.array([size])))[0]
