"""Keys of people and machines: made, shown, carried to another machine, vouched for.

owner.key (kept at home) ── vouch ──► node.key of machine 1, 2, 3 …      credit adds up under the owner;
                                                                         a machine that is lost loses nothing
"""

from __future__ import annotations

import getpass
import os
import string
import sys
from pathlib import Path

from pydantic import ValidationError

from shoal.errors import KeyFileError, ProtocolError, UserError
from shoal.protocol import SignedDocument, SigningKey, Vouch, load_key, node_id, open_document, sign_document
from shoal.protocol.identity import store_key
from shoal.runtime.clock import SystemClock
from shoal.runtime.files import write_atomically

PASSPHRASE = "SHOAL_PASSPHRASE"
NODE_HEX = 32
PUBLIC_KEY_HEX = 64
MAX_FILE_BYTES = 64 * 1024


def key_path(where: Path) -> Path:
    """The key file that is meant: the file itself, or the node.key of a worker's folder."""
    return where / "node.key" if where.is_dir() else where


def new_key(where: Path) -> list[str]:
    """Make a key, unless there is one; the lines say who it is."""
    path = key_path(where)
    if path.exists():
        return [f"there is a key at {path} already", *describe(load_key(path))]
    key = SigningKey.generate()
    store_key(path, key)
    return [f"made {path}", *describe(key)]


def describe(key: SigningKey) -> list[str]:
    return [f"node        {key.node}", f"public key  {key.public_key}"]


def export_key(where: Path, out: Path | None, passphrase_file: Path | None) -> str:
    """Seal a key with a passphrase: the text, or what to say once it is in a file that did not exist."""
    from shoal.protocol.sealing import seal

    key = load_key(key_path(where))
    if out is not None and out.exists():
        raise KeyFileError(f"{out} exists already and is not overwritten: choose another file")
    text = seal(key, read_passphrase(passphrase_file, twice=True))
    if out is None:
        return text
    write_atomically(out, text.encode() + b"\n", mode=0o600)
    return f"wrote {out}; without its passphrase nobody can open it"


def import_key(sealed: str, to: Path, passphrase_file: Path | None) -> list[str]:
    """Open an exported key (a file, or `-` for standard input) and write it where there is none yet."""
    from shoal.protocol.sealing import read_sealed, unseal

    path = key_path(to)
    if path.exists():
        raise KeyFileError(f"there is a key at {path} already: it is not overwritten; move it away first")
    text = sys.stdin.read(MAX_FILE_BYTES) if sealed == "-" else _text(Path(sealed))
    read_sealed(text)  # what is no sealed key needs no passphrase to be told so
    key = unseal(text, read_passphrase(passphrase_file, twice=False))
    store_key(path, key)
    return [f"wrote {path}", *describe(key)]


def read_passphrase(file: Path | None, twice: bool) -> str:
    """From the file, from SHOAL_PASSPHRASE, or asked for at the terminal."""
    if file is not None:
        return _text(file).rstrip("\r\n")
    given = os.environ.get(PASSPHRASE, "")
    if given:
        return given
    if not sys.stdin.isatty():
        raise UserError(f"there is no terminal to ask for the passphrase: give --passphrase-file, or set {PASSPHRASE}")
    passphrase = getpass.getpass("passphrase: ")
    if twice and getpass.getpass("once more: ") != passphrase:
        raise UserError("the two passphrases differ: nothing was written")
    return passphrase


def node_of(text: str) -> str:
    """The node that is meant by a node id, a public key, a key file or a worker's folder."""
    if set(text) <= set(string.hexdigits.lower()) and len(text) in (NODE_HEX, PUBLIC_KEY_HEX):
        return text if len(text) == NODE_HEX else node_id(text)
    if Path(text).exists():
        return load_key(key_path(Path(text))).node
    raise UserError(
        f"{text[:80]!r} is neither a node id ({NODE_HEX} hex digits), nor a public key ({PUBLIC_KEY_HEX}), nor a key "
        "file: on the machine in question, see: shoal key new FOLDER"
    )


def vouch_for(node: str, owner: SigningKey) -> SignedDocument:
    """The owner's word that a node is theirs."""
    return sign_document(Vouch(owner=owner.public_key, node=node, issued_at_ms=SystemClock().now_ms()), owner)


def vouch_of(key: SigningKey, owner: Path | None, vouch: Path | None) -> SignedDocument | None:
    """What a worker brings along of its owner: signed here, or read from a file; or nothing."""
    if owner is not None and vouch is not None:
        raise UserError("--owner and --vouch say the same thing: give one of them")
    if owner is not None:
        return vouch_for(key.node, load_key(key_path(owner)))
    if vouch is None:
        return None
    remedy = f"make one with: shoal key vouch {key.node} --owner FILE"
    try:
        signed = SignedDocument.model_validate_json(_text(vouch))
        node = open_document(signed, Vouch, signed.signed_by).node
    except (ValidationError, ProtocolError) as error:
        raise UserError(f"{vouch} is not a vouch: {remedy}") from error
    if node != key.node:
        raise UserError(f"{vouch} vouches for node {node}, but this one is {key.node}: {remedy}")
    return signed


def _text(path: Path) -> str:
    try:
        with path.open() as file:
            return file.read(MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
