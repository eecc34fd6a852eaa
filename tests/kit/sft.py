"""For tests of the warm start: a tokenizer of bytes with a chat template, rows in files, a corpus of the sort task."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer_stubs import tiny_files, tiny_model

from kit.tiny import byte_tokenizer
from shoal.environments.settings import PromptSettings
from shoal.trainer.demonstrations.reading import Demonstrations, Encoder
from shoal.trainer.demonstrations.selection import Corpus, EnvironmentFilters, FilterOptions, FilterReport, select

SPECIAL = ("<|end|>", "<|user|>", "<|bot|>", "<|sys|>")
CHAT = (
    "{% for message in messages %}{% if message.role == 'system' %}<|sys|>{% elif message.role == 'user' %}<|user|>"
    "{% else %}<|bot|>{% endif %}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
FORGETFUL = CHAT.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
"""As templates of thinking models do it: what was thought in earlier turns is left out."""


TOKENIZER = byte_tokenizer(*SPECIAL)
END, USER, BOT, SYS = (TOKENIZER.token_to_id(word) for word in SPECIAL)


def chat_files(template: str | None = CHAT, **config: Any) -> dict[str, bytes]:
    files = {
        "config.json": json.dumps({"eos_token_id": END, **config}).encode(),
        "tokenizer.json": TOKENIZER.to_str().encode(),
    }
    return files if template is None else {**files, "chat_template.jinja": template.encode()}


def sort_files() -> dict[str, bytes]:
    """What describes the tiny model: a token per character, no chat template, 256 positions."""
    return tiny_files(tiny_model())


def put(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """Rows as JSON lines; a text is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sort_row(digits: str, **more: Any) -> dict[str, Any]:
    return {"prompt": f"{digits}=", "completion": "".join(sorted(digits)), **more}


def sort_rows(count: int) -> list[dict[str, Any]]:
    """Different lists of three to five digits."""
    return [sort_row(str(7_919 * (number + 3) ** 3)[-(3 + number % 3) :] + str(number % 10)) for number in range(count)]


def chosen(
    tmp: Path, rows: Iterable[dict[str, Any] | str], files: dict[str, bytes] | None = None,
    filters: EnvironmentFilters | None = None, judge: Any = None, interrupted: bool = False, **choice: Any,
) -> tuple[Corpus, FilterReport]:  # fmt: skip
    """What `FilterOptions(**choice)` makes of the rows."""
    data = Demonstrations([put(tmp / "demos.jsonl", rows)])
    encoder = Encoder(files or sort_files(), PromptSettings(), data.layout)
    wanted = FilterOptions(**{"rank": tmp if judge else None, **choice})
    return select(data, encoder, wanted, filters, judge, interrupted=lambda: interrupted)
