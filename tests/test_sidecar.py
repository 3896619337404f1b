"""The sidecar and engines: the same weights without a copy, refusals that say why, and deaths on either side."""

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from sidecars import connect, damage, end, kill, link, load, owners, process, thread, until
from tiny import FAMILIES, FIXTURES, roomy, write_model

import jaxserve
from jaxserve import cli, params
from jaxserve.convert import convert
from jaxserve.report import Report
from jaxserve.sharding import Parallel, make_mesh
from jaxserve.sidecar import SidecarError, layout, shared
from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.place import Place
from jaxserve.sidecar.start import connect_or_start, spawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of an owner that all tests of this module may use, and leave running."""
    with process(tmp_path_factory.mktemp("sidecar") / "private") as sidecar:
        yield sidecar.socket_path.parent


def rss_anon() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_bit_for_bit_those_from_disk(folder, family, devices):
    model = FIXTURES / family
    with connect(folder) as sidecar, contextlib.ExitStack() as stack:
        name = load(sidecar, model, tensor_parallel=devices)
        stack.callback(lambda: sidecar.evict(name, force=True))
        made, wanted, mesh = stack.enter_context(link(folder, model, tensor_parallel=devices))
        held = made.weights(lambda done, total: None)
        read = params.load(wanted.specs, wanted.source, "float32", mesh)
    assert jax.tree.structure(held) == jax.tree.structure(read)
    for ours, theirs in zip(jax.tree.leaves(held), jax.tree.leaves(read), strict=True):
        assert (ours.dtype, ours.shape, ours.sharding) == (theirs.dtype, theirs.shape, theirs.sharding)
        for mine, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert mine.device == other.device
            assert mine.index == other.index
            assert np.array_equal(np.asarray(mine.data), np.asarray(other.data))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_shards_are_cut_as_jax_cuts_them(devices):
    with link_specs("qwen2", devices) as (specs, mesh):
        for spec in layout.named(specs).values():
            theirs = params.sharding(mesh, spec.axes).devices_indices_map(spec.shape)
            mine = layout.shards(spec, devices)
            for i, device in enumerate(mesh.devices.flat):
                whole = tuple(slice(*s.indices(n)[:2]) for s, n in zip(theirs[device], spec.shape, strict=True))
                assert mine[i if len(mine) > 1 else 0] == whole


def link_specs(family, devices):
    import checkpoints
    from jaxserve import models
    from jaxserve.declare import declare

    @contextlib.contextmanager
    def made():
        with checkpoints.open_checkpoint(FIXTURES / family) as source:
            yield declare(models.model_config(source.config), Parallel(devices), source, "float32"), make_mesh(devices)

    return made()


def test_attached_memory_is_not_copied():
    size, count = 8 << 20, 8
    tensors = tuple(
        layout.Tensor(f"t{i}", "bfloat16", (size // 2,), None, (layout.Piece(0, i * size),)) for i in range(count)
    )
    arenas = shared.SharedArenas("test", [size * count])
    for i, tensor in enumerate(tensors):
        arenas.room(tensor.pieces, layout.np_dtype("bfloat16"), tensor.shape)[...] = i
    arenas.seal()
    mesh = make_mesh(2)
    before = rss_anon()
    arrays = shared.attach(
        arenas.descriptors,
        layout.Layout(2, (size * count,), tensors),
        mesh,
        [params.sharding(mesh, (None,))] * count,
    )
    arenas.close()
    pointers = [[shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] for array in arrays]
    assert [p[0] - pointers[0][0] for p in pointers] == [i * size for i in range(count)], "all in one mapping"
    assert all(one == two for one, two in pointers), "devices share what is not sharded"
    assert [float(np.asarray(array)[-1]) for array in arrays] == list(range(count)), "it outlives the owner's own"
    assert rss_anon() - before < size, "an attached model takes no memory of the engine's"


def test_sealed_memory_cannot_be_changed_and_other_memory_is_refused():
    arenas = shared.SharedArenas("test", [4096])
    arenas.seal()
    with pytest.raises(PermissionError):
        os.pwrite(arenas.descriptors[0], b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(arenas.descriptors[0], 0)
    with pytest.raises(PermissionError):
        os.ftruncate(arenas.descriptors[0], 8192)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arenas.descriptors[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    tensors = (layout.Tensor("t", "float32", (8,), None, (layout.Piece(0, 0),)),)
    mesh = make_mesh(1)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4096)
    try:
        with pytest.raises(SidecarError, match="not sealed"):
            shared.attach([loose], layout.Layout(1, (4096,), tensors), mesh, [params.sharding(mesh, (None,))])
        with pytest.raises(SidecarError, match="shorter"):
            shared.attach(
                arenas.descriptors, layout.Layout(1, (8192,), tensors), mesh, [params.sharding(mesh, (None,))]
            )
    finally:
        os.close(loose)
        arenas.close()


def test_an_engine_takes_its_weights_from_the_sidecar(folder, speaking, programs_dir):
    prompt = {"max_tokens": 12, "temperature": 0.0, "progress": False}
    with roomy(programs_dir, speaking) as plain:
        expected = plain.generate([72, 101, 108], **prompt)[0].outputs[0].token_ids
        pages = plain.report()["kv cache"]["pages"]
    with roomy(programs_dir, speaking, sidecar="auto", sidecar_dir=str(folder), host_kv_gib=0) as engine:
        assert engine.generate([72, 101, 108], **prompt)[0].outputs[0].token_ids == expected
        report = engine.report()
        assert report["weights"]["source"].startswith("sidecar, process")
        assert report["weights"]["attach_seconds"] < 5
        assert (report["kv cache"]["pages"], report["executables"]["compiled"]) == (pages, 0)
        with connect(folder) as sidecar:
            clients = [c for m in sidecar.status()["models"] for c in m["clients"]]
            assert [c["pid"] for c in clients] == [os.getpid()]
            assert clients[0]["what"] == f"engine {speaking}"
    with connect(folder) as sidecar:
        until(lambda: not any(m["clients"] for m in sidecar.status()["models"]))


def test_a_converted_folder_is_held_as_well(folder, tmp_path):
    convert(str(FIXTURES / "llama3"), tmp_path / "converted", tensor_parallel=2)
    with connect(folder) as sidecar:
        load(sidecar, tmp_path / "converted", tensor_parallel=2)
    with (
        link(folder, tmp_path / "converted", tensor_parallel=2) as (made, _, mesh),
        link_specs("llama3", 2) as (specs, _),
    ):
        held = made.weights(lambda done, total: None)
        import checkpoints

        with checkpoints.open_checkpoint(FIXTURES / "llama3") as source:
            read = params.load(specs, source, "float32", mesh)
    for ours, theirs in zip(jax.tree.leaves(held), jax.tree.leaves(read), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_every_field_that_differs_is_named_with_both_values(folder):
    with connect(folder) as sidecar:
        load(sidecar, FIXTURES / "qwen3")
    with pytest.raises(SidecarError) as error, link(folder, FIXTURES / "qwen3", dtype="bfloat16", role="draft"):
        pass
    assert error.value.code == "mismatch"
    assert 'dtype: "float32" in the sidecar, "bfloat16" here' in str(error.value)
    assert 'role: "target" in the sidecar, "draft" here' in str(error.value)
    assert "model." not in str(error.value), "what is equal is not mentioned"


def test_another_model_is_named_in_a_line_that_can_be_read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with thread(folder), connect(folder) as sidecar:
        load(sidecar, FIXTURES / "qwen3")
        with pytest.raises(SidecarError) as error, link(folder, FIXTURES / "gemma3_text"):
            pass
    text = str(error.value)
    assert text.startswith(f"the sidecar holds qwen3 ({FIXTURES / 'qwen3'}), not this model: model.model_type: ")
    assert '"qwen3" in the sidecar, "gemma3_text" here; ' in text
    assert " more; `jaxserve sidecar start " in text
    assert "`jaxserve sidecar evict qwen3`" in text
    assert max(map(len, text.split("; "))) < 250
    assert len(text) < 900


def test_a_swapped_checkpoint_of_equal_shapes_is_refused_by_its_hash(folder, tmp_path):
    model = write_model(tmp_path / "swapped")
    with connect(folder) as sidecar:
        load(sidecar, model)
    with link(folder, model) as (made, _, _):
        assert made.weights(lambda done, total: None) is not None
    damage(model)
    with (
        link(folder, model) as (made, _, _),
        pytest.raises(
            SidecarError, match=r"file model.safetensors: sha256 [0-9a-f]{16}... in the sidecar, [0-9a-f]{16}... here"
        ),
    ):
        made.weights(lambda done, total: None)
    with link(folder, model, sidecar="auto") as (made, wanted, mesh):  # which has it loaded again
        held = made.weights(lambda done, total: None)
        read = params.load(wanted.specs, wanted.source, "float32", mesh)
    for ours, theirs in zip(jax.tree.leaves(held), jax.tree.leaves(read), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_copy_elsewhere_is_compared_by_its_bytes(folder, tmp_path):
    with connect(folder) as sidecar:
        load(sidecar, FIXTURES / "llama3")
    copy = write_model(tmp_path / "copy")
    with link(folder, copy) as (made, _, _):
        assert made.weights(lambda done, total: None) is not None


def test_a_file_that_changes_while_it_is_read_is_not_held(folder, tmp_path, monkeypatch):
    from jaxserve.sidecar import files, holdings, loading

    model = write_model(tmp_path / "changing")
    before = files.sha256

    def hash_and_change(path, progress=None):
        digest = before(path)
        damage(model)
        return digest

    monkeypatch.setattr(files, "sha256", hash_and_change)
    from jaxserve.sidecar.backends import CpuBackend

    wish = holdings.Wish(str(model), "float32", 1, "target")
    with pytest.raises(SidecarError, match="was changed while it was read"):
        loading.load(wish, CpuBackend(), holdings.Progress())


def test_what_fails_leads_to_the_disk_only_where_that_is_wanted_and_is_said(folder, tmp_path, caplog):
    model = FIXTURES / "smollm2"
    with (
        pytest.raises(SidecarError, match=r"the sidecar holds .*, not this model: .*`jaxserve sidecar start "),
        link(folder, model),
    ):
        pass
    with pytest.raises(SidecarError, match="jaxserve sidecar start"), link(tmp_path / "nobody", model):
        pass
    report = Report()
    for place in (folder, tmp_path / "nobody"):
        with (
            caplog.at_level(logging.WARNING),
            link(place, model, sidecar_fallback="disk", report=report) as (made, _, _),
        ):
            assert made.weights(lambda done, total: None) is None
        assert caplog.text.count("READ FROM DISK") == 1
        assert report.sections["weights"]["source"] == "disk, not the sidecar"
        assert "sidecar" in report.sections["weights"]["why"]
        caplog.clear()


def test_a_model_that_cannot_be_loaded_says_why(folder, tmp_path):
    model = write_model(tmp_path / "broken")
    (model / "model.safetensors").write_bytes(b"no weights")
    with connect(folder) as sidecar:
        made = sidecar.load(str(model), "float32", 1)
        states = lambda: [o for o in sidecar.offers() if o["id"] == made["id"] and o["state"] == "failed"]  # noqa: E731
        failed = until(states)[0]
        assert "corrupt safetensors header" in failed["error"]
        with pytest.raises(SidecarError, match="corrupt safetensors header"):
            sidecar.attach(made["id"])
        sidecar.evict(made["name"])


def test_the_engine_waits_for_weights_that_are_loading_and_not_for_ever(tmp_path):
    model, told = FIXTURES / "llama3", []
    with thread(tmp_path / "p") as owner, connect(tmp_path / "p") as sidecar:
        gate = threading.Event()
        owner.holdings._loader.submit(gate.wait)
        sidecar.load(str(model), "float32", 1)
        late = pytest.raises(SidecarError, match="still loading llama3 after 0.2 s")
        with link(tmp_path / "p", model, sidecar_timeout=0.2) as (made, _, _), late:
            made.weights(lambda done, total: told.append(done))
        assert told
        with link(tmp_path / "p", model) as (made, _, _):
            threading.Timer(0.2, gate.set).start()
            assert made.weights(lambda done, total: None) is not None


def test_other_models_count_against_the_devices_memory(folder):
    with connect(folder) as sidecar:
        load(sidecar, FIXTURES / "llama3")
        load(sidecar, FIXTURES / "qwen3", role="draft")
        held = {m["name"]: m["bytes"] for m in sidecar.status()["models"]}
        mine = next(m["bytes"] for m in sidecar.status()["models"] if m["path"] == str(FIXTURES / "llama3"))
    with link(folder, FIXTURES / "llama3") as (made, _, _):
        assert 0 < made.held <= sum(held.values()) - mine


# -- deaths -----------------------------------------------------------------------------------------------------------

ENGINE = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from sidecars import link
with link(Path(sys.argv[1]), Path(sys.argv[2])) as (made, _, _):
    assert made.weights(lambda done, total: None) is not None
    print("attached", flush=True)
    time.sleep(60)
"""


def engine(folder: Path, model: Path) -> subprocess.Popen:
    here = Path(__file__).parent
    command = [sys.executable, "-c", ENGINE, str(folder), str(model), str(here), str(here.parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "attached\n"
    return child


def test_a_killed_engine_is_noticed_and_the_next_one_attaches(folder):
    model = FIXTURES / "qwen2"
    with connect(folder) as sidecar:
        name = load(sidecar, model)

        def clients() -> list[int]:
            return [c["pid"] for m in sidecar.status()["models"] if m["name"] == name for c in m["clients"]]

        with engine(folder, model) as child:
            assert clients() == [child.pid]
            with pytest.raises(SidecarError, match=f"in use by process {child.pid}"):
                sidecar.evict(name)
            child.kill()
        until(lambda: not clients())
        with link(folder, model) as (made, _, _):
            assert made.weights(lambda done, total: None) is not None
            assert clients() == [os.getpid()]
            weights = jax.tree.map(np.asarray, made.weights(lambda done, total: None))
            assert sidecar.evict(name, force=True) > 0
            after = jax.tree.map(np.asarray, made.weights(lambda done, total: None))
            assert all(jax.tree.leaves(jax.tree.map(np.array_equal, weights, after))), "its mapping is its own"
        assert name not in [m["name"] for m in sidecar.status()["models"]]


def test_an_engine_outlives_its_sidecar_and_says_so_once(tmp_path, speaking, programs_dir, caplog):
    folder, prompt = tmp_path / "p", {"max_tokens": 8, "temperature": 0.0, "progress": False}
    with roomy(programs_dir, speaking, sidecar="auto", sidecar_dir=str(folder), host_kv_gib=0) as llm:
        assert llm.report()["weights"]["owner"] == "started by this engine"
        with connect(folder) as sidecar:
            pid = sidecar.pid
        expected = llm.generate([1, 2, 3], **prompt)[0].outputs[0].token_ids
        with caplog.at_level(logging.WARNING):
            kill(pid)
            until(lambda: "sidecar" in llm.report()["weights"])
        assert llm.report()["weights"]["sidecar"].startswith("gone")
        assert caplog.text.count("is gone; this engine goes on") == 1
        assert (
            llm.metrics.get_sample_value("jaxserve:sidecar_lost_total", {"model_name": str(speaking), "engine": "0"})
            == 1
        )
        assert llm.generate([1, 2, 3], **prompt)[0].outputs[0].token_ids == expected
        with process(folder) as successor:  # in the place of a stale socket
            assert successor.pid != pid
            load(successor, speaking)
            with link(folder, speaking) as (made, _, _):
                assert made.weights(lambda done, total: None) is not None
        assert llm.generate([1, 2, 3], **prompt)[0].outputs[0].token_ids == expected


def test_owners_that_start_at_once_end_up_as_one(tmp_path):
    with Place(tmp_path / "p", "cpu", create=True) as place:
        made: list[tuple[Sidecar, bool]] = []
        threads = [threading.Thread(target=lambda: made.append(connect_or_start(place, [], "test"))) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        try:
            assert len({sidecar.pid for sidecar, _ in made}) == 1
            spawn(place, [])  # and a late one leaves
            until(lambda: owners(tmp_path / "p") == [made[0][0].pid])
            assert "a sidecar runs already" in place.log_path.read_text()
            with connect(tmp_path / "p") as late:
                assert late.pid == made[0][0].pid
        finally:
            for sidecar, _ in made:
                sidecar.close()
            end(tmp_path / "p")


def test_engines_that_start_at_once_share_one_owner_and_one_copy(tmp_path):
    model, found = FIXTURES / "llama3", []

    def start() -> None:
        with link(tmp_path / "p", model, sidecar="auto") as (made, _, _):
            found.append((made.weights(lambda done, total: None) is not None, made.sidecar.pid))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    with process(tmp_path / "p") as sidecar:
        assert found == [(True, sidecar.pid)] * 3
        assert [m["name"] for m in sidecar.status()["models"]] == ["llama3"]


def test_a_sidecar_of_other_code_is_told_from_other_weights(folder, monkeypatch):
    from jaxserve.sidecar import key

    with connect(folder) as sidecar:
        load(sidecar, FIXTURES / "llama3")
    monkeypatch.setattr(key, "layout_version", lambda: "another")
    with pytest.raises(SidecarError, match="runs other code"), link(folder, FIXTURES / "llama3"):
        pass


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path, capsys):
    where = ["--sidecar-dir", str(tmp_path / "p")]

    def run(*words: str) -> tuple[int, str, str]:
        status = cli.main(["sidecar", words[0], *where, *words[1:]])
        return status, *capsys.readouterr()

    assert run("status")[:2] == (1, "")
    status, out, _ = run("start", str(FIXTURES / "llama3"), "--draft", str(FIXTURES / "qwen3"))
    pid = int(out.split("process ")[1].split(",")[0])
    try:
        assert status == 0
        assert "llama3: " in out
        status, out, _ = run("start", str(FIXTURES / "llama3"))
        assert (status, f"process {pid}, was running" in out) == (0, True)
        assert "target, float32" in run("status", "--wait", "5")[1]
        status, out, _ = run("status", "--json")
        assert [(m["name"], m["role"]) for m in json.loads(out)["models"]] == [("llama3", "target"), ("qwen3", "draft")]
        assert run("verify", "llama3")[:2] == (0, "llama3: as it was loaded\n")
        assert run("verify", os.path.relpath(FIXTURES / "llama3"))[0] == 0
        assert run("evict", "nothing")[0] == 1
        assert "given back" in run("evict", "qwen3")[1]
        assert run("start", "no-such-model")[0] == 1
        assert run("start", "--gpus", "x")[0] == 2
        assert "has ended" in run("stop")[1]
        assert run("stop")[0] == 1
    finally:
        end(tmp_path / "p")


def test_options_that_go_without_a_sidecar_are_refused():
    for options, name in (
        ({"load_format": "magic"}, "load_format"),
        ({"sidecar": "yes"}, "sidecar"),
        ({"sidecar_fallback": "disk"}, "sidecar_fallback"),
        ({"sidecar_dir": "x"}, "sidecar_dir"),
        ({"sidecar": "auto", "sidecar_dir": " "}, "sidecar_dir"),
        ({"sidecar": "auto", "sidecar_fallback": "never"}, "sidecar_fallback"),
        ({"sidecar_timeout": 0}, "sidecar_timeout"),
    ):
        with pytest.raises(jaxserve.ConfigError, match=f"^{name} "):
            jaxserve.EngineConfig.from_options("m", options)
    assert jaxserve.EngineConfig(load_format="ipc_cache").uses_sidecar


def test_an_owner_of_kv_pools_alone_needs_no_jax(tmp_path):
    with process(tmp_path / "p") as sidecar:
        index, records = sidecar.pool("kv", 4096, 4096)
        os.close(index)
        os.close(records)
        maps = Path(f"/proc/{sidecar.pid}/maps").read_text()
        assert "jaxlib" not in maps
