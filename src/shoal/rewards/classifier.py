"""A Hugging Face sequence classifier as a judge: run by the validator itself, in batches, on a CPU or a GPU.

    one label          its logit: a reward model's number
    several labels     the probability of the label "positive", or else of the last one

The text is the conversation in the model's chat template; without a template the prompt, an empty line and the
completion. A text that is too long loses its beginning. A control token inside a message is encoded letter by letter,
so no completion can end its turn or start another. Numbers are rounded to 4 digits: they depend slightly on the batch
size. Weights are read from safetensors only, and no code of the folder is run.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.models.prompts import CLOSING, OPENING
from shoal.rewards.panel import JudgedText
from shoal.runtime import hf

log = logging.getLogger(__name__)

BATCH, DIGITS, POSITIVE = 16, 4, "positive"
NO_BOUND = 10**9  # when neither tokenizer nor model has a limit
NO_CHARACTER = "\ufffd"


class Classifier:
    """Implements `PartJudge`. The model is loaded when it is first asked."""

    def __init__(self, folder: Path, device: str = "auto", batch: int = BATCH) -> None:
        self._folder, self._device, self._batch = folder, device, batch
        self._model: Any = None
        self._tokenizer: Any = None

    def values(self, pieces: Sequence[JudgedText]) -> list[float | ScoringFailure]:
        try:
            self.prepare()
            texts = [self._ids(piece) for piece in pieces]
            batches = (texts[start : start + self._batch] for start in range(0, len(texts), self._batch))
            return [value for batch in batches for value in self._forward(batch)]
        except EnvironmentSetupError as error:
            return [ScoringFailure(str(error))] * len(pieces)
        except Exception as error:
            log.debug("the classifier failed", exc_info=True)
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            return [ScoringFailure(f"the classifier in {self._folder} failed: {detail}")] * len(pieces)

    def close(self) -> None:
        self._model = self._tokenizer = None

    def _ids(self, piece: JudgedText) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template:
            conversation = [*piece.history, ("user", piece.prompt), ("assistant", piece.completion)]
            spelt: list[str] = []
            messages = [{"role": role, "content": self._escaped(text, spelt)} for role, text in conversation]
            controls, ids = set(self._controls.values()), list[int]()
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            for index, part in enumerate(re.split(f"{OPENING}([0-9]+){CLOSING}", text)):
                if index % 2:
                    plain = tokenizer(spelt[int(part)], add_special_tokens=False, split_special_tokens=True)
                    ids += [each for each in plain["input_ids"] if each not in controls]
                elif part:
                    ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(f"{piece.prompt}\n\n{piece.completion}", split_special_tokens=True)["input_ids"]
        bounds = (tokenizer.model_max_length, getattr(self._model.config, "max_position_embeddings", None))
        most = min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=NO_BOUND)
        return ids[-most:] or [int(self._model.config.pad_token_id)]

    @property
    def _controls(self) -> dict[str, int]:
        """The tokenizer's special tokens, the longest first: one may be the beginning of another."""
        added, unknown = self._tokenizer.added_tokens_decoder, self._tokenizer.unk_token
        found = {str(token): number for number, token in added.items() if token.special and str(token) != unknown}
        return dict(sorted(found.items(), key=lambda item: -len(item[0])))

    def _escaped(self, text: str, spelt: list[str]) -> str:
        """The text with each control token replaced by its index in `spelt`, between private marks."""

        def mark(word: str) -> str:
            spelt.append(word)
            return f"{OPENING}{len(spelt) - 1}{CLOSING}"

        controls = self._controls
        text = text.replace(OPENING, NO_CHARACTER).replace(CLOSING, NO_CHARACTER)
        if not controls:
            return text
        words = "|".join(map(re.escape, controls))
        changed = re.sub(words, lambda found: mark(found[0]), text)
        around = "".join(re.split(f"{OPENING}[0-9]+{CLOSING}", changed))
        if set(self._tokenizer(around, add_special_tokens=False)["input_ids"]) & set(controls.values()):
            return mark(text)  # control tokens in other letters, or made of the parts around one: escape everything
        return changed

    def _forward(self, texts: Sequence[list[int]]) -> list[float]:
        import torch

        width, padding = max(map(len, texts)), int(self._model.config.pad_token_id)
        ids_BT = torch.tensor([ids + [padding] * (width - len(ids)) for ids in texts])
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts])
        with torch.inference_mode():
            device = self._model.device
            logits_BC = self._model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device)).logits
        labels = logits_BC.shape[1]
        names = {str(name).lower(): int(index) for index, name in (self._model.config.id2label or {}).items()}
        chosen_BC = logits_BC.float() if labels == 1 else logits_BC.float().softmax(dim=1)
        said_B = chosen_BC[:, 0 if labels == 1 else names.get(POSITIVE, labels - 1)]
        return [round(value, DIGITS) for value in said_B.tolist()]

    def prepare(self) -> None:
        if self._model is not None:
            return
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from shoal.models import locked

        locked.lock()  # no code of the folder is run, and nobody is asked
        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = hf.model_folder(self._folder)
        log.info("loading the classifier in %s", folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            load = AutoModelForSequenceClassification.from_pretrained
            model = load(folder, local_files_only=True, use_safetensors=True)
        except Exception as error:  # a damaged file raises whatever the library that reads it does
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EnvironmentSetupError(f"the classifier in {self._folder} does not load: {detail}") from error
        if model.config.pad_token_id is None:
            known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
            model.config.pad_token_id = next(each for each in known if each is not None)
        self._model, self._tokenizer = model.to(self._device).eval(), tokenizer
