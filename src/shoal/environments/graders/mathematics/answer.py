r"""Finds the final answer of a completion, and brings its notation into one spelling.

After the thinking part, in this order:

1. the last `\boxed{…}` (or `\fbox`). Boxes with only "and", "or", commas or spaces between them are one answer, a list:
   a completion cannot win by boxing two guesses. If the last box is not closed, there is no answer.
2. the content of the last `<answer>…</answer>`
3. the text after the last "answer is", "answer:" or "####", up to the end of its sentence, or to "since" or "because"
4. the displayed formula at the end of the text
5. the last formula of the last line; else its last numbers; else the line itself. "It is not 7" is no answer.
"""

# ruff: noqa: RUF001  (the signs that look like others are what is replaced here)

import re
import unicodedata

from shoal.environments.graders import after_thinking

LONGEST = 2_000  # characters of an answer
_TAIL, _BOXES = 20_000, 16  # characters that are searched for an answer without a box; boxes that may form one answer

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*\{")
_PARTING = re.compile(r"(?:\s|\$|,|;|\\[,;()\[\] ]|\\q?quad|\band\b|\bor\b|\\text\s*\{[^{}]*\b(?:and|or)\s*\}|\*)*")
_MARK = re.compile(
    r"####|(?:answer|result|solution)\s{0,3}(?:\*\*)?\s{0,3}"
    r"(?:is(?![a-z])\s{0,3}(?:equal to\b)?|equals\b|:|=)\s{0,3}:?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|(?<=[^\s.])\.(?=\s+[A-Z]|\s*$)|,?\s(?:since|because)\s")
_CLAUSE_END = re.compile(r"[,;:]|[.!?]\s|\b(?:but|so|hence|thus|therefore)\b", re.IGNORECASE)
_DENIAL = re.compile(r"\b(?:not|never|cannot|neither|nor)\b|n't\b", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?((?:\\\$|[^$\n])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_DISPLAYS = (("$$", "$$"), (r"\[", r"\]"))
_NUMBER = r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:\s?/\s?\d+)?(?:\s?\\?%)?"
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}(?:\s*(?:,\s*(?:and|or)?|and|or)\s+{_NUMBER})*")
_TWO_WORDS = re.compile(r"[a-zA-Z]{2} [a-zA-Z]{2}")
_PROSE = re.compile(r"[A-Za-z]+ [a-z$]+ ")
_SAID = re.compile(r"\b(?:is|are|equals|by)\s+$")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def final_answer(completion: str) -> str | None:
    text = after_thinking(completion)
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    found = _boxed(text, last) if last >= 0 else _unboxed(text[-_TAIL:])
    return found if found is not None and 0 < len(found) <= LONGEST else None


def _boxed(text: str, last: int) -> str | None:
    content = _content(text, last)
    if content is None:
        return None
    contents, start = [content[0]], last
    while len(contents) < _BOXES:
        start = max(text.rfind("\\boxed", 0, start), text.rfind("\\fbox", 0, start))
        earlier = _content(text, start) if start >= 0 and last - start <= LONGEST + 200 else None
        if earlier is None or not 0 <= last - earlier[1] <= 80 or not _PARTING.fullmatch(text, earlier[1], last):
            break
        contents.append(earlier[0])
        last = start
    return ", ".join(dict.fromkeys(content.strip() for content in reversed(contents)))


def _content(text: str, start: int) -> tuple[str, int] | None:
    """The content of the box that begins at `start`, and its end."""
    opened = _BOX.match(text, start)
    begin = opened.end() if opened else 0
    end = closing(text[begin - 1 : begin + LONGEST + 1], 0) if opened else -1
    return None if end < 0 else (text[begin : begin + end - 1], begin + end)


def _unboxed(text: str) -> str | None:
    before, tag, _after = text.rpartition("</answer>")
    if tag and "<answer>" in before:
        return before.rpartition("<answer>")[2].strip() or None
    marks = list(_MARK.finditer(text))
    if marks:
        rest = text[marks[-1].end() :].lstrip(" \t*:\n")
        shown = rest.startswith(("$$", r"\[")) and _displayed(rest)
        return shown or _of_sentence(_SENTENCE_END.split(rest, maxsplit=1)[0]) or None
    lines = [line for line in text.splitlines() if line.strip(" *`-_#.$")]
    return _displayed(text) or (_of_line(lines[-1].strip()) if lines else None)


def _displayed(text: str) -> str:
    text = text.rstrip(" \n.*")
    for opening, ending in _DISPLAYS:
        start = text.rfind(opening, 0, len(text) - 2)
        if text.endswith(ending) and start >= 0 and text.count("$$") % 2 == 0:
            return " ".join(text[start + 2 : -2].split())
    return ""


def _of_sentence(sentence: str) -> str:
    """The formula, if the sentence after "the answer is" begins with one; the sentence, unless it is prose."""
    sentence = sentence[:LONGEST].strip(" *`_").rstrip(".")
    formulas = list(_FORMULA.finditer(sentence))
    if formulas and formulas[0].start() == 0:
        unit = re.fullmatch(r"\s*(\\?%|[a-z]{1,12})", sentence[formulas[-1].end() :])
        return ", ".join(map(_inside, formulas)) + (f" {unit[1]}" if unit else "")
    return _of_line(sentence) if _PROSE.match(sentence) else sentence


def _of_line(line: str) -> str:
    """The last formulas, or the numbers after them that follow "is" or the like; the whole line if it has
    neither, or denies them."""
    line = " ".join(line[-LONGEST:].split())
    formulas = list(_FORMULA.finditer(line))
    after = formulas[-1].end() if formulas else 0
    numbers = [found for found in _NUMBERS.finditer(line, after) if found[0].strip(" ,") and _TWO_WORDS.search(line)]
    if numbers and (not formulas or _SAID.search(line, after, numbers[-1].start())):
        before = numbers[-2].end() if len(numbers) > 1 else 0
        return line if _denied(line, numbers[-1].start(), before) else numbers[-1][0]
    if not formulas or _denied(line, formulas[-1].start()):
        return line
    kept = [formulas.pop()]
    while formulas and _PARTING.fullmatch(line, formulas[-1].end(), kept[0].start()):
        kept.insert(0, formulas.pop())
    return ", ".join(map(_inside, kept))


def _denied(line: str, at: int, after: int = 0) -> bool:
    """Whether the clause before this place denies what follows. "not 10" denies no later number."""
    return bool(_DENIAL.search(_CLAUSE_END.split(line[after:at])[-1]))


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "⟨": "(", "⟩": ")",
    "′": "'", "″": "''", "\u200b": "", "“": "", "”": "", "’": "'",
}  # fmt: skip
_TRANSLATION = str.maketrans(_UNICODE)
_RAISED = re.compile(r"[⁰¹²³⁴-⁹⁺⁻⁼⁽⁾ⁿⁱᵃ-ᵅᵇ-ᵉᵍʰʲᵏˡᵐᵒᵖʳˢᵗᵘᵛʷˣʸᶻ]+")
_LOWERED = re.compile(r"[₀-₉₊₋₌₍₎ₐ-ₜᵢⱼᵣᵤᵥ]+")
"""Superscripts and subscripts: without marks, 2ⁿ would become 2n and 10₂ would become 102."""
_PARTS = re.compile(r"[¼-¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))")

_SPACES = frozenset((",", ";", ":", " ", ">", "quad", "qquad", "enspace", "thinspace", "hfill", "newline", "\n", "\t",
                     "rm", "bf", "it"))  # fmt: skip
_NOTHING = frozenset(
    "! ( ) [ ] Big Bigg Biggl Biggr Bigl Bigm Bigr Large big bigg biggl biggr bigl bigm bigr bm boldsymbol "  # noqa: SIM905
    "boxed color displaystyle ensuremath fbox hat huge label large left limits mathbf mathcal mathit mathsf mathstrut "
    "middle nolimits normalsize right small strut textstyle vec".split()
)
_SAME = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom", "cdot": "*",
    "times": "*", "ast": "*", "div": "/", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ",
    "geqslant": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">", "simeq": r"\approx ", "degree": r"^\circ ", "%": "%",
    "langle": "(", "rangle": ")", "textdegree": r"^\circ ", "R": r"\mathbb{R}", "varnothing": r"\emptyset ",
    "empty": r"\emptyset ", "colon": ":", "land": r"\text{and}", "lor": r"\text{or}", "wedge": r"\text{and}",
    "vee": r"\text{or}", "smallsetminus": r"\setminus ", "backslash": r"\setminus ", "&": "&", "#": "", "_": " ",
    "euro": "€", "pounds": "£", "tg": r"\tan", "arctg": r"\arctan", "ctg": r"\cot", "varphi": r"\phi ",
    "varepsilon": r"\epsilon ", "isin": r"\in ", "rightarrow": r"\to ", "longrightarrow": r"\to ", "i": "i",
    "imath": "i", "dot": r"\overline", "infin": r"\infty ",
}  # fmt: skip
_TEXTS = frozenset("text textbf textrm textit textnormal textsf texttt mbox hbox mathrm operatorname".split())  # noqa: SIM905
_FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp lg".split())  # noqa: SIM905

_COMMAND = re.compile(r"\\(?:([a-zA-Z]+)\*?|(.))", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_QUOTIENT = re.compile(r"\\frac ?\{ *\\text\{([^{}]*)\} *\} ?\{ *\\text\{([^{}]*)\} *\}")
_SQUARED = re.compile(r"([a-zA-Z/ ]*/[a-zA-Z]+|[ckm]?m|ft|in)\^(\d)")
_DIGIT_GAP = re.compile(r"(?<=\d)(?:(?:\{,\}|,)?\\!\s*|\\,|~)(?=\d{3}(?!\d))")
_OPTION = re.compile(r"\\(?:hspace|vspace|phantom|color|label|tag)\*?\s*\{[^{}]*\}|\\(?:left|right)\s*\.")
_CIRCLE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_PRIMES = re.compile(r"\^\s*(?:\\prime(?![a-zA-Z])|\{(?:\s*\\prime(?![a-zA-Z]))+\s*\})")
_COUNTED = re.compile(r"(-?\d+(?:[.,/]\d+)*) ([A-Za-z]++(?![^{}]*\b(?:and|or)\b)[A-Za-z ./]*)")
_WORD = re.compile(r"[^\W\d_]{2,}")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,30}\.\d{0,30}?)(\d)\2{2,30} ?(?:\\[lc]?dots|\.\.\.)$")  # 0.333… is 1/3
_SUBSCRIPT = re.compile(r"_ ?\{ ?(\w) ?\}")
_DOUBLED = re.compile(r"(?<!\\)\\\\(?=(?:left|right|d?frac|sqrt|text|pi|begin|end|cdot|infty)(?![a-z]))")
"""A command with one backslash too many. (After a row of a matrix there are three.)"""
_SIMPLE = re.compile(r"-?\d+(?:\.\d+)?")


def plain(text: str) -> str:
    r"""The text in one normal spelling. Values, order and brackets stay."""
    text = _DOUBLED.sub(r"\\", text.strip())
    if _SIMPLE.fullmatch(text) and text.isascii():
        return text
    if not text.isascii():
        text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
        text = _PARTS.sub(lambda part: rf"\frac{{{_full_size(part[0]).replace('⁄', '}{')}}}", text)
        text = _RAISED.sub(lambda run: f"^{{{_full_size(run[0])}}}", text)
        text = _LOWERED.sub(lambda run: f"_{{{_full_size(run[0])}}}", text).translate(_TRANSLATION)
        text = unicodedata.normalize("NFKC", text)
    if "\\" in text or "~" in text:
        text = _OPTION.sub("", _DIGIT_GAP.sub("", text)).replace("~", " ")
        text = _CIRCLE.sub(r"^\\circ ", text).replace(r"\$", "USD ")
        text = _PRIMES.sub(lambda primes: "'" * primes[0].count("prime"), text)
        text = _QUOTIENT.sub(r"\\text{\1/\2}", _TEXT.sub(_words, _COMMAND.sub(_command, text)))
    text = " ".join(text.replace("{,}", ",").replace("$", "").replace("**", "^").split())
    if text.endswith(("dots", "...")):
        text = _REPEATING.sub(r"\1\\overline{\2}", text)
    text = _SUBSCRIPT.sub(r"_\1", text)
    # remove the punctuation at the end
    while text and (text[-1] in ".,;:\\*`" or text.endswith(" ")) and not text.endswith((r"\}", r"\|")):
        text = text[:-1]
    text = text.strip("`").lstrip(":").strip()
    # remove braces around the whole; with a comma inside they are a set without its backslashes
    while text.startswith("{") and "," not in text and 0 < closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _full_size(small: str) -> str:
    return unicodedata.normalize("NFKC", small).replace("−", "-")


def _command(found: re.Match[str]) -> str:
    name = found[1] or found[2]
    if name in _NOTHING:
        return ""
    if name in _SPACES:
        return " "
    return r"\text" if name in _TEXTS else _SAME.get(name, found[0])


def _words(found: re.Match[str]) -> str:
    r"""`\text{e}` becomes a letter, `\text{-7}` a formula; `\text{ or }` stays marked as a word."""
    words = found[1].strip()
    if words in _FUNCTIONS:
        return f"\\{words} "
    if words in ("e", "i", "x", "y", "z", "n", ""):
        return words or " "
    squared = _SQUARED.fullmatch(words)
    if squared:
        return rf" \text{{{squared[1]}}}^{squared[2]} "
    if any(sign.isdigit() for sign in words) and set(_WORD.findall(words)) <= {"and", "or"}:
        return f" {words} "
    counted = _COUNTED.fullmatch(words)
    return rf" {counted[1]} \text{{{counted[2]}}} " if counted else rf" \text{{{words}}} "


def closing(text: str, start: int) -> int:
    r"""Where the brace that opens at `start` is closed, or -1. `\{` and `\}` do not count."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0 and found[0] == "}":
            return found.start()
    return -1


def balanced(text: str) -> bool:
    return closing(f"{{{text}}}", 0) == len(text) + 1
