"""The sidecar's protocol: what it refuses, what a client may cost it, and leases of KV pools."""

import json
import os
import socket
import struct
import threading
import time

import pytest
from fuzz_sidecar import fuzz, state
from sidecars import connect, load, process, thread, until
from tiny import FIXTURES

from jaxserve.sidecar import SidecarError, holdings, layout, owner, wire
from jaxserve.sidecar.place import Place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of an owner on a thread of this process."""
    with thread(tmp_path_factory.mktemp("sidecar") / "private") as made:
        yield made.place.folder


@pytest.fixture
def raw(folder):
    """A bare connection."""
    with Place(folder, "cpu") as place, place.connect() as sock:
        yield sock


def answer(sock: socket.socket) -> dict:
    sock.settimeout(10)
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        more = sock.recv(1 << 16)
        assert more, "the connection ended"
        data += more
    return json.loads(data[4:])


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


HELLO = frame(json.dumps({"op": "hello", "protocol": 1, "what": "test"}).encode())


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"[]", b'"hello"', b"\xff\xfe", b"{", b"[" * 60_000, b'{"a":' * 12_000, b"1" * 5000),
        *(b'{"op":"dance"}', b'{"op":["hello"]}', b'{"op":"hello"}', b'{"op":"hello","protocol":"1"}'),
        *(b'{"op":"hello","protocol":1,"what":7}', b'{"op":"load"}', b'{"op":"load","path":"relative"}'),
        *(b'{"op":"load","path":"/x","tensor_parallel":true}', b'{"op":"load","path":"/x","role":"boss"}'),
        *(b'{"op":"load","path":"/x\\u0000y"}', b'{"op":"load","path":"/\\ud800"}', b'{"op":"attach","id":1}'),
        *(b'{"op":"pool","identity":"x","index_bytes":0}', b'{"op":"evict","name":"x","force":1}'),
        b'{"op":"pool","identity":"x","index_bytes":1,"records_bytes":1e30}',
    ],
)
def test_nonsense_is_answered_and_the_connection_goes_on(raw, body):
    raw.sendall(frame(body))
    reply = answer(raw)
    assert reply["ok"] is False
    assert reply["error"] == "invalid"
    assert len(json.dumps(reply)) < 1000
    raw.sendall(HELLO)
    assert answer(raw)["ok"] is True


@pytest.mark.parametrize("size", [65_537, 2**31, 2**32 - 1])
def test_a_frame_that_claims_too_much_ends_the_connection(raw, size):
    raw.sendall(struct.pack(">I", size) + b"x")
    assert "longer than" in answer(raw)["message"]
    assert raw.recv(1) == b""


def test_slow_and_silent_clients_are_let_go(folder, raw, monkeypatch):
    monkeypatch.setattr(owner, "FRAME_SECONDS", 0.2)
    monkeypatch.setattr(owner, "HELLO_SECONDS", 0.4)
    raw.sendall(HELLO)
    assert answer(raw)["ok"]
    with Place(folder, "cpu") as place, place.connect() as silent:
        begun = time.monotonic()
        raw.sendall(HELLO[:7])  # and nothing more
        raw.settimeout(5)
        silent.settimeout(5)
        assert raw.recv(1) == b""
        assert silent.recv(1) == b""
        assert time.monotonic() - begun < 4
    with connect(folder) as sidecar:  # said hello, and may stay
        time.sleep(1.2)
        assert sidecar.status()["pid"] == os.getpid()


def test_a_client_that_reads_nothing_is_held_back_and_hurts_no_other(folder, raw, monkeypatch):
    monkeypatch.setattr(owner, "WRITE_SECONDS", 1.0)
    raw.setblocking(False)
    sent = 0
    with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):
        while sent < 100 << 20:
            sent += raw.send(HELLO * 100)
    with connect(folder) as sidecar:
        assert sidecar.status()["ok"]
        until(lambda: len(sidecar.status()["connections"]) == 1)


def test_pieces_and_many_at_once_are_put_together(raw):
    for i in range(len(HELLO)):
        raw.sendall(HELLO[i : i + 1])
    assert answer(raw)["ok"]
    raw.sendall(HELLO * 3)
    got = b""
    while got.count(b'"protocol":1') < 3:
        got += raw.recv(1 << 16)


def test_there_are_only_so_many_connections(folder, monkeypatch):
    monkeypatch.setattr(owner, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(owner, "SPARE_CONNECTIONS", 1)
    with connect(folder), connect(folder), connect(folder) as third, connect(folder) as spare:
        # a few are kept, and not for work
        assert len(spare.status()["connections"]) == 4
        for work in (
            lambda: spare.attach("m1"),
            lambda: spare.load("/x", "auto", 1),
            lambda: spare.pool("x", 1, 1),
        ):
            with pytest.raises(SidecarError, match="too many connections"):
                work()
        with pytest.raises(SidecarError, match="too many connections") as error:
            connect(folder)
        assert error.value.code == "busy"
        third.close()
        until(lambda: len(spare.status()["connections"]) == 3)
        with pytest.raises(SidecarError, match="no such model"):  # it has become one like others
            spare.attach("m0")
    until(lambda: connect_and_close(folder))


def test_a_spare_connection_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(owner, "MAX_CONNECTIONS", 0)
    monkeypatch.setattr(owner, "HELLO_SECONDS", 0.2)
    with connect(folder) as spare:
        gone = threading.Event()
        spare.watch(gone.set)
        assert gone.wait(10)


def connect_and_close(folder) -> bool:
    try:
        connect(folder).close()
    except SidecarError:
        return False
    return True


def test_fuzzing_a_sidecar_leaves_it_as_it_was(tmp_path):
    with process(tmp_path / "p") as sidecar, Place(tmp_path / "p", "cpu") as place:
        load(sidecar, FIXTURES / "llama3")
        fuzz(place, 600, seed=1)
        until(lambda: len(sidecar.status()["connections"]) == 1)
        descriptors, memory = state(sidecar.pid)
        assert fuzz(place, 1500) >= 1500
        until(lambda: len(sidecar.status()["connections"]) == 1)
        pools = 2 * holdings.MAX_POOLS
        assert state(sidecar.pid)[0] <= descriptors + pools
        assert state(sidecar.pid)[1] < memory + (16 << 20)
        assert sidecar.verify(load(sidecar, FIXTURES / "llama3")) == []  # it may have been evicted


def test_many_requests_of_one_client_let_others_in_between(folder, raw):
    raw.settimeout(10)
    raw.sendall(HELLO * 900)
    with connect(folder) as sidecar:
        assert sidecar.status()["ok"]
    got = b""
    while got.count(b'"protocol":1') < 900:
        got += raw.recv(1 << 20)


def test_models_that_failed_make_way(tmp_path):
    with thread(tmp_path / "p"), connect(tmp_path / "p") as sidecar:
        for i in range(holdings.MAX_MODELS + 3):
            made = sidecar.load(f"/nowhere/{i}", "auto", 1)["id"]
            until(lambda made=made: [o for o in sidecar.offers() if (o["id"], o["state"]) == (made, "failed")])
        assert len(sidecar.offers()) == holdings.MAX_MODELS
        assert "no such file" in sidecar.offers()[0]["error"]


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_another_user_is_refused_on_either_side(tmp_path, monkeypatch):
    with thread(tmp_path / "p", uid=os.geteuid() + 1), pytest.raises(SidecarError, match="its own user only") as error:
        connect(tmp_path / "p")
    assert error.value.code == "refused"
    with thread(tmp_path / "p"):
        peer = wire.peer
        monkeypatch.setattr(wire, "peer", lambda sock: (peer(sock)[0], os.geteuid() + 1))
        with pytest.raises(SidecarError, match="is run by user"), Place(tmp_path / "p", "cpu") as place:
            place.connect()


def test_the_folder_must_be_private_and_no_link(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SidecarError, match="mode 0700.*mode 0755"):
        Place(tmp_path / "open", "cpu", create=True)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(SidecarError, match="is no folder of its own"):
        Place(tmp_path / "link", "cpu", create=True)
    with Place(tmp_path / "mine", "cpu") as place:
        (tmp_path / "mine" / "sidecar-cpu.sock").symlink_to(tmp_path / "open")
        with pytest.raises(SidecarError, match="is not a socket"):
            place.connect()
    with pytest.raises(SidecarError, match="no name of a device group"):
        Place(tmp_path / "mine", "../cpu")
    with thread(tmp_path / "made") as made:
        modes = {path.name: path.stat().st_mode & 0o777 for path in made.place.folder.iterdir()}
        assert modes == {"sidecar-cpu.sock": 0o600, "sidecar-cpu.lock": 0o600}
        assert made.place.folder.stat().st_mode & 0o777 == 0o700
        assert made.place.lock() is None, "one owner a group"


def test_a_long_path_is_no_obstacle(tmp_path):
    deep = tmp_path.joinpath(*["a" * 50] * 4)
    deep.mkdir(parents=True)
    with thread(deep / "p"), connect(deep / "p") as sidecar:
        assert sidecar.pid == os.getpid()


# -- KV pools ---------------------------------------------------------------------------------------------------------


def test_a_pool_keeps_its_bytes_from_one_engine_to_the_next(folder):
    with connect(folder) as sidecar:
        index, records = sidecar.pool("kv", 4096, 8192)
        os.pwrite(index, b"index", 0)
        os.pwrite(records, b"records", 100)
        os.close(index)
        os.close(records)
    with connect(folder) as sidecar:
        index, records = until(lambda: lease(sidecar, "kv"))
        assert (os.pread(index, 5, 0), os.pread(records, 7, 100)) == (b"index", b"records")
        with connect(folder) as other, pytest.raises(SidecarError, match=f"in use by process {os.getpid()}") as error:
            other.pool("kv", 4096, 8192)
        assert error.value.code == "busy"
        with pytest.raises(SidecarError, match="in use"):
            sidecar.evict("kv")
        os.close(index)
        os.close(records)
    with connect(folder) as sidecar:
        assert until(lambda: [p for p in sidecar.status()["pools"] if p["identity"] == "kv" and p["client"] is None])
        assert sidecar.evict("pool:kv") > 0
        assert not [p for p in sidecar.status()["pools"] if p["identity"] == "kv"]


def lease(sidecar, identity):
    try:
        return sidecar.pool(identity, 4096, 8192)
    except SidecarError:
        return None


def test_a_pool_needs_free_memory_and_idle_ones_make_way():
    free = [10 << 20]
    held = holdings.Holdings(lambda: pytest.fail("no weights"), lambda: free[0])
    first, second = holdings.Client(1), holdings.Client(2)
    one = held.pool("one", 1 << 20, 5 << 20, first)
    with pytest.raises(SidecarError, match="does not fit: 4194304 bytes of host memory are free"):
        held.pool("two", 1 << 20, 5 << 20, second)
    os.pwrite(one.records, bytes(3 << 20), 0)
    free[0] -= 3 << 20
    held.pool("two", 1 << 20, 3 << 20, second)  # what is used is not promised twice
    held.leave(first)
    assert held.pool("one", 1 << 20, 5 << 20, first) is one
    held.leave(first)
    free[0] = 4 << 20  # too little, until the idle pool has gone
    with pytest.raises(SidecarError, match="does not fit"):
        held.pool("three", 1 << 20, 60 << 20, first)
    assert list(held.pools) == ["two"]
    held.leave(second)
    for i in range(holdings.MAX_POOLS + 3):
        held.pool(f"n{i}", 1, 1, first)
        held.leave(first)
    assert len(held.pools) == holdings.MAX_POOLS
    for pool in list(held.pools.values()):
        held.evict(pool.identity)


# -- what a client believes -------------------------------------------------------------------------------------------

TENSOR = {"name": "t", "dtype": "float32", "shape": [2, 8], "axis": 0, "pieces": [[0, 0], [0, 256]], "sha256": ""}
GOOD = {"devices": 2, "arenas": [4096], "tensors": [TENSOR]}


@pytest.mark.parametrize(
    "change",
    [
        *({"devices": 0}, {"devices": True}, {"arenas": []}, {"arenas": [0]}, {"arenas": [64]}, {"arenas": None}),
        *({"tensors": 3}, {"tensors": [{"name": "t"}]}, {"tensors": [None]}),
        *(
            {"tensors": [{**TENSOR, **wrong}]}
            for wrong in (
                *({"axis": 2}, {"shape": [3, 8]}, {"shape": [2, -8]}, {"dtype": "float3"}, {"pieces": [[0, 0]]}),
                *({"pieces": [[1, 0], [0, 0]]}, {"pieces": [[0, 8], [0, 256]]}, {"pieces": [[0, 0], [0, 4096]]}),
                {"pieces": [[0, 0], [0, -256]]},
            )
        ),
    ],
)
def test_a_wrong_manifest_is_refused(change):
    assert layout.Layout.from_json(GOOD).as_json() == GOOD
    with pytest.raises(SidecarError, match="manifest is wrong"):
        layout.Layout.from_json({**GOOD, **change})


def test_replies_may_be_cut_and_descriptors_come_beside_them():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\0\0")
        with pytest.raises(SidecarError, match=r"no answer in 0.1 s") as error:
            wire.call(ours, {"op": "hello"}, 0.1)
        assert error.value.code == "silent"
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(frame(b'{"ok":true}')[:6])
        theirs.close()
        with pytest.raises(SidecarError, match="is gone"):
            wire.call(ours, {"op": "hello"}, 5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        wire.send_some(theirs, memoryview(frame(b'{"ok":false,"error":"busy","message":"no"}')), [0, 1])
        with pytest.raises(SidecarError, match="the sidecar says: no") as error:
            wire.call(ours, {"op": "hello"}, 5)
        assert error.value.code == "busy"
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors beside an error are closed"
