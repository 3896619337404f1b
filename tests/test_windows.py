"""Groups of layers and their windows: which pages are needed, how many planes, and how few pages are held."""

import dataclasses
import random

import pytest
from simulation import BLOCK, Wish, World, make, sequence, word

from jaxserve.cache_spec import FP8, HeadPages, KeyPages, LatentPages
from jaxserve.grouping import arrange, plane_count
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import Hit, PrefixCache, in_order
from jaxserve.windows import Windows


@pytest.mark.parametrize("seed", range(20))
def test_the_most_pages_are_never_exceeded_and_sometimes_reached(seed: int) -> None:
    """Computing a text chunk by chunk, page by page counted: those from the first one looked at to the last written."""
    rng = random.Random(seed)
    size, step = rng.randint(1, 9), rng.randint(1, 40)
    windows = Windows((None, rng.randint(1, 50)), size)
    start, end = rng.randint(0, 60), rng.randint(300, 400)
    most, (whole, bound) = [0, 0], windows.most(start, end, step)
    for position in range(start, end):
        for group in (0, 1):
            held = -(-min(position + step, end) // size) - windows.first(group, position)
            most[group] = max(most[group], held)
    assert whole == most[0] == -(-end // size)
    assert most[1] <= bound <= most[1] + 1
    assert windows.most(end - 1, end, step)[1] <= bound


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    for tokens in ((None,), (None, 7), (5,), (None, 3, 9)):
        windows = Windows(tokens, 4)
        for pages in range(40):
            longest = windows.longest(pages, 8, 100)
            assert sum(windows.most(0, longest, 8)) <= pages
            assert longest == 100 or sum(windows.most(0, longest + 1, 8)) > pages
    assert Windows((None,), 4).longest(7, 8, 100) == 28
    assert Windows((5,), 4).longest(4, 8, 100) == 100, "however long"
    assert Windows((None,), 4).fit(50, 8, 30) == 200, "without windows the pages' tokens"


@pytest.mark.parametrize(
    ("layers", "planes"),
    [
        ({None: 12, 128: 12}, 12),  # gpt-oss
        ({None: 4, 512: 22}, 4),  # Gemma 3 1B
        ({None: 5, 1024: 29}, 5),
        ({None: 8, 1024: 40}, 8),
        ({None: 10, 1024: 52}, 10),
        ({None: 1, 16: 2}, 1),
        ({None: 40, 4096: 2}, 8),  # two would waste nothing, and take 21 tables
        ({128: 6, 512: 6}, 6),
        ({None: 1, 128: 60}, 9),
    ],
)
def test_planes_fit_the_groups(layers: dict[int | None, int], planes: int) -> None:
    assert plane_count(layers) == planes


PAGES = (HeadPages((0, 1), 64, "float32"),)


@pytest.mark.parametrize("count", [6, 26, 34, 62])
def test_every_layer_has_a_place_of_its_own(count: int) -> None:
    windows = [None if number % 6 == 5 else 512 for number in range(count)]
    cache = arrange([PAGES] * count, windows, 10**5)
    assert len(set(cache.layers)) == count
    assert [cache.windows[layer.group] for layer in cache.layers] == windows
    assert {layer.plane for layer in cache.layers} == set(range(len(cache.planes)))
    periods = {tuple(layer.group for layer in cache.layers[i : i + 6]) for i in range(0, count - 5, 6)}
    assert len(periods) == 1, "programs of six layers are shared"
    assert all(len({layer.plane for layer in cache.layers[i : i + 6]}) == 1 for i in range(0, count - 5, 6))


def test_layers_that_look_equally_far_make_one_group() -> None:
    cache = arrange([PAGES] * 5, [512] * 5, 4096)
    assert (len(cache.planes), cache.windows) == (5, (512,))
    for windows in ([None] * 5, [None, 4096, None, 9999, None]):  # a window as long as any text is none
        cache = arrange([PAGES] * 5, windows, 4096)
        assert (len(cache.planes), cache.windows) == (5, (None,))
    latents = (LatentPages(512, 64, "bfloat16"), KeyPages(128, "bfloat16"))
    assert arrange([latents, latents[:1]], [None, None], 4096).planes == (latents, latents[:1])


def test_planes_fit_the_widest_heads() -> None:
    wide = (dataclasses.replace(PAGES[0], head_dim=128),)
    cache = arrange([PAGES, wide, PAGES, wide], [9, None, 9, None], 4096)
    assert cache.planes == (wide, wide)
    narrow = (dataclasses.replace(PAGES[0], dtype=FP8),)
    for other in ((KeyPages(64, "float32"),), narrow, (dataclasses.replace(PAGES[0], kv_source=(0,)),)):
        cache = arrange([PAGES, other], [9, None], 4096)
        assert (cache.planes, cache.windows) == ((PAGES, other), (None,)), "no plane would do for both"


def test_fp8_heads_of_two_widths_share_no_plane() -> None:
    """Their scales stand behind all rows of a page: a narrower head is not the beginning of a wider one."""
    one, two = ((HeadPages((0, 1), width, FP8),) for width in (64, 128))
    cache = arrange([one, two, one, two], [9, None, 9, None], 4096)
    assert (cache.planes, cache.windows) == ((one, two, one, two), (None,))
    assert arrange([one, one], [9, None], 4096).planes == (one,), "of one width they do"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("windows", "size"), [((None, 10), 4), ((9,), 2), ((None, 3, 17), 5)])
def test_what_is_held_behind_a_window_is_bounded_however_long_the_text(windows, size: int, depth: int) -> None:
    """Through a prompt of many windows and a long answer, alone and beside others."""
    blocks = 2
    for wishes in ([Wish(300, 200)], [Wish(200, 100), Wish(150, 150, turn=3), Wish(9, 200)]):
        world = World(400, size, 4, blocks, depth, windows=windows)
        world.run(wishes)
        assert world.scheduler.preemptions == 0
        for window, most in zip(windows, world.most, strict=True):
            if window is not None:
                assert most <= -(-(window + blocks * BLOCK) // size) + 1


def test_a_text_far_longer_than_the_pool_goes_through_a_window() -> None:
    world = World(8, 4, 2, 1, 1, windows=(9,))
    longest = world.scheduler.pool.windows.longest(8, BLOCK, 10**6)
    assert longest == 10**6, "no length is too much"
    seq = sequence(500, 700)
    world.wishes, world.seqs = [Wish(500, 200)], [seq]
    seq.prompt = [word(100, i) for i in range(500)]
    seq.chain = world.cache.chain(seq.prompt)
    world.scheduler.add(seq)
    while not (world.scheduler.idle and not world.flight):
        world.turn()
    assert len(seq.output) == 200
    assert world.scheduler.preemptions == 0


@pytest.mark.parametrize("records", [0, 300])
@pytest.mark.parametrize("windows", [(None, 9), (9,), (None, 5, 11)])
def test_who_is_preempted_brings_back_no_more_than_the_window(windows, records: int) -> None:
    world = World(14 * len(windows), 4, 6, 8, 1, records=records, windows=windows)
    if windows[0] is not None:
        world.pages = 14
    seqs = world.run([Wish(6, 30) for _ in range(6)])
    assert world.scheduler.preemptions > 0
    if records:
        again = world.prompt_tokens - 6 * 6
        assert again == world.scheduler.preemptions, "its last token, each time"
        restored, pages = world.tier.counts.restored, sum(seq.preemptions for seq in seqs)
        bounded = sum(9 if window is None else -(-window // 4) + 1 for window in windows)
        assert 0 < restored <= pages * bounded


def test_several_prefills_that_run_short_of_pages_all_end() -> None:
    """Their windows grow after they have been admitted, into pages that others have taken."""
    for pages in range(8, 16):
        world = World(pages, 2, 6, 2, 1, windows=(11,))
        world.run([Wish(60, 4, topic=1), *[Wish(40, 12, turn=i) for i in range(6)], Wish(60, 4, topic=1)])


def known(cache: PrefixCache, tokens: list[int]) -> tuple[int, list[list[int]]]:
    hit = cache.match(cache.chain(tokens), tokens, len(tokens))
    cache.let_go(hit.pinned)
    return hit.tokens, hit.pages


def text_of(cache: PrefixCache, tokens: list[int], step: int) -> None:
    """A sequence that computes ``tokens``, a chunk at a time, and goes."""
    chain, windows = cache.chain(tokens), cache.pool.windows
    tables: list[list[int]] = [[] for _ in range(len(windows))]
    for start in range(0, len(tokens), step):
        end = min(start + step, len(tokens))
        for group, table in enumerate(tables):
            first = windows.first(group, start)
            cache.let_go([page for page in table[:first] if page])
            table[:first] = [0] * first
            table += cache.pool.take(cache.pool.pages_for(end) - len(table))
        cache.enter(chain, tokens, tables, end)
    cache.leave(chain, tokens, tables, len(tokens))


def test_a_window_that_is_missing_shortens_the_hit_to_one_that_is_there() -> None:
    """A text of twelve pages over a group without a window and one of six tokens."""
    tokens = [*range(48)]
    cache = PrefixCache(PagePool(41, 4, (None, 6)))
    text_of(cache, tokens, 8)
    assert known(cache, tokens)[0] == 48
    assert known(cache, [*tokens[:23], 99])[0] == 23, "within the text as well: what was behind is still known"
    held = known(cache, tokens)[1]
    assert [page > 0 for page in held[1]] == [False] * 10 + [True] * 2
    assert all(held[0])
    window = cache.chain(tokens).keys[1]
    for page in (11, 6, 5):
        cache.forget(cache._by_key[window[page]])
    assert known(cache, tokens)[0] == 44, "page 11 is in the window of all that ends behind it"
    cache.forget(cache._by_key[window[9]])
    assert known(cache, tokens)[0] == 36, "and page 9 in that of what ends at 44"
    cache.forget(cache._by_key[window[8]])
    cache.forget(cache._by_key[window[7]])
    assert known(cache, tokens)[0] == 20, "nothing from 6 to 9"
    cache.forget(cache._by_key[cache.chain(tokens).keys[0][2]])
    assert known(cache, tokens)[0] == 8


def test_the_pages_of_the_end_outlive_those_behind_a_window() -> None:
    """Of a text that has gone, those that lay behind the window are taken first, then the text from its end."""
    tokens = [*range(48)]
    cache = PrefixCache(PagePool(25, 4, (None, 6)))
    text_of(cache, tokens, 8)
    pages = in_order(known(cache, tokens)[1])
    behind = [page for page in cache.pool.oldest() if page not in pages]
    assert list(cache.pool.oldest())[: len(behind)] == behind
    assert len(behind) == 10
    cache.pool.take(10)
    assert known(cache, tokens)[0] == 48
    cache.pool.take(1)
    assert known(cache, tokens)[0] < 48


def test_admission_counts_the_pages_of_all_groups() -> None:
    scheduler = make(pages=12, blocks=1, windows=(None, 5))  # four tokens a step
    scheduler.add(sequence(20, 24, arrival=0))
    scheduler.add(sequence(20, 24, arrival=1))
    scheduler.schedule()
    full, window = scheduler.running[0].pages
    assert (len(full), len(window)) == (6, 3)
    assert [seq.arrival for seq in scheduler.waiting] == [1], "nine pages, two for the first, and three are left"
    assert scheduler._need(scheduler.waiting[0], Hit(0, [[], []])) == 9
