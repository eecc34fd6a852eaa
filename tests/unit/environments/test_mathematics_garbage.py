"""What no person would answer: it is worth 0, and neither raises nor hangs. (A hang fails by the test's time limit.)"""

from __future__ import annotations

import pytest

from shoal.environments.graders.mathematics import MathematicsGrader

GOLDS = (
    "7",
    "10^{900}",
    "x^2+1",
    "(1,2)",
    "Tuesday",
    "\\frac{\\sqrt{3}}{2}",
    "x > 3",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
)

BOXED = {
    "nothing": "",
    "a null byte": "\0",
    "brackets": "(" * 1500,
    "braces": "{" * 900 + "}" * 900,
    "fractions in fractions": "\\frac{1}{" * 150 + "1" + "}" * 150,
    "roots of roots": "\\sqrt{" * 200 + "2" + "}" * 200,
    "minus signs": "-" * 1901 + "1",
    "a long sum": "1+" * 900 + "1",
    "a long product": "(1)" * 600,
    "factorials of nothing": "!" * 500,
    "factorials of factorials": "5" + "!" * 100,
    "a large factorial": "100000!",
    "a tower": "10^{10^{10}}",
    "a high tower": "10^{10^{10^{10}}}",
    "a tower of Python": "9**9**9",
    "a bare tower": "9^9^9^9^9",
    "many digits": "9" * 1900,
    "a tower of twos": "2^{" * 300 + "2" + "}" * 300,
    "a large power": "7^{99999999}",
    "a large binomial": "\\binom{1000000}{500000}",
    "a larger binomial": "\\binom{99999999999}{3}",
    "a long row": "\\begin{pmatrix}" + "&".join(["1"] * 200) + "\\end{pmatrix}",
    "a ragged matrix": "\\begin{pmatrix}1&2\\\\3\\end{pmatrix}",
    "a matrix in a matrix": "\\begin{pmatrix}\\begin{pmatrix}1\\end{pmatrix}\\end{pmatrix}",
    "a large polynomial": "(x+1)^{99999}",
    "a tower of variables": "x^{x^{x^{x}}}",
    "a sine of a large number": "\\sin(10^{100})",
    "logarithm to base one": "\\log_{1}{5}",
    "logarithm to base zero": "\\log_0 0",
    "zero to the zero": "0^0",
    "a division by zero": "1/0",
    "zero by zero": "\\frac{0}{0}",
    "infinity less infinity": "\\infty-\\infty",
    "a root of degree zero": "\\sqrt[0]{5}",
    "a root of a large degree": "\\sqrt[10^9]{5}",
    "a large exponent": "1e9999",
    "a larger exponent": "1e99999999",
    "a pole": "\\tan(\\frac{\\pi}{2})",
    "powers of i": "i^{i^{i^{i}}}",
    "right to left": "\u202e7",
    "a lone surrogate": "\ud800",
    "halves": "½½½",
    "superscripts": "²²²",
    "large operators": "∑∏∫√",
    "roots without arguments": "√√√√",
    "Chinese": "五",
    "an emoji": "🐟",
    "a backslash": "\\\\",
    "dollars": "$$$$",
    "text without end": "\\text{\\text{\\text{a}}}",
    "begin": "\\begin{pmatrix}",
    "end": "\\end{pmatrix}",
    "commas": ",,,,",
    "empty pairs": "(,)",
    "an empty bracket": "()",
    "a bar": "|",
    "equals": "==",
    "half an equation": "x=",
    "a chain": "a=b=c=d=e",
    "numbers in a chain": "1<2<3<4",
    "variables in a chain": "x<y<z",
    "plus or minus": "\\pm" * 40,
    "colons": "::",
    "a ratio to nothing": "1:0",
    "no such time": "99:99",
    "percents": "%%%",
    "a long list": "1," * 900,
    "brackets in a list": "(1," * 300,
    "subscripts": "x_{" * 300,
    "a long word": "a" * 1900,
    "ands": "and " * 450,
    "guesses": "1 or " * 380,
    "all numbers": ", ".join(map(str, range(400))),
    "fractions of nothing": "\\frac" * 300,
    "roots of nothing": "\\sqrt" * 300,
    "Python": "__import__('os').system('touch pwned')",
    "Python as an operator": "\\operatorname{__import__('os').system('touch pwned')}",
    "unions": "\\cup" * 200,
    "half a union": "(1,2)\\cup",
    "half a complement": "\\mathbb{R}\\setminus\\{",
    "points taken out twice": "\\mathbb{R}\\setminus\\{1,1,1\\}",
    "sets of sets": "\\{" * 200 + "\\}" * 200,
    "two exponents": "x^{-1}^{2}",
    "an open exponent": "2^",
    "an open base": "^2",
    "an open function": "\\sin^",
    "no repeating digits": "0.\\overline{}",
    "many repeating digits": "3.\\overline{" + "1" * 1500 + "}",
    "points": "1.2.3.4",
    "terms": "1\\text{to}" * 200 + "+",
    "units": "1 " + "meters " * 250 + "=",
    "units per unit": "1 " + "/ meter " * 200 + "=",
    "equals signs": "=" * 1900,
    "a chain of comparisons": "<1" * 900,
    "fractions to a power": "*".join(["(2/3)^{30000}"] * 40),
    "large denominators": "+".join(f"1/{n}" for n in range(100_000_000, 100_000_150)),
    "large factorials": "*".join(["1999!"] * 60),
    "slow functions to many digits": "10^{900}+0*" + "*".join(["\\binom{1999.5}{333.3}"] * 25),
    "seven and all else": "7, x^2+1, (1,2), Tuesday",
}

UNBOXED = {
    "nothing": "",
    "null bytes": "\0" * 1_000_000,
    "open boxes": "\\boxed{" * 150_000,
    "empty boxes": "\\boxed{}" * 100_000,
    "a box of a megabyte": "\\boxed{" + "7" * 1_000_000 + "}",
    "letters": "a" * 1_000_000,
    "digits": "1" * 1_000_000,
    "dollars": "$" * 1_000_000,
    "lines": "\n" * 1_000_000,
    "spaces": "answer" + " " * 1_000_000,
    "numbers": "1 " * 500_000,
    "answers": "answer is" * 100_000,
    "formulas without end": "\\(" * 300_000,
    "thoughts": "<think>" * 100_000,
    "ends of thoughts": "</think>" * 100_000,
    "all numbers": "The answer is " + " or ".join(map(str, range(1000))),
}


@pytest.fixture(scope="module")
def grader() -> MathematicsGrader:
    return MathematicsGrader()


@pytest.mark.parametrize("name", BOXED)
def test_a_strange_answer_is_worth_nothing(grader: MathematicsGrader, name: str) -> None:
    for gold in GOLDS:
        assert grader.score(gold, f"\\boxed{{{BOXED[name]}}}").value == 0.0
    grader.score("5", BOXED[name])  # unboxed: whatever is found in it, it does not raise


@pytest.mark.parametrize("name", UNBOXED)
def test_a_strange_completion_is_worth_nothing(grader: MathematicsGrader, name: str) -> None:
    for gold in GOLDS:
        assert grader.score(gold, UNBOXED[name]).value == 0.0
