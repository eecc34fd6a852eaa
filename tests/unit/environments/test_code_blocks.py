"""Which block of a completion is the program, however it is fenced."""

from __future__ import annotations

import pytest

from shoal.environments.graders.code import program
from shoal.environments.graders.thinking import after_thinking

BLOCKS = [
    ("```python\na\n```", "a\n"),
    ("```py\na\n```", "a\n"),
    ("```Python3 title=x\na\n```", "a\n"),
    ("```py3\na\n```", "a\n"),
    ("```python3.11\na\n```", "a\n"),
    ("```{python}\na\n```", "a\n"),
    ("```{.python .numbers}\na\n```", "a\n"),
    ("``` python\na\n```", "a\n"),
    ("```python,linenos\na\n```", "a\n"),
    ("```\na\n```", "a\n"),
    ("```python\r\na\r\n```\r\n", "a\n"),
    ("````python\na\n````", "a\n"),
    ("````python\na\n```\nb\n````", "a\n```\nb\n"),
    ("```python\na\n````", "a\n"),
    ("~~~python\na\n~~~", "a\n"),
    ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
    ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
    ("```python\na\n```\nprints\n```\n5\n```", "a\n"),
    ("```python\na\n```\n```json\n{}\n```", "a\n"),
    ("  ```python\na\n  ```", "a\n"),
    ("1. so\n   ```python\n   a\n     b\n   ```", "a\n  b\n"),
    ("- ```python\n  a\n\n    b\n  ```", "a\n\n  b\n"),
    ("> ```python\n> a\n>   b\n> ```\nDone", "a\n  b\n"),
    ("> 1. ```python\n>    a\n>    ```", "a\n"),
    ("      ```python\n      a\n      ```", "a\n"),
    ("Here it is:```python\na\n```", "a\n"),
    ("- **Code:** ```python\na\n```", "a\n"),
    ("```python\na```", "a\n"),
    ("```python\na\nb```\nIt prints:\n```\n5\n```", "a\nb\n"),
    ("```python\na  # ```\nb\n```", "a  # ```\nb\n"),
    ("```python\n\"\"\"see:```\n\"\"\"\nb\n```", "\"\"\"see:```\n\"\"\"\nb\n"),
    ("```python\ndef f():\n    \"\"\"\n    ```\n    5\n    ```\n    \"\"\"\n```",
     "def f():\n    \"\"\"\n    ```\n    5\n    ```\n    \"\"\"\n"),
    ("```python\na", "a\n"),
    ("```python\na\n", "a\n"),
    ("```python\na\n```\n```python\nb", "b\n"),
    ("```python\na\n```\nDone.\n```", "a\n"),
    ("```python\na\n```\n```python\n>>> a\n5\n```", "a\n"),
    ("Use `x` and ```y``` then\n```python\na\n```", "a\n"),
    ("```python a```\n```python\nb\n```", "b\n"),
    ("```pycon\n>>> a\n```", ""),
    ("<think>```python\na\n```</think>no code", ""),
    ("<think>```python\na\n```", ""),
    ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
    ("```rust\na\n```", ""),
    ("```python\n```", ""),
    ("a = 1", ""),
    ("", ""),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "code"), BLOCKS)
def test_which_block_is_the_program(completion: str, code: str) -> None:
    assert program(after_thinking(completion)) == code


WANTED = [
    ("```python\ndef f(): 1\n```\n```python\nf()\n```", "def f(): 1\n"),
    ("```python\ndef f(): 1\n```\n```python\ndef f(): 2\n```", "def f(): 2\n"),
    ("```\ndef f(): 1\n```\n```python\nf()\n```", "def f(): 1\n"),
    ("```python\nclass Solution:\n  def f(self): 1\n```\n```python\nassert f == 2\n```",
     "class Solution:\n  def f(self): 1\n"),
    ("```python\nf = max\n```\n```python\nprint(f(1))\n```", "f = max\n"),
    ("```python\ndef f2(): 1\n```\n```python\ng()\n```", "g()\n"),
    ("```python\nfrom math import gcd as f\n```\n```python\nf(1)\n```", "from math import gcd as f\n"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "code"), WANTED)
def test_for_a_function_it_is_the_last_block_that_defines_it(completion: str, code: str) -> None:
    assert program(completion, ["f"]) == code
