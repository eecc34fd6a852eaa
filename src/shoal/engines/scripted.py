"""A toy engine without torch: for tests of workers, validators and hubs, and for the simulator.

Its "model" is a hash of the loaded tensors' digest, the last tokens and the position; after a quarter of all contexts
the end of the sequence is the likeliest. It samples as a real engine does, so every check that holds for a real engine
holds here, and two policies that differ in one bit give different tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shoal.engines.protocol import GenerationRequest, Groups, Prefill, PrefillRequest
from shoal.engines.rows import DrawingEngine, DrawnRow, report
from shoal.models.folder import read_config
from shoal.protocol import PolicyRef, ProofParameters, TensorView
from shoal.sampling.inverse import cumulative, intervals, sample
from shoal.sampling.stream import uniforms
from shoal.toploc import PointBatch, commit, top_points

DEFAULT_VOCABULARY, DEFAULT_EOS = 96, 1
EOS_LOGIT, EOS_CHANCE, LOGIT_SPREAD = 9.0, 0.25, 6.0
HIDDEN_SIZE, CONTEXT_TOKENS = 64, 3


class ScriptedEngine(DrawingEngine):
    """Implements `Engine`; see the module's docstring for its model."""

    name = "scripted"
    kind = "scripted/cpu/float32"
    hidden_size = HIDDEN_SIZE

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        config = read_config(files) if files and "config.json" in files else {}
        self.vocabulary_size = int(config.get("vocab_size") or DEFAULT_VOCABULARY)
        named = config.get("eos_token_id") or DEFAULT_EOS
        self._eos_token_id = int(named[0] if isinstance(named, list) else named)
        self.policy: PolicyRef | None = None
        self.size_bytes = 0
        self._digest = b""

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        digest = hashlib.sha256()
        for name in sorted(tensors):
            view = tensors[name]
            digest.update(f"{name}/{view.dtype}/{view.shape}\n".encode())
            digest.update(view.data)
        self._digest, self._loaded = digest.digest(), True
        self.policy, self.size_bytes = ref, sum(view.data.nbytes for view in tensors.values())

    def _drawn(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None, greedy: bool) -> Groups:
        self._refuse_unloaded()
        for request in requests:
            self._refuse_unknown(request.prompt_ids)
        size = self.vocabulary_size
        groups = [[DrawnRow(each, seed, size, greedy=greedy) for seed in each.seeds] for each in requests]
        for group in groups:
            for row in group:
                self._complete(row, group, proof)
                if row.request.check is not None:
                    row.request.check()
        return [[row.completion() for row in group] for group in groups]

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        return [self._prefill(request, proof) for request in requests]

    def _complete(self, row: DrawnRow, group: Sequence[DrawnRow], proof: ProofParameters | None) -> None:
        sampling, states = row.request.sampling, list[npt.NDArray[np.float32]]()
        for u in uniforms(row.seed, row.request.begun, sampling.max_new_tokens):
            logits_V, hidden_H = self._step([*row.request.prompt_ids, *row.tokens])
            tokens, logprob = sample(logits_V[None], u[None], sampling.temperature)
            states.append(hidden_H)
            row.choose(int(np.argmax(logits_V)) if row.greedy else int(tokens[0]), float(logprob[0]))
            row.take()
            is_whole = proof is not None and (row.ended or len(states) == proof.rows)
            if proof is not None and is_whole:
                row.proofs += commit(_points(states, proof))
                states.clear()
            report(group, proof, is_whole, counts=row.ended)
            if row.ended:
                return

    def _prefill(self, request: PrefillRequest, proof: ProofParameters | None) -> Prefill:
        self._refuse_unloaded()
        sequence = [*request.prompt_ids, *request.token_ids.tolist()]
        self._refuse_unknown(sequence)
        start = len(request.prompt_ids)
        steps = [self._step(sequence[:end]) for end in range(start, len(sequence))]
        logits_TV = np.stack([logits for logits, _ in steps])
        tokens_T = request.token_ids.astype(np.int64)
        low_T, high_T, logprobs_T = intervals(logits_TV, tokens_T, request.temperature)
        probabilities_TV, _ = cumulative(logits_TV, request.temperature)
        surprise_TV = -np.log(np.maximum(probabilities_TV, np.finfo(np.float64).tiny))
        mean_T = (probabilities_TV * surprise_TV).sum(axis=1)
        variance_T = (probabilities_TV * (surprise_TV - mean_T[:, None]) ** 2).sum(axis=1)
        points = _points([state for _, state in steps], proof) if proof is not None else None
        return Prefill(logprobs_T, low_T, high_T, mean_T.astype(np.float32), variance_T.astype(np.float32), points)

    def _step(self, sequence: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logits and hidden state after a sequence: uniforms under a seed that is a hash of digest, length and last
        tokens."""
        context = np.array([len(sequence), *sequence[-CONTEXT_TOKENS:]], dtype="<i8").tobytes()
        seed = int.from_bytes(hashlib.sha256(self._digest + context).digest()[:8], "big")
        values = uniforms(seed, 0, self.vocabulary_size + HIDDEN_SIZE)
        logits_V = (LOGIT_SPREAD * values[: self.vocabulary_size]).astype(np.float32)
        if values[self._eos_token_id] < EOS_CHANCE:
            logits_V[self._eos_token_id] = EOS_LOGIT
        hidden_H = (8.0 * (values[self.vocabulary_size :] - 0.5)).astype(np.float32)
        return logits_V, hidden_H


def _points(states: Sequence[npt.NDArray[np.float32]], proof: ProofParameters) -> PointBatch:
    return top_points(np.stack(states), [len(states)], proof.topk, proof.rows)
