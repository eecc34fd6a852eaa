"""The figures of a run before it begins: memory, disk, bytes on links, time by stage, machines, money. No I/O.

Speeds and shares are assumptions (`runtime/sizing.Speeds`); benchmarks/results/plan_check.md has measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, log, log2, pow
from typing import TYPE_CHECKING

from shoal.engines.memory import ALLOWANCE
from shoal.hub.settings import CONCURRENT_UPLOADS
from shoal.models.folder import is_known, model_folder, model_size, most_bytes
from shoal.protocol import ModelSize
from shoal.run.recipe import Recipe
from shoal.runtime import count_of, sizing
from shoal.runtime.sizing import Derived, RunSize, Speeds, machines_needed, open_settings
from shoal.shardcast import OriginSettings, RelayConfig
from shoal.shardcast.origin import DELTA_PAYS, DELTA_STRIDES
from shoal.trainer.folder import AWAITED
from shoal.trainer.guards import LOOKBACK

if TYPE_CHECKING:
    from shoal.trainer.memory import MemoryPlan, Shape

GIB = 2**30
PROCESS_BYTES = {"hub": 113 * 10**6, "relay": 69 * 10**6}  # resident, of a small run: plan_check.md
BATCH_SHARE = 0.8  # of free GPU memory that a batch takes (engines/memory.py)
CACHED = 2  # policies on a worker's disk (worker/loop.py)
PROOF_BYTES = 8  # of a token as submitted; what is trained on has none
PROVEN_BEYOND = 16  # tokens: a rollout's last proof has the size of those of 32
DATABASE_BYTES, DATABASE_LOG_BYTES = 300_000, 4_000_000  # empty, and what SQLite writes ahead: plan_check.md
FROM_BEFORE = 2  # checkpoints kept beside the newest and the best (trainer/folder.py), once there are so many
ANCHORED = 1.7  # payloads of deltas in a row after which a version is whole: shorter ways skip some (plan_check.md)
WIDTHS = {"float32": 4, "bfloat16": 2, "auto": 2}


@dataclass
class Planning:
    """`memory_bytes` is the memory of one device, whatever its role. Each figure follows from those before it."""

    recipe: Recipe
    shape: Shape
    trainer: MemoryPlan
    processes: int
    kind: str
    memory_bytes: int
    speeds: Speeds = field(default_factory=Speeds)

    def __post_init__(self) -> None:
        recipe, speeds, shape = self.recipe, self.speeds, self.shape
        run, trainer = recipe.run, recipe.trainer
        adapters = 0 if trainer.lora is None else 4 * shape.trained
        self.payload = shape.weights * WIDTHS[trainer.publish_dtype] + adapters
        self.size = run_size(recipe, ModelSize(parameters=shape.weights, payload_bytes=most_bytes(self.payload)))
        derived = vars(sizing.derive(self.size, speeds))
        sections = (recipe.hub, recipe.validator, trainer)
        given = {name: value for one in sections for name, value in one if name in derived and value is not None}
        self.chosen = Derived(**{**derived, **given})  # the derived settings, unless the recipe sets them
        self.delta = self._delta()
        self._beside = self.delta if self.delta < self.payload else 0.0  # the delta stored beside a version, if any
        self.checkpoint = 4 * shape.weights + 8 * shape.trained
        rollouts, self._length = run.groups_per_step * run.group_size, run.max_new_tokens * speeds.length_share
        self.tokens = rollouts * self._length
        # bytes of a step's groups: of its tokens, and of what is proven beyond a rollout's last token
        self.submitted = self.tokens * speeds.submission_bytes + rollouts * PROOF_BYTES * PROVEN_BEYOND
        self.trained = self.tokens * (speeds.submission_bytes - PROOF_BYTES)
        self.worker_dtype = trainer.publish_dtype if recipe.worker.dtype == "auto" else recipe.worker.dtype
        each = shape.weights * WIDTHS[recipe.validator.dtype]
        self.loaded = sizing.policies_loaded(self.chosen.keep_versions, each, int(self.room("validator")))
        # an engine reserves for one sequence at its longest: keys and values, twice
        self._row = max(1, shape.cached_bytes * run.max_new_tokens)
        self._sequences = run.group_size * recipe.worker.units_per_lease
        weights = shape.weights * WIDTHS[self.worker_dtype]
        fit = int(BATCH_SHARE * max(0, self.room("worker") - weights) / self._row)
        self._rows = max(1, min(fit, self._sequences))
        # the time for one token of any number of sequences: kernels, and reading the weights once
        self._token_s = speeds.decode_s + weights / 1e9 / speeds.generate_gb_s
        drawn_s = self._batch_s(self._sequences)
        self.worker_tokens_s = speeds.worker_tokens_s or self._sequences * self._length / drawn_s
        self.audit_tokens_s = self._audit_tokens_s()
        self._train_tflops = speeds.train_tflops if trainer.memory.compile else speeds.eager_tflops
        self.train_s = self._train_s()
        self.publish_s = speeds.publish_least_s + self.payload / 1e9 / speeds.publish_gb_s
        self._transfer_s = self.size.transfer_s((speeds.workers_per_relay + 1) * self.delta, speeds)
        self._saving_s = self.checkpoint / 1e9 / speeds.disk_gb_s / self.chosen.checkpoint_every
        # generating and checking may take as long as everything else that a step waits for
        most_s = self._batch_s(self._rows) / (run.max_staleness + 1)
        wanted_s = max(self.train_s, self.publish_s + self._saving_s, self._transfer_s, most_s)
        self.workers = machines_needed(self.tokens / self.worker_tokens_s, wanted_s, run.steps)
        self.validators = machines_needed(self.tokens / self.audit_tokens_s, wanted_s, run.steps)
        self.relays = ceil((self.workers + self.validators) / speeds.workers_per_relay)
        # With enough machines the trainer limits a step; but a completion must not take longer than the allowed
        # staleness. With staleness 0 the stages run one after the other.
        tokens_s = min(self.workers * self.worker_tokens_s, self.validators * self.audit_tokens_s)
        one_by_one = run.max_staleness == 0
        self.step_s = sum(each[1] for each in self.stages()) if one_by_one else max(wanted_s, self.tokens / tokens_s)

    def room(self, role: str) -> float:
        """The memory that a role may take of a device. If roles share it (`memory_share`), the trainer has the rest."""
        shares = {"validator": self.recipe.validator.memory_share, "worker": self.recipe.worker.memory_share}
        taken = {name: share for name, share in shares.items() if share < 1}
        return self.memory_bytes * taken.get(role, 1.0 - sum(taken.values()) if role.startswith("trainer") else 1.0)

    def _delta(self) -> float:
        """The size of most versions on a link. A bfloat16 payload changes more at higher learning rates and with more
        optimizer steps; in float32 nearly every value changes, and doubling the step changes one more bit."""
        trainer = self.recipe.trainer
        if trainer.lora is not None:
            return 4.0 * self.shape.trained
        rate, updates = float(trainer.learning_rate), float(trainer.minibatches)
        share = min(1.0, self.speeds.delta_share * pow(rate / 1e-6, 0.86) * pow(updates, 0.83))
        if trainer.publish_dtype == "float32":
            share = max(share, self.speeds.float32_delta_share + log2(trainer.learning_rate / 1e-6) / 32)
        return self.payload * (share if share <= DELTA_PAYS else 1.0)

    def disk(self) -> Iterator[tuple[str, float, float, str]]:
        """Folder, largest size during the run, size after it, and what it contains."""
        run, payload, versions = self.recipe.run, self.payload, self.recipe.run.steps + 1
        yield self._checkpoints()
        yield "trainer: export", payload, payload, "the last version"
        rollouts = self.trained * run.steps
        yield "trainer: rollouts", rollouts, rollouts, "what each step was trained on"
        kept = max(OriginSettings().keep_versions, run.max_staleness + 2) + 1
        finished = self._offered(sizing.kept_when_finished(run.max_staleness))
        what = "with the one that is being published"
        yield "origin", self._offered(kept), finished, f"{min(kept, versions)} versions, {what}"
        mirrored = RelayConfig.keep_versions
        yield "each relay", self._offered(mirrored), 0, f"{min(mirrored, versions)} versions"
        for role, count in {"validator": self.chosen.keep_versions + 1, "worker": CACHED + 1}.items():
            size = (held := min(versions, count)) * (payload + self._beside)
            yield f"each {role}", size, 0, f"{held} versions, with the one that is being made"
        hub = DATABASE_BYTES + run.steps * (self.submitted + run.groups_per_step * self.speeds.group_row_bytes)
        yield "hub", hub + DATABASE_LOG_BYTES, hub, "of all steps; groups that are dropped or refused come on top"

    def _offered(self, count: int) -> float:
        """So many versions back to a whole one, with their deltas."""
        every = min(OriginSettings().anchor_every, int(ANCHORED * self.payload / self.delta))
        span = min(self.recipe.run.steps + 1, count + every - 1)
        deltas = sum((span - 1) // stride for stride in (1, *DELTA_STRIDES) if stride <= every)
        return ceil(span / every) * self.payload + deltas * self._beside

    def _checkpoints(self) -> tuple[str, float, float, str]:
        """With the one that is being written, and the first, without moments, until guards need it no more."""
        trainer, steps, newest = self.recipe.trainer, self.recipe.run.steps, self.chosen.keep_checkpoints
        best = trainer.keep_best if trainer.evaluate_every else 0
        saved = 1 + ceil(steps / self.chosen.checkpoint_every)
        most = min(saved, newest + best + 1 + (FROM_BEFORE if steps > LOOKBACK else 1))
        ended = min(saved, newest + best)
        first = 8 * self.shape.trained if steps <= LOOKBACK or most == saved else 0
        awaited = f" (up to {AWAITED} more while their scores are awaited)" if best and most < saved else ""
        running = max(most * self.checkpoint - first, ended * self.checkpoint)
        what = f"{most}{awaited}, {ended} in the end; {self.checkpoint / 1e9:,.3g} GB each"
        return "trainer: checkpoints", running, ended * self.checkpoint, what

    def memory(self) -> Iterator[tuple[str, float, float, str]]:
        """Role, bytes on its device, bytes of its host, and what they are. On a CPU all is in the first."""
        base, on_gpu = self.trainer.device["torch itself"], self.kind == "cuda"
        first = sum(self.trainer.host.values())
        alone, total = self.processes == 1, self.trainer.total
        yield "trainer" if alone else "trainer, first process", total, first + base if on_gpu else 0, ""
        if not alone:
            other = self.trainer.others
            yield "trainer, each other process", other, base if on_gpu else 0, ""
            together = first + self.processes * base if on_gpu else total + (self.processes - 1) * other
            yield f"trainer, {self.processes} on one host", 0, together, ""
        sequence = self._row // ALLOWANCE
        models = {
            "validator": self._validator_bytes(base),
            "worker": (
                WIDTHS[self.worker_dtype] * self.shape.weights + base + sequence,
                "weights and one sequence; more take the rest",
            ),
        }
        for role, (device, what) in models.items():
            host = self.payload + base
            yield role, device + (0 if on_gpu else self.payload), host if on_gpu else 0, f"{what}; a payload is mapped"
        upload = self.recipe.run.group_size * self.recipe.run.max_new_tokens * self.speeds.submission_bytes
        yield "hub", 0, PROCESS_BYTES["hub"] + CONCURRENT_UPLOADS * upload, f"with {CONCURRENT_UPLOADS} uploads"
        yield "origin, relay", 0, PROCESS_BYTES["relay"], "files are served from the disk"

    def _validator_bytes(self, base: float) -> tuple[float, str]:
        """Its policies, and another engine to measure with and for second looks. Where both compute in bfloat16 the
        look is in float32 (`validator/judge.py`), if that fits."""
        own, weights, what = WIDTHS[self.recipe.validator.dtype], self.shape.weights, f"{self.loaded} loaded, 1"
        kept = self.loaded * own * weights + base
        if own == 4:
            return kept + 4 * weights, f"{what} for second looks"
        if kept + 4 * weights <= self.room("validator"):
            return kept + 4 * weights, f"{what} in float32 for second looks"
        wanted = f"in float32 they take {(kept + 4 * weights) / GIB:,.1f} GiB"
        return kept + own * weights, f"{what} for second looks; {wanted}"

    def device_bytes(self, role: str) -> float:
        return next(device for name, device, _, _ in self.memory() if name == role)

    @property
    def crowded(self) -> list[str]:
        """The roles on the trainer's first GPU (of `shoal run`), if it has no room for all and no shares are set."""
        recipe = self.recipe
        beside = [
            role
            for role, one in (("validator", recipe.validator), ("worker", recipe.worker))
            if one.count and one.device != "cpu" and one.memory_share == 1
        ]
        too_much = self.trainer.total + sum(map(self.device_bytes, beside)) > self.memory_bytes
        return beside if self.kind == "cuda" and too_much else []

    def changed(self, section: str, **settings: object) -> Planning:
        changed = getattr(self.recipe, section).model_copy(update=settings)
        return replace(self, recipe=self.recipe.model_copy(update={section: changed}))

    def links(self) -> Iterator[tuple[str, float, float]]:
        copies = self.speeds.workers_per_relay + 1
        yield "origin to each relay", self.delta, self.payload
        yield f"out of a relay ({copies:g} copies)", copies * self.delta, copies * self.payload
        yield "into each worker and validator", self.delta, self.payload

    def hub_links(self) -> dict[str, float]:
        """Bytes of a step's groups. All are submitted whole, checked, and trained on without proofs."""
        return {"workers to hub": self.submitted, "hub to validators": self.submitted, "hub to trainer": self.trained}

    def _batch_s(self, sequences: int) -> float:
        """A finished sequence is replaced at once; the last ones take as many tokens as the longest of them (lengths
        are exponentially distributed). For each token half of its sequence is read."""
        longest = min(self.recipe.run.max_new_tokens, self._length * (1 + log(self._rows)))
        steps = longest + self._length * (sequences / self._rows - 1)
        cached = sequences * self._length**2 / 2 * self.shape.cached_bytes
        return self.speeds.batch_s + steps * self._token_s + cached / 1e9 / self.speeds.cache_gb_s

    def _audit_tokens_s(self) -> float:
        """The branches of a claim are decoded together, with the overhead of two for each token."""
        run, speeds = self.recipe.run, self.speeds
        claim = min(self.chosen.max_audits, run.groups_per_step)
        tokens = claim * run.group_size * self._length
        branches = min(1.0, speeds.branch_share * claim * run.group_size) * self._length
        branches *= self._token_s + speeds.decode_s
        prefill_s = tokens * 2 * self.shape.weights / (speeds.audit_tflops * 1e12)
        return tokens / (prefill_s + claim * speeds.audit_group_s + branches)

    def _train_s(self) -> float:
        """Forward and backward; one more forward pass for a KL reference, and one for all but the first minibatch if
        log-probabilities are recomputed."""
        settings, operations = self.recipe.trainer, 6.0
        operations += 2.0 if settings.objective.kl > 0 else 0.0
        if settings.objective.ratio_base == "recomputed":
            operations += 2.0 * (settings.minibatches - 1) / settings.minibatches
        computed_s = self.tokens * operations * self.shape.weights / (self.processes * self._train_tflops * 1e12)
        return computed_s + self.speeds.train_least_s

    def stages(self) -> Iterator[tuple[str, float, str]]:
        speeds, gb, every = self.speeds, self.payload / 1e9, self.chosen.checkpoint_every
        for name, machine, count, tokens_s in (
            ("generate", "worker", self.workers, self.worker_tokens_s),
            ("audit", "validator", self.validators, self.audit_tokens_s),
        ):
            yield name, self.tokens / tokens_s / count, f"{count_of(count, machine)} of {tokens_s:,.0f} tokens/s"
        yield "train", self.train_s, f"{count_of(self.processes, 'device')} of {self._train_tflops:g} TFLOP/s"
        yield "save", self._saving_s, f"a checkpoint every {f'{every:,} steps' if every > 1 else 'step'}, per step"
        yield "publish", self.publish_s, f"{gb:,.3g} GB at {speeds.publish_gb_s:g} GB/s"
        whole_s = self.size.transfer_s((speeds.workers_per_relay + 1) * self.payload, speeds)
        link = f"of {self.recipe.hub.link_mbit:g} Mbit/s with {speeds.workers_per_relay:g} workers"
        yield "transfer", self._transfer_s, f"out of a relay {link}; a whole version: {whole_s:,.0f} s"
        disk = f"on a worker's disk at {speeds.apply_gb_s:g} GB/s"
        apply_s = self.payload / 1e9 / speeds.apply_gb_s if self._beside else 0.0
        yield "apply", apply_s, f"{disk}; a whole version is checked as it comes"

    def cost(self, gpu_hour: float) -> float:
        """Of the whole run: every trainer process, worker and validator has one GPU."""
        machines = self.processes + self.workers + self.validators
        return machines * gpu_hour * self.step_s * self.recipe.run.steps / 3600


def announced_size(recipe: Recipe) -> ModelSize:
    """The size of policies, as the hub announces it; unknown while the model is not here."""
    trainer = recipe.trainer
    adapters = (trainer.lora.rank, trainer.lora.targets) if trainer.lora is not None else (0, ())
    if not is_known(recipe.model.path):
        return ModelSize()
    return model_size(model_folder(recipe.model.path, weights=False), trainer.publish_dtype, *adapters)


def patience_of(recipe: Recipe) -> float:
    """How long `shoal run` lets a run be without progress."""
    return sizing.derive(run_size(recipe, announced_size(recipe))).patience_s


def with_derived_settings(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe as `--dry-run` shows it, and TOML comments about its derived settings, which stay open while the model
    is unknown."""
    model, changes, derived = announced_size(recipe), {}, list[str]()
    for name in ("hub", "validator", "trainer"):
        section = getattr(recipe, name)
        chosen, still_open = vars(sizing.settle(section, run_size(recipe, model))), open_settings(section)
        changes[name] = section.model_copy(update={key: chosen[key] for key in still_open})
        derived += [f"{name}.{key}" for key in still_open]
    if not derived:
        return recipe, ""
    if not model.parameters:
        what = (
            f"not known yet, since they follow from the size of the model, and there is no model at {recipe.model.path}"
        )
        how = "\n# for a model of so many weights: shoal plan RECIPE --parameters NUMBER --memory GIB"
        return recipe, f"# {what}:\n#   {', '.join(derived)}{how}\n"
    size = f"{model.parameters / 1e6:,.1f} M weights, at most {model.payload_bytes / 1e6:,.1f} MB a version"
    comment = f"# derived from the model {recipe.model.path}: {size}:\n#   {', '.join(derived)}\n"
    return recipe.model_copy(update=changes), comment


def run_size(recipe: Recipe, model: ModelSize) -> RunSize:
    run = recipe.run
    lengths = run.group_size, run.max_new_tokens, run.max_staleness
    return RunSize(model.parameters, model.payload_bytes, *lengths, recipe.hub.link_mbit)


def usual_config(parameters: float) -> dict[str, object]:
    """The usual decoder, a hundred times as wide as deep. Real models differ in activations and caches."""
    vocabulary = 151_936 if parameters > 3e8 else 32_000
    layers = max(2, round((parameters / (12 * 100**2)) ** (1 / 3)))
    hidden = 1024 * round(100 * layers / 1024) if layers > 10 else 128 * layers
    tied = parameters < 4e9
    embeddings = min(vocabulary * hidden, parameters / 2) * (1 if tied else 2)
    attention = 2.25 * hidden * hidden  # keys and values have an eighth of the heads
    inner = max(64, round(((parameters - embeddings) / layers - attention) / (3 * hidden)))
    return {
        "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
        "num_attention_heads": hidden // 128, "num_key_value_heads": max(1, hidden // 1024), "head_dim": 128,
        "vocab_size": int(embeddings / hidden / (1 if tied else 2)), "tie_word_embeddings": tied,
    }  # fmt: skip
