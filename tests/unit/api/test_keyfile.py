"""The swarm key's file."""

from __future__ import annotations

import pytest

from p2pdrl.api.keyfile import KEY_BYTES, read_swarm_key, write_swarm_key
from p2pdrl.errors import UsageError


def test_a_key_is_written_for_its_owner_only_and_read_back(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_swarm_key(path)) == KEY_BYTES
    other = tmp_path / "other.key"
    write_swarm_key(other)
    assert read_swarm_key(other) != read_swarm_key(path)


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        write_swarm_key(path)
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="can't write"):
        write_swarm_key(tmp_path / "missing" / "swarm.key")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_swarm_key(path)


@pytest.mark.parametrize("content", [b"", b"not base64!", b"c2hvcnQ=", b"\xff" * 50, b"A" * 5000])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path, content):
    path = tmp_path / "swarm.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="isn't a swarm key"):
        read_swarm_key(path)


def test_a_missing_or_unreadable_file_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="p2pdrl keygen"):
        read_swarm_key(tmp_path / "none.key")
    with pytest.raises(UsageError, match="can't read"):
        read_swarm_key(tmp_path)
