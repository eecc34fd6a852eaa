"""Engines by policy: fetched when first needed, a few kept loaded, the least recently used given up first.

    get(policy) ─┬─ loaded ───────────────────────────────────────────────► engine
                 └─ fetch ─► is it the policy asked for? ─┬─► load into the engine given up, or into a new one
                                                          └─► only the changes, if the engine given up holds the
                                                              policy that the new one was made from

Each engine is a whole copy of the weights. The first policy of a model is checked before an engine is made for it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.engines.memory import MEMORY_ERRORS, is_out_of_memory, release_memory
from shoal.engines.protocol import Engine, UpdatableEngine
from shoal.errors import PolicyMismatch, ResourceError
from shoal.models.folder import check_files
from shoal.protocol import Entry, PolicyRef
from shoal.shardcast import Payload

log = logging.getLogger(__name__)

Fetch = Callable[[PolicyRef, float], Payload]
Build = Callable[[Mapping[str, bytes]], Engine]
Check = Callable[[Mapping[str, bytes], Sequence[Entry]], None]


@dataclass(frozen=True)
class LoadedPolicy:
    """An engine with one policy in place, and the files that came with it (tokenizer, configuration)."""

    ref: PolicyRef
    engine: Engine
    files: Mapping[str, bytes]


class EngineShelf:
    """At most `held` loaded policies, fewer if memory does not suffice. One caller at a time."""

    wait_s = 30.0  # the usual deadline of callers that have other work

    def __init__(self, fetch: Fetch, build: Build, held: int, check: Check = lambda _files, _entries: None) -> None:
        if held < 1:
            raise ValueError(f"a shelf holds at least one policy, not {held}")
        self._fetch, self._build, self._held, self._check = fetch, build, held, check
        self._loaded: OrderedDict[PolicyRef, LoadedPolicy] = OrderedDict()

    def get(self, ref: PolicyRef, deadline_s: float) -> LoadedPolicy:
        """The engine of exactly this policy. Raises `BroadcastError` if it cannot be fetched before the deadline."""
        if ref in self._loaded:
            self._loaded.move_to_end(ref)
            return self._loaded[ref]
        payload = self._fetch(ref, deadline_s)
        if payload.manifest.policy != ref:
            raise PolicyMismatch(
                f"policy {ref.label} was promised with digest {ref.digest[:16]}…, "
                f"but {payload.manifest.policy.label} with {payload.manifest.policy.digest[:16]}… was published"
            )
        check_files(payload.manifest.entries)
        files = dict(payload.files)
        if all(loaded.files != files for loaded in self._loaded.values()):
            self._check(files, payload.manifest.entries)
        self._loaded[ref] = LoadedPolicy(ref, self._load(files, payload), files)
        return self._loaded[ref]

    def clear(self) -> None:
        """Give all engines up, and their memory back."""
        self._loaded.clear()
        release_memory()

    def _load(self, files: Mapping[str, bytes], payload: Payload) -> Engine:
        """An engine with the payload loaded. If memory does not suffice, fewer engines are held from now on."""
        while True:
            try:
                return self._put_in_place(files, payload)
            except MEMORY_ERRORS as error:
                if not is_out_of_memory(error):
                    raise
            if not self._loaded:
                size_gb = payload.manifest.size_bytes / 1e9
                raise ResourceError(
                    f"policy {payload.manifest.policy.label} ({size_gb:.3g} GB) does not fit into the memory that is "
                    "free: free some, or choose another device (--device) or number format (--dtype)"
                )
            self._held = len(self._loaded)
            log.warning("memory does not suffice for %d policies: %d are held now", self._held + 1, self._held)
            release_memory()

    def _put_in_place(self, files: Mapping[str, bytes], payload: Payload) -> Engine:
        """Load into the least recently used engine, if one must go and is of the same model. A function of its own, so
        that no reference to an engine is left when memory runs out."""
        spare = self._loaded.popitem(last=False)[1] if len(self._loaded) == self._held else None
        engine = spare.engine if spare is not None and spare.files == files else self._build(files)
        ref, changes = payload.manifest.policy, payload.changes_from(engine.policy)
        if changes is not None and isinstance(engine, UpdatableEngine):
            engine.update_policy(ref, changes)
            log.info("policy %s: only what changed was written into the engine", ref.label)
        else:
            engine.load_policy(ref, {tensor.name: tensor for tensor in payload.tensors})
        return engine
