"""Model folders in Hugging Face format, without torch: the small files that describe a model, and its weight files.

A published policy contains the small files and the weights, so a worker needs nothing else. Raw tensors are numpy
arrays. A folder may also hold adapters in PEFT's format; their base is what they name, or another: `ADAPTERS+BASE`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from shoal.errors import ModelError
from shoal.protocol import ITEM_BYTES, Entry, ModelSize, TensorView
from shoal.protocol.lease import MAX_END_TOKENS
from shoal.runtime import hf  # before `locked`: it reads the user's own HF_HUB_OFFLINE

if TYPE_CHECKING:
    import numpy.typing as npt

BUILTIN = ("tiny",)
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX, PEFT_DOWN, PEFT_UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
OTHER_SUMS = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out",
    "layer_replication", "megatron_config", "use_qalora", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config",
)  # fmt: skip
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # the others change the base's weights, too
MERGE_FIRST = "merge them with peft (merge_and_unload), and give that model"
DESCRIPTION_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
MAX_FILES, MAX_FILE_BYTES = 16, 64 * 1024 * 1024
MAX_CONFIG_BYTES = 1024 * 1024  # config.json, generation_config.json


def model_folder(name: str | Path, weights: bool = True) -> Path:
    """The folder of a built-in model by its name, the given folder, or that of a model of the Hugging Face hub, which
    is downloaded (without `weights`: only what describes it). Of adapters, the folder of their base. It contains at
    least config.json."""
    path, base = parts(name)
    if path in BUILTIN and not base:
        return Path(__file__).parent / "data" / path
    folder = hf.model_folder(path, weights)
    if not folder.is_dir():
        named = f"a Hugging Face folder, a name on its hub (ORG/NAME), or a built-in name ({', '.join(BUILTIN)})"
        raise ModelError(f"there is no model folder {folder}: give {named}")
    if (adapter := read_adapter(folder)) is not None:
        return _base_folder(path, adapter, base, weights)
    if base:
        raise ModelError(f"{path} holds no adapters in PEFT's format ({PEFT_CONFIG}): leave +{base} out")
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json; is it a Hugging Face folder?")
    return folder


def _base_folder(path: str, adapter: PeftAdapter, base: str, weights: bool) -> Path:
    named = base or adapter.base
    if not named:
        raise ModelError(f"{adapter.folder / PEFT_CONFIG} names no base_model_name_or_path: give it as {path}+BASE")
    try:
        folder = model_folder(named, weights)
    except ModelError as error:
        raise ModelError(f"the base of the adapters {path}: {error}; another base is given as {path}+BASE") from error
    if named not in BUILTIN and read_adapter(hf.model_folder(named, weights)) is not None:
        raise ModelError(f"the base of the adapters {path}, {named}, holds adapters itself: merge those first")
    return folder


def adapter_of(name: str | Path) -> PeftAdapter | None:
    """The adapters in PEFT's format that `name` is, if it is some."""
    path = parts(name)[0]
    return None if path in BUILTIN else read_adapter(hf.model_folder(path))


def is_known(name: str) -> bool:
    """Whether there is such a model here, or it can be asked for at the Hugging Face hub."""
    path = parts(name)[0]
    return path in BUILTIN or Path(path).is_dir() or hf.parse(path) is not None


def is_whole(name: str) -> bool:
    """Whether nothing of it is left to be downloaded."""
    path, base = parts(name)
    if not hf.is_whole(path):
        return False
    adapter = adapter_of(path)
    return adapter is None or hf.is_whole(base or adapter.base)


def read_files(folder: Path) -> dict[str, bytes]:
    """The files that describe the model (configuration, tokenizer), by name: everything but weights."""
    paths = {name: folder / name for name in DESCRIPTION_FILES if (folder / name).is_file()}
    for path in paths.values():
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    for name in ("config.json", "tokenizer.json"):
        if name not in paths:
            raise ModelError(f"the model folder {folder} has no {name}")
    return {name: path.read_bytes() for name, path in paths.items()}


def check_files(entries: Iterable[Entry]) -> None:
    """Raise `ModelError` if a policy has more, or larger, files than a model's description needs."""
    files = [entry for entry in entries if entry.type == "file"]
    largest = max(files, key=lambda entry: entry.size_bytes, default=None)
    if len(files) > MAX_FILES or (largest is not None and largest.size_bytes > MAX_FILE_BYTES):
        found, most = f"{len(files)} files, the largest of {largest.size_bytes if largest else 0} bytes", MAX_FILE_BYTES
        raise ModelError(f"the policy has {found}; at most {MAX_FILES} of {most} bytes each are allowed")


def read_config(files: Mapping[str, bytes], name: str = "config.json") -> dict[str, Any]:
    """One of the JSON files as a mapping; anything but a JSON object is a `ModelError`."""
    if name not in files:
        raise ModelError(f"the model has no {name}")
    most = MAX_CONFIG_BYTES if name in ("config.json", "generation_config.json") else MAX_FILE_BYTES
    if len(files[name]) > most:
        raise ModelError(f"the model's {name} has {len(files[name])} bytes; at most {most} are allowed")

    def number(value: dict[str, Any]) -> Any:  # JSON has no infinity: transformers writes {"__float__": "Infinity"}
        tag = value.get("__float__") if len(value) == 1 else None
        return float(tag) if tag in ("Infinity", "-Infinity", "NaN") else value

    try:
        value = json.loads(files[name], object_hook=number)
    except RecursionError:
        raise ModelError(f"the model's {name} is nested too deep") from None
    except ValueError as error:
        raise ModelError(f"the model's {name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"the model's {name} is no JSON object")
    return value


def eos_token_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """All end-of-sequence tokens (chat models have several): the generation configuration's if it has any, else the
    model's, else the tokenizer's."""
    found = dict[str, Any]()
    for name in ("generation_config.json", "config.json"):
        found[name] = read_config(files, name).get("eos_token_id") if name in files else None
    if "tokenizer_config.json" in files and "tokenizer.json" in files:
        named = read_config(files, "tokenizer_config.json").get("eos_token")
        text, added = named.get("content") if isinstance(named, dict) else named, read_config(files, "tokenizer.json")
        tokens = [each for each in added.get("added_tokens") or () if isinstance(each, dict)]
        found["tokenizer.json"] = [each.get("id") for each in tokens if text and each.get("content") == text]
    for name, value in found.items():
        ids = tuple(dict.fromkeys(value if isinstance(value, list) else [value]))
        if len(ids) > MAX_END_TOKENS:
            raise ModelError(f"the model's {name} names {len(ids)} end-of-sequence tokens; at most {MAX_END_TOKENS}")
        if ids and all(isinstance(each, int) and 0 <= each < 2**31 for each in ids):
            return ids
    raise ModelError("the model names no end-of-sequence token (eos_token_id in config.json)")


PUBLISHED_BYTES = {"float32": 4, "bfloat16": 2}
SLACK, SLACK_BYTES = 0.1, 16 * 1024 * 1024  # for additions of later versions of shoal
REMEDY = "download it again, or save the model again with save_pretrained"


def check_weights(folder: Path) -> None:
    """Raise `ModelError` unless the folder has weights, and all files of them are there and complete."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"the model folder {folder} has no *.safetensors file: save the model with save_pretrained")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no list of weight files: {error}; {REMEDY}") from error
        missing = sorted(name for name in names if not (index.parent / name).is_file())
        if missing:
            raise ModelError(f"{index} names {missing[0]}, which is not there; {REMEDY}")
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the weights {file} are damaged or cut short: {error}; {REMEDY}") from error


def model_digest(where: str | Path) -> str:
    """Of the files of a model, and of its adapters."""
    digest, adapter = files_digest(model_folder(where)), adapter_of(where)
    return digest if adapter is None else blake3(f"{digest}\n{files_digest(adapter.folder)}".encode()).hexdigest()


def files_digest(folder: Path, names: Collection[str] | None = None) -> str:
    """Of the bytes of weights and of what describes them, with their names; only of these `names` if they are given,
    since a folder in a cache may have others."""
    whole = blake3(b"shoal/model/v1\n")
    for path in sorted({*folder.glob("*.safetensors"), *(folder / name for name in (*DESCRIPTION_FILES, PEFT_CONFIG))}):
        if path.is_file() and (names is None or path.name in names):
            try:
                content = blake3(max_threads=blake3.AUTO).update_mmap(path)
            except OSError as error:
                raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
            whole.update(f"{path.name}\n{content.hexdigest()}\n".encode())
    return whole.hexdigest()


def check_targets(folder: Path, targets: Iterable[str]) -> None:
    """Raise `ModelError` for an adapter target that is no layer's name in the folder's weights. Embeddings and the
    output layer (not among the numbered layers, a row for each token) do not count."""
    shapes = ((name, shape) for name, shape, _ in described_weights(folder))
    matrices = {name: shape for name, shape in shapes if name.endswith(".weight") and len(shape) == 2}
    vocabulary = json.loads((folder / "config.json").read_bytes()).get("vocab_size")
    layers = [name.split(".") for name in matrices]
    inner = [each for each in layers if matrices[".".join(each)][0] != vocabulary or any(map(str.isdecimal, each))]
    refuse_unknown_targets(targets, sorted({parts[-2] for parts in inner if len(parts) > 1}))


def model_size(folder: Path, dtype: str, rank: int = 0, targets: Sequence[str] = ()) -> ModelSize:
    """The size of the folder's model, and the largest size of its policy when floats travel as `dtype`, with adapters
    of this rank on the matrices that `targets` name. Zeros if the folder has no weights."""
    parameters = payload = 0
    for name, shape, kind in described_weights(folder):
        bytes_each = PUBLISHED_BYTES[dtype] if "F" in kind else ITEM_BYTES.get(kind, 8)
        parameters += prod(shape)
        payload += prod(shape) * bytes_each
        if rank and len(shape) == 2 and name.removesuffix(".weight").rpartition(".")[2] in targets:
            payload += rank * sum(shape) * PUBLISHED_BYTES["float32"]
    if not parameters:
        return ModelSize()
    files = sum(path.stat().st_size for path in folder.iterdir() if path.name in DESCRIPTION_FILES)
    return ModelSize(parameters=parameters, payload_bytes=most_bytes(payload) + files)


def most_bytes(payload_bytes: int) -> int:
    """The largest allowed size of a policy with so many bytes of weights."""
    return int(payload_bytes * (1 + SLACK)) + SLACK_BYTES


def refuse_unknown_targets(targets: Iterable[str], known: Sequence[str]) -> None:
    for target in targets:
        if target not in known:
            detail = f"no linear layer of this model that can have an adapter is called {target!r}"
            raise ModelError(f"trainer.lora.targets: {detail}; there are: {', '.join(known) or 'none'}")


def described_weights(folder: Path) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and type of every weight in a folder, by the headers of its files."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - no dictionary
                part = opened.get_slice(name)
                yield name, part.get_shape(), part.get_dtype()


NUMPY_TYPES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip


def as_numpy(view: TensorView) -> npt.NDArray[Any]:
    """The values without a copy, read-only; bfloat16 as uint16 with its bits (numpy has no such type)."""
    import numpy as np

    array = np.frombuffer(view.data, dtype=NUMPY_TYPES[view.dtype]).reshape(view.shape)
    array.flags.writeable = False
    return array


def from_numpy(name: str, array: npt.NDArray[Any], dtype: str | None = None) -> TensorView:
    """A view of an array's bytes; `dtype` is needed for types that numpy does not have (BF16 as uint16)."""
    import numpy as np

    for known, code in NUMPY_TYPES.items():
        if ((dtype is None and known != "BF16") or dtype == known) and array.dtype == np.dtype(code):
            flat = np.ascontiguousarray(array).reshape(-1)
            return TensorView(name, known, tuple(array.shape), flat.view(np.uint8).data)
    raise ValueError(f"tensor {name}: numpy type {array.dtype} does not travel as {dtype or 'any known type'}")


# -- adapters in PEFT's format: B·A·alpha/rank is added to a layer's weights ----------------------------------------


def parts(name: str | Path) -> tuple[str, str]:
    """`ADAPTERS+BASE` as two; a path that exists, and any other name, has no second."""
    text = str(name)
    path, plus, base = text.rpartition("+")
    return (text, "") if not plus or Path(text).expanduser().exists() else (path, base)


@dataclass(frozen=True)
class PeftAdapter:
    folder: Path
    rank: int
    alpha: float
    base: str

    def layers(self) -> tuple[str, ...]:
        """The layers that have an adapter, by the headers of the file; `ModelError` if it is not whole."""
        from safetensors import SafetensorError, safe_open

        path, found = self.folder / PEFT_WEIGHTS, dict[str, list[int]]()
        try:
            with safe_open(path, framework="np") as opened:
                found = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the adapters {path} cannot be read: {error}") from error
        names = {
            name.removeprefix(PEFT_PREFIX).removesuffix(end)
            for name in found
            for end in (PEFT_DOWN, PEFT_UP)
            if end in name
        }
        wanted = {f"{PEFT_PREFIX}{name}{end}" for name in names for end in (PEFT_DOWN, PEFT_UP)}
        if odd := sorted(found.keys() ^ wanted):
            pair = f"{PEFT_DOWN[1:]} and {PEFT_UP[1:]}"
            raise ModelError(f"the adapters {path} have {odd[0]} where a pair of {pair} belongs: {MERGE_FIRST}")
        for name in names:
            down, up = found[f"{PEFT_PREFIX}{name}{PEFT_DOWN}"], found[f"{PEFT_PREFIX}{name}{PEFT_UP}"]
            if len(down) != 2 or len(up) != 2 or down[0] != self.rank or up[1] != self.rank:
                raise ModelError(f"the adapters {path} have shapes {down} and {up} at {name}, not of rank {self.rank}")
        return tuple(sorted(names))

    def require(self, rank: int, alpha: float, targets: Collection[str], kl: float) -> None:
        """Raise `ModelError` unless such settings train these adapters further."""
        if kl > 0:
            why = f"its reference would be the base, and not what the run starts from, the adapters in {self.folder}"
            raise ModelError(f"trainer.objective.kl: {why}: leave [trainer.lora] out to merge them, or set kl to 0")
        own = sorted({name.rpartition(".")[2] for name in self.layers()})
        if (rank, alpha, sorted(targets)) != (self.rank, self.alpha, own):
            theirs = f"rank = {self.rank}, alpha = {self.alpha:g}, targets = {json.dumps(own)}"
            remedy = (
                "set these to train them further, or leave [trainer.lora] out to train the model that has them merged"
            )
            raise ModelError(f"trainer.lora differs from the adapters in {self.folder} ({theirs}): {remedy}")


def read_adapter(folder: Path) -> PeftAdapter | None:
    """The adapters in a folder; None if it has none. What they cannot be merged by is refused."""
    path = folder / PEFT_CONFIG
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        kind, rank, alpha = values["peft_type"], int(values["r"]), float(values["lora_alpha"])
        base, revision = str(values.get("base_model_name_or_path") or ""), str(values.get("revision") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no configuration of LoRA adapters: {error!r}") from error
    odd = [name for name in OTHER_SUMS if values.get(name)]
    odd += [f"bias = {values['bias']!r}"] if values.get("bias", "none") != "none" else []
    odd += [f"peft_type = {kind!r}"] if kind != "LORA" else []
    start = values.get("init_lora_weights")
    odd += [] if start in PLAIN_STARTS else [f"init_lora_weights = {start!r}"]
    if odd or not (0 < rank <= 65_536 and alpha > 0):
        raise ModelError(f"{path} has {odd[0] if odd else f'r = {rank}'}, and only plain LoRA is read: {MERGE_FIRST}")
    named = hf.parse(base)
    return PeftAdapter(folder, rank, alpha, f"{base}@{revision}" if named and revision and not named.revision else base)


def peft_config(rank: int, alpha: float, targets: Collection[str], base: str) -> bytes:
    """adapter_config.json. A base of the hub has its commit in a key of its own."""
    name = hf.parse(base)
    values: Mapping[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name.repo if name else base,
        "revision": (name.revision or None) if name else None, "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "target_modules": sorted(targets), "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "use_dora": False, "use_rslora": False, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    return json.dumps(values, indent=2).encode() + b"\n"
