r"""One spelling for what LaTeX, Unicode and habit spell in many ways, before anything is read as mathematics.

>>> plain("$\\dfrac{1}{2}\\,\\text{cm}$")
'\\frac{1}{2} \\text{cm}'
"""

# ruff: noqa: RUF001  (the signs that look like others are what is replaced here)

from __future__ import annotations

import re
import unicodedata

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "⟨": "(", "⟩": ")",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
    "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
    "′": "'", "″": "''", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "“": "", "”": "", "’": "'",
}  # fmt: skip
_TRANSLATION = str.maketrans(_UNICODE)
_RAISED = re.compile(r"[⁰¹²³⁴-⁹⁺⁻⁼⁽⁾ⁿⁱᵃ-ᵅᵇ-ᵉᵍʰʲᵏˡᵐᵒᵖʳˢᵗᵘᵛʷˣʸᶻ]+")
_LOWERED = re.compile(r"[₀-₉₊₋₌₍₎ₐ-ₜᵢⱼᵣᵤᵥ]+")
"""Signs that are written small: plain, 2ⁿ would be 2n and 10₂ would be 102."""
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))")

_SPACES = {",", ";", ":", " ", ">", "quad", "qquad", "enspace", "thinspace", "hfill", "newline", "\n", "\t"}
_NOTHING = {
    "!", "(", ")", "Big", "Bigg", "Biggl", "Biggr", "Bigl", "Bigm", "Bigr", "Large", "[", "]", "bf", "big", "bigg",
    "biggl", "biggr", "bigl", "bigm", "bigr", "bm", "boldsymbol", "boxed", "color", "displaystyle", "ensuremath",
    "fbox", "hat", "huge", "it", "label", "large", "left", "limits", "mathbf", "mathcal", "mathit", "mathsf",
    "mathstrut", "middle", "nolimits", "normalsize", "right", "rm", "small", "strut", "textstyle", "vec",
}  # fmt: skip
_SAME = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom", "cdot": "*",
    "times": "*", "ast": "*", "div": "/", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ",
    "geqslant": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">", "simeq": r"\approx ", "degree": r"^\circ ", "%": "%",
    "langle": "(", "rangle": ")", "textdegree": r"^\circ ", "R": r"\mathbb{R}", "varnothing": r"\emptyset ",
    "empty": r"\emptyset ", "colon": ":", "land": r"\text{and}", "lor": r"\text{or}", "wedge": r"\text{and}",
    "vee": r"\text{or}", "smallsetminus": r"\setminus ", "backslash": r"\setminus ", "&": "&", "#": "", "_": " ",
    "euro": "€", "pounds": "£", "tg": r"\tan", "arctg": r"\arctan", "ctg": r"\cot", "varphi": r"\phi ",
    "varepsilon": r"\epsilon ", "isin": r"\in ", "to": r"\to ", "rightarrow": r"\to ",
    "longrightarrow": r"\to ", "i": "i", "imath": "i", "dot": r"\overline",
}  # fmt: skip
_TEXTS = frozenset(
    "text textbf textrm textit textnormal textsf texttt mbox hbox mathrm operatorname".split()  # noqa: SIM905
)
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp lg".split()  # noqa: SIM905
)

_COMMAND = re.compile(r"\\(?:([a-zA-Z]+)\*?|(.))", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_DIGIT_GAP = re.compile(r"(?<=\d)(?:\\[,!]|\{,\}\\!|~)(?=\d{3}(?!\d))")
_OPTION = re.compile(r"\\(?:hspace|vspace|phantom|color|label|tag)\*?\s*\{[^{}]*\}")
_CIRCLE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_PRIMES = re.compile(r"\^\s*(?:\\prime(?![a-zA-Z])|\{(?:\s*\\prime(?![a-zA-Z]))+\s*\})")
_COUNTED = re.compile(r"(-?\d+(?:[.,/]\d+)*) ([A-Za-z]++(?![^{}]*\b(?:and|or)\b)[A-Za-z ./]*)")
_WORD = re.compile(r"[^\W\d_]{2,}")
_LEFT_OUT = re.compile(r"\\(?:left|right)\s*\.")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,30}\.\d{0,30}?)(\d)\2{2,30} ?(?:\\[lc]?dots|\.\.\.)$")
"""0.333… is 1/3: a digit that stands three times before the dots goes on for ever."""
_MANY_SPACES = re.compile(r"\s+")
_SIMPLE = re.compile(r"-?\d+(?:\.\d+)?")


def plain(text: str) -> str:
    """The text in the one spelling that is read. Only spelling changes: no value, no order, no bracket."""
    text = text.strip()
    if _SIMPLE.fullmatch(text) and text.isascii():
        return text
    if not text.isascii():
        text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
        text = _RAISED.sub(lambda run: f"^{{{_full_size(run[0])}}}", text)
        text = _LOWERED.sub(lambda run: f"_{{{_full_size(run[0])}}}", text).translate(_TRANSLATION)
        text = unicodedata.normalize("NFKC", text)
    if "\\" in text or "~" in text:
        text = _commands(text)
    text = text.replace("{,}", ",").replace("$", "").replace("**", "^")
    text = _MANY_SPACES.sub(" ", text).strip()
    if text.endswith(("dots", "...")):
        text = _REPEATING.sub(r"\1\\overline{\2}", text)
    return _unwrapped(_trimmed(text))


def _full_size(small: str) -> str:
    return unicodedata.normalize("NFKC", small).replace("−", "-")


def _commands(text: str) -> str:
    text = _LEFT_OUT.sub("", _OPTION.sub("", _DIGIT_GAP.sub("", text))).replace("~", " ")
    text = _CIRCLE.sub(r"^\\circ ", text).replace(r"\$", "USD ")
    text = _PRIMES.sub(lambda primes: "'" * primes[0].count("prime"), text)
    return _TEXT.sub(_words, _COMMAND.sub(_command, text))


def _command(found: re.Match[str]) -> str:
    name = found[1] or found[2]
    if name in _NOTHING:
        return " " if name in ("rm", "bf", "it") else ""
    if name in _SPACES:
        return " "
    if name in _TEXTS:
        return r"\text"
    return _SAME.get(name, found[0])


def _words(found: re.Match[str]) -> str:
    r"""`\text{sin}` is a function, `\text{e}` a letter, `\text{ or }` a word: the word keeps its mark.

    Where no word stands beside the digits, it is mathematics: `\text{-7}` is -7, and signs count in it.
    """
    words = found[1].strip()
    if words in FUNCTIONS:
        return f"\\{words} "
    if words in ("e", "i", "x", "y", "z", "n", ""):
        return words or " "
    if any(sign.isdigit() for sign in words) and set(_WORD.findall(words)) <= {"and", "or"}:
        return f" {words} "
    counted = _COUNTED.fullmatch(words)
    if counted:
        return rf" {counted[1]} \text{{{counted[2]}}} "
    return rf" \text{{{words}}} "


def _trimmed(text: str) -> str:
    """Without what ends a sentence or a line. A bracket, a factorial and a digit stay."""
    while text and (text[-1] in ".,;:\\*`" or text.endswith(" ")) and not text.endswith((r"\}", r"\|")):
        text = text[:-1]
    return text.strip("`").lstrip(":").strip()


def _unwrapped(text: str) -> str:
    """Without braces around the whole; with a comma in them they are a set whose backslashes were forgotten."""
    for _layer in range(4):
        whole = len(text) > 1 and text[0] == "{" and text[-1] == "}" and text[-2] != "\\" and "," not in text
        if not whole or closing(text, 0) != len(text) - 1:
            break
        text = text[1:-1].strip()
    return text


def balanced(text: str) -> bool:
    """Whether every brace that opens is closed, and none is closed that was not opened."""
    depth = 0
    for found in _BRACE.finditer(text):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth < 0:
            return False
    return depth == 0


def closing(text: str, start: int) -> int:
    r"""Where the brace that opens at `start` is closed, or -1. `\{` and `\}` are no braces.

    >>> closing("{a{b}}c", 0)
    5
    """
    depth = 0
    for found in _BRACE.finditer(text, start):
        brace = found[0]
        if brace == "{":
            depth += 1
        elif brace == "}":
            depth -= 1
            if depth == 0:
                return found.start()
    return -1


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
