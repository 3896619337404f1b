"""The resolver of hot regions against a dictionary: rows, plans, order of use, over 20,000 steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from pallas_kernels.resolver import NO_REGION, Hot, Plan, emptied, empty, resolve

G, W = 2, 6
SPAN = G * W
FIRST = 1000
N, Q, K = 3, 2, 3
REGIONS, SLOTS = 4, 5
step = jax.jit(partial(resolve, page_size=G, first=FIRST))


class Model:
    """Hot regions as plain Python: of each a dictionary from positions to slots, and slots in order of use."""

    def __init__(self, regions: int, slots: int, page_size: int = G) -> None:
        self.slots, self.page_size = slots, page_size
        self.held: list[dict[int, int]] = [{} for _ in range(regions)]
        self.order = [list(range(slots)) for _ in range(regions)]

    def row(self, positions: np.ndarray, pages: np.ndarray, frames: np.ndarray, region: int):
        """Rows ``[Q * k]``, copies as pairs in order, hits, lost entries."""
        if region < NO_REGION:
            region = emptied(region)  # its own inverse
            self.held[region], self.order[region] = {}, list(range(self.slots))
        rows, misses, hits, lost = [], {}, [], 0
        asked = [int(position) for position in positions.reshape(-1)]
        away = [p for p in asked if p >= 0 and (p >= len(frames) * self.page_size or frames[p // self.page_size] < 0)]
        if region != NO_REGION:
            held, order = self.held[region], self.order[region]
            inside = [p for p in dict.fromkeys(away) if p < len(frames) * self.page_size]
            hits = [p for p in inside if p in held]
            used = {held[p] for p in hits}
            unused = [slot for slot in order if slot not in used]
            wanted = [p for p in inside if p not in held]
            for position, slot in zip(wanted, unused, strict=False):
                misses[position] = slot
                for old in [p for p, s in held.items() if s == slot]:
                    del held[old]
                held[position] = slot
            filled = unused[: len(misses)]
            self.order[region] = unused[len(misses) :] + filled + [slot for slot in order if slot in used]
        for position in asked:
            page, offset = divmod(position, self.page_size)
            if position >= 0 and page < len(frames) and frames[page] >= 0:
                rows.append(frames[page] * self.page_size + offset)
            elif region != NO_REGION and position in self.held[region] and page < len(frames):
                rows.append(FIRST + region * self.slots + self.held[region][position])
            else:
                rows.append(-1)
                lost += position >= 0
        copies = [
            (pages[p // self.page_size] * self.page_size + p % self.page_size, FIRST + region * self.slots + slot)
            for p, slot in misses.items()
        ]
        return rows, copies, len(hits), lost

    def compare(self, positions, pages, frames, regions, plan: Plan, hot: Hot) -> None:
        """Take the same step, and find everything alike."""
        shape = positions.shape
        for n in range(shape[0]):
            rows, copies, hits, lost = self.row(positions[n], pages[n], frames[n], int(regions[n]))
            assert plan.rows[n].reshape(-1).tolist() == rows
            padding = [-1] * (min(shape[1] * shape[2], self.slots) - len(copies))
            assert plan.sources[n].tolist() == [source for source, _ in copies] + padding
            assert plan.targets[n].tolist() == [target for _, target in copies] + padding
            assert (plan.hits[n], plan.misses[n], plan.lost[n]) == (hits, len(copies), lost)
        index = np.full((len(self.held), self.slots), -1)
        for region, held in enumerate(self.held):
            index[region, list(held.values())] = list(held)
        assert np.array_equal(hot.held, index)
        assert np.array_equal(hot.lru, self.order)


def on_host(found):
    return jax.tree.map(np.asarray, found)


STEPS = 50


@jax.jit
def many(args: tuple[jax.Array, ...]) -> tuple[Plan, Hot]:
    """One step after another from empty regions: what each planned and left."""

    def one(hot: Hot, now: tuple[jax.Array, ...]):
        plan, hot = resolve(*now, hot, page_size=G, first=FIRST)
        return hot, (plan, hot)

    return jax.lax.scan(one, empty(REGIONS, SLOTS), args)[1]


class Machine(RuleBasedStateMachine):
    """Three rows over four regions, queries that ask for the same, or together for more than there are slots, pages
    that come and go, sequences that end. What is done is written down, and resolved in one go when a run ends."""

    steps = 0

    @initialize(pages=st.permutations(range(N * W)))
    def begin(self, pages: list[int]) -> None:
        self.pages = np.array(pages, np.int32).reshape(N, W)
        self.frames = np.full((N, W), -1, np.int32)
        self.regions = np.array([0, 1, NO_REGION], np.int32)
        self.last = np.arange(N * Q * K, dtype=np.int32).reshape(N, Q, K) % SPAN
        self.done: list[tuple[np.ndarray, ...]] = []

    @rule(chosen=st.lists(st.integers(-1, SPAN), min_size=N * Q * K, max_size=N * Q * K))
    def choose(self, chosen: list[int]) -> None:
        self.take(np.array(chosen, np.int32).reshape(N, Q, K))

    @rule(chosen=st.lists(st.integers(0, SPAN - 1), min_size=N * K, max_size=N * K), shift=st.integers(0, 1))
    def choose_alike(self, chosen: list[int], shift: int) -> None:
        """The queries of a row want nearly the same."""
        one = np.array(chosen, np.int32).reshape(N, 1, K)
        self.take(np.concatenate([one, one - shift], axis=1))

    @rule(row=st.integers(0, N - 1), page=st.integers(0, W - 1), frame=st.integers(-1, 400))
    def move(self, row: int, page: int, frame: int) -> None:
        self.frames[row, page] = frame
        self.take(self.last)

    @rule(row=st.integers(0, N - 1), region=st.integers(0, REGIONS - 1), kept=st.booleans(), chosen=st.integers(0, 9))
    def give(self, row: int, region: int, kept: bool, chosen: int) -> None:
        """Another region for a row, with what it holds or emptied; the row that had it goes without."""
        self.regions[self.regions == region] = NO_REGION
        self.regions[row] = region if kept else emptied(region)
        self.take((self.last + chosen) % SPAN)

    def take(self, positions: np.ndarray) -> None:
        self.last = positions
        self.done.append((positions, self.pages, self.frames.copy(), self.regions.copy()))
        self.regions = np.where(self.regions < NO_REGION, emptied(self.regions), self.regions)

    def teardown(self) -> None:
        if not getattr(self, "done", None):
            return
        nothing = tuple(np.full_like(arg, -1) for arg in self.done[0])
        padded = self.done + [nothing] * (STEPS + 1 - len(self.done))
        plans, hots = on_host(many(tuple(np.stack(column) for column in zip(*padded, strict=True))))
        model = Model(REGIONS, SLOTS)
        for i, args in enumerate(self.done):
            plan, hot = Plan(*(field[i] for field in plans)), Hot(*(field[i] for field in hots))
            model.compare(*args, plan, hot)
        Machine.steps += len(self.done)


def test_as_a_dictionary_would() -> None:
    how = settings(
        max_examples=440,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    Machine.steps = 0
    run_state_machine_as_test(Machine, settings=how)
    assert Machine.steps >= 20_000


def inputs(rng: np.random.Generator, rows: int, queries: int, top_k: int, width: int, size: int):
    """What an indexer would choose, rising and distinct in a query, of texts whose last two pages are in frames."""
    starts = rng.integers(1, width * size, rows)
    positions = np.full((rows, queries, top_k), -1, np.int32)
    for row, start in enumerate(starts):
        common = rng.permutation(start)  # the queries of a row choose much the same
        for query in range(queries):
            some = np.sort(common[query : query + rng.integers(top_k // 2, top_k + 1)])
            positions[row, query, : len(some)] = some
    pages = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    frames = np.where(rng.random((rows, width)) < 0.2, rng.integers(0, 99, (rows, width)), -1).astype(np.int32)
    return positions, pages, frames


def test_larger_regions() -> None:
    """Verification of 4 tokens; regions as small as they may be, and pages that are not powers of two."""
    rng = np.random.default_rng(1)
    rows, queries, top_k, width, size = 4, 4, 32, 40, 12
    slots = queries * top_k
    model, hot = Model(5, slots, size), empty(5, slots)
    call = jax.jit(partial(resolve, page_size=size, first=FIRST))
    for i in range(60):
        args = (*inputs(rng, rows, queries, top_k, width, size), np.array([3, emptied(1) if i % 7 == 5 else 1, -1, 0]))
        plan, hot = call(*args, hot)
        model.compare(*args, *on_host((plan, hot)))


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(2)
    together, alone = empty(3, 16), [empty(3, 16) for _ in range(3)]
    call = jax.jit(partial(resolve, page_size=4, first=0))
    regions = np.array([2, 0, 1], np.int32)
    for _ in range(10):
        args = inputs(rng, 3, 2, 8, 20, 4)
        plan, together = call(*args, regions, together)
        for row in range(3):
            one, alone[row] = call(*(arg[row : row + 1] for arg in args), regions[row : row + 1], alone[row])
            for whole, single in zip(plan, one, strict=True):
                np.testing.assert_array_equal(whole[row], single[0])
            for whole, single in zip(together, alone[row], strict=True):
                np.testing.assert_array_equal(whole[regions[row]], single[regions[row]])


def test_rows_without_a_region_are_lost_and_leave_no_trace() -> None:
    positions = np.full((N, Q, K), -1, np.int32)
    positions[:, 1] = [0, 5, -1]
    frames = np.array([[7, *[-1] * (W - 1)]] * N, np.int32)
    hot = empty(REGIONS, SLOTS)._replace(held=jnp.arange(REGIONS * SLOTS, dtype=jnp.int32).reshape(REGIONS, SLOTS))
    regions = np.array([NO_REGION, REGIONS, emptied(REGIONS)], np.int32)  # there are only so many
    plan, after = on_host(step(positions, frames, frames, regions, hot))
    assert plan.rows.tolist() == [[[-1] * K, [7 * G, -1, -1]]] * N
    assert plan.lost.tolist() == [1] * N
    assert not any(x.any() for x in (plan.hits, plan.misses))
    assert all((x == -1).all() for x in (plan.sources, plan.targets))
    jax.tree.map(np.testing.assert_array_equal, after, hot)


def test_tables_narrower_than_what_a_region_holds() -> None:
    """What lies beyond the tables of a step is not taken for something else, and stays until it is evicted."""
    rng = np.random.default_rng(3)
    model, hot = Model(REGIONS, SLOTS), empty(REGIONS, SLOTS)
    regions = np.array([1, 0, 3], np.int32)
    for i in range(20):
        width = 4 if i % 3 == 2 else W
        positions, *tables = inputs(rng, N, Q, K, W, G)
        args = (positions, *(table[:, :width] for table in tables), regions)
        plan, hot = step(*args, hot)
        model.compare(*args, *on_host((plan, hot)))


def test_regions_too_small_for_a_query() -> None:
    tables, regions = jnp.zeros((1, 8), jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="2 rows cannot hold the 3"):
        resolve(jnp.zeros((1, 1, 3), jnp.int32), tables, tables, regions, empty(1, 2), page_size=2, first=0)


def test_true_sizes_in_little_memory() -> None:
    """64 rows of 131,072 tokens, 2,048 chosen: the map, and a few arrays the size of the regions' state, which is
    changed in place."""
    shapes = [(64, 1, 2048), (64, 4096), (64, 4096), (64,), (64, 4096), (64, 4096)]
    args = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    call = jax.jit(lambda *a: resolve(*a[:4], Hot(*a[4:]), page_size=32, first=0), donate_argnums=(4, 5))
    analysis = call.lower(*args).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 4 * 64 * (131072 + 16 * 4096)
    assert analysis.alias_size_in_bytes == 2 * 4 * 64 * 4096
