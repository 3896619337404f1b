"""The host and the disk tier on a real tiny model: damage, restarts, hanging up; never a wrong token, nothing left."""

import shutil
import threading

import jax
import numpy as np
import pytest
from test_prefix_engine import ASKS, CROWD, texts
from tiny import FIXTURES, idle, roomy

import jaxserve
from benchmarks import tier_stress

SMALL = {"kv_cache_memory_bytes": 300 << 10, "host_kv_gib": 0.0002}


@pytest.fixture(scope="module")
def plain(speaking, programs_dir):
    with roomy(programs_dir, speaking, prefix_caching=False) as made:
        yield made


def value(llm: jaxserve.LLM, name: str, **labels: str) -> float:
    found = llm.metrics.get_sample_value(f"jaxserve:{name}", {"model_name": llm.config.model, "engine": "0", **labels})
    assert found is not None, name
    return found


def damage(llm: jaxserve.LLM) -> int:
    """Flip a bit of every record in host memory."""
    blocks = llm._built.engine.scheduler.cache.tier.blocks()
    for block in blocks:
        (data,) = block.data
        bytes_ = np.array(data).view(np.uint8)
        bytes_.reshape(len(block.keys), -1)[:, 17] ^= 1
        block.data = (jax.device_put(bytes_.view(data.dtype), data.sharding),)
    return sum(block.live for block in blocks)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_damaged_record_is_dropped_and_computed_again(speaking, programs_dir, plain, devices, caplog):
    expected, _ = texts(plain, CROWD, max_tokens=20)
    limits = {"kv_cache_memory_bytes": (300 << 10) // devices, "host_kv_gib": 0.001, "tensor_parallel": devices}
    with roomy(programs_dir, speaking, **limits, kv_checksums=True) as checked:
        for _ in range(2):
            assert texts(checked, CROWD, max_tokens=20)[0] == expected
        assert value(checked, "host_kv_dropped_pages_total", reason="damaged") == 0
        assert value(checked, "prompt_tokens_cached_by_source_total", source="host") > 0
        assert damage(checked) > 0
        assert texts(checked, CROWD, max_tokens=20)[0] == expected
        assert value(checked, "host_kv_dropped_pages_total", reason="damaged") > 0
        assert "damaged" in caplog.text


def test_a_restart_keeps_what_was_on_the_device_and_on_the_host(speaking, programs_dir, plain, tmp_path):
    prompts = [*ASKS, *CROWD]
    expected, _ = texts(plain, prompts)
    room = {**SMALL, "disk_kv_path": str(tmp_path / "kv"), "disk_kv_gib": 0.01}
    with roomy(programs_dir, speaking, **room) as first:
        assert first.report()["kv cache"]["disk_tokens_that_fit"] > 1000
        assert texts(first, prompts)[0] == expected
        assert value(first, "kv_store_bytes_total", store="disk", way="write") > 0
    with roomy(programs_dir, speaking, **room) as second:
        assert second.report()["kv cache"]["disk_tokens_there"] > 500
        found, cached = texts(second, prompts)
        assert found == expected
        assert all(tokens >= len(prompt) // 8 * 8 - 8 for tokens, prompt in zip(cached, prompts, strict=True))
        assert value(second, "prompt_tokens_cached_by_source_total", source="disk") > 500
        assert second.compilations_after_ready == 0
        assert not second._built.engine.scheduler.cache.stores.reading


def test_damaged_pages_on_disk_are_computed_again(speaking, programs_dir, plain, tmp_path, caplog):
    expected, _ = texts(plain, ASKS)
    room = {**SMALL, "disk_kv_path": str(tmp_path / "kv"), "disk_kv_gib": 0.01}
    with roomy(programs_dir, speaking, **room) as first:
        texts(first, ASKS)
    (file,) = (tmp_path / "kv").rglob("records")
    data = bytearray(file.read_bytes())
    data[5 :: 1 << 10] = bytes(255 - byte for byte in data[5 :: 1 << 10])
    file.write_bytes(data)
    with roomy(programs_dir, speaking, **room) as second:
        found, cached = texts(second, ASKS)
        assert found == expected
        assert cached[0] == 0
        assert value(second, "kv_store_dropped_pages_total", store="disk", reason="damaged") > 0
    assert "damaged" in caplog.text


def test_another_model_of_the_same_shape_finds_nothing(speaking, programs_dir, tmp_path):
    import safetensors.numpy

    other = tmp_path / "other"
    shutil.copytree(speaking, other)
    (file,) = other.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("k_proj.weight"))
    tensors[name].reshape(-1)[-1] *= -1  # one number of one weight
    safetensors.numpy.save_file(tensors, file)
    room = {**SMALL, "disk_kv_path": str(tmp_path / "kv"), "disk_kv_gib": 0.01}
    with roomy(programs_dir, speaking, **room) as first:
        texts(first, ASKS)
    with roomy(programs_dir, other, **room) as second:
        assert second.report()["kv cache"]["disk_tokens_there"] == 0
        assert texts(second, ASKS[:1])[1] == [0]


def test_hanging_up_while_pages_come_from_the_disk_leaves_nothing(speaking, programs_dir, plain, tmp_path):
    expected, _ = texts(plain, ASKS)
    room = {**SMALL, "disk_kv_path": str(tmp_path / "kv"), "disk_kv_gib": 0.01}
    with roomy(programs_dir, speaking, **room) as first:
        texts(first, ASKS)
    with roomy(programs_dir, speaking, **room) as second:
        disk = second._built.engine.scheduler.cache.stores
        gate, asked = threading.Event(), threading.Event()
        read = disk._read

        def slow(keys):
            asked.set()
            assert gate.wait(30)
            return read(keys)

        disk._read = slow
        params = jaxserve.SamplingParams(max_tokens=4, temperature=0.0)
        ended = threading.Event()
        request = second.submit(ASKS[0], params, on_delta=lambda delta: delta.request_done and ended.set())
        assert asked.wait(30)
        (other,) = second.generate("Nobody has to wait for another's pages.", max_tokens=4, temperature=0.0)
        assert other.outputs[0].finish_reason == "length"
        assert not ended.is_set()
        second.abort(request)
        assert ended.wait(30)
        gate.set()
        assert texts(second, ASKS)[0] == expected
        idle(second)
        tier_stress.check_idle(second)
        second._built.engine.scheduler.cache.tier.check()


def test_rounds_of_shared_beginnings_with_aborts_over_too_little_memory(programs_dir):
    """The benchmark's stress, shortened; the whole is ``python -m benchmarks tiers stress``."""
    found = tier_stress.stress(FIXTURES / "llama3", 12, cache_dir=programs_dir)
    assert found["whole"] > 12 * 4 * 10
    assert found["disk"]["written"] > 50
    assert found["disk"]["read"] > 50
    for name in ("tier", "tight"):
        assert found[name]["spilled"] > 100
        assert found[name]["restored"] > (100 if name == "tier" else 0)


def test_options_that_cannot_be_are_refused(speaking, programs_dir, tmp_path):
    for options, named in (
        ({"disk_kv_path": ""}, "disk_kv_path"),
        ({"disk_kv_path": str(tmp_path), "host_kv_gib": 0}, "host_kv_gib"),
        ({"disk_kv_path": str(tmp_path), "prefix_caching": False}, "prefix_caching"),
        ({"disk_kv_gib": 1}, "disk_kv_path"),
        ({"disk_kv_path": str(tmp_path), "disk_kv_gib": -1}, "disk_kv_gib"),
        ({"disk_kv_path": str(tmp_path), "disk_kv_gib": 2**19}, "has room for"),
        ({"kv_checksums": True, "host_kv_gib": 0}, "kv_checksums"),
    ):
        with pytest.raises(jaxserve.ConfigError, match=named):
            roomy(programs_dir, speaking, **options)
