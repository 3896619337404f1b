"""Several stores under one thread, pools that a sidecar lends, and whom pages belong to."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sidecars

from jaxserve import kv_stores
from jaxserve.config import EngineConfig
from jaxserve.host_tier import Block
from jaxserve.identity import content
from jaxserve.kv_stores import open_stores
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import PrefixCache
from jaxserve.record_store import RecordStore
from jaxserve.report import Report
from jaxserve.sidecar import files
from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.place import Place
from jaxserve.store_tier import QUEUED_BYTES, StoreTier

SIZE = 100
NAME = "ab" * 32


def key(number: int) -> bytes:
    return bytes([number]) * 32


def block(*numbers: int) -> Block:
    return Block([key(n) for n in numbers], np.stack([np.full(SIZE, n, np.uint8) for n in numbers]))


def memory(name: str, records: int, near: bool = False) -> RecordStore:
    fds = os.memfd_create("index"), os.memfd_create("records")
    return RecordStore(name, *fds, identity=NAME, record_bytes=SIZE, capacity=records, place=name, near=near)


def tier(*stores: RecordStore) -> StoreTier:
    return StoreTier(stores, lambda array: array)


def arrived(stores: StoreTier, *numbers: int) -> list[tuple[str, list[int]]]:
    """Ask for records; where each block came from, and what is in it."""
    told = threading.Event()
    stores.notify = told.set
    stores.fetch([key(n) for n in numbers])
    assert told.wait(10)
    (arrival,) = stores.arrived()
    return [(source, [int(row[0]) for row in data]) for _, data, source in arrival.blocks]


def test_all_stores_are_written_to_and_the_fastest_is_read():
    fast, slow = memory("sidecar", 2, near=True), memory("disk", 8)
    stores = tier(fast, slow)
    stores.save(block(1, 2, 3, 4), range(4))
    while stores.pending:
        pass
    assert [len(fast), len(slow)] == [2, 4]
    assert [key(n) in stores for n in (1, 4, 5)] == [True, True, False]
    assert [stores.near(key(n)) for n in (1, 4)] == [False, True]
    assert arrived(stores, 3, 4) == [("sidecar", [3, 4])]
    assert arrived(stores, 1, 2) == [("disk", [1, 2])]
    assert arrived(stores, 1, 2) == [("sidecar", [1, 2])], "what a slower store had is in the faster one again"
    assert arrived(stores, 3, 9, 2) == [("disk", [3])], "nothing behind one that is nowhere"
    stores.stop()
    stores.close()


def test_a_record_that_is_damaged_in_one_store_comes_from_the_next(caplog):
    fast, slow = memory("sidecar", 4), memory("disk", 4)
    stores = tier(fast, slow)
    stores.save(block(1), [0])
    while stores.pending:
        pass
    os.pwrite(fast._records, b"\xff", 3)
    assert arrived(stores, 1) == [("disk", [1])]
    assert fast.counts.damaged == 1
    assert arrived(stores, 1) == [("sidecar", [1])]
    stores.stop()
    stores.close()


def test_what_is_used_goes_last_even_if_it_is_never_read():
    store = memory("disk", 3)
    stores = tier(store)
    stores.save(block(1, 2, 3), range(3))
    stores.used([key(2), key(9), key(1)])
    stores.stop()
    for number in (4, 5):
        store.write(key(number), np.full(SIZE, number, np.uint8))
    assert [key(n) in store for n in (1, 2, 3, 4, 5)] == [True, False, False, True, True]
    stores.close()


def test_a_record_that_was_written_and_pushed_out_is_saved_again():
    stores = tier(memory("disk", 1))
    for number in (1, 2, 1):
        assert not stores.keeps(key(number))
        assert stores.save(block(number), [0])
        assert stores.keeps(key(number))
        while stores.pending:
            pass
    assert [key(n) in stores for n in (1, 2)] == [True, False]
    stores.stop()
    stores.close()


def test_nothing_is_copied_while_the_stores_are_behind_or_twice():
    """And what an engine forgets meanwhile is not copied at all."""
    stores = tier(memory("disk", 100))
    pool = PagePool(9, 4)
    cache = PrefixCache(pool, stores=stores)
    tokens = [*range(16)]
    chain, pages = cache.chain(tokens), pool.take(4)
    cache.enter(chain, tokens, [pages], 14)
    assert len(cache.backlog) == 3, "full pages"
    stores._queued = QUEUED_BYTES
    cache.back_up()
    assert not cache.spills
    stores._queued = 0
    cache.back_up()
    assert [item.pages for item in cache.spills] == [pages[:2]]
    cache.enter(cache.chain(tokens), tokens, [pages], 14)
    assert len(cache.backlog) == 1, "two are planned already"
    cache.spills.clear()
    cache.leave(chain, tokens, [pages], 14)
    assert pool.take(8) is not None
    assert not cache.backlog
    cache.check()
    stores.stop()
    stores.close()


def opened(config: EngineConfig, sidecar: Sidecar | None, pool_bytes: int = 1000) -> StoreTier | None:
    return open_stores(
        config,
        NAME,
        record_bytes=SIZE,
        pool_bytes=pool_bytes,
        sidecar=sidecar,
        place=lambda array: array,
        report=Report(),
    )


def ended(stores: StoreTier | None) -> None:
    assert stores is not None
    stores.stop()
    stores.close()


@pytest.fixture
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with sidecars.thread(folder), Place(folder, "cpu") as made:
        yield made


def test_a_pool_is_found_again_by_the_next_engine_and_is_one_engine_s_alone(place, monkeypatch, caplog):
    monkeypatch.setattr(kv_stores, "PATIENCE_SECONDS", 0.1)
    config = EngineConfig(model="m", sidecar="auto")
    with Sidecar(place, "first") as one:
        first = opened(config, one)
        first.save(block(1, 2), range(2))
        with Sidecar(place, "second") as two:
            second = opened(config, two)
            assert len(second.stores[0]) == 0
            assert "pool of its own" in caplog.text
            ended(second)
        first.stop()
    # The connection has ended, as a killed process's does; its descriptors are closed after it.
    with Sidecar(place, "third") as three:
        third = opened(config, three)
        assert arrived(third, 1, 2) == [("sidecar", [1, 2])]
        ended(third)
    first.close()


def test_a_pool_that_does_not_fit_is_an_error_or_said(place, caplog):
    with Sidecar(place, "one") as sidecar:
        with pytest.raises(SidecarError, match="KV pool"):
            opened(EngineConfig(model="m", sidecar="auto"), sidecar, pool_bytes=1 << 50)
        assert (
            opened(EngineConfig(model="m", sidecar="auto", sidecar_fallback="disk"), sidecar, pool_bytes=1 << 50)
            is None
        )
        assert "WILL NOT OUTLIVE" in caplog.text
        ended(opened(EngineConfig(model="m", sidecar="auto"), sidecar))


def test_an_engine_goes_on_with_its_pool_when_the_sidecar_has_died(tmp_path_factory):
    with sidecars.process(tmp_path_factory.mktemp("s")) as sidecar:
        stores = opened(EngineConfig(model="m", sidecar="auto"), sidecar)
        sidecars.kill(sidecar.pid)
        stores.save(block(1, 2), range(2))
        while stores.pending:
            pass
        assert arrived(stores, 1, 2) == [("sidecar", [1, 2])]
        ended(stores)


def checkpoint(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(path=folder, files=tuple(sorted(folder.glob("*.safetensors"))))


def test_files_are_hashed_once_and_again_when_they_have_changed(tmp_path, monkeypatch):
    model, notes = tmp_path / "model", tmp_path / "notes"
    model.mkdir()
    notes.mkdir()
    for name in ("a", "b"):
        (model / f"{name}.safetensors").write_bytes(name.encode())
    read = []
    sha256 = files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path.name) or sha256(path))
    first = content(checkpoint(model), notes)
    assert content(checkpoint(model), notes) == first
    assert len(read) == 4, "a file that has just been written may be written again in the same instant"
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    del read[:]
    assert content(checkpoint(model), notes) == first
    assert content(checkpoint(model), notes) == first
    assert sorted(read) == ["a.safetensors", "b.safetensors"]
    stat = (model / "a.safetensors").stat()
    (model / "a.safetensors").write_bytes(b"c")
    os.utime(model / "a.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = content(checkpoint(model), notes)
    assert changed["a.safetensors"] != first["a.safetensors"], "its size and mtime are what they were"
    assert changed["b.safetensors"] == first["b.safetensors"]
    (notes / "checkpoints.json").write_text("[1")
    assert content(checkpoint(model), notes) == changed
