"""Pages and what they hold, under any sequence of events: conservation, and no page read for what it does not hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from jaxserve.host_tier import HostTier
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import Chain, Hit, PrefixCache

SIZE = 4
PAGES = 12


class Holder:
    """A sequence: its text, its pages, and how much of the text they hold."""

    def __init__(self, salt: str, tokens: list[int], chain: Chain):
        self.salt, self.tokens, self.chain = salt, tokens, chain
        self.pages: list[int] = []
        self.computed = 0


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a device of dictionaries: (page, offset) -> (salt, the text up to that token)."""

    holders = Bundle("holders")

    @initialize(records=st.integers(0, 14))
    def start(self, records: int) -> None:
        self.pool = PagePool(PAGES + 1, SIZE)
        self.tier = HostTier(records * 10, 10)
        self.cache = PrefixCache(self.pool, tier=self.tier)
        self.device: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.alive: list[Holder] = []

    def page(self, number: int) -> dict:
        return {offset: self.device[number, offset] for offset in range(SIZE) if (number, offset) in self.device}

    def spill(self) -> None:
        """What the runner does before anything else."""
        for item in self.cache.spills:
            assert item.block.data is None, "a block is filled twice"
            item.block.data = [self.page(number) for number in item.pages]
        self.cache.spills.clear()

    def write(self, holder: Holder, start: int, stop: int) -> None:
        for i in range(start, stop):
            self.device[holder.pages[i // SIZE], i % SIZE] = (holder.salt, tuple(holder.tokens[: i + 1]))

    def check_reads(self, holder: Holder) -> None:
        for i in range(holder.computed):
            held = self.device[holder.pages[i // SIZE], i % SIZE]
            assert held == (holder.salt, tuple(holder.tokens[: i + 1]))

    @rule(target=holders, salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, salt: str, tokens: list[int]):
        holder = Holder(salt, tokens, self.cache.chain(tokens, salt))
        hit = self.cache.match(holder.chain, tokens, len(tokens) - 1)
        assert hit.tokens <= len(tokens) - 1
        assert hit.copy is None or hit.tokens % SIZE
        fresh = self.pool.take(self.pool.pages_for(len(tokens) + 1) - len(hit.held))
        self.spill()
        if fresh is None:
            self.cache.let_go(hit)
            return multiple()
        given = iter(fresh)
        pages = [page or next(given) for page in hit.pages]
        fresh = list(given)
        for number, block, record in hit.loads:
            assert block.data is not None, "a record is read before it is written"
            for offset, content in block.data[record].items():
                self.device[pages[number], offset] = content
        holder.pages, holder.computed = pages + fresh, hit.tokens
        if hit.copy is not None:
            for offset in range(SIZE):  # whatever stands there, the rest too
                if (hit.copy, offset) in self.device:
                    self.device[fresh[0], offset] = self.device[hit.copy, offset]
            self.cache.let_go(Hit(0, [], hit.copy))
        self.check_reads(holder)
        self.alive.append(holder)
        return holder

    @rule(holder=holders, count=st.integers(1, 9))
    def prefill(self, holder: Holder, count: int) -> None:
        stop = min(holder.computed + count, len(holder.tokens))
        self.write(holder, holder.computed, stop)
        holder.computed = stop
        self.cache.enter(holder.chain, holder.tokens, holder.pages, stop)

    @rule(holder=holders, token=st.integers(0, 1))
    def decode(self, holder: Holder, token: int) -> None:
        if holder.computed < len(holder.tokens):
            return
        need = self.pool.pages_for(len(holder.tokens) + 1) - len(holder.pages)
        if need > 0:
            fresh = self.pool.take(need)
            self.spill()
            if fresh is None:
                return
            holder.pages += fresh
        holder.tokens.append(token)
        self.write(holder, holder.computed, holder.computed + 1)
        holder.computed += 1

    @rule(holder=consumes(holders), returns=st.booleans())
    def leave(self, holder: Holder, returns: bool) -> None:
        self.alive.remove(holder)
        self.cache.leave(holder.chain, holder.tokens, holder.pages, holder.computed, returns=returns)

    @invariant()
    def sound(self) -> None:
        self.pool.check(page for holder in self.alive for page in holder.pages)
        self.cache.check()
        self.tier.check()
        for holder in self.alive:
            self.check_reads(holder)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)


def enter_and_leave(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """A sequence that computes ``tokens`` and goes."""
    chain = cache.chain(tokens, salt)
    hit = cache.match(chain, tokens, len(tokens) - 1)
    fresh = cache.pool.take(cache.pool.pages_for(len(tokens)) - len(hit.pages))
    assert fresh is not None
    if hit.copy is not None:
        cache.let_go(Hit(0, [], hit.copy))
    pages = hit.pages + fresh
    cache.enter(chain, tokens, pages, len(tokens))
    cache.leave(chain, tokens, pages, len(tokens))
    return pages


def known(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    hit = cache.match(cache.chain(tokens, salt), tokens, len(tokens))
    cache.let_go(hit)
    return hit.tokens


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(9, SIZE))


def test_a_text_is_known_as_far_as_it_agrees(cache):
    enter_and_leave(cache, [*range(10)])
    assert known(cache, [*range(10)]) == 10
    assert known(cache, [*range(12)]) == 10
    assert known(cache, [0, 1, 2, 3, 4, 9]) == 5
    assert known(cache, [0, 9]) == 1
    assert known(cache, [9, 1]) == 0


def test_salts_and_layouts_share_nothing(cache):
    enter_and_leave(cache, [1, 2, 3, 4, 5], "mine")
    assert known(cache, [1, 2, 3, 4, 5], "mine") == 5
    assert known(cache, [1, 2, 3, 4, 5], "yours") == known(cache, [1, 2, 3, 4, 5]) == 0
    assert PrefixCache(PagePool(3, SIZE), "x").chain([1]).root != PrefixCache(PagePool(3, SIZE), "y").chain([1]).root


def test_the_end_of_a_text_is_forgotten_before_its_beginning(cache):
    enter_and_leave(cache, [*range(16)])  # four pages of eight
    enter_and_leave(cache, [*range(8), 50, 51, 52, 53])  # one of its own
    assert cache.pool.free == 8
    for expected in (12, 12, 8, 4):  # what is left of the first text (asked for each time) while pages are taken
        taken = cache.pool.take(cache.pool.free - cache.pool.kept + 1)
        assert taken is not None
        assert known(cache, [*range(16)]) == expected


def test_two_that_compute_the_same_leave_one_copy(cache):
    tokens = [*range(8)]
    chains = [cache.chain(tokens) for _ in range(2)]
    held = [cache.pool.take(2) for _ in range(2)]
    for chain, pages in zip(chains, held, strict=True):
        cache.enter(chain, tokens, pages, 8)
    for chain, pages in zip(chains, held, strict=True):
        cache.leave(chain, tokens, pages, 8)
    assert cache.pool.kept == 2
    assert known(cache, tokens) == 8


def test_what_another_let_go_of_is_replaced_when_leaving(cache):
    tokens = [*range(8)]
    enter_and_leave(cache, tokens)
    chain = cache.chain(tokens)
    mine = cache.pool.take(2)
    cache.enter(chain, tokens, mine, 8)  # known already: not entered
    others = cache.pool.take(cache.pool.free)  # the first one's pages are taken
    assert known(cache, tokens) == 0
    cache.leave(chain, tokens, mine, 8)
    assert known(cache, tokens) == 8
    cache.pool.give(others)
    cache.pool.check()
