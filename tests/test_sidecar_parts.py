"""What the sidecar is made of, each alone: files that are taken for unchanged, frames in pieces, credentials."""

import os
import struct
from pathlib import Path

import pytest

from jaxserve.sidecar import files, wire
from jaxserve.sidecar.files import SourceFile


def seen(path: Path) -> SourceFile:
    stat = files.look(path)
    return SourceFile(path.name, files.sha256(path), stat, files.settled(stat))


def swap(path: Path, content: bytes) -> None:
    """Write into a file so that its size and mtime stay: ctime alone tells."""
    before = path.stat()
    while True:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        if path.stat().st_ctime_ns != before.st_ctime_ns:  # the kernel's clock has steps
            return


def test_what_is_swapped_under_the_same_size_and_mtime_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    known = [seen(path)]
    assert files.unchanged(known, [path], tmp_path)
    assert files.differences(known, [path], tmp_path) == []
    swap(path, b"two")
    assert not files.unchanged(known, [path], tmp_path)
    (text,) = files.differences(known, [path], tmp_path)
    assert known[0].sha256[:16] in text
    assert files.sha256(path)[:16] in text


def test_a_file_that_has_just_been_written_is_read_again(tmp_path, monkeypatch):
    """Its times may stay although it is written to: its stat alone says nothing."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    known = [seen(path)]
    assert not known[0].settled
    assert not files.unchanged(known, [path], tmp_path)
    assert files.differences(known, [path], tmp_path) == []
    path.write_bytes(b"two")
    same_instant = [SourceFile("a", known[0].sha256, files.look(path), settled=False)]
    assert len(files.differences(same_instant, [path], tmp_path)) == 1


@pytest.mark.parametrize("which", ["mtime", "ctime"])
def test_a_file_is_settled_when_neither_time_is_recent(which, monkeypatch):
    now = 10**18
    monkeypatch.setattr(files.time, "time_ns", lambda: now)
    old, recent = now - files.SETTLED_NS - 1, now - files.SETTLED_NS
    assert files.settled((1, 2, 3, old, old))
    assert not files.settled((1, 2, 3, recent, old) if which == "mtime" else (1, 2, 3, old, recent))


def test_the_time_of_a_frame_begins_with_its_first_byte_and_ends_with_its_last(monkeypatch):
    now = 100.0
    monkeypatch.setattr(wire.time, "monotonic", lambda: now)
    frames, whole = wire.Frames(), wire.encode({"op": "hello"})
    assert frames.feed(whole[:6]) == []
    assert frames.begun == 100
    now = 103.0
    assert frames.feed(whole[6:8]) == []
    assert frames.begun == 100, "a byte now and then gives no more time"
    assert frames.feed(whole[8:]) == [whole[4:]]
    assert frames.begun is None, "a client between two requests is not late with one"
    now = 109.0
    assert frames.feed(whole + whole[:1]) == [whole[4:]]
    assert frames.begun == 109, "the next frame has its own time"


@pytest.mark.parametrize("uid", [0, 1000, 1 << 31, (1 << 32) - 2])
def test_users_are_unsigned(uid):
    assert wire.credentials(struct.pack("=iII", 7, uid, uid)) == (7, uid)
