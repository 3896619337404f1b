"""Pages to blocks and back: both forms of the programs agree in every bit, and the memory of blocks is used again."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import transfers
from jaxserve.block_pool import KEPT, BlockPool
from jaxserve.cache_spec import FP8, CacheSpec, HeadPages, KeyPages, LatentPages, LayerCache
from jaxserve.host_tier import Block
from jaxserve.records import rows

SIZE, PAGES = 8, 12
HEADS = HeadPages((0, 1, 2), 16, "bfloat16")
PLANES = {
    "heads": [(HEADS,)] * 3,
    "fp8": [(HeadPages((0, 1), 16, FP8),)] * 2,
    "latents and keys": [(LatentPages(32, 8, "bfloat16"), KeyPages(16, "bfloat16"))] * 2 + [(HEADS,)] * 2,
}


def pages(kind, rng):
    shape = (PAGES, *kind.page(SIZE))
    dtype = jnp.dtype(kind.dtype)
    bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return jnp.asarray(bits.view(dtype))  # NaNs too: pages are copied, not read


@pytest.fixture(params=PLANES)
def cache(request):
    planes = PLANES[request.param]
    return CacheSpec(tuple(planes), tuple(LayerCache(i, 0) for i in range(len(planes))), (None,))


def made(cache, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(pages(kind, rng) for kind in plane) for plane in cache.planes]


def bits(tree):
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def same(one, other):
    assert jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, other)
    return all(np.array_equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def spill_in_turn(cache):
    return jax.jit(lambda block, kv, where: transfers.spill_in_turn(cache, block, kv, where), donate_argnums=0)


def restore_in_turn(cache):
    return jax.jit(lambda kv, block, where: transfers.restore_in_turn(cache, kv, block, where), donate_argnums=0)


def test_both_forms_move_the_same_bits(cache):
    kv, where, back = made(cache), jnp.array([5, 1, 11, 7]), jnp.array([2, 0, 9, 0])
    block = transfers.spill_pages(cache, SIZE, kv, where)
    blank = jax.tree.map(lambda part: jnp.full(part.shape, 7, part.dtype), block)
    assert same(spill_in_turn(cache)(blank, kv, where), block)
    expected = bits(transfers.restore_pages(cache, made(cache, 1), block, back))
    found = bits(restore_in_turn(cache)(made(cache, 1), block, back))
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one[1:], other[1:])  # page 0 is where nobody looks
    assert not same(restore_in_turn(cache)(made(cache, 1), block, where), made(cache, 1))


def test_a_record_comes_back_to_another_page_as_it_was(cache):
    kv = made(cache)
    before = bits(kv)
    block = spill_in_turn(cache)(transfers.spill_pages(cache, SIZE, kv, jnp.array([0, 0])), kv, jnp.array([3, 4]))
    after = bits(restore_in_turn(cache)(kv, block, jnp.array([8, 3])))
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(new[8], old[3])
        assert np.array_equal(new[3], old[4])
        rest = [page for page in range(PAGES) if page not in (3, 8)]
        assert np.array_equal(new[rest], old[rest])


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
@pytest.mark.parametrize("source", [(0, 0, 1, 1), (0, 1, 2, -1), (0, 0, 0, 1, 1, 1, -1, -1)])
def test_heads_that_devices_repeat_or_pad_are_recorded_once_and_come_back_to_all(source, dtype) -> None:
    """Records are those of the model's own heads, so that engines of other numbers of devices can read them."""
    heads, model = np.array(source), max(source) + 1
    plain, ours = HeadPages(tuple(range(model)), 16, dtype), HeadPages(source, 16, dtype)
    one, many = (CacheSpec(((kind,),) * 2, (LayerCache(0, 0), LayerCache(1, 0)), (None,)) for kind in (plain, ours))
    theirs = made(one)
    kv = [(array[:, :, np.maximum(heads, 0)],) for (array,) in theirs]
    where, back = jnp.array([5, 1, 11]), jnp.array([2, 9, 4])
    block = transfers.spill_pages(many, SIZE, kv, where)
    assert same(block, transfers.spill_pages(one, SIZE, theirs, where))
    blank = made(many, 1)
    restored = transfers.restore_pages(many, blank, block, back)
    rest = np.setdiff1d(np.arange(PAGES), back)
    for new, old, before in zip(bits(restored), bits(kv), bits(blank), strict=True):
        assert np.array_equal(new[back][:, :, heads >= 0], old[where][:, :, heads >= 0])
        assert np.array_equal(new[rest], before[rest])


@pytest.mark.parametrize("count", [1, 4])
def test_in_turn_pages_are_moved_by_one_function_in_place(cache, count):
    """What makes them quick: one call in the compiled program, which copies no whole array."""
    kv, where = made(cache), jnp.array([5, 1, 11, 7])[:count]
    block = transfers.spill_pages(cache, SIZE, kv, where)
    for program, args in ((spill_in_turn(cache), (block, kv, where)), (restore_in_turn(cache), (kv, block, where))):
        text = program.lower(*args).compile().as_text()
        entry = text[text.index("ENTRY") :]
        assert entry.count(" call(") == 1
        assert "xla_cpu_small_call" in entry
        assert not [line for line in text.splitlines() if " copy(" in line and "s32[] copy(" not in line]


def test_the_memory_of_a_block_that_is_gone_is_used_again(cache):
    kv, where = made(cache), jnp.array([5, 1])
    spill = spill_in_turn(cache)
    blanks = []

    def make(records):
        blanks.append(jax.tree.map(jnp.copy, transfers.spill_pages(cache, SIZE, kv, jnp.zeros(records, jnp.int32))))
        return blanks.pop()

    def spilled():
        block = Block([b"a", b"b"])
        block.data = spill(pool.take(2), kv, where)
        pool.watch(block)
        return block, [part.unsafe_buffer_pointer() for part in block.data]

    pool = BlockPool(make)
    first, places = spilled()
    second, others = spilled()
    assert not set(places) & set(others), "a block that is known is not written to"
    text = rows(first.data).copy()  # as a store reads it
    del first
    gc.collect()
    third, again = spilled()
    assert again == places
    assert np.array_equal(rows(third.data), text)
    assert np.array_equal(rows(second.data), text)


def test_unused_memory_is_bounded():
    made = []
    pool = BlockPool(lambda records: made.append(records) or len(made))
    blocks = []
    for _ in range(KEPT + 3):
        blocks.append(Block([b"x"] * 4, pool.take(4)))
        pool.watch(blocks[-1])
    blocks.clear()
    gc.collect()
    for _ in range(KEPT + 3):
        pool.take(4)
    assert len(made) == 2 * (KEPT + 3) - KEPT
    pool.take(8)
    assert made[-1] == 8
