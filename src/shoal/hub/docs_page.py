"""`/docs`: every call of the hub on one page that needs nothing from elsewhere: no script, no style sheet, no network.

The text is the OpenAPI document's own (`/openapi.json`), so that the two cannot differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

_CODE = re.compile(r"`([^`]+)`")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ background: #eee; color: #111; padding: 1rem; overflow-x: auto }}
h3 {{ font-family: monospace; margin-bottom: 0 }}
</style></head><body>
<h1>{title}</h1>
<p>{version}; for programs: <a href="openapi.json">openapi.json</a>; <a href=".">back</a></p>
<pre>{description}</pre>
{calls}
</body></html>
"""


def docs_page(document: dict[str, Any]) -> str:
    """The OpenAPI document as a page to read."""
    info = document["info"]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(f"version {info['version']}"),
        description=escape(info["description"].strip()),
        calls="\n".join(line for tag in document["tags"] for line in _section(document, tag)),
    )


def _section(document: dict[str, Any], tag: dict[str, str]) -> Iterator[str]:
    yield f"<h2>{escape(tag['name'])}</h2><p>{_text(tag['description'])}</p>"
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            if tag["name"] in call["tags"]:
                yield from _call(f"{method.upper()} {path}", call)


def _call(name: str, call: dict[str, Any]) -> Iterator[str]:
    yield f"<h3>{escape(name)}</h3><p><b>{escape(call['summary'])}.</b> {_text(call.get('description', ''))}</p>"
    for kind, content in call.get("requestBody", {}).get("content", {}).items():
        body = content["schema"].get("$ref", kind).rsplit("/", 1)[-1]
        example = f", for example <code>{escape(json.dumps(content['example']))}</code>" if "example" in content else ""
        yield f"<p>Body: <code>{escape(body)}</code>{example}</p>"
    answers = [f"{status}: {_text(said['description'])}" for status, said in sorted(call["responses"].items())]
    yield f"<ul>{''.join(f'<li>{answer}</li>' for answer in answers)}</ul>"


def _text(text: str) -> str:
    """A docstring as HTML: what is between back-ticks is code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))
