"""Makes a model's prompt from a task: chat template, system message, thinking prefix. No torch.

    history + prompt ─► chat template ─► text ─► token ids ─► + thinking prefix
                        └─ none: the texts themselves, a line each

The template's own control tokens become control tokens; the same characters inside a message are spelt out, so no
message can end its turn or start one of another role. Completions are never encoded again: they stay the same ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from shoal.errors import ModelError
from shoal.models.folder import read_config
from shoal.models.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from jinja2 import Template

Message = tuple[str, str]
FROZEN_NOW = datetime(2024, 7, 26)  # the date for templates that ask for it, so that prompts never change
OPENING, CLOSING = "\U0010fff0", "\U0010fff1"
"""Around the number of a control token in a message; from the private use area, which text does not contain."""


class PromptEncoder:
    """Deterministic. `chat` None: use the model's template if it has one."""

    def __init__(
        self, files: Mapping[str, bytes], chat: bool | None = None, system: str = "", thinking: str = ""
    ) -> None:
        self.tokenizer = TextTokenizer(files)
        self._system, self._thinking = system, thinking
        source = template_source(files) if chat is not False else None
        if chat and source is None:
            detail = "has no chat template (chat_template.jinja, or in tokenizer_config.json)"
            raise ModelError(f"environment.prompt.chat is true, but the model {detail}: leave chat out")
        self._template, self._words, self._controls = None, dict[str, str](), dict[str, int]()
        if source is not None:
            self._template, self._words = _compiled(source), special_token_texts(files)
            self._controls = _control_tokens(files)

    @property
    def uses_template(self) -> bool:
        return self._template is not None

    @property
    def opens_thinking(self) -> bool:
        """Whether the chat template itself begins every answer with a thinking block."""
        return self._template is not None and self._render([("user", "?")]).rstrip().endswith("<think>")

    def encode(self, prompt: str, history: Sequence[Message] = ()) -> tuple[int, ...]:
        own = any(role == "system" for role, _text in history)
        messages = [*([("system", self._system)] if self._system and not own else []), *history, ("user", prompt)]
        if self._template is None:
            ids = self.tokenizer.encode("\n".join(text for _role, text in messages))
            return ids + self.tokenizer.encode(self._thinking) if self._thinking else ids
        found = []
        for role, text in messages:
            if OPENING in text or CLOSING in text:
                raise ModelError(f"a message has the character {OPENING!r} or {CLOSING!r}, which prompts may not have")
            for number, word in enumerate(self._controls):
                text = text.replace(word, f"{OPENING}{number}{CLOSING}")
            if set(self.tokenizer.encode(text)) & set(self._controls.values()):
                raise ModelError(f"a message of the role {role} spells a control token of the model: {text[:80]!r}")
            found.append((role, text))
        text, words = self._with_thinking(self._render(found)), list(self._controls)
        ids = ()
        for index, piece in enumerate(re.split(f"{OPENING}([0-9]+){CLOSING}", text)):
            if index % 2:  # a control token in a message: letter by letter
                ids += self.tokenizer.encode_plain(words[int(piece)])
            elif piece:
                ids += self.tokenizer.encode(piece)
        return ids

    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before a tool's text, which follows the model's turn, and those after it, up to where the model
        continues. Without a template each is a line break."""
        if self._template is None:
            after = self.tokenizer.encode("\n") + (self.tokenizer.encode(self._thinking) if self._thinking else ())
            return self.tokenizer.encode("\n"), after
        between, after_text = self._around()
        if between is None or after_text is None:
            raise ModelError("the model's chat template leaves out earlier messages: it cannot be used for dialogues")
        ended = next((text for text in self._ends() if between.startswith(text)), "")
        return self.tokenizer.encode(between.removeprefix(ended)), self.tokenizer.encode(after_text)

    @cached_property
    def end_of_turn(self) -> int:
        """The end-of-sequence token that the template puts after a turn of the model; the first one without any."""
        try:
            between = "" if self._template is None else (self._around()[0] or "").lstrip()
        except ModelError:  # it takes one turn only
            between = ""
        return next(
            (id_ for text, id_ in self._ends().items() if between.startswith(text)), self.tokenizer.eos_token_id
        )

    def _ends(self) -> dict[str, int]:
        """The end-of-sequence tokens by their text, the longest first."""
        ids = self.tokenizer.eos_token_ids  # of two, `decode` leaves one
        texts = {text: id_ for id_ in reversed(ids) if (text := self.tokenizer.decode([id_, id_]))}
        return dict(sorted(texts.items(), key=lambda each: -len(each[0])))

    def _around(self) -> tuple[str | None, str | None]:
        """What the template puts between a turn of the model and the user's next words, and after these; None where it
        leaves them out."""
        turn, words = f"{OPENING}turn{CLOSING}", f"{OPENING}words{CLOSING}"
        text = self._with_thinking(self._render([("user", "?"), ("assistant", turn), ("user", words)]))
        _prompt, found, rest = text.partition(turn)
        between, found_too, after_text = rest.partition(words)
        return (between if found and found_too else None), (after_text if found and found_too else None)

    def _with_thinking(self, text: str) -> str:
        """The rendered text with the thinking prefix, unless the template adds it itself."""
        prefix = self._thinking.strip()
        return text if prefix and text.rstrip().endswith(prefix) else text + self._thinking

    def _render(self, messages: Sequence[Message]) -> str:
        import jinja2

        assert self._template is not None
        listed = [{"role": role, "content": text} for role, text in messages]
        try:
            options = {"add_generation_prompt": True, "tools": None, "documents": None, **self._words}
            return self._template.render(messages=listed, **options)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ModelError(f"the model's chat template refuses the prompt: {why}") from error


def template_source(files: Mapping[str, bytes]) -> str | None:
    """The model's chat template: chat_template.jinja, else the (default) one in tokenizer_config.json, else None."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"the model's chat_template.jinja is no text: {error}") from error
    config = read_config(files, "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    given = config.get("chat_template")
    if isinstance(given, list):
        named = (one for one in given if isinstance(one, dict) and one.get("name") == "default")
        given = next(named, {}).get("template")
    return given if isinstance(given, str) and given else None


def special_token_texts(files: Mapping[str, bytes]) -> dict[str, str]:
    """Special tokens by name (`bos_token`, …), as templates use them."""
    words: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_config(files, name).items() if name in files else ():
            word = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(word, str):
                words[key] = word
    return words


def _control_tokens(files: Mapping[str, bytes]) -> dict[str, int]:
    """The special tokens of tokenizer.json with their ids, the longest first, since one may begin another."""
    listed = read_config(files, "tokenizer.json").get("added_tokens")
    unknown = special_token_texts(files).get("unk_token")
    found = {
        str(token["content"]): int(token["id"])
        for token in (listed if isinstance(listed, list) else [])
        if isinstance(token, dict) and token.get("special") and token.get("content") and token["content"] != unknown
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _compiled(source: str) -> Template:
    """The template in jinja's sandbox, with the functions that such templates expect."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks assistant messages; here only its content is used."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    # jinja's own filter escapes for HTML and takes no options.
    sandbox.filters["tojson"] = lambda value, ensure_ascii=False, indent=None: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )
    sandbox.globals |= {"raise_exception": refuse, "strftime_now": FROZEN_NOW.strftime}
    try:
        return sandbox.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template cannot be read: {error}") from error
