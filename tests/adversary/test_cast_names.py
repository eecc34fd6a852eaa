"""Names that try to leave the folder they are unpacked into: signed by an evil origin, or met by a link on the disk."""

from __future__ import annotations

import pytest

from kit import eventually
from kit.cast import WITHIN_S, Lab, ask, health, is_complete
from kit.liar import head_of, manifest_of, sign, write, write_tree
from shoal.errors import BroadcastError, ManifestRefused, ShoalError
from shoal.shardcast import Payload
from shoal.shardcast.tree import HEAD, manifest_key

EVIL_NAMES = [
    "../x", "a/../../x", "a/..", "..", ".", "/etc/x", "//x", "a//b", "a/", "", "a\\..\\x", "C:\\x", "a\x00b", "a\nb",
    "a\u202eb", "x" * 300, "/".join(["x" * 100] * 20),
]  # fmt: skip


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_a_manifest_with_a_name_that_leads_out_is_refused(lab: Lab, name: str) -> None:
    manifest, payload = manifest_of(1, [("fine", b"a" * 1500), (name, b"b" * 700)])
    write_tree(lab.www, manifest, payload)
    source = lab.source()
    with pytest.raises(ManifestRefused, match=r"name|entry"):
        lab.client(source.url).fetch(manifest.policy, 5)
    assert source.asked("/chunks/") == []
    relay = lab.relay("relay", source.url)
    eventually(lambda: len(source.asked("/manifests/")) >= 3)
    assert ask(relay.url, f"/{manifest_key((0, 1))}")[0] != 200


def fetched(lab: Lab, *names: str) -> Payload:
    manifest, payload = manifest_of(1, [(name, name.encode() * 50) for name in names])
    write_tree(lab.www, manifest, payload)
    return lab.client(lab.source().url).fetch(manifest.policy, WITHIN_S)


def test_honest_names_are_unpacked_into_their_folders(lab: Lab) -> None:
    """Or the refusals here would prove nothing."""
    names = ["a", "sub/b", "sub/deeper/c", "ä ö.txt", "...", ".hidden"]
    fetched(lab, *names).export(lab.folder / "out")
    for name in names:
        assert (lab.folder / "out" / name).read_bytes() == name.encode() * 50


@pytest.mark.parametrize("name", ["sub/x", "sub/deeper/x"])
def test_a_link_in_the_target_folder_is_not_followed(lab: Lab, name: str) -> None:
    outside = lab.folder / "outside"
    (outside / "deeper").mkdir(parents=True)
    (lab.folder / "out").mkdir()
    (lab.folder / "out" / "sub").symlink_to(outside)
    payload = fetched(lab, name)
    with pytest.raises(BroadcastError, match="is a link"):
        payload.export(lab.folder / "out")
    assert [path for path in outside.rglob("*") if path.is_file()] == []


def test_a_file_that_is_a_link_is_replaced_not_written_through(lab: Lab) -> None:
    secret = lab.folder / "secret"
    write(secret, b"keep me")
    (lab.folder / "out").mkdir()
    (lab.folder / "out" / "x").symlink_to(secret)
    fetched(lab, "x").export(lab.folder / "out")
    assert secret.read_bytes() == b"keep me"
    assert (lab.folder / "out" / "x").read_bytes() == b"x" * 50
    assert not (lab.folder / "out" / "x").is_symlink()


def test_a_name_that_is_both_file_and_folder_ends_in_words(lab: Lab) -> None:
    """`a` and `a/b` cannot both be unpacked. Whoever notices says so; nobody falls over."""
    manifest, payload = manifest_of(1, [("a", b"1" * 50), ("a/b", b"2" * 50)])
    write_tree(lab.www, manifest, payload)
    client = lab.client(lab.source().url)
    with pytest.raises(ShoalError, match=r"a part of the path is a file|entry|name"):
        client.fetch(manifest.policy, WITHIN_S).export(lab.folder / "out")


def test_a_head_that_names_odd_versions_leads_nowhere(lab: Lab) -> None:
    """`kept_versions` become names of files on a relay."""
    manifest = lab.publish(1)
    data = (lab.www / manifest_key((0, 1))).read_bytes()
    odd = ("0.1", "../../etc/passwd", "0.1/../../x", "-1.0", "0.99999999999", "0.٣")
    write(lab.www / HEAD, sign(head_of(manifest, data, kept_versions=odd)))
    source = lab.source()
    relay = lab.relay("relay", source.url)
    eventually(lambda: is_complete(relay, "0.1") and health(relay)["versions"] == ["0.1"])
    assert {target.partition("?")[0] for target in source.asked("/manifests/")} == {f"/{manifest_key((0, 1))}"}
    assert {path.name for path in lab.folder.iterdir()} >= {"relay", "www"}
    assert not (lab.folder / "etc").exists()
