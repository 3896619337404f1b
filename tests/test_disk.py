"""What outlives the process: what was written comes back, after any death of it, and nothing else does."""

import os
import shutil
import stat
import threading
import time

import numpy as np
import pytest

from jaxserve import disk_store, record_store
from jaxserve.disk_store import DiskError, open_store
from jaxserve.host_tier import Block, HostTier
from jaxserve.record_store import HEADER, STRIDE, RecordStore
from jaxserve.store_tier import StoreTier

SIZE = 100
NAME = "ab" * 32


def opened(folder, records: int = 4, name: str = NAME) -> RecordStore:
    return open_store(folder / "kv", name, SIZE, records * (SIZE + STRIDE))


def key(number: int) -> bytes:
    return bytes([number]) * 32


def record(number: int) -> np.ndarray:
    return np.full(SIZE, number, np.uint8)


def written(folder, *numbers: int, records: int = 4) -> None:
    store = opened(folder, records)
    for number in numbers:
        store.write(key(number), record(number))
    store.close()


def found(store: RecordStore) -> list[int]:
    """The records that are there and whole."""
    return [n for n in range(1, 60) if (got := store.read(key(n))) is not None and (got == record(n)).all()]


def test_what_was_written_is_there_after_a_restart(tmp_path):
    written(tmp_path, 1, 2, 3)
    store = opened(tmp_path)
    assert len(store) == 3
    assert found(store) == [1, 2, 3]
    assert store.read(key(9)) is None
    store.close()


def test_the_longest_unused_go_first_even_after_a_restart(tmp_path):
    written(tmp_path, 1, 2, 3, 4)
    store = opened(tmp_path)
    store.read(key(1))
    store.close()
    written(tmp_path, 5)
    store = opened(tmp_path)
    assert found(store) == [1, 3, 4, 5]
    store.close()


def test_only_the_user_may_read(tmp_path):
    written(tmp_path, 1)
    paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert len(paths) == 4
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_damaged_record_is_discarded_and_the_others_are_not(tmp_path, caplog):
    written(tmp_path, 1, 2, 3)
    store = opened(tmp_path)
    with open(tmp_path / "kv" / f"kv-{NAME[:32]}" / "records", "r+b") as file:
        file.seek(SIZE + 7)
        file.write(b"\xff")
    assert found(store) == [1, 3]
    assert key(2) not in store
    assert store.counts.damaged == 1
    assert "damaged" in caplog.text
    store.close()


@pytest.mark.parametrize("harm", ["foreign", "empty", "cut short", "no records"])
def test_foreign_and_torn_files_are_discarded_with_a_line(tmp_path, caplog, harm):
    written(tmp_path, 1, 2)
    folder = next((tmp_path / "kv").iterdir())
    if harm == "foreign":
        (folder / "index").write_bytes(b"something else" * 1000)
    elif harm == "empty":
        (folder / "index").write_bytes(b"")
    elif harm == "cut short":
        os.truncate(folder / "index", HEADER + STRIDE + 20)
    else:
        os.truncate(folder / "records", SIZE + 1)
    store = opened(tmp_path)
    assert found(store) == ([1] if harm in ("cut short", "no records") else [])
    assert len(caplog.records) == {"foreign": 1, "empty": 0, "cut short": 0, "no records": 1}[harm]
    store.write(key(5), record(5))
    assert 5 in found(store)
    store.close()


def test_a_process_may_die_before_any_write(tmp_path, monkeypatch):
    """At each system call that writes: what is found afterwards is whole, whatever was overwritten."""
    calls = 0
    write = os.pwrite

    class DeadError(BaseException):
        pass

    for die_at in range(1, 20):
        folder = tmp_path / str(die_at)
        written(folder, 1, 2, 3, 4)
        calls = 0

        def dying(file, data, offset, die_at=die_at):
            nonlocal calls
            calls += 1
            if calls == die_at:
                write(file, bytes(memoryview(data)[: len(data) // 2]), offset)
                raise DeadError
            return write(file, data, offset)

        store = opened(folder)
        monkeypatch.setattr(record_store.os, "pwrite", dying)
        try:
            for number in (5, 6, 7):
                store.write(key(number), record(number))
        except DeadError:
            pass
        monkeypatch.undo()
        store.close()
        store = opened(folder)
        whole = found(store)
        assert set(whole) <= set(range(1, 8))
        assert len(whole) >= 3
        assert store.counts.damaged <= 1
        store.close()
    assert calls < die_at, "the last one did not die"


def test_a_full_disk_is_counted_and_logged_once(tmp_path, monkeypatch, caplog):
    store = opened(tmp_path)
    monkeypatch.setattr(record_store.os, "pwrite", lambda *_: 10)
    store.write(key(1), record(1))
    store.write(key(2), record(2))
    monkeypatch.undo()
    assert store.counts.refused == 2
    assert len(caplog.records) == 1
    assert found(store) == []
    store.write(key(3), record(3))
    assert found(store) == [3]
    store.close()


def test_a_smaller_budget_keeps_what_fits_and_a_larger_one_all(tmp_path):
    written(tmp_path, 1, 2, 3, 4)
    store = opened(tmp_path, records=2)
    assert found(store) == [1, 2]
    store.close()
    written(tmp_path, 5, 6, 7, records=8)
    store = opened(tmp_path, records=8)
    assert found(store) == [1, 2, 5, 6, 7]
    store.close()


def test_a_second_engine_of_the_same_identity_has_a_subfolder_of_its_own(tmp_path, monkeypatch, caplog):
    store = opened(tmp_path)
    store.write(key(1), record(1))
    monkeypatch.setattr(disk_store, "PATIENCE_SECONDS", 0.1)
    second = opened(tmp_path)
    assert second.place == store.place + ".2"
    assert "in use by another engine" in caplog.text
    second.write(key(2), record(2))
    assert found(store) == [1]
    assert found(second) == [2]
    monkeypatch.setattr(disk_store, "ENGINES", 2)
    with pytest.raises(DiskError, match="another folder"):
        opened(tmp_path)
    other = opened(tmp_path, name="cd" * 32)
    other.close()
    store.close()
    second.close()
    first = opened(tmp_path)
    assert found(first) == [1]
    first.close()


def test_one_that_is_just_ending_is_waited_for(tmp_path):
    written(tmp_path, 1)
    store = opened(tmp_path)
    threading.Timer(0.1, store.close).start()
    again = opened(tmp_path)
    assert again.place == store.place
    assert found(again) == [1]
    again.close()


def names(folder) -> set[str]:
    return {path.name for path in (folder / "kv").iterdir()}


def age(folder, name: str, seconds: int) -> None:
    """Let a subfolder have been used so long ago."""
    for file in (folder / "kv" / f"kv-{name[:32]}").iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_models_share_nothing_and_what_is_kept_stays_while_there_is_room(tmp_path, caplog):
    """The budget, 4 records, is for what is there: two models by turns keep theirs until there are more."""
    written(tmp_path, 1, 2)
    store = opened(tmp_path, name="cd" * 32)
    assert found(store) == []
    for number in (3, 4):
        store.write(key(number), record(number))
    assert not caplog.records
    store.close()
    again = opened(tmp_path)
    assert found(again) == [1, 2]
    again.write(key(5), record(5))
    assert names(tmp_path) == {f"kv-{NAME[:32]}"}
    assert "removing" in caplog.text
    assert found(again) == [1, 2, 5]
    again.close()


def test_the_longest_unused_subfolder_goes_first_and_no_more_than_it_takes(tmp_path):
    for number, name in enumerate(("01" * 32, "02" * 32, "03" * 32)):
        store = opened(tmp_path, name=name)
        store.write(key(1), record(1))
        store.close()
        age(tmp_path, name, 100 + (number == 1) * 50)
    store = opened(tmp_path)
    store.write(key(1), record(1))
    assert len(names(tmp_path)) == 4
    store.write(key(2), record(2))
    assert names(tmp_path) == {f"kv-{NAME[:32]}", "kv-" + "01" * 16, "kv-" + "03" * 16}
    store.close()


def test_a_smaller_budget_removes_what_is_beyond_it_when_the_store_opens(tmp_path):
    written(tmp_path, 1, 2, 3)
    store = opened(tmp_path, records=3, name="cd" * 32)
    assert len(names(tmp_path)) == 2
    store.close()
    opened(tmp_path, records=2, name="cd" * 32).close()
    assert names(tmp_path) == {"kv-" + "cd" * 16}


def test_an_open_store_is_never_removed_and_one_beside_it_makes_do(tmp_path, caplog):
    one = opened(tmp_path)
    for number in (1, 2, 3):
        one.write(key(number), record(number))
    two = opened(tmp_path, name="cd" * 32)
    for number in (4, 5):
        two.write(key(number), record(number))
    assert (found(two), two.counts.evicted) == ([5], 1)
    three = opened(tmp_path, name="ef" * 32)
    for number in (6, 7):
        three.write(key(number), record(number))
    assert (found(three), three.counts.refused) == ([], 2)
    assert caplog.text.count("there is no room beside") == 1
    assert found(one) == [1, 2, 3]
    one.write(key(8), record(8))
    assert found(one) == [2, 3, 8], "its own oldest record goes"
    for store in (one, two):
        store.close()
    three.write(key(9), record(9))
    assert found(three) == [9]
    three.close()


def test_a_disk_without_room_takes_what_nobody_uses(tmp_path, monkeypatch):
    written(tmp_path, 1, 2)
    store = opened(tmp_path, name="cd" * 32, records=100)
    usage = shutil.disk_usage(tmp_path)
    free = iter([0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=next(free, usage.free)))
    store.write(key(3), record(3))
    assert found(store) == [3]
    assert names(tmp_path) == {"kv-" + "cd" * 16}
    store.close()


def test_what_a_removal_that_was_cut_short_has_left_goes_too(tmp_path):
    written(tmp_path, 1, 2, 3, 4)
    (tmp_path / "kv" / f"kv-{NAME[:32]}" / "index").unlink()
    store = opened(tmp_path, name="cd" * 32)
    store.write(key(1), record(1))
    store.write(key(2), record(2))
    assert names(tmp_path) == {"kv-" + "cd" * 16}
    assert found(store) == [1, 2]
    store.close()


def test_a_budget_beyond_the_file_system_is_refused(tmp_path):
    with pytest.raises(DiskError, match="has room for"):
        opened(tmp_path, records=1 << 50)


def test_a_disk_that_has_filled_up_keeps_what_is_there_and_says_so(tmp_path, monkeypatch, caplog):
    """A cache is no reason not to start."""
    written(tmp_path, 1, 2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    store = opened(tmp_path, records=1000)
    assert found(store) == [1, 2]
    assert 2 <= store.capacity < 1000
    assert "were asked for" in caplog.text
    store.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(DiskError, match="kv"):
        opened(tmp_path)


def test_blocks_go_down_and_come_back_in_order(tmp_path):
    tier = HostTier(4 * SIZE, SIZE)
    disk = StoreTier([opened(tmp_path, records=40)], lambda array: array)
    tier.below = disk.save
    for start in range(1, 17, 4):
        for block in tier.put([key(n) for n in range(start, start + 4)]):
            block.data = np.stack([record(n) for n in range(start, start + 4)])
    disk.stop()
    assert sorted(found(disk.stores[0])) == list(range(1, 13))
    again = StoreTier(disk.stores, lambda array: array)
    again.fetch([key(n) for n in (3, 4, 99, 5)])
    assert again.reading
    again.stop()
    (arrival,) = again.arrived()
    assert not again.reading
    assert [keys for keys, _, _ in arrival.blocks] == [[key(3), key(4)]], "nothing behind one that is missing"
    assert (arrival.blocks[0][1] == np.stack([record(3), record(4)])).all()
    again.close()


def test_who_waits_hears_of_a_failure(tmp_path, caplog):
    def fail(array: np.ndarray) -> None:
        raise MemoryError("no room")

    written(tmp_path, 1)
    disk = StoreTier([opened(tmp_path)], fail)
    told = []
    disk.notify = lambda: told.append(True)
    disk.fetch([key(1)])
    disk.stop()
    assert told == [True]
    assert disk.arrived()[0].blocks == []
    assert not disk.reading
    disk.close()


def test_too_much_at_once_is_refused_not_queued(tmp_path, monkeypatch):
    disk = StoreTier([opened(tmp_path)], lambda array: array)
    disk._queued = 1 << 60
    assert not disk.save(Block([key(1)], np.stack([record(1)])), [0])
    assert disk.stores[0].counts.refused == 1
    disk._queued = 0
    assert not disk.save(Block([key(1)]), [0]), "a block that has not been filled"
    assert disk.save(Block([key(1)], np.stack([record(1)])), [0])
    disk.stop()
    assert found(disk.stores[0]) == [1]
    disk.close()


def test_a_record_that_has_come_twice_counts_once():
    """Spilled again while it was being read."""
    tier = HostTier(3 * SIZE, SIZE)
    tier.put([key(1), key(2)])
    tier.adopt([key(2)], np.stack([record(2)]), "disk")
    tier.check()
    assert tier.find(key(2))[0].data is not None
    tier.adopt([key(1)], np.stack([record(1)]), "disk")
    tier.check()
    assert tier.records == 2
