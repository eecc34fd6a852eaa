"""Models: folders, tokenizers, weights as they travel, and log-probabilities.

    folder     model_folder, read_files, check_weights, as_numpy: find, read and check a Hugging Face folder (no torch)
    tokenizer  TextTokenizer: text to ids and back, from tokenizer.json alone (no torch)
    prompts    PromptEncoder: a task as a prompt, by the model's chat template if it has one (no torch)
    ending     EndRule: where a completion ends, by its tokens and by stop strings in its text (no torch)
    state      policy_state, apply_state, to_torch, to_view: a model's weights by name, tied ones once
    locked     transformers without its ways to run a model's code or to access a hub
    load       LoadedModel, load_model, model_from_files: a causal language model from a folder or from its files
    logprobs   hidden_states, Head, token_logprobs: log-probabilities in float32, by tiles, differentiable
    packed     Packed, packed_states, compile_layers: sequences end to end, none of which sees another
    head_kernels: one tile of logits and its gradients, in Triton
    quantize   quantized, INT8, INT4: weights rounded to few bits, for attacks and calibration (no torch)

The package itself imports without torch; `state`, `locked`, `load`, `logprobs`, `packed` and `head_kernels` need it.
"""

from shoal.models.folder import BUILTIN, as_numpy, eos_token_ids, from_numpy, model_folder, read_config, read_files
from shoal.models.prompts import PromptEncoder
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import TensorView
