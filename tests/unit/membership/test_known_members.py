from __future__ import annotations

from pathlib import Path

import pytest

from p2pdrl.errors import StorageError
from p2pdrl.membership.known_members import KnownMember, KnownMembers

MEMBER = KnownMember("1" * 32, "box", "10.0.0.1:7600")


def test_what_is_saved_is_known_at_the_next_start(tmp_path: Path) -> None:
    KnownMembers(tmp_path).save(5_000, (MEMBER,))
    again = KnownMembers(tmp_path)
    assert again.members == (MEMBER,)
    assert again.next_boot_ms(wall_s=4.0) == 5_001  # the clock was set back
    assert again.next_boot_ms(wall_s=6.0) == 6_000
    assert [path.name for path in tmp_path.iterdir()] == ["members.json"]


def test_a_boot_from_the_far_future_is_forgotten(tmp_path: Path) -> None:
    KnownMembers(tmp_path).save(10_000_000, ())
    assert KnownMembers(tmp_path).next_boot_ms(wall_s=4.0) == 4_000


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b'{"boot_ms": "x"}', b"[" * 5000, b'{"new": ' + b"[" * 5000]
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "members.json").write_bytes(content)
    known = KnownMembers(tmp_path)
    assert known.members == ()
    known.save(1, (MEMBER,))
    assert KnownMembers(tmp_path).members == (MEMBER,)


def test_no_folder_keeps_nothing() -> None:
    known = KnownMembers(None)
    known.save(1, (MEMBER,))
    assert known.members == (MEMBER,)


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="can't write"):
        KnownMembers(tmp_path / "file").save(1, ())
