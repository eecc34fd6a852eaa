"""Which key a broadcast is believed from: pinned in the URL, remembered from before, or taken on first use.

    http://host:8471/#KEY ──pins──► KEY ─┐
    trust.json (from before) ───────────┼─► every head that is offered must be signed by it
    neither: the first head's own key ──┘   and is from then on the remembered one

A relay needs no key of its own: it hands on what the publisher signed, so its URL takes the publisher's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import BroadcastError, ManifestRefused, ProtocolError, UserError
from shoal.protocol import BroadcastHead, SignedDocument, open_document
from shoal.protocol.identity import PUBLIC_KEY_HEX, check_public_key
from shoal.runtime.files import write_atomically
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Address, Connection, Deadline, Timeouts
from shoal.shardcast.lookup import get_document
from shoal.shardcast.manifest import MAX_HEAD_BYTES
from shoal.shardcast.tree import HEAD

ASK_S = 5.0
PAUSE_S = 0.5


@dataclass(frozen=True)
class Sources:
    """Where to fetch from, and the key that one of the URLs pinned."""

    urls: tuple[str, ...]
    key: str | None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Sources:
        """`http://host:8471/#KEY`; several URLs may carry the key or leave it out, but must not differ in it.

        >>> Sources.parse(["http://a:8471/#" + "ab" * 32, "http://b:8471"]).urls
        ('http://a:8471', 'http://b:8471')
        """
        urls: dict[str, None] = {}
        keys: set[str] = set()
        for text in texts:
            url, mark, key = text.partition("#")
            Address.parse(url.rstrip("/"))
            urls[url.rstrip("/")] = None
            if mark:
                try:
                    keys.add(check_public_key(key.strip().lower()))
                except ValueError as error:
                    raise UserError(
                        f"{text!r} does not end in a key: after # come the {PUBLIC_KEY_HEX} digits that "
                        f"`shoal cast publish` prints ({error})"
                    ) from error
        if len(keys) > 1:
            raise UserError("the URLs name different keys: sources of one broadcast carry one publisher's key")
        return cls(tuple(urls), next(iter(keys), None))


class Trust(BaseModel):
    """What is believed: this broadcast, signed by this key. Kept as JSON beside what was fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    run: str

    @classmethod
    def load(cls, path: Path) -> Trust | None:
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise UserError(
                f"cannot read {path}, which remembers whom to believe; restore it, or remove it and give the key "
                "in the URL"
            ) from error

    def save(self, path: Path) -> None:
        write_atomically(path, self.model_dump_json(indent=1).encode())


def agree(sources: Sources, path: Path) -> tuple[str | None, Trust | None]:
    """The key to ask for, and what was remembered; an error if the two contradict each other."""
    remembered = Trust.load(path)
    if remembered is not None and sources.key not in (None, remembered.key):
        raise UserError(
            f"the URL names key {short(sources.key)}, but what is here came from key {short(remembered.key)}; "
            f"if the publisher really has a new key, remove {path}"
        )
    return sources.key or (remembered.key if remembered else None), remembered


def meet(sources: Sources, path: Path, stop: StopToken, wait_s: float) -> tuple[Trust, bool]:
    """What to believe from now on, and whether it was taken on first use. Asks until a source answers or time is up."""
    key, remembered = agree(sources, path)
    deadline = Deadline(wait_s)
    while True:
        found: set[Trust] = set()
        problems: list[BroadcastError] = []
        for url in sources.urls:
            try:
                found.add(_ask(url, key, stop))
            except BroadcastError as error:
                problems.append(error)
        if found:
            trust = _one_of(found, remembered, path)
            break
        if all(isinstance(problem, ManifestRefused) for problem in problems):
            if remembered is None or sources.key is not None:
                raise problems[0]
            raise ManifestRefused(
                f"{problems[0]}; key {short(remembered.key)} was believed here before: somebody else is answering, or "
                f"the publisher has a new key (then remove {path})"
            )
        if deadline.passed() or stop.wait(min(PAUSE_S, max(0.0, deadline.remaining_s()))):
            raise BroadcastError("nobody offers anything: " + "; ".join(str(problem) for problem in problems))
    trust.save(path)
    return trust, key is None


def short(key: str | None) -> str:
    return f"{(key or '')[:16]}…"


def _ask(url: str, key: str | None, stop: StopToken) -> Trust:
    """What the head at `url` stands for; without a key, by its own word."""
    with closing(Connection(url, stop, Timeouts())) as connection:
        data = get_document(connection, HEAD, MAX_HEAD_BYTES, Deadline(ASK_S))
    if data is None:
        raise BroadcastError(f"{url} has nothing published (yet)")
    try:
        head, signer = open_head(data, key)
    except ValidationError as error:
        raise ManifestRefused(f"{url} offers a head that is not a signed document") from error
    except ProtocolError as error:
        raise ManifestRefused(f"{url} offers a head that is refused: {error}") from error
    return Trust(key=signer, run=head.run)


def open_head(data: bytes, key: str | None) -> tuple[BroadcastHead, str]:
    """The head in `data`, signed by `key`, or without one by whoever signed it; and who that is."""
    signed = SignedDocument.model_validate_json(data)
    return open_document(signed, BroadcastHead, key or signed.signed_by), signed.signed_by


def _one_of(found: set[Trust], remembered: Trust | None, path: Path) -> Trust:
    """The sources must agree, or whoever answers first would decide."""
    if remembered in found:
        assert remembered is not None
        return remembered
    if remembered is not None:
        other = next(iter(found))
        raise ManifestRefused(
            f"this is another broadcast ({other.run[:80]}) than the one fetched here before ({remembered.run[:80]}); "
            f"choose another output, or remove {path}"
        )
    if len(found) > 1:
        raise ManifestRefused(
            "the sources offer different broadcasts, or ones signed by different keys: give the key of the right one "
            "as http://host:port/#KEY, and only its sources"
        )
    return next(iter(found))
