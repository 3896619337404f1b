"""Copies between a pool of records and the latents, against numpy: by jnp, and by the CUDA functions built
for a CPU, which XLA calls as it will call those for a GPU."""

import mmap
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import host_rows, resolver
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.host_rows import Pinned, build, foreign

P, G, FRAMES = 6, 4, 5
RECORDS = [(656, np.uint8), (576, np.float32), (10, np.float32), (13, np.uint8)]
"""Published; more than a warp has in flight; whole words of 32 bits; single bytes."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory):
    """Built for the device that is at hand."""
    path = tmp_path_factory.mktemp("host_rows") / "librows.so"
    gpu = jax.default_backend() != "cpu"
    if (build.find_nvcc() if gpu else shutil.which("c++")) is None:
        pytest.skip("there is no compiler")
    (build.cuda if gpu else build.cpu)(path)
    return foreign.load(path, "CUDA" if gpu else "cpu")


@pytest.fixture(params=["array", "pinned"])
def pool_of(request: pytest.FixtureRequest):
    """Makes a pool of ``memory [P, G, n]``."""
    if request.param == "array":
        yield lambda memory: jnp.array(memory)
        return
    library, pinned = request.getfixturevalue("library"), []

    def pin(memory: np.ndarray) -> Pinned:
        pinned.append(memory)
        return Pinned.at(foreign.pin(library, memory), memory.shape[0] * memory.shape[1])

    yield pin
    for memory in pinned:
        foreign.unpin(library, memory)


def random_records(rng: np.random.Generator, count: int, size: int, width: int, dtype: type) -> np.ndarray:
    """``[count, size, width]`` in memory pages of their own."""
    raw = np.frombuffer(mmap.mmap(-1, count * size * width * np.dtype(dtype).itemsize), np.uint8)
    raw[:] = rng.integers(0, 100, len(raw))
    return raw.view(dtype).reshape(count, size, width)


def held(pool, memory: np.ndarray) -> np.ndarray:
    """What the pool holds now."""
    jax.block_until_ready(pool)
    return memory if isinstance(pool, Pinned) else np.asarray(pool)


@pytest.mark.parametrize(("width", "dtype"), RECORDS)
def test_fetch(pool_of, width: int, dtype: type) -> None:
    """Rows of both ends, -1 in either array, rows beyond either."""
    rng = np.random.default_rng(width)
    memory = random_records(rng, P, G, width, dtype)
    latents = random_records(rng, FRAMES, G, width, dtype)
    sources = np.array([[0, 23, 5, -1, 7, 24, 3, 9], [11, 5, -1, -1, -1, -1, -1, 1]], np.int32)
    targets = np.array([[19, 0, -1, 4, 8, 9, 20, 10], [3, 2, -1, -1, -1, -1, -1, 18]], np.int32)
    expected = latents.copy().reshape(-1, width)
    for source, target in [(0, 19), (23, 0), (7, 8), (9, 10), (11, 3), (5, 2), (1, 18)]:
        expected[target] = memory.reshape(-1, width)[source]
    got = jax.jit(host_rows.fetch)(pool_of(memory), sources, latents, targets)
    np.testing.assert_array_equal(np.asarray(got).reshape(-1, width), expected)


@pytest.mark.parametrize(("width", "dtype"), RECORDS)
def test_write(pool_of, width: int, dtype: type) -> None:
    """Whether or not the pool is asked for afterwards."""
    rng = np.random.default_rng(width)
    memory = random_records(rng, P, G, width, dtype)
    records = random_records(rng, 5, 1, width, dtype)[:, 0]
    expected = memory.copy().reshape(-1, width)
    expected[[23, 0, 6]] = records[[0, 2, 4]]
    pool = pool_of(memory)
    pool = jax.jit(host_rows.write)(pool, records, np.array([23, -1, 0, 24, 6], np.int32))
    np.testing.assert_array_equal(held(pool, memory).reshape(-1, width), expected)


def test_fetching_is_by_chunks_to_the_last_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows.reference, "CHUNK", 6)
    memory = np.arange(100, dtype=np.float32).reshape(20, 5, 1)
    for width in (1, 7, 9):
        for last in range(width):
            sources = np.full((2, width), -1, np.int32)
            sources[1, [0, last]] = [30, 31 + last]
            targets = np.where(sources < 0, -1, sources - 30)
            got = host_rows.fetch(jnp.array(memory), sources, jnp.zeros((11, 1, 1)), targets)
            assert sorted(np.flatnonzero(got)) == sorted({31 + last - 30} | ({0} if last else set()))


def test_in_one_program_a_fetch_sees_what_was_written_before(pool_of) -> None:
    rng = np.random.default_rng(0)
    memory = random_records(rng, P, G, 656, np.uint8)
    records = random_records(rng, 3, 1, 656, np.uint8)[:, 0]

    def both(pool, latents):
        pool = host_rows.write(pool, records, jnp.array([5, 9, 1]))
        latents = host_rows.fetch(pool, jnp.array([9, 5]), latents, jnp.array([2, 0]))
        pool = host_rows.write(pool, records[::-1], jnp.array([5, -1, -1]))
        return pool, host_rows.fetch(pool, jnp.array([5]), latents, jnp.array([1]))

    pool, latents = jax.jit(both)(pool_of(memory), np.zeros((1, 4, 656), np.uint8))
    np.testing.assert_array_equal(latents[0, :3], records[[0, 2, 1]])
    np.testing.assert_array_equal(held(pool, memory).reshape(-1, 656)[[5, 9, 1]], records[[2, 1, 2]])


def test_every_entry_is_copied_once(pool_of) -> None:
    """More entries than warps look at in a turn: all rows of the pool, in any order, among entries that are none."""
    rng = np.random.default_rng(6)
    memory = random_records(rng, 150, G, 16, np.uint8)
    rows, where = rng.permutation(150 * G).astype(np.int32), np.sort(rng.permutation(4 * 250)[: 150 * G])
    sources, targets = np.full((2, 4 * 250), -1, np.int32)
    sources[where], targets[where] = rows, np.arange(150 * G)
    latents = jnp.zeros((150, G, 16), jnp.uint8)
    plan = sources.reshape(4, 250), latents, targets.reshape(4, 250)
    got = jax.jit(host_rows.fetch)(pool_of(memory), *plan)
    np.testing.assert_array_equal(got.reshape(-1, 16), memory.reshape(-1, 16)[rows])


def test_unaligned_memory(library) -> None:
    rng = np.random.default_rng(4)
    memory = random_records(rng, P, G, 656, np.uint8)
    address = foreign.pin(library, memory)
    for shift in (1, 4, 8):
        moved, pool = memory.reshape(-1)[shift : shift + 10 * 656].reshape(10, 1, 656), Pinned.at(address + shift, 10)
        got = jax.jit(host_rows.fetch)(pool, np.array([9, 0]), np.zeros((2, 1, 656), np.uint8), np.array([0, 1]))
        np.testing.assert_array_equal(got, moved[[9, 0]])
    foreign.unpin(library, memory)


def test_latents_stay_where_they_are(pool_of) -> None:
    latents = jax.ShapeDtypeStruct((4096, 32, 656), jnp.uint8)
    plan = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    pool = jax.eval_shape(lambda: pool_of(np.zeros((2, 32, 656), np.uint8)))
    compiled = jax.jit(host_rows.fetch, donate_argnums=2).lower(pool, plan, latents, plan).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == 4096 * 32 * 656
    assert analysis.temp_size_in_bytes < 4096 * 32 * 656 // 8


@pytest.mark.parametrize("shape", [(2, 3, 4, 9, 4), (2, 40, 90, 30, 32), (3, 500, 1600, 60, 64)])
def test_the_resolver_for_a_gpu(library, shape: tuple[int, ...]) -> None:
    """All that the reference answers, over many steps: more entries than slots, less than threads, several a thread."""
    queries, top_k, slots, width, size = shape
    rows, regions, steps = 3, 4, 100 if slots < 1000 else 8
    rng = np.random.default_rng(slots)
    length = width * size
    popular = rng.permutation(length + 3)[: slots + 5] - 1  # beyond the tables too, and -1
    chosen = popular[(len(popular) * rng.random((steps, rows, queries, top_k)) ** 2).astype(int)].astype(np.int32)
    pages = np.broadcast_to(rng.permutation(rows * width).reshape(rows, width), (steps, rows, width)).astype(np.int32)
    frames = np.where(rng.random((steps, rows, width)) < 0.3, rng.integers(0, 50, pages.shape), -1).astype(np.int32)
    whose = np.stack([rng.permutation(regions + 1)[:rows] for _ in range(steps)])  # one region too many: none
    whose = np.where(rng.random(whose.shape) < 0.2, -2 - whose, whose).astype(np.int32)
    whose[::7, 0] = resolver.NO_REGION

    def run(resolve):
        def one(hot, now):
            plan, hot = resolve(*now, hot, page_size=size, first=77)
            return hot, (plan, hot)

        return jax.jit(lambda *args: jax.lax.scan(one, resolver.empty(regions, slots), args)[1])(
            chosen, pages, frames, whose
        )

    expected, got = run(resolver.resolve), run(resolver.foreign.resolve)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(np.asarray(count).any() for count in (expected[0].hits, expected[0].misses, expected[0].lost))


def test_which_resolver_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case, hopper = resolver.Case(2048, 4096), Kernels("auto", "NVIDIA H200", "9.0")
    assert "no NVIDIA GPU" in str(resolver.choose(case, Kernels()))
    assert "kernels is reference" in str(resolver.choose(case, REFERENCE))
    monkeypatch.setattr(resolver.foreign, "unavailable", lambda: "there is no library")
    assert str(resolver.choose(case, hopper)) == "reference (foreign: there is no library)"
    monkeypatch.setattr(resolver.foreign, "unavailable", lambda: None)
    assert str(resolver.choose(case, hopper)) == "foreign"
    assert "do not fit shared memory" in str(resolver.choose(resolver.Case(16384, 32768), hopper))


def test_what_is_read_after_a_plan_is_what_was_chosen(pool_of) -> None:
    """The resolver and the copies together, over texts that grow, pages that come and go, regions that change hands:
    every row read is the record of the position that was chosen."""
    rng = np.random.default_rng(5)
    rows, queries, top_k, width, regions, slots = 3, 2, 4, 20, 3, 8
    size = 656
    memory = random_records(rng, rows * width, G, size, np.uint8)
    first, pages = FRAMES * G, rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    latents = jnp.full((FRAMES + regions * slots // G, G, size), 0xA5, jnp.uint8)
    hot, pool = resolver.empty(regions, slots), pool_of(memory)

    @partial(jax.jit, donate_argnums=(0, 5, 6))
    def step(latents, positions, pages, frames, whose, hot, pool, records, host, frame):
        latents = latents.reshape(-1, size).at[jnp.where(frame < 0, latents.size, frame)].set(records, mode="drop")
        latents = latents.reshape(-1, G, size)
        pool = host_rows.write(pool, records, host)
        plan, hot = resolver.resolve(positions, pages, frames, whose, hot, page_size=G, first=first)
        latents = host_rows.fetch(pool, plan.sources, latents, plan.targets)
        found = latents.reshape(-1, size)[jnp.maximum(plan.rows, 0)]
        return latents, hot, pool, plan, found

    truth, lengths = memory.copy().reshape(-1, size), rng.integers(20, width * G - 30, rows)
    free = list(range(FRAMES))
    frames, whose = np.full((rows, width), -1, np.int32), np.array([2, 0, 1], np.int32)
    for row, length in enumerate(lengths):
        page = (length - 1) // G
        frames[row, page] = free.pop()
        latents = latents.at[frames[row, page]].set(memory[pages[row, page]])
    for i in range(30):
        if i % 8 == 7:  # two sequences change regions
            whose[:2] = [resolver.emptied(whose[1]), resolver.emptied(whose[0])]
        records = random_records(rng, rows, 1, size, np.uint8)[:, 0]
        for row in range(rows):  # the next token; its page gets a frame, and the one before gives its own back
            page = lengths[row] // G
            if frames[row, page] < 0:
                frames[row, page], frames[row, page - 1] = frames[row, page - 1], -1
            lengths[row] += 1
        last = lengths - 1
        host, frame = (table[np.arange(rows), last // G] * G + last % G for table in (pages, frames))
        truth[host] = records
        positions = np.full((rows, queries, top_k), -1, np.int32)
        for row, query in np.ndindex(rows, queries):
            chosen = rng.choice(lengths[row], top_k - query, replace=False)
            positions[row, query, : len(chosen)] = np.sort(chosen)
        latents, hot, pool, plan, found = step(
            latents, positions, pages, frames.copy(), whose.copy(), hot, pool, records, host, frame
        )
        assert not plan.lost.any()
        where = np.take_along_axis(pages, np.maximum(positions, 0).reshape(rows, -1) // G, axis=1)
        where = where.reshape(positions.shape) * G + positions % G
        np.testing.assert_array_equal(np.asarray(found)[positions >= 0], truth[where[positions >= 0]])
        np.testing.assert_array_equal(plan.rows == -1, positions == -1)
        whose = np.where(whose < resolver.NO_REGION, resolver.emptied(whose), whose)
    np.testing.assert_array_equal(held(pool, memory).reshape(-1, size), truth)


def test_lowered_for_a_gpu() -> None:
    """The calls are in the program, in place, and a write is kept though nothing uses what it returns."""

    def call(pool, latents, rows):
        host_rows.write(pool, latents[0], rows)
        return host_rows.fetch(pool, rows, latents, rows)

    pool = Pinned(jax.ShapeDtypeStruct((2,), jnp.uint32), 1 << 33)
    shapes = jax.ShapeDtypeStruct((8, 4, 656), jnp.uint8), jax.ShapeDtypeStruct((4,), jnp.int32)
    text = jax.jit(call).trace(pool, *shapes).lower(lowering_platforms=("cuda",)).as_text()
    write, fetch = (line for line in text.splitlines() if "stablehlo.custom_call" in line)
    assert f"@{foreign.WRITE}" in write
    assert "has_side_effect = true" in write
    assert f"@{foreign.FETCH}" in fetch
    for line, operand in ((write, 0), (fetch, 2)):
        assert "pool_rows = 8589934592 : i64" in line
        assert f"operand_index = {operand}" in line


def test_a_library_that_is_missing_or_old_says_so(library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "librows.so"
    assert "python -m pallas_kernels.host_rows.build" in (foreign.unavailable(missing) or "")
    missing.write_text("not a library")
    assert "cannot be loaded" in (foreign.unavailable(missing) or "")
    monkeypatch.setattr("jaxlib.__version__", "0.0.1")
    assert "this is 0.0.1" in (foreign.unavailable(Path(library._name)) or "")


def test_addresses_in_halves() -> None:
    big = Pinned.at(0x1234_5678_9ABC_DEF0, 3)
    assert [int(half) for half in big.address] == [0x9ABC_DEF0, 0x1234_5678]


def test_build_says_what_the_compiler_says(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="cannot be run"):
        build.cuda(tmp_path / "out.so", tmp_path / "nvcc")
    with pytest.raises(build.BuildError, match="failed"):
        build.cpu(tmp_path / "out.so", "false")
    assert not list(tmp_path.iterdir())
