"""vLLM as an engine: its scheduler, its attention, its cache; our seeds, our proofs, our weights written in place.

    generate   one vLLM request for each seed ─► step ─► step ─► …                 all groups of a call at once
                                                  │ `hook`: the next token of each row, its hidden state
                                                  └► tokens taken, full chunks proved, ended rows aborted, callbacks;
                                                     an exception ends the call, and aborts all requests
    prefill    the whole sequence as a prompt ─► its states, piece by piece ─► statistics, points
    policy     first: built with arbitrary weights ─► written ─► probed         later: written in place

vLLM ends no completion and knows no seed, temperature or end-of-sequence tokens: `Line` ends a row, and its request is
aborted. A prompt is computed once for its group (prefix caching). The cache is emptied after every call, so no policy
is computed with another one's keys.

N: tokens, V: vocabulary, H: hidden size.
"""

import json
import math
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal.engines import memory
from shoal.engines.protocol import GenerationRequest, Groups, Prefill, PrefillRequest, checks_of
from shoal.engines.rows import DrawingEngine, report
from shoal.engines.vllm.hook import GivenRow, Hook, VllmRow, prove
from shoal.engines.vllm.needs import load
from shoal.engines.vllm.probe import check_model
from shoal.engines.vllm.weights import places, plain_linear
from shoal.errors import ModelError
from shoal.models.load import read_model_config
from shoal.models.lora import ADAPTER_FILE
from shoal.models.state import change_values, overwrite
from shoal.protocol import PolicyRef, ProofParameters, TensorView
from shoal.sampling.sampler import token_statistics
from shoal.shardcast import ChangedValues
from shoal.toploc import top_points

MAX_ROWS = 256
TILE_ELEMENTS = 2**23  # of logits at once, when a completion is recomputed
BLOCK_TOKENS = 32  # of the cache: a shorter prompt is shared with nobody
PREFILL_TOKENS = {"cpu": 4096, "cuda": 16_384}
LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 64 << 20, 4 << 30  # on a processor, whose memory is also used otherwise
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class VllmEngine(DrawingEngine):
    """One caller at a time, in one process: vLLM keeps much of its state in modules. Tensor parallelism would put the
    model into other processes, out of reach: a worker computes on one device."""

    name = "vllm"
    memory_bytes: int | None = None

    def __init__(self, files: Mapping[str, bytes], device: str, dtype: str, max_rows: int = MAX_ROWS) -> None:
        if ADAPTER_FILE in files:
            raise ModelError("the engine vllm does not compute with adapters: generate with --engine torch")
        self._files, self._device, self._dtype, self._max_rows = files, device, dtype, max_rows
        self._config = read_model_config(files)
        self.vocabulary_size, self.hidden_size = self._config.vocab_size, self._config.hidden_size
        self.policy: PolicyRef | None = None
        self.size_bytes = 0
        self.weights: dict[str, Tensor] = {}  # of the policy, in vLLM's own parameters
        self._vllm: Any = None

    @property
    def kind(self) -> str:
        return f"{self.name}/{self._device}/{self._dtype}"

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._loaded, self.policy, is_first = False, None, self._vllm is None
        if is_first:
            self._start({name: tuple(view.shape or ()) for name, view in tensors.items()})
        overwrite(self.weights, tensors)
        self._loaded, self.policy = True, ref
        if is_first:
            try:
                check_model(self, self._files, tensors)
            except BaseException:
                self._loaded, self.policy = False, None
                raise

    def update_policy(self, ref: PolicyRef, changes: Iterable[ChangedValues]) -> None:
        self._refuse_unloaded()
        self._loaded, self.policy = False, None
        change_values(self.weights, changes)
        self._loaded, self.policy = True, ref

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        self._refuse_unloaded()
        for request in requests:
            self._refuse_unknown(request.prompt_ids, request.token_ids.tolist())
            self._refuse_long(len(request.prompt_ids) + len(request.token_ids))
        rows = [GivenRow(request) for request in requests]
        found: dict[int, Prefill] = {}
        with self._in_flight([(row, row.ids, 1) for row in rows]):
            while self._vllm.has_unfinished_requests():
                self._step()
                whole = [place for place, row in enumerate(rows) if place not in found and row.is_whole]
                found.update((place, self._statistics(rows[place], proof)) for place in whole)
        return [found[place] for place in range(len(rows))]

    def rows_at_once(self, tokens_each: int) -> int:
        """vLLM takes more and lets them wait: nothing is gained by asking for them together."""
        if self._vllm is None:
            return self._max_rows
        cache = self._vllm.vllm_config.cache_config
        cached_tokens: int = cache.num_gpu_blocks * cache.block_size
        return max(1, min(self._max_rows, cached_tokens // max(1, tokens_each)))

    def _start(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Start vLLM with the model that the files describe. It gets only the configuration, as transformers read
        it."""
        load()  # `warm_up` may not have been called
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self._config.model_type]
        described = json.loads(self._config.to_json_string(use_diff=False))
        described["architectures"] = [names] if isinstance(names, str) else list(names)
        weights = sum(math.prod(shape) for shape in shapes.values()) * DTYPE_BYTES[self._dtype]
        quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
        with tempfile.TemporaryDirectory(prefix="shoal-vllm-") as folder, plain_linear(), quiet:
            (Path(folder) / "config.json").write_text(json.dumps(described))
            arguments = EngineArgs(
                model=folder, load_format="dummy", model_impl="vllm", skip_tokenizer_init=True, trust_remote_code=False,
                generation_config="vllm", dtype=self._dtype, hf_overrides={"head_dtype": "float32"}, seed=0,
                max_model_len=-1, max_num_seqs=self._max_rows, max_num_batched_tokens=PREFILL_TOKENS[self._device],
                enable_prefix_caching=True, async_scheduling=False, enforce_eager=self._device == "cpu",
                disable_log_stats=True, **self._memory(weights),
            )  # fmt: skip
            try:
                self._vllm = LLMEngine.from_engine_args(arguments)
            except Exception as error:  # vLLM and the libraries below it raise many types
                if memory.is_out_of_memory(error):
                    raise
                why = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ModelError(f"vLLM takes no {names}: {why[:300]}; generate with --engine torch") from error
        [self._runner] = self._vllm.collective_rpc(lambda worker: worker.model_runner)
        self._hook = Hook(self._runner)
        self.weights = places(self._runner.get_model(), shapes)
        self.size_bytes = sum(weight.nbytes for weight in self.weights.values())

    def _memory(self, weights_bytes: int) -> dict[str, Any]:
        """vLLM's memory: a share of a GPU's; on a processor as much cache as all rows together can fill."""
        usable = memory.usable_bytes(self._device, self.memory_bytes)
        if self._device == "cuda":
            return {"gpu_memory_utilization": min(0.95, usable / torch.cuda.get_device_properties(0).total_memory)}
        positions = getattr(self._config, "max_position_embeddings", PREFILL_TOKENS["cpu"])
        row = memory.cached_token_bytes(self._config, DTYPE_BYTES[self._dtype]) * positions
        cache = min(usable - weights_bytes, self._max_rows * row, MOST_CACHE_BYTES)
        return {"kv_cache_memory_bytes": max(LEAST_CACHE_BYTES, cache), "block_size": BLOCK_TOKENS}

    def _drawn(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None, greedy: bool) -> Groups:
        self._refuse_unloaded()
        for request in requests:
            self._refuse_unknown(request.prompt_ids)
            self._refuse_long(len(request.prompt_ids) + request.sampling.max_new_tokens)
        groups = [
            [VllmRow(request, seed, self.vocabulary_size, group, greedy) for seed in request.seeds]
            for group, request in enumerate(requests)
        ]
        rows = [row for group in groups for row in group]
        self._hook.keeps_states, checks = proof is not None, checks_of(requests)
        with self._in_flight([(row, row.request.prompt_ids, row.request.sampling.max_new_tokens) for row in rows]):
            while self._vllm.has_unfinished_requests():
                seen = self._step()
                for check in checks:
                    check()
                for row in seen:
                    row.take()
                proved = prove(seen, proof) if proof is not None else []
                self._abort([row for row in seen if row.ended])
                chunked = {row.group for row in proved}
                for number, group in enumerate(groups):
                    report(group, proof, number in chunked)
        return [[row.completion() for row in group] for group in groups]

    @contextmanager
    def _in_flight(self, rows: Sequence[tuple[VllmRow | GivenRow, Sequence[int], int]]) -> Iterator[None]:
        """Requests for these rows, each with its prompt and its largest number of new tokens. Afterwards no request and
        nothing cached is left, however the block ends."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        try:
            for row, ids, most in rows:
                parameters = SamplingParams(
                    max_tokens=most, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_reading_prefix_cache=isinstance(row, GivenRow),
                )  # fmt: skip
                row.name = self._vllm.add_request("row", {"prompt_token_ids": list(ids)}, parameters)
                if isinstance(row, GivenRow):
                    self._hook.given[row.name] = row
                else:
                    self._hook.drawn[row.name] = row
            yield
        finally:
            self._abort([row for row, _, _ in rows])
            self._hook.drawn.clear()
            self._hook.given.clear()
            self._vllm.reset_prefix_cache()

    def _step(self) -> list[VllmRow]:
        """One step of vLLM; the rows that got a token."""
        self._hook.seen = []
        self._vllm.step()
        return self._hook.seen

    def _abort(self, rows: Sequence[VllmRow | GivenRow]) -> None:
        if rows:
            self._vllm.abort_request([row.name for row in rows if row.name], internal=True)

    def _statistics(self, row: GivenRow, proof: ProofParameters | None) -> Prefill:
        states_TH, tokens = torch.cat(row.pieces), row.request.token_ids
        tokens_T = torch.from_numpy(tokens.astype(np.int64)).to(states_TH.device)
        size, model = max(1, TILE_ELEMENTS // self.vocabulary_size), self._runner.get_model()
        with torch.inference_mode():
            tiles = [
                token_statistics(model.compute_logits(states), ids, row.request.temperature)
                for states, ids in zip(torch.split(states_TH, size), torch.split(tokens_T, size), strict=True)
            ]
        columns = (torch.cat(column).cpu().numpy() for column in zip(*tiles, strict=True))
        low, high, logprobs, entropy, varentropy = columns
        points = None
        if proof is not None:
            points = top_points(states_TH.to(torch.bfloat16), [len(tokens)], proof.topk, proof.rows)
        return Prefill(logprobs, low, high, entropy, varentropy, points)

    def _refuse_long(self, tokens: int) -> None:
        most = self._vllm.model_config.max_model_len
        if tokens > most:
            raise ValueError(f"{tokens} tokens, prompt included, are more than the {most} that vLLM has room for")
