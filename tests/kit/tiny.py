"""The built-in tiny policy: a Qwen3 decoder of 170,000 weights and a tokenizer of 96 characters, large enough to sort
digits and small enough to train on one CPU core. Its embeddings are not tied. scripts/make_tiny_policy.py makes its
weights."""

import json
import string
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
LEFT_OUT = "\\`~"
CHARACTERS = "\n " + string.digits + string.ascii_letters + "".join(
    sign for sign in string.punctuation if sign not in LEFT_OUT
)  # fmt: skip
PAD, EOS = 0, 1
VOCABULARY = (*SPECIAL_TOKENS, *CHARACTERS)
CONTEXT_TOKENS = 256


def build_tokenizer() -> Tokenizer:
    """One token per character; unknown characters become <unk>."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def tokenizer_config() -> str:
    """tokenizer_config.json, which `AutoTokenizer` needs besides tokenizer.json."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT_TOKENS, "pad_token": "<pad>",
        "eos_token": "<eos>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return json.dumps(values, indent=2) + "\n"


def build_tiny(seed: int = 0, **changes: Any) -> Any:
    """An untrained tiny policy, determined by the seed; `changes` override its configuration."""
    values: dict[str, Any] = {
        "vocab_size": len(VOCABULARY), "max_position_embeddings": CONTEXT_TOKENS, "hidden_size": 64,
        "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "tie_word_embeddings": False, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
        "attn_implementation": "sdpa", "dtype": torch.float32,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**{**values, **changes})).eval()


def byte_tokenizer(*special: str) -> Tokenizer:
    """A tokenizer that knows every byte, and these control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer
