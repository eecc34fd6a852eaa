"""A policy's files come from the trainer's owner: none of them becomes code, or asks the person."""

import builtins
import json
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, TrOCRConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kit import Patch
from shoal.errors import ModelError
from shoal.models import PromptEncoder, TextTokenizer, model_folder
from shoal.models.load import _first_line, model_from_files
from shoal.models.lora import ADAPTER_FILE, adapter_shape

TINY = model_folder("tiny")
AUTO = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
TABLES = {"attn_config", "ffn_config"}  # of mpt and dbrx: no models
ONE_LAYER = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers"), 1)
EVIL = """
from pathlib import Path
Path(__file__).with_name("EXECUTED").write_text("yes")
from transformers import TrOCRForCausalLM as Evil
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with code that leaves a mark when it is imported; a question to the person fails the test."""

    def asked(*_arguments: object) -> str:
        pytest.fail("somebody was asked")

    monkeypatch.setattr(builtins, "input", asked)
    for name in ("evil", "generate", "custom_generate/generate", "modeling_evil", "tokenization_evil"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(EVIL)
    return tmp_path


def planting(folder: Path) -> dict[str, object]:
    """Every key through which transformers, peft or a hub would load something."""
    return {
        "auto_map": dict.fromkeys(AUTO, "evil.Evil") | {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        "name_or_path": str(folder), "_name_or_path": str(folder), "base_model_name_or_path": str(folder),
        "trust_remote_code": True, "custom_generate": str(folder), "custom_pipelines": {"text": {"impl": "evil.Evil"}},
        "attn_implementation": f"{folder}/evil", "_attn_implementation": "evil/kernel:evil",
        "experts_implementation": "evil/kernel", "auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"},
        "_attn_implementation_internal": "evil/kernel", "dtype": "load", "torch_dtype": "load", "use_kernels": True,
        "architectures": ["evil.Evil"], "transformers_version": "0.0.0",
    }  # fmt: skip


def nothing_happened(folder: Path) -> bool:
    return not list(folder.rglob("EXECUTED")) and not any("transformers_modules" in name for name in sys.modules)


def test_composite_with_code_in_its_inner_model_or_hidden_in_a_text_model_is_refused(planted):
    inner = {"model_type": "trocr", "d_model": 16, "decoder_layers": 1, "vocab_size": 32, **planting(planted)}
    with pytest.raises(ModelError, match=r"'fuyu' is a composite \(text_config"):
        model_from_files({"config.json": json.dumps({"model_type": "fuyu", "text_config": inner}).encode()})
    assert nothing_happened(planted)
    hidden = {"layers": [{"deep": {"model_type": "trocr", **planting(planted)}}]}
    with pytest.raises(ModelError, match=r"'qwen3' is a composite \(layers\.layers\.deep"), torch.device("meta"):
        model_from_files({"config.json": json.dumps({"model_type": "qwen3", **hidden}).encode()}, device="meta")


def test_every_composite_architecture_is_refused():
    composites = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if set(CONFIG_MAPPING[kind].sub_configs) - TABLES]
    assert len(composites) > 15
    for kind in composites:
        with pytest.raises(ModelError, match=f"'{kind}' is a composite"), torch.device("meta"):
            model_from_files({"config.json": json.dumps({"model_type": kind}).encode()}, device="meta")


def test_no_code_runs_in_any_architecture(planted):
    """All that transformers has, on the meta device; what cannot have one layer has as many as by default."""
    extra = planting(planted)
    built = set[str]()
    for kind, size in product(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, (ONE_LAYER, {})):
        config = {"model_type": kind, **size, **extra, "unknown_table": dict(extra), "unknown_list": [dict(extra)]}
        if kind in built:
            continue
        try:
            with torch.device("meta"):
                model = model_from_files({"config.json": json.dumps(config).encode()}, device="meta")
        except ModelError:
            continue
        assert type(model).__module__.startswith("transformers.models."), kind
        assert not hasattr(model.config, "auto_map"), kind
        assert model.config._name_or_path == "", kind
        built.add(kind)
    assert len(built) > 100
    assert nothing_happened(planted)


def test_no_code_runs_from_the_files_beside_the_configuration(planted):
    template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch EXECUTED') }}"
    )
    files = {name: (TINY / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    extra = planting(planted)
    files["generation_config.json"] = json.dumps({"eos_token_id": 1, **extra}).encode()
    files["tokenizer_config.json"] = json.dumps(
        {"tokenizer_class": "evil.Evil", "chat_template": template, **extra}
    ).encode()
    files["special_tokens_map.json"] = json.dumps({"unk_token": "?", **extra}).encode()
    files[ADAPTER_FILE] = json.dumps({"rank": 2, "alpha": 4.0, "targets": ["q_proj"], **extra}).encode()
    files["adapter_config.json"] = json.dumps({"peft_type": "LORA", **extra}).encode()
    files["pytorch_model.bin"] = b"cos\nsystem\n(S'touch EXECUTED'\ntR."
    files["evil.py"] = files["modeling_evil.py"] = EVIL.encode()
    model_from_files(files)
    assert adapter_shape(files) is not None
    assert TextTokenizer(files).eos_token_id == 1
    with pytest.raises(ModelError, match="chat template refuses the prompt: SecurityError"):
        PromptEncoder(files).encode("1+1=")
    assert nothing_happened(planted)
    assert not Path("EXECUTED").exists()


def test_transformers_neither_asks_nor_imports(planted):
    """The rules above left aside: the configuration is given to transformers as it is."""
    (planted / "config.json").write_text(json.dumps({"model_type": "evil", **planting(planted)}))
    (planted / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", **planting(planted)}))
    inner = TrOCRConfig(d_model=16, decoder_layers=1, vocab_size=32)
    inner.auto_map, inner._name_or_path = {"AutoModel": "evil.Evil"}, str(planted)
    loads = [lambda **trust: AutoModel.from_config(inner, **trust), partial(AutoModel.from_pretrained, planted)]
    for load in (*loads, partial(AutoTokenizer.from_pretrained, planted)):
        for trusted in (None, True):
            with pytest.raises(ModelError, match="runs no code of a model folder or a policy"):
                load(trust_remote_code=trusted)
    assert nothing_happened(planted)


def test_model_hub_cannot_be_reached():
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    assert constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE
    with pytest.raises((OfflineModeIsEnabled, OSError)):
        hf_hub_download("nobody/nothing", "config.json")


@pytest.mark.parametrize("role", ["worker", "validator-0"])
def test_role_does_not_read_what_is_typed(role):
    code = (
        f"from shoal.run.roles import start_role; start_role({role!r}, None, False)\n"
        "try: print('typed', input('run the code? [y/N] '))\n"
        "except EOFError: print('nothing is read')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], input="y\n", capture_output=True, text=True, timeout=60)
    assert found.stdout.endswith("nothing is read\n"), found.stderr


def test_control_characters_of_a_policy_are_not_printed():
    told = _first_line(ValueError("no activation \x1b]0;owned\x07\x9b31m here\nand more"))
    assert told == "ValueError: no activation ?]0;owned??31m here"
