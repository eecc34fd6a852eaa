"""Heads and manifests that are forged, rolled back, contradictory, endless or hidden.

forged          not signed, or by another key, or changed afterwards
rolled back     signed once, and old: a version or an incarnation that was left behind
contradictory   two signed documents for one version
hidden          a source that never mentions what is new
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kit import TempPaths
from kit.liar import (
    KEY,
    OTHER_KEY,
    WITHIN_S,
    Handler,
    Lab,
    Source,
    assert_files,
    endings,
    endless_body,
    endless_headers,
    eventually,
    files_of,
    get,
    head_of,
    head_version,
    health,
    huge_body,
    manifest_of,
    pieces_of,
    says,
    sign,
    silent,
    tree,
    write_tree,
)
from shoal.errors import BroadcastError, ManifestRefused, VersionNotFound
from shoal.shardcast.manifest import place_of, read_head, read_manifest
from shoal.shardcast.tree import HEAD, manifest_key

RUN_NAME = "attacked"
ALONE_S = 2.0  # several at once, on a machine that may be busy


def changed(path: Path, change: Callable[[dict[str, object]], None]) -> bytes:
    """A signed document with its content changed and its signature left."""
    signed = json.loads(path.read_bytes())
    change(signed["document"])
    return json.dumps(signed).encode()


def resigned(path: Path) -> bytes:
    """The same document, signed by somebody else."""
    data = path.read_bytes()
    if path.name == HEAD:
        return sign(read_head(data, RUN_NAME, KEY.public_key), OTHER_KEY)
    return sign(read_manifest(data, RUN_NAME, KEY.public_key), OTHER_KEY)


def claims_our_key(path: Path) -> bytes:
    """Signed by somebody else who writes our key beside the signature."""
    signed = json.loads(resigned(path))
    return json.dumps({**signed, "signed_by": KEY.public_key}).encode()


def unsigned(path: Path) -> bytes:
    return json.dumps(json.loads(path.read_bytes())["document"]).encode()


def another_kind(path: Path) -> bytes:
    """A signature that is right, over a document of another kind."""
    return json.dumps({**json.loads(path.read_bytes()), "kind": "policy-announcement"}).encode()


FORGERIES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "another key": (resigned, "not trusted"),
    "another key under our name": (claims_our_key, "signature does not match"),
    "no signature": (unsigned, "not a signed document"),
    "another kind": (another_kind, "expected a signed"),
    "a later date": (lambda path: changed(path, lambda d: d.update(created_at_ms=9)), "signature does not match"),
    "another run": (lambda path: changed(path, lambda d: d.update(run="theirs")), "signature does not match"),
    "nothing": (lambda _path: b"", "not a signed document"),
    "noise": (lambda _path: bytes(range(256)), "not a signed document"),
    "deep nesting": (lambda _path: b"[" * 60_000, "not a signed document"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused_and_somebody_honest_is_asked(lab: Lab, name: str) -> None:
    forge, sentence = FORGERIES[name]
    manifest = lab.publish(1)
    liar = lab.liar({"/manifests/": says(forge(lab.www / manifest_key((0, 1))))})
    with pytest.raises(ManifestRefused, match=sentence):
        lab.client(liar.url).fetch(manifest.policy, 5)
    both = lab.client(liar.url, lab.honest().url, name="other")
    assert_files(both.fetch(manifest.policy, WITHIN_S), files_of(1))


def head_forger(lab: Lab, name: str) -> Source:
    return lab.liar({f"/{HEAD}": says(FORGERIES[name][0](lab.www / HEAD))})


def ask_a_head_forger(lab: Lab, name: str) -> None:
    lab.publish(1)
    lab.client(head_forger(lab, name).url).newest(ALONE_S)


@pytest.fixture(scope="module")
def forged_heads(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    """How asking for the newest version ends where nobody but a forger answers."""
    return endings(tmp_path_factory.mktemp("forged"), FORGERIES, ask_a_head_forger)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_head_is_refused_and_somebody_honest_is_asked(lab, forged_heads, name):
    with pytest.raises(ManifestRefused, match=FORGERIES[name][1]):
        raise forged_heads[name]
    manifest = lab.publish(1)
    assert lab.client(head_forger(lab, name).url, lab.honest().url).newest(WITHIN_S) == manifest.policy


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("document", [HEAD, "/manifests/"])
def test_a_relay_takes_and_serves_no_forgery(lab: Lab, name: str, document: str) -> None:
    lab.publish(1)
    path = lab.www / (HEAD if document == HEAD else manifest_key((0, 1)))
    liar = lab.liar({document: says(FORGERIES[name][0](path))})
    relay = lab.relay("relay", liar.url)
    eventually(lambda: len(liar.asked(document)) >= 2)  # so the first was dealt with
    assert get(relay.url, f"/{HEAD}")[0] == 404
    assert get(relay.url, f"/{manifest_key((0, 1))}")[0] in (404, 503)
    honest = lab.relay("other", liar.url, lab.honest().url)
    eventually(lambda: head_version(honest.url) == "0.1")
    assert get(honest.url, f"/{HEAD}")[1] == (lab.www / HEAD).read_bytes()


ENDLESS: dict[str, Handler] = {
    "endless headers": endless_headers,
    "endless body": endless_body,
    "huge body": huge_body,
    "silence": silent,
}


DOCUMENTS = (HEAD, "/manifests/")


def ask_one_without_end(lab: Lab, name: str) -> None:
    """`name` is a document and what comes instead of it."""
    document, _, kind = name.partition(": ")
    manifest = lab.publish(1)
    client = lab.client(lab.liar({document: ENDLESS[kind]}).url, stall_s=0.3)
    client.newest(ALONE_S) if document == HEAD else client.fetch(manifest.policy, ALONE_S)


@pytest.fixture(scope="module")
def without_end(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    """How it ends where nobody but such a source is asked."""
    names = [f"{document}: {kind}" for document in DOCUMENTS for kind in ENDLESS]
    return endings(tmp_path_factory.mktemp("endless"), names, ask_one_without_end)


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_without_end_hold_nobody_up(lab, without_end, name, document):
    manifest = lab.publish(1)
    client = lab.client(lab.liar({document: ENDLESS[name]}).url, lab.honest().url, stall_s=0.3)
    assert client.newest(WITHIN_S) == manifest.policy
    assert_files(client.fetch(manifest.policy, WITHIN_S), files_of(1))
    with pytest.raises(BroadcastError, match=r"is too slow|endless answer head|Content-Length|bytes where|nothing for"):
        raise without_end[f"{document}: {name}"]


# ── rolled back ──────────────────────────────────────────────────────────────────────────────────────────────────


def past_of(lab: Lab) -> Handler:
    """The tree as it is now: every document and chunk of one moment, still validly signed later."""
    return tree(Path(shutil.copytree(lab.www, lab.folder / "past")))


@pytest.mark.parametrize("newer", [(0, 2), (1, 0), (1, 5)], ids=["version", "incarnation", "both"])
def test_a_client_that_has_seen_the_new_refuses_the_old(lab: Lab, newer: tuple[int, int]) -> None:
    lab.publish(1)
    past = past_of(lab)
    new = lab.publish(newer[1], seed=9, incarnation=newer[0])
    now = [tree(lab.www)]
    source = lab.source(lambda target, to: now[0](target, to))
    client = lab.client(source.url)
    assert client.newest(WITHIN_S) == new.policy
    now[0] = past
    with pytest.raises(ManifestRefused, match=r"it goes back to policy 0\.1"):
        client.newest(1)
    honest = lab.honest()
    client.set_sources([source.url, honest.url])
    assert client.newest(WITHIN_S) == new.policy


@pytest.mark.parametrize("newer", [(0, 2), (1, 0)], ids=["version", "incarnation"])
def test_a_relay_that_has_seen_the_new_keeps_it_also_over_a_restart(lab: Lab, newer: tuple[int, int]) -> None:
    lab.publish(1)
    past = past_of(lab)
    new = lab.publish(newer[1], seed=9, incarnation=newer[0])
    now = [tree(lab.www)]
    source = lab.source(lambda target, to: now[0](target, to))
    relay = lab.relay("relay", source.url)
    eventually(lambda: head_version(relay.url) == new.policy.label)
    eventually(lambda: health(relay.url)["missing_chunks"] == 0)
    now[0] = past
    asked = len(source.asked(HEAD))
    eventually(lambda: len(source.asked(HEAD)) >= asked + 2)
    assert head_version(relay.url) == new.policy.label
    lab.stop(relay)
    relay = lab.relay("relay", source.url)
    asked = len(source.asked(HEAD))
    eventually(lambda: len(source.asked(HEAD)) >= asked + 2)
    assert head_version(relay.url) == new.policy.label
    assert_files(lab.client(relay.url).fetch(new.policy, WITHIN_S), files_of(9))


@pytest.mark.parametrize("newer", [(0, 2), (1, 0)], ids=["version", "incarnation"])
def test_a_client_started_again_still_refuses_the_old(lab: Lab, newer: tuple[int, int]) -> None:
    lab.publish(1)
    past = past_of(lab)
    new = lab.publish(newer[1], seed=9, incarnation=newer[0])
    client = lab.client(lab.honest().url)
    client.fetch(client.newest(WITHIN_S), WITHIN_S)
    client.close()
    again = lab.client(lab.source(past).url)  # the same folder
    with pytest.raises(ManifestRefused, match=f"it goes back to policy 0.1 although {new.policy.label} is known"):
        again.newest(1)


def test_an_old_manifest_under_the_new_name_is_refused(lab: Lab) -> None:
    lab.publish(1)
    old = (lab.www / manifest_key((0, 1))).read_bytes()
    new = lab.publish(2)
    liar = lab.liar({manifest_key((0, 2)): says(old)})
    with pytest.raises(ManifestRefused, match=r"for policy 0\.1 .* not 0\.2"):
        lab.client(liar.url).fetch(new.policy, 5)
    both = lab.client(liar.url, lab.honest().url, name="both")
    assert_files(both.fetch(new.policy, WITHIN_S), files_of(2))


# ── contradictory ────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_signed_manifest_of_the_same_version_is_refused(lab: Lab) -> None:
    """The key signed two different contents as version 0.2 (it was stolen, or restored from a backup)."""
    lab.publish(1)
    true = lab.publish(2)
    twin, payload = manifest_of(2, [("data.bin", b"other bytes" * 300)])
    twins = lab.folder / "twins"
    write_tree(twins, twin, pieces_of(payload))
    liar = lab.source(tree(twins))
    with pytest.raises(ManifestRefused, match=r"not 0\.2 with"):
        lab.client(liar.url).fetch(true.policy, 5)
    both = lab.client(liar.url, lab.honest().url, name="both")
    assert_files(both.fetch(true.policy, WITHIN_S), files_of(2))


def test_a_client_that_knows_a_version_refuses_a_head_with_another_content_for_it(lab: Lab) -> None:
    true = lab.publish(2)
    twin, payload = manifest_of(2, [("data.bin", b"other bytes" * 300)])
    write_tree(lab.folder / "twins", twin, pieces_of(payload))
    honest = lab.honest()
    client = lab.client(honest.url)
    assert client.newest(WITHIN_S) == true.policy
    client.set_sources([lab.source(tree(lab.folder / "twins")).url])
    with pytest.raises(ManifestRefused, match=r"names other weights for policy 0\.2"):
        client.newest(1)


def test_a_relay_takes_only_the_manifest_that_the_head_names(lab: Lab) -> None:
    """The same content signed twice, with other bytes: only the one whose hash is in the signed head is taken."""
    manifest = lab.publish(1)
    again = sign(manifest.model_copy(update={"created_at_ms": 1}))
    liar = lab.liar({"/manifests/": says(again)})
    relay = lab.relay("relay", liar.url)
    eventually(lambda: len(liar.asked("/manifests/")) >= 2)
    assert get(relay.url, f"/{HEAD}")[0] == 404
    other = lab.relay("other", liar.url, lab.honest().url)
    eventually(lambda: head_version(other.url) == "0.1")
    assert get(other.url, f"/{manifest_key((0, 1))}")[1] == (lab.www / manifest_key((0, 1))).read_bytes()


def test_a_signed_manifest_that_is_unsound_in_itself_is_refused(lab: Lab) -> None:
    """An evil origin: its signature is right, its arithmetic is not."""
    sound, payload = manifest_of(1, [("a", b"x" * 2500), ("b", b"y" * 700)])
    unsound = {
        "a chunk too few": {"chunks": sound.chunks[:-1]},
        "a size that is not the chunks'": {"size_bytes": sound.size_bytes + 1},
        "overlapping entries": {"entries": (sound.entries[0], sound.entries[1].model_copy(update={"offset": 0}))},
        "an entry beyond the end": {
            "entries": (sound.entries[0], sound.entries[1].model_copy(update={"size_bytes": 1 << 40}))
        },
        "two entries of one name": {"entries": (sound.entries[0], sound.entries[1].model_copy(update={"name": "a"}))},
        "the digest of something else": {"policy": sound.policy.model_copy(update={"digest": "0" * 64})},
        "chunks too large to hold": {"chunk_size_bytes": 1 << 40},
        "neither anchor nor delta": {"anchor": False},
    }
    for name, changes in unsound.items():
        manifest = sound.model_copy(update=changes)
        folder = lab.folder / name.replace(" ", "-")
        write_tree(folder, manifest, pieces_of(payload))
        with pytest.raises(ManifestRefused):
            lab.client(lab.source(tree(folder)).url, name=f"{folder.name}-cache").fetch(manifest.policy, 5)
    write_tree(lab.folder / "sound", sound, pieces_of(payload))  # or the refusals above would prove nothing
    payload_there = lab.client(lab.source(tree(lab.folder / "sound")).url).fetch(sound.policy, WITHIN_S)
    assert_files(payload_there, {"a": b"x" * 2500, "b": b"y" * 700})


# ── hidden ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_relay_that_hides_new_versions_hides_nothing_beside_another(lab: Lab) -> None:
    lab.publish(1)
    past = past_of(lab)
    new = lab.publish(2)
    liar = lab.source(past)
    client = lab.client(liar.url, lab.honest().url)
    assert client.newest(WITHIN_S) == new.policy
    assert_files(client.fetch(new.policy, WITHIN_S), files_of(2))
    relay = lab.relay("relay", liar.url, lab.honest().url)
    eventually(lambda: head_version(relay.url) == "0.2")


def test_a_head_that_claims_versions_without_end_is_bounded(lab: Lab) -> None:
    manifest = lab.publish(1)
    data = (lab.www / manifest_key((0, 1))).read_bytes()
    head = head_of(manifest, data, kept_versions=tuple(f"0.{number}" for number in range(2000)))
    liar = lab.liar({f"/{HEAD}": says(sign(head))})
    with pytest.raises(ManifestRefused, match="kept_versions"):
        lab.client(liar.url).newest(1)


def test_a_head_that_disowns_a_version_cannot_be_forged(lab: Lab) -> None:
    """Only the signer can say that a version is gone; a forged head that says so ends no fetch."""
    manifest = lab.publish(1)
    data = (lab.www / manifest_key((0, 1))).read_bytes()
    gone = head_of(manifest, data, policy=manifest.policy.model_copy(update={"version": 9}), kept_versions=("0.9",))
    liar = lab.liar({f"/{HEAD}": says(sign(gone, OTHER_KEY)), "/manifests/": says(b"", 404)})
    late = lab.liar({"/manifests/": says(b"", 404)})
    with pytest.raises(VersionNotFound, match="before the deadline"):
        lab.client(liar.url, late.url).fetch(manifest.policy, 1)
    both = lab.client(liar.url, lab.honest().url, name="both")
    assert place_of(both.fetch(manifest.policy, WITHIN_S).manifest) == (0, 1)
