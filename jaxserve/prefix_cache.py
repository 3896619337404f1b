"""Which KV pages hold which text, so that a prompt's known beginning is not computed again. Imports no jax.

The key of a full page is a SHA-256 over the key before it and the page's token ids; the first key stands for all else
that must agree (model and layout, the request's salt, the group of layers). Equal keys mean equal texts from the start.
A page that is not full, or a full one of which only the first tokens agree, serves too: it is copied, and the copy
written on.

Every group of layers has pages of its own. A beginning is known where all groups have what the next token looks at: a
group without a window all pages from the start, one with a window those that lie in it. Where a window is missing, the
beginning that is known ends further ahead, and the rest is computed.

Pages enter when the step that fills them has been planned, to be matched from the next plan on: the device runs steps
in order. They stay while held, and afterwards until the pool needs them; then they go to the host tier, where there is
one, and come back from it.

Stores that outlive the process, where there are some, get a copy of every full page soon after it has been computed,
and bring it back through the host tier: what is lost with the process is only what has not been copied yet.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import TypeGuard

from jaxserve.chains import Chain, common, tail_key
from jaxserve.host_tier import SIZES, Block, HostTier, Spill, sizes
from jaxserve.pages import PagePool
from jaxserve.store_tier import StoreTier

LOOK_AT = 64
"""Pages that continue the same text are compared with a prompt at most this often, the latest first."""
Tables = Sequence[Sequence[int]]
"""For each group the pages of a text; 0 where there is none because it lies behind the window."""


def in_order(tables: Tables) -> list[int]:
    """The pages of all groups, from the beginning of the text to its end."""
    return [page for pages in zip_longest(*tables, fillvalue=0) for page in pages if page]


@dataclass(frozen=True, slots=True)
class Load:
    """Page ``number`` of a group's table is record number ``record`` of a block. It may be filled in part."""

    group: int
    number: int
    block: Block
    record: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A known beginning of ``tokens`` tokens: ``pages`` by group, held for the asker, then the first tokens of the
    ``copies``: (group, page) each.

    A page 0 stands for one that lies behind the window, or that is not on the device and has to be loaded.
    """

    tokens: int
    pages: list[list[int]]
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    beyond: list[bytes] = field(default_factory=list)
    """Records in the stores that would make it longer."""

    @property
    def held(self) -> list[int]:
        return in_order(self.pages)

    @property
    def pinned(self) -> list[int]:
        """All that is held for the asker: the pages to copy as well."""
        return [*self.held, *(page for _, page in self.copies)]


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of a text: ``pages`` whole pages, and ``rest`` tokens of the next, where each group has one of
    ``tails``: a page, or the key of a record."""

    pages: int
    rest: int
    tails: list[int | bytes]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a page holds: ``tokens`` after the text of key ``before``. A full page has a ``key`` of its own.

    ``record`` is what the host tier would know it by; None where it is not worth a record.
    """

    before: bytes
    tokens: tuple[int, ...]
    key: bytes | None
    record: bytes | None


class PrefixCache:
    """The contents of a pool's pages. ``layout`` names what else must agree: model, dtype, record layout.

    Stores need a host tier above them.
    """

    def __init__(self, pool: PagePool, layout: str = "", tier: HostTier | None = None, stores: StoreTier | None = None):
        self.pool = pool
        self.tier = tier
        self.stores = stores
        if tier is not None and stores is not None:
            tier.below = stores.save
        self.spills: list[Spill] = []
        """What has to be copied to the host before anything is written to the pages taken since."""
        self.backlog: dict[bytes, None] = {}
        """Keys of full pages on the device that are to be copied to the stores."""
        self.backed_up = 0
        """Pages that copies have been planned of."""
        pool.forget = self._evict
        self._layout = layout
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[bytes, int] = {}
        self._after: dict[bytes, dict[int, None]] = {}
        """The pages that continue a text, by its key."""

    def chain(self, tokens: Sequence[int], salt: str = "") -> Chain:
        """The keys of a new sequence. Different salts share nothing."""
        chain = Chain.begin(len(self.pool.windows), self._layout, salt)
        chain.extend(tokens, self.pool.page_size)
        return chain

    def match(self, chain: Chain, tokens: Sequence[int], limit: int, *, tails: bool = True) -> Hit:
        """The longest known beginning of ``tokens``, at most ``limit`` of them; whole pages without ``tails``. Its
        pages are held."""
        chain.extend(tokens, self.pool.page_size)
        hit = None
        while hit is None:  # once more where a record turns out to be damaged: it is dropped
            hit = self._hit(chain, self._longest(chain, tokens, limit, self._recorded, tails=tails))
        if self.stores is not None and tails and hit.tokens < limit:
            hit.beyond.extend(self._beyond(chain, tokens, limit, hit.tokens))
        self.pool.hold(hit.pinned)
        return hit

    def _longest(
        self, chain: Chain, tokens: Sequence[int], limit: int, below: Callable[[bytes], bool], *, tails: bool = True
    ) -> Beginning:
        """The longest beginning of which all groups have what they need, on the device or ``below`` it."""
        size, windows = self.pool.page_size, self.pool.windows.tokens
        page = limit // size
        for keys, window in zip(chain.keys, windows, strict=True):
            if window is None:
                page = next((n for n in range(page) if keys[n] not in self._by_key and not below(keys[n])), page)
        while True:
            missing = self._missing(chain, page, min(page * size + size - 1, limit), below)
            if missing is None:
                rest = tuple(tokens[page * size : min(page * size + size, limit)]) if tails else ()
                found = self._tails(chain, page, rest, below)
                missing = self._missing(chain, page, page * size + found.rest, below)
                if missing is None:
                    return found
            page = missing  # no longer one can do without it

    def _missing(self, chain: Chain, page: int, position: int, below: Callable[[bytes], bool]) -> int | None:
        """The last page before ``page`` that the token at ``position`` looks at through a window and that some group
        does not have."""
        last = -1
        for group, window in enumerate(self.pool.windows.tokens):
            if window is not None:
                keys, first = chain.keys[group], self.pool.windows.first(group, position)
                for number in range(page - 1, max(first - 1, last), -1):
                    if keys[number] not in self._by_key and not below(keys[number]):
                        last = number
                        break
        return None if last < 0 else last

    def _tails(self, chain: Chain, page: int, rest: tuple[int, ...], below: Callable[[bytes], bool]) -> Beginning:
        """How much of ``rest``, which follows on whole pages, all groups have on the next."""
        shortest = len(rest)
        tails: list[int | bytes] = []
        for group in range(len(chain.keys) if rest else 0):
            before = chain.before(group, page)
            best, tail = 0, None
            for other in islice(reversed(self._after.get(before, {})), LOOK_AT):
                same = common(self._entries[other].tokens, rest)
                if same > best:
                    best, tail = same, other
            if best < len(rest) and below(key := tail_key(before, rest)):
                tails.append(key)
            elif tail is None:
                return Beginning(page, 0, [])
            else:
                tails.append(tail)
                shortest = min(shortest, best)
        return Beginning(page, shortest, tails)

    def _hit(self, chain: Chain, known: Beginning) -> Hit | None:
        """The pages and records of a beginning; None where one of them cannot be read."""
        hit = Hit(known.pages * self.pool.page_size + known.rest, [])
        for group, keys in enumerate(chain.keys):
            first = self.pool.windows.first(group, hit.tokens)
            pages = [0] * first + [self._by_key.get(key, 0) for key in keys[first : known.pages]]
            wanted = [(number, keys[number]) for number in range(first, known.pages) if not pages[number]]
            if known.tails:
                tail = known.tails[group]
                if isinstance(tail, bytes):
                    wanted.append((known.pages, tail))
                    pages.append(0)
                else:
                    hit.copies.append((group, tail))
            for number, key in wanted:
                assert self.tier is not None
                if (record := self.tier.find(key)) is None:
                    return None
                hit.loads.append(Load(group, number, *record))
            hit.pages.append(pages)
        return hit

    def _beyond(self, chain: Chain, tokens: Sequence[int], limit: int, known: int) -> list[bytes]:
        """Keys of the records in the stores that would make more than the first ``known`` tokens known.

        With the others that would be loaded then they have to fit into the host tier.
        """
        assert self.tier is not None
        stores, size = self.stores, self.pool.page_size
        assert stores is not None
        while True:
            found = self._longest(chain, tokens, limit, lambda key: self._recorded(key) or key in stores)
            length = found.pages * size + found.rest
            if length <= known:
                return []
            firsts = [self.pool.windows.first(group, length) for group in range(len(chain.keys))]
            keys = [
                keys[number]
                for number in range(min(firsts), found.pages)
                for keys, first in zip(chain.keys, firsts, strict=True)
                if number >= first and keys[number] not in self._by_key
            ]
            keys += [tail for tail in found.tails if isinstance(tail, bytes)]
            if len(keys) <= self.tier.capacity:
                return [key for key in keys if key not in self.tier]
            less = -(-(len(keys) - self.tier.capacity) // len(firsts))
            limit = max(0, found.pages + bool(found.rest) - less) * size

    def _recorded(self, key: bytes) -> bool:
        """Whether the host tier has it."""
        return self.tier is not None and key in self.tier

    def enter(self, chain: Chain, tokens: Sequence[int], pages: Tables, computed: int, *, tail: bool = True) -> None:
        """Make known what a sequence has in ``pages``: the first ``computed`` of its ``tokens``.

        ``tail`` False leaves out what is on a page not yet full.
        """
        size = self.pool.page_size
        chain.extend(tokens, size)
        full = computed // size
        entered: list[bytes] = []
        for number in range(chain.entered, full):
            text: tuple[int, ...] = ()
            for group, table in enumerate(pages):
                key = chain.keys[group][number]
                if key not in self._by_key:
                    if not table[number]:
                        continue
                    text = text or tuple(tokens[number * size : (number + 1) * size])
                    self._put(table[number], Entry(chain.before(group, number), text, key, key))
                entered.append(key)
        if self.stores is not None:
            self._want_copies(self.stores, entered)
        chain.entered = max(chain.entered, full)
        rest = tuple(tokens[full * size : computed]) if tail else ()
        for group, table in enumerate(pages if rest else ()):
            before = chain.before(group, full)
            if not self._covered(before, rest):
                self._put(table[full], Entry(before, rest, None, None))

    def leave(
        self, chain: Chain, tokens: Sequence[int], pages: Tables, computed: int, *, returns: bool = False
    ) -> None:
        """A sequence gives its pages back; what they hold stays known until they are needed.

        One that ``returns`` to go on just there (it is preempted) has its last page kept as well as the others.
        """
        chain.entered = 0  # what others have entered may be gone by now: then ours takes its place
        self.enter(chain, tokens, pages, computed)
        full = computed // self.pool.page_size
        rest = tuple(tokens[full * self.pool.page_size : computed])
        for group, table in enumerate(pages):
            if returns and rest:
                before = chain.before(group, full)
                self._put(table[full], Entry(before, rest, None, tail_key(before, rest)))
        for number in reversed(range(full)):
            for group, table in enumerate(pages):
                if table[number] and (known := self._by_key.get(chain.keys[group][number])) is not None:
                    self.pool.touch(known)
        chain.entered = 0  # if it comes back, it will be with other pages
        self.let_go(in_order(pages))

    def let_go(self, pages: Sequence[int]) -> None:
        """Hold pages no longer: a hit is not wanted after all, its page has been copied, or a sequence leaves."""
        self.pool.give(pages, keep=self._entries.__contains__)

    def keys(self, chain: Chain, tokens: Sequence[int], page: int) -> Iterator[bytes]:
        """The first group's keys of the pages of ``tokens`` from number ``page`` on; the last page's as far as it is
        filled."""
        chain.extend(tokens, self.pool.page_size)
        full = len(chain.keys[0])
        yield from chain.keys[0][page:]
        if tail := tokens[full * self.pool.page_size :]:
            yield tail_key(chain.before(0, full), tail)

    def keepsakes(self) -> dict[bytes, int]:
        """Kept pages that neither the host tier nor a store has, by their record's key, the last used first."""
        found: dict[bytes, int] = {}
        for page in reversed(list(self.pool.oldest())):
            record = self._entries[page].record
            if record is not None and not any(
                below is not None and record in below for below in (self.tier, self.stores)
            ):
                found.setdefault(record, page)
        return found

    def _want_copies(self, stores: StoreTier, keys: list[bytes]) -> None:
        """These pages, of one text, hold what they are to hold from the next plan on."""
        planned = {key for spill in self.spills for key in spill.block.keys}
        stores.used(key for key in reversed(keys) if key in stores)  # the end of a text goes before its beginning
        self.backlog.update((key, None) for key in keys if key not in planned and not stores.keeps(key))

    def back_up(self) -> None:
        """Plan copies of pages that are on the device alone: a block of them, if the stores keep up.

        To be called before anything else is planned: pages that have been entered since the last plan was launched
        hold nothing yet.
        """
        if self.stores is None or not self.backlog or self.stores.busy:
            return
        found = [key for key in islice(self.backlog, SIZES[0]) if not self.stores.keeps(key)]
        if found:
            found = found[: sizes(len(found))[0]]
            self.spills.append(Spill(Block(found), [self._by_key[key] for key in found]))
            self.backed_up += len(found)
        for key in found or list(islice(self.backlog, SIZES[0])):
            del self.backlog[key]

    def _covered(self, before: bytes, rest: tuple[int, ...]) -> bool:
        after = self._after.get(before, {})
        return any(self._entries[page].tokens[: len(rest)] == rest for page in islice(reversed(after), LOOK_AT))

    def _put(self, page: int, entry: Entry) -> None:
        if page in self._entries:
            self.forget(page)
        self._entries[page] = entry
        self._after.setdefault(entry.before, {})[page] = None
        if entry.key is not None:
            self._by_key[entry.key] = page

    def _evict(self, page: int) -> None:
        """The page is taken for something else; the host tier gets it, and others that will go next."""
        entry = self._entries.get(page)
        if self.tier is not None and entry is not None and self._worth_a_spill(entry.record):
            found = {entry.record: page}
            for other in islice(self.pool.oldest(), LOOK_AT):
                record = self._entries[other].record
                if self._worth_a_spill(record) and len(found) < SIZES[0]:
                    found.setdefault(record, other)
            pages = list(found.values())
            for block in self.tier.put(list(found)):
                self.spills.append(Spill(block, pages[: len(block.keys)]))
                del pages[: len(block.keys)]
        self.forget(page)

    def _worth_a_spill(self, record: bytes | None) -> TypeGuard[bytes]:
        """Not where the host tier has it, or a store from which it comes as quickly."""
        if record is None or self.tier is None or record in self.tier:
            return False
        return self.stores is None or not self.stores.near(record)

    def forget(self, page: int) -> None:
        """What the page holds is known no more."""
        entry = self._entries.pop(page, None)
        if entry is None:
            return
        after = self._after[entry.before]
        del after[page]
        if not after:
            del self._after[entry.before]
        if entry.key is not None:
            del self._by_key[entry.key]
            self.backlog.pop(entry.key, None)

    def check(self) -> None:
        """Raise AssertionError unless the three indices agree."""
        keys = {entry.key: page for page, entry in self._entries.items() if entry.key is not None}
        after = sorted((entry.before, page) for page, entry in self._entries.items())
        if keys != self._by_key or after != sorted((key, page) for key, pages in self._after.items() for page in pages):
            raise AssertionError("the prefix cache's indices disagree")
        if not self.backlog.keys() <= keys.keys():
            raise AssertionError("a page is to be copied that is not on the device")
