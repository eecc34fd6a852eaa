"""Between vLLM's model and its sampler: which token is next, and the hidden state that it is drawn from.

    scheduler ─► execute_model ─► states after the final norm, logits        (a captured graph ends before the head)
                 sample_tokens ─► `Hook`: rows of ours by the inverse CDF at u[t], or forced; their states are kept
                 scheduler     ◄─ the tokens

The hook decides nothing else and asks nobody: whatever may fail for reasons of ours happens after the step, in the
engine, where an exception leaves vLLM as it was. Requests that are not ours are vLLM's own affair.

N: rows that get a token, V: vocabulary, H: hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engines.vllm.rows import DrawnRow, GivenRow
from shoal.sampling.sampler import sample
from shoal.sampling.stream import uniforms_at


class Hook:
    """`rows` are ours, by vLLM's name for the request; `seen` are those that the last step chose a token for."""

    def __init__(self, runner: Any) -> None:
        self.rows: dict[str, DrawnRow | GivenRow] = {}
        self.seen: list[DrawnRow] = []
        self._runner = runner
        self._sample_tokens, self._vllm_sample = runner.sample_tokens, runner._sample
        self._states_NH = torch.empty(0)
        runner.sample_tokens, runner._sample = self._with_states, self._chosen

    def _with_states(self, grammar_output: Any) -> Any:
        """In place of `sample_tokens`: the states of this step are here, and gone afterwards."""
        self.seen.clear()
        computed = self._runner.execute_model_state
        if computed is not None:
            self._states_NH = computed.sample_hidden_states
            starts = self._runner.query_start_loc.np
            batch = self._runner.input_batch
            for place, request in enumerate(batch.req_ids):
                row = self.rows.get(request)
                if isinstance(row, GivenRow):
                    states_TH = computed.hidden_states[starts[place] : starts[place + 1]]
                    row.see(states_TH, int(batch.num_computed_tokens_cpu[place]))
        return self._sample_tokens(grammar_output)

    def _chosen(self, logits_NV: Tensor, spec_decode_metadata: Any) -> Any:
        """In place of `_sample`. A prompt that is only partly computed gets a row here too, and no token."""
        from vllm.v1.outputs import SamplerOutput

        requests = self._runner.input_batch.req_ids
        found = [self.rows.get(request) for request in requests]
        if all(row is None for row in found):
            return self._vllm_sample(logits_NV, spec_decode_metadata)
        partial = self._runner.discard_request_mask.np
        at = [place for place, row in enumerate(found) if isinstance(row, DrawnRow) and not partial[place]]
        rows = [row for place in at if isinstance(row := found[place], DrawnRow)]
        tokens = [0] * len(requests)
        if rows:
            every = len(rows) == len(logits_NV)  # as usual: nothing is copied
            self._choose(rows, *((each if every else each[at]) for each in (logits_NV, self._states_NH)))
            for place, row in zip(at, rows, strict=True):
                tokens[place] = row.next[0] if row.next is not None else 0
        self.seen.extend(rows)
        return SamplerOutput(torch.tensor(tokens, dtype=torch.int32, device=logits_NV.device)[:, None], None)

    def _choose(self, rows: list[DrawnRow], logits_NV: Tensor, states_NH: Tensor) -> None:
        if rows[0].greedy:
            tokens_N, logprobs_N = logits_NV.argmax(dim=1), torch.zeros(len(rows))
        else:
            seeds_N = np.array([row.seed for row in rows], dtype=np.uint64)
            uniforms_N = uniforms_at(seeds_N, np.array([row.position for row in rows], dtype=np.uint64))
            temperatures_N = torch.tensor([row.request.sampling.temperature for row in rows], dtype=torch.float64)
            uniforms = torch.from_numpy(uniforms_N).to(logits_NV.device)
            tokens_N, logprobs_N = sample(logits_NV, uniforms, temperatures_N)
        states = states_NH.to(torch.bfloat16).unbind()
        for row, token, logprob, state in zip(rows, tokens_N.tolist(), logprobs_N.tolist(), states, strict=True):
            forced = row.line.forced
            row.next = (token, logprob, state) if forced is None else (forced, 0.0, state)
