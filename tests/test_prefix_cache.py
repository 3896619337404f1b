"""Pages and what they hold, under any sequence of events: conservation, and no page read for what it does not hold."""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from memory_stores import MemoryStores

from jaxserve.chains import Chain
from jaxserve.host_tier import Block, HostTier
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import PrefixCache, in_order

SIZE = 4
PAGES = 12


GROUPS = ((None,), (None, 6), (9,), (None, 3, 13))
TOPICS = ([0, 1] * 20, [1, 1, 0] * 14, [0] * 40)
texts = st.builds(
    lambda topic, count, rest: TOPICS[topic][:count] + rest,
    st.integers(0, 2),
    st.integers(1, 30),
    st.lists(st.integers(0, 1), max_size=2),
)


class Holder:
    """A sequence: its text, its pages by group, and how much of the text they hold."""

    def __init__(self, salt: str, tokens: list[int], chain: Chain):
        self.salt, self.tokens, self.chain = salt, tokens, chain
        self.pages: list[list[int]] = []
        self.computed = 0


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a device of dictionaries: (page, offset) -> (group, salt, the text up to that token)."""

    holders = Bundle("holders")
    preempted = Bundle("preempted")
    events: ClassVar[Counter[str]] = Counter()

    @initialize(
        records=st.sampled_from([0, 1, 2, 3, 5, 9, 14]),
        kept=st.sampled_from([0, 3, 30]),
        names=st.sampled_from([("disk",), ("sidecar",), ("sidecar", "disk")]),
        windows=st.sampled_from(GROUPS),
    )
    def start(self, records: int, kept: int, names: tuple[str, ...], windows: tuple[int | None, ...]) -> None:
        self.records, self.kept_records, self.windows = records, kept, windows
        self.kept: list[tuple[str, dict[bytes, dict]]] = [(name, {}) for name in names]
        self.begin()

    def begin(self) -> None:
        self.pool = PagePool(PAGES * len(self.windows) + 1, SIZE, self.windows)
        self.tier = HostTier(self.records * 10, 10)
        near = self.kept[0][0] == "sidecar"
        self.stores = MemoryStores(self.kept_records, *self.kept, near=near) if self.kept_records else None
        self.cache = PrefixCache(self.pool, tier=self.tier, stores=self.stores)
        self.device: dict[tuple[int, int], tuple[int, str, tuple[int, ...]]] = {}
        self.alive: list[Holder] = []

    def page(self, number: int) -> dict:
        return {offset: self.device[number, offset] for offset in range(SIZE) if (number, offset) in self.device}

    def spill(self) -> None:
        """What the runner does before anything else."""
        for item in self.cache.spills:
            assert item.block.data is None, "a block is filled twice"
            item.block.data = [self.page(number) for number in item.pages]
            self.events["spilled"] += len(item.pages)
            if self.stores is not None:
                self.stores.save(item.block, range(len(item.pages)))
        self.cache.spills.clear()

    @rule(busy=st.booleans())
    def back_up(self, busy: bool) -> None:
        """A plan begins: a block goes to the stores, unless they are behind."""
        if self.stores is None:
            return
        self.stores.busy = busy
        self.cache.back_up()
        self.events["backed up"] += sum(len(item.pages) for item in self.cache.spills)
        assert not (busy and self.cache.spills)
        for item in self.cache.spills:
            for page in item.pages:
                assert len(self.page(page)) == SIZE, "a page is copied that is not full"
        self.spill()
        if not self.cache.backlog:
            self.check_copies()

    def check_copies(self) -> None:
        """Where there is room for all that ever was, every full page on the device is in every store."""
        if self.kept_records < 30 or any(len(store) >= 30 for _, store in self.kept):
            return
        for page, entry in self.cache._entries.items():
            for _, store in self.kept:
                if entry.key is not None:
                    assert store[entry.key] == self.page(page)
                    self.events["a copy of a page"] += 1

    def write(self, holder: Holder, start: int, stop: int) -> None:
        for group, table in enumerate(holder.pages):
            for i in range(start, stop):
                page = table[i // SIZE]
                assert self.pool.holders(page) == 1, "a page that others read is written"
                self.device[page, i % SIZE] = (group, holder.salt, tuple(holder.tokens[: i + 1]))

    def check_reads(self, holder: Holder) -> None:
        """What the next token would look at."""
        for group, table in enumerate(holder.pages):
            window = self.windows[group]
            for i in range(0 if window is None else max(0, holder.computed - window + 1), holder.computed):
                held = self.device[table[i // SIZE], i % SIZE]
                assert held == (group, holder.salt, tuple(holder.tokens[: i + 1]))

    def shift(self, holder: Holder) -> None:
        """Pages behind the windows go back."""
        for group, table in enumerate(holder.pages):
            first = self.pool.windows.first(group, holder.computed)
            self.cache.let_go([page for page in table[:first] if page])
            self.events["behind"] += sum(page > 0 for page in table[:first])
            table[:first] = [0] * first

    @rule(target=holders, salt=st.sampled_from("aab"), tokens=texts)
    def admit(self, salt: str, tokens: list[int]):
        return self.take(salt, tokens)

    @rule(salt=st.sampled_from("aab"), tokens=texts)
    def come_and_go(self, salt: str, tokens: list[int]) -> None:
        holder = self.take(salt, tokens)
        if isinstance(holder, Holder):
            self.prefill(holder, len(tokens))
            self.leave(holder)

    @rule(target=preempted, salt=st.sampled_from("aab"), tokens=texts)
    def come_and_be_preempted(self, salt: str, tokens: list[int]):
        holder = self.take(salt, tokens)
        if not isinstance(holder, Holder):
            return holder
        self.prefill(holder, len(tokens))
        return self.preempt(holder)

    @rule(target=holders, who=consumes(preempted))
    def resume(self, who: tuple[str, list[int]]):
        """A preempted one comes back, with the token that was under way when it went."""
        return self.take(who[0], [*who[1], 1])

    @rule(target=holders, who=preempted)
    def ask_again(self, who: tuple[str, list[int]]):
        return self.take(*who)

    def take(self, salt: str, tokens: list[int]):
        holder = Holder(salt, list(tokens), self.cache.chain(tokens, salt))
        hit = self.cache.match(holder.chain, tokens, len(tokens) - 1)
        if hit.beyond:
            self.events["waited for a store"] += 1
            self.cache.let_go(hit.pinned)
            self.stores.fetch(hit.beyond)
            for arrival in self.stores.arrived():
                for keys, data, source in arrival.blocks:
                    self.tier.adopt(keys, data, source)
            hit = self.cache.match(holder.chain, tokens, len(tokens) - 1)
            for load in hit.loads:
                self.events[f"came from {load.block.source}"] += 1
        assert hit.tokens <= len(tokens) - 1
        if not self.tier.capacity:
            assert hit.tokens == self.most_known(holder)
        assert not hit.copies or hit.tokens % SIZE
        groups = range(len(self.windows))
        firsts = [self.pool.windows.first(group, hit.tokens) for group in groups]
        last = self.pool.pages_for(len(tokens) + 1)
        self.events["a window was missing"] += any(self.falls_short(holder, hit.tokens, group) for group in groups)
        fresh = self.pool.take(sum(last - first for first in firsts) - len(hit.held))
        self.spill()
        if fresh is None:
            self.events["no room"] += 1
            self.cache.let_go(hit.pinned)
            return multiple()
        given = iter(fresh)
        for known, first in zip(hit.pages, firsts, strict=True):
            pages = [page or next(given) for page in known[first:]]
            pages += [next(given) for _ in range(last - first - len(pages))]
            holder.pages.append([0] * first + pages)
        assert not list(given)
        for load in hit.loads:
            assert load.block.data is not None, "a record is read before it is written"
            for offset, content in load.block.data[load.record].items():
                self.device[holder.pages[load.group][load.number], offset] = content
        self.events["loaded"] += len(hit.loads)
        self.events["loaded a tail"] += bool(hit.loads) and hit.loads[-1].number == hit.tokens // SIZE
        self.events["loaded under a full tier"] += bool(hit.loads) and self.tier.usage == 1
        self.events["copied"] += bool(hit.copies)
        holder.computed = hit.tokens
        for group, page in hit.copies:
            for offset in range(SIZE):  # whatever stands there, the rest too
                if (page, offset) in self.device:
                    self.device[holder.pages[group][hit.tokens // SIZE], offset] = self.device[page, offset]
            self.cache.let_go([page])
        self.check_reads(holder)
        self.alive.append(holder)
        return holder

    def most_known(self, holder: Holder) -> int:
        """The longest beginning that the device could supply, by trying them all, the last token apart."""
        texts = [self.pages_with(group, holder.salt) for group in range(len(self.windows))]
        for tokens in range(len(holder.tokens) - 1, 0, -1):
            firsts = [self.pool.windows.first(group, tokens) for group in range(len(self.windows))]
            wanted = [(n, tuple(holder.tokens[: min((n + 1) * SIZE, tokens)])) for n in range(-(-tokens // SIZE))]
            if all(text in texts[g] for g, first in enumerate(firsts) for n, text in wanted if n >= first):
                return tokens
        return 0

    def pages_with(self, group: int, salt: str) -> set[tuple[int, ...]]:
        """All texts whose last page the cache knows to be on the device."""
        found = set()
        for page in self.cache._entries:
            held = [self.device[page, offset] for offset in range(len(self.cache._entries[page].tokens))]
            found |= {text for owner, whose, text in held if (owner, whose) == (group, salt)}
        return found

    def falls_short(self, holder: Holder, known: int, group: int) -> bool:
        """Whether the group without a window has the page that would be next, and this one's window is not there."""
        page = known // SIZE
        if self.windows[0] is not None or self.windows[group] is None or page >= len(holder.chain.keys[0]):
            return False
        if (page + 1) * SIZE >= len(holder.tokens):
            return False
        return holder.chain.keys[0][page] in self.cache._by_key

    @rule(holder=holders, count=st.integers(1, 9))
    def prefill(self, holder: Holder, count: int) -> None:
        if holder not in self.alive:
            return
        stop = min(holder.computed + count, len(holder.tokens))
        self.write(holder, holder.computed, stop)
        holder.computed = stop
        self.cache.enter(holder.chain, holder.tokens, holder.pages, stop)
        self.shift(holder)

    @rule(holder=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, holder: Holder, tokens: list[int]) -> None:
        if holder not in self.alive or holder.computed < len(holder.tokens):
            return
        for token in tokens:
            self.shift(holder)
            need = self.pool.pages_for(len(holder.tokens) + 1) - len(holder.pages[0])
            if need > 0:
                fresh = self.pool.take(need * len(self.windows))
                self.spill()
                if fresh is None:
                    return
                for group, table in enumerate(holder.pages):
                    table += fresh[group * need : (group + 1) * need]
            holder.tokens.append(token)
            self.write(holder, holder.computed, holder.computed + 1)
            holder.computed += 1

    @rule(holder=consumes(holders))
    def leave(self, holder: Holder) -> None:
        if holder in self.alive:
            self.alive.remove(holder)
            self.cache.leave(holder.chain, holder.tokens, holder.pages, holder.computed)

    @rule(target=preempted, holder=consumes(holders))
    def preempt(self, holder: Holder):
        if holder not in self.alive:
            return multiple()
        self.alive.remove(holder)
        self.cache.leave(holder.chain, holder.tokens, holder.pages, holder.computed, returns=True)
        return (holder.salt, holder.tokens)

    @rule()
    def all_leave(self) -> None:
        for holder in list(self.alive):
            self.leave(holder)

    @rule(dice=st.integers(0, 19))
    def restart(self, dice: int) -> None:
        """The engine ends; what the stores have is left, with what is brought there at the end."""
        if dice != 7 or self.stores is None:
            return
        self.spill()
        for key, page in self.cache.keepsakes().items():
            self.stores.save(Block([key], [self.page(page)]), [0])
        for block in self.tier.blocks():
            self.stores.save(block, self.tier.live(block))
        self.events["restarted"] += 1
        self.begin()

    @rule(dice=st.integers(0, 19))
    def die(self, dice: int) -> None:
        """The engine is killed: what the stores have is left."""
        if dice == 7 and self.stores is not None:
            self.events["killed"] += 1
            self.begin()

    @invariant()
    def sound(self) -> None:
        self.events["steps"] += 1
        self.pool.check(page for holder in self.alive for page in in_order(holder.pages))
        self.cache.check()
        self.tier.check()
        for holder in self.alive:
            self.check_reads(holder)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.events["dropped"] += self.tier.counts.dropped
            self.events["refused"] += self.tier.counts.refused


@pytest.mark.timeout(600)
def test_pages_hold_what_they_are_read_for_whatever_happens() -> None:
    """And whatever may happen does: a run in which nothing is spilled or restored proves nothing."""
    CacheMachine.events.clear()
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=420, stateful_step_count=80, deadline=None))
    events = CacheMachine.events
    assert events["steps"] >= 20_000
    names = ("spilled", "loaded", "copied", "no room", "dropped", "backed up", "waited for a store", "behind")
    often = {name: events[name] for name in names}
    assert min(often.values()) >= 100, often
    seldom = ("loaded a tail", "loaded under a full tier", "restarted", "killed", "refused", "a copy of a page")
    seldom += ("a window was missing",)
    assert min(events[name] for name in (*seldom, "came from sidecar", "came from disk")) >= 5, events


def enter_and_leave(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """A sequence that computes ``tokens`` and goes."""
    chain = cache.chain(tokens, salt)
    hit = cache.match(chain, tokens, len(tokens) - 1)
    (known,) = hit.pages
    fresh = cache.pool.take(cache.pool.pages_for(len(tokens)) - len(known))
    assert fresh is not None
    cache.let_go([page for _, page in hit.copies])
    pages = known + fresh
    cache.enter(chain, tokens, [pages], len(tokens))
    cache.leave(chain, tokens, [pages], len(tokens))
    return pages


def known(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    hit = cache.match(cache.chain(tokens, salt), tokens, len(tokens))
    cache.let_go(hit.pinned)
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
    assert PrefixCache(PagePool(3, SIZE), "x").chain([1]).roots != PrefixCache(PagePool(3, SIZE), "y").chain([1]).roots


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
        cache.enter(chain, tokens, [pages], 8)
    for chain, pages in zip(chains, held, strict=True):
        cache.leave(chain, tokens, [pages], 8)
    assert cache.pool.kept == 2
    assert known(cache, tokens) == 8


def test_what_another_let_go_of_is_replaced_when_leaving(cache):
    tokens = [*range(8)]
    enter_and_leave(cache, tokens)
    chain = cache.chain(tokens)
    mine = cache.pool.take(2)
    cache.enter(chain, tokens, [mine], 8)  # known already: not entered
    others = cache.pool.take(cache.pool.free)  # the first one's pages are taken
    assert known(cache, tokens) == 0
    cache.leave(chain, tokens, [mine], 8)
    assert known(cache, tokens) == 8
    cache.pool.give(others)
    cache.pool.check()
