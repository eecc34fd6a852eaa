"""Between vLLM's model and its sampler: chooses the next token, and keeps the hidden state that it is drawn from.

    scheduler ─► execute_model ─► states after the final norm, logits        (a captured graph ends before the head)
                 sample_tokens ─► `Hook`: our rows by the inverse CDF at u[t], or forced; their states are kept
                 scheduler     ◄─ the tokens

The hook makes no other decision and calls nobody: what may fail for our reasons happens after the step, in the engine,
where an exception leaves vLLM as it was. Requests that are not ours are left to vLLM.

N: rows that get a token, V: vocabulary, H: hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engines.protocol import PrefillRequest
from shoal.engines.rows import DrawnRow
from shoal.protocol import ProofParameters
from shoal.sampling.sampler import sample
from shoal.sampling.stream import uniforms_at
from shoal.toploc import commit, top_points


@dataclass(eq=False)
class VllmRow(DrawnRow):
    """`states` are those of its open chunk, each a view of what the step of its token computed."""

    states: list[Tensor] = field(default_factory=list)
    name: str = ""  # vLLM's

    @property
    def position(self) -> int:
        """Position of the next token, in the stream of its seed."""
        return self.request.begun + len(self.tokens)


def prove(rows: Sequence[VllmRow], proof: ProofParameters) -> list[VllmRow]:
    """Prove all chunks that are full, or the last of their completion; returns the rows with new proofs."""
    full = [row for row in rows if len(row.states) == proof.rows or (row.ended and row.states)]
    if full:
        states_NH = torch.stack([state for row in full for state in row.states])
        points = top_points(states_NH, [len(row.states) for row in full], proof.topk, proof.rows)
        for row, made in zip(full, commit(points), strict=True):
            row.proofs.append(made)
            row.states.clear()
    return full


@dataclass(eq=False)
class GivenRow:
    """A completion that somebody claims to have drawn. `pieces` are the states that its tokens would be drawn from:
    vLLM computes a long prompt piece by piece."""

    request: PrefillRequest
    pieces: list[Tensor] = field(default_factory=list)
    name: str = ""

    @property
    def is_whole(self) -> bool:
        return sum(map(len, self.pieces)) == len(self.request.token_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens but the last, from which nothing is drawn."""
        return [*self.request.prompt_ids, *self.request.token_ids.tolist()[:-1]]

    def see(self, states_TH: Tensor, first: int) -> None:
        """Add states of the tokens from position `first` on. A sequence that lost its cache is computed again from the
        start."""
        begin = len(self.request.prompt_ids) - 1
        wanted_TH = states_TH[max(0, begin - first) :]
        if first <= begin:
            self.pieces.clear()
        if len(wanted_TH):
            self.pieces.append(wanted_TH.clone())


class Hook:
    """`drawn` and `given` are our rows, by vLLM's name of the request; `seen` are those that got a token in this step:
    each step begins with an empty list."""

    def __init__(self, runner: Any) -> None:
        self.drawn: dict[str, VllmRow] = {}
        self.given: dict[str, GivenRow] = {}
        self.seen: list[VllmRow] = []
        self.keeps_states = False
        self._runner = runner
        self._sample_tokens, self._vllm_sample = runner.sample_tokens, runner._sample
        self._states_NH = torch.empty(0)
        runner.sample_tokens, runner._sample = self._with_states, self._chosen

    def _with_states(self, grammar_output: Any) -> Any:
        """Replaces `sample_tokens`: the states of a step are available only here."""
        computed = self._runner.execute_model_state
        if computed is not None:
            self._states_NH = computed.sample_hidden_states
            if self.given:
                self._see(computed.hidden_states)
        return self._sample_tokens(grammar_output)

    def _see(self, states_NH: Tensor) -> None:
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        for place, request in enumerate(batch.req_ids):
            if request in self.given:
                computed = int(batch.num_computed_tokens_cpu[place])
                self.given[request].see(states_NH[starts[place] : starts[place + 1]], computed)

    def _chosen(self, logits_NV: Tensor, spec_decode_metadata: Any) -> Any:
        """Replaces `_sample`. A prompt that is only partly computed has a row here too, and gets no token."""
        from vllm.v1.outputs import SamplerOutput

        if not (self.drawn or self.given):
            return self._vllm_sample(logits_NV, spec_decode_metadata)
        requests = self._runner.input_batch.req_ids
        partial = self._runner.discard_request_mask.np[: len(requests)].tolist()
        tokens, at = [0] * len(requests), list[int]()
        for place, request in enumerate(requests):
            if request in self.drawn and not partial[place]:
                at.append(place)
                self.seen.append(self.drawn[request])
        if at:
            every = len(at) == len(logits_NV)  # as usual: nothing is copied
            self._choose(self.seen, *((each if every else each[at]) for each in (logits_NV, self._states_NH)))
        for place, row in zip(at, self.seen, strict=True):
            tokens[place] = row.chosen
        return SamplerOutput(torch.tensor(tokens, dtype=torch.int32, device=logits_NV.device)[:, None], None)

    def _choose(self, rows: list[VllmRow], logits_NV: Tensor, states_NH: Tensor) -> None:
        if rows[0].greedy:
            tokens_N, logprobs_N = logits_NV.argmax(dim=1), torch.zeros(len(rows))
        else:
            seeds_N = np.array([row.seed for row in rows], dtype=np.uint64)
            uniforms_N = uniforms_at(seeds_N, np.array([row.position for row in rows], dtype=np.uint64))
            temperatures_N = torch.tensor([row.request.sampling.temperature for row in rows], dtype=torch.float64)
            uniforms = torch.from_numpy(uniforms_N).to(logits_NV.device)
            tokens_N, logprobs_N = sample(logits_NV, uniforms, temperatures_N)
        for row, token, logprob in zip(rows, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
            row.choose(token, logprob)
        if self.keeps_states:
            for row, state in zip(rows, states_NH.to(torch.bfloat16).unbind(), strict=True):
                row.states.append(state)
