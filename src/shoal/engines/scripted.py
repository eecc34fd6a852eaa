"""A toy engine without torch: for tests of workers, validators and hubs, and for the simulator.

Its "model" is a hash: logits depend on the digest of the loaded tensors, the last tokens and the position, and on
nothing else; after a quarter of all contexts the end of the sequence is the likeliest. It samples through the same
stream and the same inverse CDF as a real engine, so every check that holds for a real engine holds here, and two
policies that differ in one bit give different tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shoal.engines.protocol import Completion, GenerationRequest, Prefill, PrefillRequest
from shoal.errors import PolicyMismatch
from shoal.models.folder import read_config
from shoal.protocol import PolicyRef, TensorView
from shoal.sampling.inverse import intervals, sample
from shoal.sampling.stream import uniforms

DEFAULT_VOCABULARY = 96
DEFAULT_EOS = 1
EOS_LOGIT = 9.0
EOS_CHANCE = 0.25
HIDDEN_SIZE = 64
LOGIT_SPREAD = 6.0
CONTEXT_TOKENS = 3


class ScriptedEngine:
    """Implements `Engine`; see the module's docstring for its model."""

    name = "scripted"

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        config = read_config(files) if files and "config.json" in files else {}
        self.vocabulary_size = int(config.get("vocab_size") or DEFAULT_VOCABULARY)
        self._eos_token_id = int(config.get("eos_token_id") or DEFAULT_EOS)
        self.policy: PolicyRef | None = None
        self._digest: bytes | None = None

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        digest = hashlib.sha256()
        for name in sorted(tensors):
            view = tensors[name]
            digest.update(f"{name}/{view.dtype}/{view.shape}\n".encode())
            digest.update(view.data)
        self._digest = digest.digest()
        self.policy = ref

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        for request in requests:
            self._refuse_unknown(request.prompt_ids)
        return [[self._complete(request, seed, keep_hidden) for seed in request.seeds] for request in requests]

    def prefill(self, requests: Sequence[PrefillRequest], keep_hidden: bool = False) -> list[Prefill]:
        return [self._prefill(request, keep_hidden) for request in requests]

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_id: int
    ) -> list[npt.NDArray[np.int32]]:
        return [self._greedy(prompt, max_new_tokens, eos_token_id) for prompt in prompts]

    def _complete(self, request: GenerationRequest, seed: int, keep_hidden: bool) -> Completion:
        sampling = request.sampling
        stream_T = uniforms(seed, 0, sampling.max_new_tokens)
        sequence, logprobs, states = list(request.prompt_ids), [], []
        for position in range(sampling.max_new_tokens):
            logits_V, hidden_H = self._step(sequence)
            tokens, logprob = sample(logits_V[None], stream_T[position : position + 1], sampling.temperature)
            sequence.append(int(tokens[0]))
            logprobs.append(logprob[0])
            states.append(hidden_H)
            if sequence[-1] == sampling.eos_token_id:
                break
        drawn = np.array(sequence[len(request.prompt_ids) :], dtype=np.int32)
        return Completion(
            token_ids=drawn,
            logprobs=np.array(logprobs, dtype=np.float32),
            finish="eos" if drawn[-1] == sampling.eos_token_id else "length",
            hidden=np.stack(states) if keep_hidden else None,
        )

    def _prefill(self, request: PrefillRequest, keep_hidden: bool) -> Prefill:
        sequence = [*request.prompt_ids, *(int(token) for token in request.token_ids)]
        self._refuse_unknown(sequence)
        start = len(request.prompt_ids)
        steps = [self._step(sequence[:end]) for end in range(start, len(sequence))]
        logits_TV = np.stack([logits for logits, _ in steps])
        tokens_T = request.token_ids.astype(np.int64)
        low_T, high_T, logprobs_T = intervals(logits_TV, tokens_T, request.temperature)
        hidden = np.stack([state for _, state in steps]) if keep_hidden else None
        return Prefill(logprobs_T, low_T, high_T, hidden)

    def _greedy(self, prompt: tuple[int, ...], max_new_tokens: int, eos: int) -> npt.NDArray[np.int32]:
        self._refuse_unknown(prompt)
        sequence = list(prompt)
        for _ in range(max_new_tokens):
            sequence.append(int(np.argmax(self._step(sequence)[0])))
            if sequence[-1] == eos:
                break
        return np.array(sequence[len(prompt) :], dtype=np.int32)

    def _step(self, sequence: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logits and hidden state after a sequence: uniforms under a seed that is a hash of where we are."""
        if self._digest is None:
            raise PolicyMismatch("no policy is loaded")
        context = np.array([len(sequence), *sequence[-CONTEXT_TOKENS:]], dtype="<i8").tobytes()
        seed = int.from_bytes(hashlib.sha256(self._digest + context).digest()[:8], "big")
        values = uniforms(seed, 0, self.vocabulary_size + HIDDEN_SIZE)
        logits_V = (LOGIT_SPREAD * values[: self.vocabulary_size]).astype(np.float32)
        if values[self._eos_token_id] < EOS_CHANCE:
            logits_V[self._eos_token_id] = EOS_LOGIT
        hidden_H = (8.0 * (values[self.vocabulary_size :] - 0.5)).astype(np.float32)
        return logits_V, hidden_H

    def _refuse_unknown(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self.vocabulary_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocabulary_size}")
