"""Which KV pages hold which text, so that a prompt's known beginning is not computed again. Imports no jax.

The key of a full page is a SHA-256 over the key before it and the page's token ids; the first key stands for all else
that must agree (model and layout, the request's salt). Equal keys mean equal texts from the start. A page that is not
full, or a full one of which only the first tokens agree, serves too: it is copied, and the copy written on.

Pages enter when the step that fills them has been planned, to be matched from the next plan on: the device runs steps
in order. They stay while held, and afterwards until the pool needs them; then they go to the host tier, where there is
one, and come back from it.

Stores that outlive the process, where there are some, get a copy of every full page soon after it has been computed,
and bring it back through the host tier: what is lost with the process is only what has not been copied yet.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeGuard

from jaxserve.host_tier import SIZES, Block, HostTier, Spill, sizes
from jaxserve.pages import PagePool
from jaxserve.store_tier import StoreTier

LOOK_AT = 64
"""Pages that continue the same text are compared with a prompt at most this often, the latest first."""


@dataclass(slots=True)
class Chain:
    """The keys of one sequence's pages. ``keys[i]`` belongs to page i, which is full; ``keys`` grows with the text."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    entered: int = 0
    """Full pages that have been put into the cache, or were found there."""

    def before(self, page: int) -> bytes:
        """The key that page number ``page`` of the sequence builds upon."""
        return self.keys[page - 1] if page else self.root


@dataclass(frozen=True, slots=True)
class Hit:
    """A known beginning of ``tokens`` tokens: ``pages``, held for the asker, then the first tokens of page ``copy``.

    A page 0 stands for one that is not on the device: ``loads`` has its number in the sequence, and the record. The
    last one loaded may be filled in part.
    """

    tokens: int
    pages: list[int]
    copy: int | None = None
    loads: list[tuple[int, Block, int]] = field(default_factory=list)
    beyond: list[bytes] = field(default_factory=list)
    """Records in the stores that would make it longer."""

    @property
    def held(self) -> list[int]:
        return [page for page in self.pages if page]

    @property
    def pinned(self) -> list[int]:
        """All that is held for the asker: the page to copy as well."""
        return self.held if self.copy is None else [*self.held, self.copy]


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
        chain = Chain(hashlib.sha256(f"{self._layout}\0{salt}".encode("utf-8", "surrogatepass")).digest())
        self.extend(chain, tokens)
        return chain

    def extend(self, chain: Chain, tokens: Sequence[int]) -> None:
        """Add the keys of the pages that ``tokens`` (all of the sequence's) fill by now."""
        size = self.pool.page_size
        for page in range(len(chain.keys), len(tokens) // size):
            chain.keys.append(_key(chain.before(page), tokens[page * size : (page + 1) * size]))

    def match(self, chain: Chain, tokens: Sequence[int], limit: int) -> Hit:
        """The longest known beginning of ``tokens``, at most ``limit`` of them. Its pages are held."""
        size = self.pool.page_size
        self.extend(chain, tokens)
        pages: list[int] = []
        loads: list[tuple[int, Block, int]] = []
        while (len(pages) + 1) * size <= limit:
            key = chain.keys[len(pages)]
            page = self._by_key.get(key)
            if page is None:
                if (record := self._record(key)) is None:
                    break
                loads.append((len(pages), *record))
            pages.append(page or 0)
        done = len(pages) * size
        best, copy = 0, None
        rest = tuple(tokens[done : min(done + size, limit)])
        if rest:
            for page in islice(reversed(self._after.get(chain.before(len(pages)), {})), LOOK_AT):
                same = _common(self._entries[page].tokens, rest)
                if same > best:
                    best, copy = same, page
        if best < len(rest) and (record := self._record(_key(chain.before(len(pages)), rest))) is not None:
            loads.append((len(pages), *record))
            pages.append(0)
            best, copy = len(rest), None
        beyond = (
            []
            if self.stores is None or best == len(rest)
            else self._beyond(chain, tokens, limit, len(pages), len(loads))
        )
        hit = Hit(done + best, pages, copy, loads, beyond)
        self.pool.hold(hit.pinned)
        return hit

    def _beyond(self, chain: Chain, tokens: Sequence[int], limit: int, page: int, loads: int) -> list[bytes]:
        """Keys of records in the stores for the pages from ``page`` on, up to the first one that is nowhere.

        With those to ``loads`` they have to fit into the host tier.
        """
        assert self.tier is not None
        assert self.stores is not None
        size = self.pool.page_size
        keys = chain.keys[page : limit // size]
        rest = tokens[limit // size * size : limit]
        if rest:
            keys.append(_key(chain.before(limit // size), rest))
        found = []
        for key in keys[: max(0, self.tier.capacity - loads)]:
            if key in self.stores:
                found.append(key)
            elif key not in self._by_key and key not in self.tier:
                break
        return found

    def _record(self, key: bytes) -> tuple[Block, int] | None:
        return None if self.tier is None else self.tier.find(key)

    def enter(
        self, chain: Chain, tokens: Sequence[int], pages: Sequence[int], computed: int, *, tail: bool = True
    ) -> None:
        """Make known what a sequence has in ``pages``: the first ``computed`` of its ``tokens``.

        ``tail`` False leaves out what is on a page not yet full.
        """
        size = self.pool.page_size
        self.extend(chain, tokens)
        full = computed // size
        for page in range(chain.entered, full):
            key = chain.keys[page]
            if key not in self._by_key:
                text = tuple(tokens[page * size : (page + 1) * size])
                self._put(pages[page], Entry(chain.before(page), text, key, key))
        if self.stores is not None:
            self._want_copies(self.stores, chain.keys[chain.entered : full])
        chain.entered = max(chain.entered, full)
        rest = tuple(tokens[full * size : computed]) if tail else ()
        if rest and not self._covered(chain.before(full), rest):
            self._put(pages[full], Entry(chain.before(full), rest, None, None))

    def leave(
        self, chain: Chain, tokens: Sequence[int], pages: Sequence[int], computed: int, *, returns: bool = False
    ) -> None:
        """A sequence gives its pages back; what they hold stays known until they are needed.

        One that ``returns`` to go on just there (it is preempted) has its last page kept as well as the others.
        """
        chain.entered = 0  # what others have entered may be gone by now: then ours takes its place
        self.enter(chain, tokens, pages, computed)
        full = computed // self.pool.page_size
        rest = tuple(tokens[full * self.pool.page_size : computed])
        if returns and rest:
            before = chain.before(full)
            self._put(pages[full], Entry(before, rest, None, _key(before, rest)))
        for key in reversed(chain.keys[: computed // self.pool.page_size]):
            if (known := self._by_key.get(key)) is not None:
                self.pool.touch(known)
        chain.entered = 0  # if it comes back, it will be with other pages
        self.let_go(pages)

    def let_go(self, pages: Sequence[int]) -> None:
        """Hold pages no longer: a hit is not wanted after all, its page has been copied, or a sequence leaves."""
        self.pool.give(pages, keep=self._entries.__contains__)

    def keys(self, chain: Chain, tokens: Sequence[int], page: int) -> Iterator[bytes]:
        """The keys of the pages of ``tokens`` from number ``page`` on; the last page's as far as it is filled."""
        self.extend(chain, tokens)
        yield from chain.keys[page:]
        if tail := tokens[len(chain.keys) * self.pool.page_size :]:
            yield _key(chain.before(len(chain.keys)), tail)

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
            self._forget(page)
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
        self._forget(page)

    def _worth_a_spill(self, record: bytes | None) -> TypeGuard[bytes]:
        """Not where the host tier has it, or a store from which it comes as quickly."""
        if record is None or self.tier is None or record in self.tier:
            return False
        return self.stores is None or not self.stores.near(record)

    def _forget(self, page: int) -> None:
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


def _key(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(before + array("I", tokens).tobytes()).digest()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens agree from the start."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
