"""Heads and manifests that are forged, rolled back, contradictory, endless or hidden.

forged          not signed, or by another key, or changed afterwards
rolled back     signed once, and old: a version or an incarnation that was left behind
contradictory   two signed documents for one version
hidden          a source that never mentions what is new

A manifest that is signed and unsound in itself: unit/shardcast/test_cast_manifest.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kit import Request, TempPaths, cast, eventually
from kit.forged import ENDLESS, endings, head_of, manifest_of, sign, write, write_tree
from shoal.errors import BroadcastError, ManifestRefused, VersionNotFound
from shoal.protocol import PolicyManifest
from shoal.shardcast import Downloader, Payload
from shoal.shardcast.manifest import read_head, read_manifest
from shoal.shardcast.tree import HEAD, manifest_key

MANIFEST = manifest_key((0, 1))
DOCUMENTS = (HEAD, MANIFEST)
ALONE_S = 2.0  # several at once, on a machine that may be busy


def changed(**fields: object) -> Callable[[Path], bytes]:
    """A signed document with its content changed and its signature left."""

    def forge(path: Path) -> bytes:
        signed = json.loads(path.read_bytes())
        return json.dumps({**signed, "document": {**signed["document"], **fields}}).encode()

    return forge


def resigned(path: Path) -> bytes:
    """The same document, signed by somebody else."""
    data = path.read_bytes()
    read = read_head if path.name == HEAD else read_manifest
    return sign(read(data, cast.RUN, cast.KEY.public_key), cast.OTHER_KEY)


def beside(data: bytes, **fields: str) -> bytes:
    """With something else beside the signature: another's key, or another kind of document."""
    return json.dumps({**json.loads(data), **fields}).encode()


FORGERIES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "another key": (resigned, "not trusted"),
    "another key under our name": (lambda path: beside(resigned(path), signed_by=cast.KEY.public_key),
        "signature does not match"),
    "no signature": (lambda path: json.dumps(json.loads(path.read_bytes())["document"]).encode(), "not a signed docu"),
    "another kind": (lambda path: beside(path.read_bytes(), kind="policy-announcement"), "expected a signed"),
    "a later date": (changed(created_at_ms=9), "signature does not match"),
    "another run": (changed(run="theirs"), "signature does not match"),
    "chunks of a terabyte": (changed(chunk_size_bytes=1 << 40), "signature does not match"),
    "nothing": (lambda _path: b"", "not a signed document"),
    "noise": (lambda _path: bytes(range(256)), "not a signed document"),
    "deep nesting": (lambda _path: b"[" * 60_000, "not a signed document"),
}  # fmt: skip
INSTEAD: dict[str, Callable[[Path], cast.Handler]] = {  # of a document: what a source says
    **{name: lambda path, forge=forge: cast.says(forge(path)) for name, (forge, _) in FORGERIES.items()},  # type: ignore[misc]
    **{name: lambda _path, end=end: end for name, end in ENDLESS.items()},  # type: ignore[misc]
}
NO_END = r"is too slow|endless answer head|Content-Length|bytes where|nothing for"
CASES = [f"{document}: {name}" for document in DOCUMENTS for name in INSTEAD]


def forger(lab: cast.Lab, case: str) -> cast.ScriptedSource:
    document, _, name = case.partition(": ")
    return lab.liar({document: INSTEAD[name](lab.www / document)})


def ask_for(client: Downloader, case: str, manifest: PolicyManifest, deadline_s: float) -> None:
    if case.startswith(HEAD):
        assert client.newest(deadline_s) == manifest.policy
    else:
        client.fetch(manifest.policy, deadline_s)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    """How it ends where nobody else is asked."""

    def ask_a_forger(lab: cast.Lab, case: str) -> None:
        manifest = lab.publish(1)
        ask_for(lab.client(forger(lab, case).url, stall_s=0.3), case, manifest, ALONE_S)

    return endings(tmp_path_factory.mktemp("forged"), CASES, ask_a_forger)


@pytest.mark.parametrize("case", CASES)
def test_forged_or_endless_document_is_refused_and_another_source_is_asked(lab, alone, case):
    name = case.partition(": ")[2]
    error, sentence = (ManifestRefused, FORGERIES[name][1]) if name in FORGERIES else (BroadcastError, NO_END)
    with pytest.raises(error, match=sentence):
        raise alone[case]
    manifest = lab.publish(1)
    client = lab.client(forger(lab, case).url, lab.honest().url, stall_s=0.3)
    ask_for(client, case, manifest, cast.WITHIN_S)
    lab.fetch(manifest, client)


@pytest.mark.parametrize("case", [case for case in CASES if case.partition(": ")[2] in FORGERIES])
def test_a_relay_takes_and_serves_no_forgery(lab: cast.Lab, case: str) -> None:
    lab.publish(1)
    liar, document = forger(lab, case), case.partition(": ")[0]
    relay = lab.relay("relay", liar.url)
    eventually(lambda: len(liar.asked(document)) >= 2)  # so the first was dealt with
    assert cast.ask(relay.url, f"/{HEAD}")[0] == 404
    assert cast.ask(relay.url, f"/{MANIFEST}")[0] in (404, 503)
    honest = lab.relay("other", liar.url, lab.honest().url)
    eventually(lambda: cast.head_version(honest) == "0.1")
    assert cast.ask(honest.url, f"/{HEAD}")[1] == (lab.www / HEAD).read_bytes()


# ── rolled back ──────────────────────────────────────────────────────────────────────────────────────────────────


class Switch:
    """A source that first shows the tree as it is, with a newer version, and then as it was."""

    def __init__(self, lab: cast.Lab, newer: tuple[int, int]) -> None:
        lab.publish(1)
        self.past = cast.from_folder(Path(shutil.copytree(lab.www, lab.folder / "past")))
        self.new = lab.publish(newer[1], seed=9, incarnation=newer[0])
        self._now = cast.from_folder(lab.www)
        self.source = lab.source(lambda target, to: self._now(target, to))
        self.url = self.source.url

    def go_back(self) -> None:
        self._now = self.past

    def until_asked(self) -> None:
        asked = len(self.source.asked(HEAD))
        eventually(lambda: len(self.source.asked(HEAD)) >= asked + 2)


@pytest.fixture(params=[(0, 2), (1, 0), (1, 5)], ids=["version", "incarnation", "both"])
def switch(lab: cast.Lab, request: Request) -> Switch:
    return Switch(lab, request.param)


def test_a_client_that_has_seen_the_new_refuses_the_old_also_after_a_restart(lab: cast.Lab, switch: Switch) -> None:
    client = lab.client(switch.url)
    assert client.newest(cast.WITHIN_S) == switch.new.policy
    switch.go_back()
    for refusing in (client, lab.client(switch.url)):  # the second in the same folder
        with pytest.raises(ManifestRefused, match=f"goes back to policy 0.1 although {switch.new.policy.label} is kno"):
            refusing.newest(1)
    client.set_sources([switch.url, lab.honest().url])
    assert client.newest(cast.WITHIN_S) == switch.new.policy


def test_a_relay_that_has_seen_the_new_keeps_it_also_over_a_restart(lab: cast.Lab, switch: Switch) -> None:
    relay = lab.relay("relay", switch.url)
    eventually(
        lambda: cast.head_version(relay) == switch.new.policy.label and cast.health(relay)["missing_chunks"] == 0
    )
    switch.go_back()
    switch.until_asked()
    assert cast.head_version(relay) == switch.new.policy.label
    lab.stop(relay)
    relay = lab.relay("relay", switch.url)
    switch.until_asked()
    assert cast.head_version(relay) == switch.new.policy.label
    lab.fetch(switch.new, relay.url)


def test_relay_that_hides_versions_has_no_effect_with_an_honest_one(lab: cast.Lab) -> None:
    switch = Switch(lab, (0, 2))
    switch.go_back()
    client = lab.client(switch.url, lab.honest().url)
    assert client.newest(cast.WITHIN_S) == switch.new.policy
    lab.fetch(switch.new, client)
    relay = lab.relay("relay", switch.url, lab.honest().url)
    eventually(lambda: cast.head_version(relay) == "0.2")


# ── contradictory ────────────────────────────────────────────────────────────────────────────────────────────────


def twins(lab: cast.Lab) -> str:
    """The key signed two different contents as version 0.2 (it was stolen, or restored from a backup)."""
    write_tree(lab.folder / "twins", *manifest_of(2, [("data.bin", b"other bytes" * 300)]))
    return lab.source(cast.from_folder(lab.folder / "twins")).url


@pytest.mark.parametrize("what", ["an old one", "a twin"])
def test_another_signed_manifest_under_the_name_of_a_version_is_refused(lab: cast.Lab, what: str) -> None:
    lab.publish(1)
    old = (lab.www / MANIFEST).read_bytes()
    new = lab.publish(2)
    liar = twins(lab) if what == "a twin" else lab.liar({manifest_key((0, 2)): cast.says(old)}).url
    with pytest.raises(ManifestRefused, match=r"not 0\.2 with"):
        lab.client(liar).fetch(new.policy, 5)
    lab.fetch(new, liar, lab.honest().url, name="both")


def test_a_client_that_knows_a_version_refuses_a_head_with_another_content_for_it(lab: cast.Lab) -> None:
    true = lab.publish(2)
    client = lab.client(lab.honest().url)
    assert client.newest(cast.WITHIN_S) == true.policy
    client.set_sources([twins(lab)])
    with pytest.raises(ManifestRefused, match=r"names other weights for policy 0\.2"):
        client.newest(1)


def test_a_relay_takes_only_the_manifest_that_the_head_names(lab: cast.Lab) -> None:
    """The same content signed twice, with other bytes: only the one whose hash is in the signed head is taken."""
    manifest = lab.publish(1)
    liar = lab.liar({MANIFEST: cast.says(sign(manifest.model_copy(update={"created_at_ms": 1})))})
    relay = lab.relay("relay", liar.url)
    eventually(lambda: len(liar.asked(MANIFEST)) >= 2)
    assert cast.ask(relay.url, f"/{HEAD}")[0] == 404
    other = lab.relay("other", liar.url, lab.honest().url)
    eventually(lambda: cast.head_version(other) == "0.1")
    assert cast.ask(other.url, f"/{MANIFEST}")[1] == (lab.www / MANIFEST).read_bytes()


# ── heads that say too much ──────────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_claims_versions_without_end_is_bounded(lab: cast.Lab) -> None:
    manifest = lab.publish(1)
    kept = tuple(f"0.{number}" for number in range(2000))
    head = head_of(manifest, (lab.www / MANIFEST).read_bytes(), versions=kept)
    with pytest.raises(ManifestRefused, match="versions"):
        lab.client(lab.liar({HEAD: cast.says(sign(head))}).url).newest(1)


def test_a_head_that_disowns_a_version_cannot_be_forged(lab: cast.Lab) -> None:
    """Only the signer can say that a version is gone; a forged head that says so ends no fetch."""
    manifest = lab.publish(1)
    policy = manifest.policy.model_copy(update={"version": 9})
    gone = head_of(manifest, (lab.www / MANIFEST).read_bytes(), policy=policy, versions=("0.9",))
    liar = lab.liar({HEAD: cast.says(sign(gone, cast.OTHER_KEY)), MANIFEST: cast.says(b"", 404)})
    late = lab.liar({MANIFEST: cast.says(b"", 404)})
    with pytest.raises(VersionNotFound, match="before the deadline"):
        lab.client(liar.url, late.url).fetch(manifest.policy, 1)
    lab.fetch(manifest, liar.url, lab.honest().url, name="both")


# ── names that lead out of the folder they are unpacked into ──────────────────────────────────────────────────────────

EVIL_NAMES = [
    "../x", "a/../../x", "a/..", "..", ".", "/etc/x", "//x", "a//b", "a/", "", "a\\..\\x", "C:\\x", "a\x00b", "a\nb",
    "a\u202eb", "x" * 300, "/".join(["x" * 100] * 20),
]  # fmt: skip


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_a_manifest_with_a_name_that_leads_out_is_refused(lab: cast.Lab, name: str) -> None:
    manifest, payload = manifest_of(1, [("fine", b"a" * 1500), (name, b"b" * 700)])
    write_tree(lab.www, manifest, payload)
    source = lab.source()
    with pytest.raises(ManifestRefused, match=r"name|entry"):
        lab.client(source.url).fetch(manifest.policy, 5)
    assert source.asked("/chunks/") == []
    relay = lab.relay("relay", source.url)
    eventually(lambda: len(source.asked("/manifests/")) >= 3)
    assert cast.ask(relay.url, f"/{manifest_key((0, 1))}")[0] != 200


def fetched(lab: cast.Lab, *names: str) -> Payload:
    manifest, payload = manifest_of(1, [(name, name.encode() * 50) for name in names])
    write_tree(lab.www, manifest, payload)
    return lab.client(lab.source().url).fetch(manifest.policy, cast.WITHIN_S)


def test_honest_names_are_unpacked_into_their_folders(lab: cast.Lab) -> None:
    """Or the refusals here would prove nothing."""
    names = ["a", "sub/b", "sub/deeper/c", "ä ö.txt", "...", ".hidden"]
    fetched(lab, *names).export(lab.folder / "out")
    for name in names:
        assert (lab.folder / "out" / name).read_bytes() == name.encode() * 50


@pytest.mark.parametrize("name", ["sub/x", "sub/deeper/x"])
def test_a_link_in_the_target_folder_is_not_followed(lab: cast.Lab, name: str) -> None:
    outside = lab.folder / "outside"
    (outside / "deeper").mkdir(parents=True)
    (lab.folder / "out").mkdir()
    (lab.folder / "out" / "sub").symlink_to(outside)
    payload = fetched(lab, name)
    with pytest.raises(BroadcastError, match="is a link"):
        payload.export(lab.folder / "out")
    assert [path for path in outside.rglob("*") if path.is_file()] == []


def test_a_file_that_is_a_link_is_replaced_not_written_through(lab: cast.Lab) -> None:
    secret = lab.folder / "secret"
    write(secret, b"keep me")
    (lab.folder / "out").mkdir()
    (lab.folder / "out" / "x").symlink_to(secret)
    fetched(lab, "x").export(lab.folder / "out")
    assert secret.read_bytes() == b"keep me"
    assert (lab.folder / "out" / "x").read_bytes() == b"x" * 50
    assert not (lab.folder / "out" / "x").is_symlink()


def test_a_head_that_names_odd_versions_leads_nowhere(lab: cast.Lab) -> None:
    """`versions` become names of files on a relay."""
    manifest = lab.publish(1)
    data = (lab.www / manifest_key((0, 1))).read_bytes()
    odd = ("0.1", "../../etc/passwd", "0.1/../../x", "-1.0", "0.99999999999", "0.٣")
    write(lab.www / HEAD, sign(head_of(manifest, data, versions=odd)))
    source = lab.source()
    relay = lab.relay("relay", source.url)
    eventually(lambda: cast.is_complete(relay, "0.1") and cast.health(relay)["versions"] == ["0.1"])
    assert {target.partition("?")[0] for target in source.asked("/manifests/")} == {f"/{manifest_key((0, 1))}"}
    assert {path.name for path in lab.folder.iterdir()} >= {"relay", "www"}
    assert not (lab.folder / "etc").exists()
