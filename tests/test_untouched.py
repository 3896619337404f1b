"""Zeros that nobody has touched: they are zeros, they take no memory, and they are changed in their place."""

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import untouched
from jaxserve.executables import ExecutableStore, Program
from jaxserve.sharding import make_mesh, sharding

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere zeros are written")

MIB = 1 << 20


def like(shape: tuple[int, ...], dtype: str, devices: int = 1, axes: tuple = ()) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding(make_mesh(devices), axes))


def program(shapes: object) -> Program:
    places = jax.tree.map(lambda s: s.sharding, shapes)
    return Program("zeros", lambda: untouched.zeros(shapes), (), out_shardings=places, about=str(shapes))


def store(folder: Path, devices: int = 1) -> ExecutableStore:
    return ExecutableStore(folder, jax.devices()[:devices])


def own_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_nothing_is_touched_and_changes_are_made_in_place(tmp_path: Path):
    shapes = [like((64, MIB), "float32"), like((3,), "int32")]
    made, change = store(tmp_path).build(program(shapes)), jax.jit(lambda x: x.at[5, 7].set(2.0), donate_argnums=0)
    change(jnp.zeros((64, MIB), jnp.float32)).block_until_ready()
    before = own_bytes()
    big, small = jax.block_until_ready(made())
    assert own_bytes() - before < 32 * MIB
    where = big.unsafe_buffer_pointer()
    big = change(big).block_until_ready()
    assert big.unsafe_buffer_pointer() == where
    assert own_bytes() - before < 32 * MIB
    assert np.asarray(big[5, 7]) == 2.0
    assert not np.asarray(small).any()
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(big[5])), [7])


@pytest.mark.parametrize("dtype", sorted(untouched._CODES))
def test_memory_that_others_have_left_dirty_is_zeros_all_the_same(tmp_path: Path, dtype: str):
    """malloc hands out again what was freed: the pages, and the beginning and the end between two pages."""
    shapes = [like((MIB + 4099 * i,), dtype) for i in range(4)]
    make = store(tmp_path).build(program(shapes))
    dirty = jax.jit(lambda: [jnp.ones(s.shape, s.dtype) for s in shapes])
    for _ in range(3):
        left = jax.block_until_ready(dirty())
        del left
        for array in jax.block_until_ready(make()):
            assert array.dtype == jnp.dtype(dtype)
            assert not np.asarray(array).view(np.uint8).any()


@pytest.mark.parametrize("start", [0, 1, 64, 4095, 4096])
@pytest.mark.parametrize("size", [1, 100, 4096, 9000, 3 * 4096])
def test_clearing_stays_within_its_bounds(start: int, size: int):
    room = np.full(8 * 4096, 255, np.uint8)
    base = -room.ctypes.data % 4096 + start
    untouched.clear(room.ctypes.data + base, size)
    assert not room[base : base + size].any()
    assert room[:base].all()
    assert room[base + size :].all()


def test_a_kernel_that_refuses_is_no_trouble(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(untouched, "_madvise", lambda *_: -1)
    room = (ctypes.c_uint8 * 20_000)(*([7] * 20_000))
    untouched.clear(ctypes.addressof(room), 20_000)
    assert not any(room)


def test_each_device_makes_its_own_part(tmp_path: Path):
    shapes = [like((4, 4 * MIB), "bfloat16", 4, ("kv_heads", None)), like((MIB,), "float32", 4)]
    split, whole = store(tmp_path, 4).build(program(shapes))()
    assert {piece.data.shape for piece in split.addressable_shards} == {(1, 4 * MIB)}
    assert whole.sharding == shapes[1].sharding
    assert not np.asarray(split).any()
    assert not np.asarray(whole).any()


def test_it_is_stored_and_loaded(tmp_path: Path):
    shapes = [like((2 * MIB,), "float32")]
    store(tmp_path).build(program(shapes))
    again = store(tmp_path)
    (found,) = again.build(program(shapes))()
    assert again.tally.loaded == 1
    assert not np.asarray(found).any()
