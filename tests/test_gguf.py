"""GGUF files: what is read equals the package's own dequantizer and the Hugging Face checkpoint it came from."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import checkpoints
from checkpoints import CheckpointError
from checkpoints.gguf import GgufCheckpoint

FIXTURES = Path(__file__).parent / "fixtures" / "models"
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)
SCALES = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}  # where a block keeps its float16 scales

INVERSE = (
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm", r"blk.\1.attn_\2_norm"),
    (r"model\.layers\.(\d+)\.mlp\.(\w+)_proj", r"blk.\1.ffn_\2"),
)


def encode(array: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of ``array`` in ``kind``; random blocks for the kinds the package can only read."""
    if kind not in SCALES:
        return gguf.quants.quantize(array, kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (array.size // elements, nbytes), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return blocks.reshape(array.shape[0], -1)


def write_gguf(path: Path, arch: str = "llama", tensors=None, omit=(), **metadata) -> Path:
    """A GGUF file of a one-layer model; ``metadata`` keys have ``__`` for a dot and lack the architecture."""
    values = {
        "block_count": 1,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "context_length": 128,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "attention__layer_norm_rms_epsilon": 1e-5,
    } | metadata
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        name = key.replace("__", ".")
        if name in omit:
            continue
        name = name if name.startswith(("tokenizer.", "split.")) else f"{arch}.{name}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        (writer.add_bool if isinstance(value, bool) else add[type(value)])(name, value)
    if tensors is None:
        tensors = {"token_embd.weight": (np.ones((32, 64), np.float32), Kind.F32)}
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def embedded_with(tensors: dict) -> dict:
    return {"token_embd.weight": (np.ones((32, 64), np.float32), Kind.F32)} | tensors


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_equal_the_packages_dequantizer(tmp_path, kind):
    array = np.random.default_rng(0).normal(size=(96, 512)).astype(np.float32)
    data = encode(array, kind)
    path = write_gguf(tmp_path / "m.gguf", tensors=embedded_with({"blk.0.ffn_down.weight": (data, kind)}))
    expected = gguf.quants.dequantize(data.view(np.uint8) if kind == Kind.BF16 else data, kind).reshape(array.shape)
    name = "model.layers.0.mlp.down_proj.weight"
    with checkpoints.open_checkpoint(path) as ckpt:
        info = ckpt.tensors[name]
        assert (info.shape, info.encoding) == (array.shape, kind.name)
        assert info.nbytes == data.nbytes
        assert ckpt.read(name).dtype == info.dtype
        index = np.array([95, 0, 1, 2, 40, 0, 39, 38])
        for rows in (None, slice(0, 1), slice(5, 80), slice(None, None, 9), slice(4, 4), index):
            wanted = expected if rows is None else expected[rows]
            np.testing.assert_array_equal(ckpt.read(name, rows).astype(np.float32), wanted)


def gguf_layout(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter leaves them: rotary pairs side by side."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


@pytest.mark.parametrize("family", ["llama3", "smollm2", "qwen2", "qwen3", "ministral3"])
def test_hf_checkpoint_survives_gguf(tmp_path, family):
    arch = {"llama3": "llama", "smollm2": "llama", "ministral3": "mistral3"}.get(family, family)
    with checkpoints.open_checkpoint(FIXTURES / family) as source:
        hf = source.config
        original = {name: source.read(name) for name in source.tensors}
    tensors = {}
    for name, array in original.items():
        if arch in ("llama", "mistral3") and re.search(r"\.[qk]_proj\.", name):
            heads = hf["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            array = gguf_layout(array, heads)
        for pattern, replacement in INVERSE:
            name = re.sub("^" + pattern, replacement, name)
        tensors[name] = (array, Kind.F32)
    rope, metadata = hf["rope_parameters"], {}
    if rope["rope_type"] == "yarn":
        metadata = {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": rope["factor"],
            "rope__scaling__original_context_length": rope["original_max_position_embeddings"],
            "rope__scaling__yarn_beta_fast": rope["beta_fast"],
            "rope__scaling__yarn_log_multiplier": rope["mscale_all_dim"],
            "attention__temperature_scale": rope["llama_4_scaling_beta"],
        }
    head_dim = hf.get("head_dim") or 16
    path = write_gguf(
        tmp_path / "m.gguf",
        arch,
        tensors,
        block_count=3,
        feed_forward_length=128,
        context_length=256,
        attention__head_count_kv=hf["num_key_value_heads"],
        attention__layer_norm_rms_epsilon=hf["rms_norm_eps"],
        attention__key_length=head_dim,
        attention__value_length=head_dim,
        rope__freq_base=float(rope["rope_theta"]),
        **metadata,
    )
    with checkpoints.open_checkpoint(path) as ckpt:
        assert set(ckpt.tensors) == set(original)
        for name, array in original.items():
            np.testing.assert_array_equal(ckpt.read(name), array)
            rows = np.random.default_rng(0).permutation(array.shape[0])[:7]
            np.testing.assert_array_equal(ckpt.read(name, rows), array[rows])
            np.testing.assert_array_equal(ckpt.read(name, slice(1, 9)), array[1:9])
        for key, value in ckpt.config.items():
            if key in hf and key not in ("rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"):
                assert value == hf[key], key
        if rope["rope_type"] != "llama3":  # in a GGUF that is a tensor of factors
            for key, value in ckpt.config["rope_parameters"].items():
                assert rope[key] == value, key


def rope_of(tmp_path: Path, **metadata) -> dict:
    with checkpoints.open_checkpoint(write_gguf(tmp_path / "m.gguf", **metadata)) as ckpt:
        assert ckpt.config["rope_theta"] == ckpt.config["rope_parameters"]["rope_theta"]
        return ckpt.config["rope_parameters"]


def test_rope_scaling(tmp_path):
    assert rope_of(tmp_path) == {"rope_type": "default", "rope_theta": 10000.0}
    assert rope_of(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0) == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = embedded_with({"rope_freqs.weight": (factors, Kind.F32)})
    rope = rope_of(tmp_path, tensors=tensors, rope__freq_base=5e5)
    assert rope == {"rope_type": "factors", "rope_theta": 5e5, "factors": factors.tolist()}
    with pytest.raises(CheckpointError, match="rope scaling 'longrope' is not supported"):
        rope_of(tmp_path, rope__scaling__type="longrope", rope__scaling__factor=4.0)
    with pytest.raises(CheckpointError, match=r"llama\.rope\.scaling\.yarn_ext_factor = 0\.5 is not supported"):
        rope_of(
            tmp_path,
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=32,
            rope__scaling__yarn_ext_factor=0.5,
        )
    short = embedded_with({"rope_freqs.weight": (factors[:4], Kind.F32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold 8 positive numbers"):
        rope_of(tmp_path, tensors=short)


def test_config_details(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        attention__sliding_window=64,
        tokenizer__ggml__eos_token_id=3,
        tokenizer__ggml__eot_token_id=5,
        tokenizer__ggml__bos_token_id=1,
    )
    with checkpoints.open_checkpoint(path) as ckpt:
        assert (ckpt.config["model_type"], ckpt.config["sliding_window"]) == ("mistral", 64)
        assert ckpt.config["tie_word_embeddings"] is True
        assert ckpt.config["vocab_size"] == 32
        assert ckpt.config["rms_norm_eps"] == 1e-5
        assert ckpt.generation_config == {"bos_token_id": 1, "eos_token_id": [3, 5]}
        assert ckpt.asset("tokenizer.json") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "gemma3"}, r"architecture 'gemma3' is not supported in GGUF; supported: llama"),
        ({"expert_count": 8}, r"llama\.expert_count = 8 is not supported"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5 is not supported"),
        ({"omit": ("block_count",)}, r"llama\.block_count must be an integer, is None"),
        ({"attention__head_count": [4, 2]}, r"llama\.attention\.head_count must be an integer, is \[4, 2\]"),
        ({"attention__layer_norm_rms_epsilon": "x"}, r"layer_norm_rms_epsilon must be a number, is 'x'"),
        ({"attention__head_count": 0}, r"llama\.attention\.head_count must be positive, is 0"),
        ({"embedding_length": 0}, r"embedding_length must be positive"),
        ({"split__count": "2"}, r"split\.count must be an integer, is '2'"),
        ({"tokenizer__ggml__bos_token_id": "<s>"}, r"bos_token_id must be an integer, is '<s>'"),
        ({"attention__value_length": 8}, r"value_length differs"),
        ({"split__count": 2}, r"is one of 2 parts"),
        ({"tensors": {}}, r"no tensor token_embd\.weight"),
        (
            {"tensors": embedded_with({"blk.0.ffn_gate_exps.weight": (np.ones((2, 32), np.float32), Kind.F32)})},
            r"tensor blk\.0\.ffn_gate_exps\.weight is not one a dense decoder has",
        ),
        (
            {"tensors": embedded_with({"blk.0.ffn_up.weight": (np.zeros((2, 22), np.uint8), Kind.Q5_0)})},
            r"tensor blk\.0\.ffn_up\.weight is of type Q5_0, which is not supported; F32, F16",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, arguments, message):
    path = write_gguf(tmp_path / "m.gguf", **arguments)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoints.open_checkpoint(path)
    assert str(path) in str(error.value)


def test_every_truncation_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", tokenizer__ggml__tokens=["a", "bc", "def"]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 600, 7), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            checkpoints.open_checkpoint(cut)


def test_random_damage_never_escapes_as_another_error(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", tokenizer__ggml__tokens=["a", "bc", "def"]).read_bytes()
    rng = np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    refused = read = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, 700, 3):
            data[at] = rng.integers(0, 256)
        broken.write_bytes(data)
        try:
            checkpoints.open_checkpoint(broken).close()
        except CheckpointError as error:
            refused += "broken.gguf" in str(error)
        else:
            read += 1
    assert refused > 100
    assert refused + read == 300


def test_wrong_magic_and_version(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(CheckpointError, match=r"m\.gguf: is not a GGUF file"):
        checkpoints.open_checkpoint(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1 is not supported"):
        checkpoints.open_checkpoint(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(CheckpointError, match="big-endian"):
        checkpoints.open_checkpoint(path)


def test_fingerprint_follows_the_content(tmp_path):
    prints = set()
    for context in (128, 256):
        path = write_gguf(tmp_path / "m.gguf", context_length=context)
        with checkpoints.open_checkpoint(path) as ckpt:
            assert ckpt.fingerprint() == ckpt.fingerprint()
            prints.add(ckpt.fingerprint())
    assert len(prints) == 2


def test_embedded_model():
    try:
        path = checkpoints.resolve_model("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))
    with checkpoints.open_checkpoint(path) as ckpt:
        assert isinstance(ckpt, GgufCheckpoint)
        assert len(ckpt.tensors) == 272
        assert ckpt.config["tie_word_embeddings"]
        rows = ckpt.read("model.embed_tokens.weight", np.array([49151, 5, 6]))
        np.testing.assert_array_equal(rows, ckpt.read("model.embed_tokens.weight")[[49151, 5, 6]])
