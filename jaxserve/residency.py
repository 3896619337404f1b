"""Which pages' latents the devices hold, where the host holds them all: sparse decode beyond device memory. Policy
only; imports no jax.

Every latent is written to the host's pages, under the same page number as the rest of its token. Devices have *frames*
for some of the pages, and *regions*: a buffer of single rows for each sequence that reads from the host. A running
sequence is resident (all its pages have frames) or host-backed (only its last pages surely have). Frames of pages that
nobody needs are kept, the longest unneeded taken first.

A sequence becomes host-backed when frames run short, or when its prompt has been computed where the mode is
``always``; nothing is copied for it, the host has everything. Where there is room again the first in order becomes
resident, page by page from the host. A prompt that fits no other way is computed host-backed, few tokens at a time.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from jaxserve.prefix_cache import Hit
from jaxserve.sequence import Sequence

NO_REGION = -1
TAIL = 2
"""Last pages of a host-backed sequence that keep their frames."""
SPARE = 10
"""One of so many frames stays free when a sequence becomes resident again."""


@dataclass(frozen=True, slots=True)
class HotShape:
    """What the devices hold for latents whose home is the host. Frame 0 is a dump."""

    frames: int
    regions: int
    rows: int
    """Of a region: tokens of one sequence."""
    chunk: int
    """Prompt tokens that a host-backed sequence computes at once: what they choose has to fit its region."""
    row_bytes: int = 0
    """Of a latent in one plane."""
    planes: int = 0
    always: bool = False
    checked: bool = False
    """Whether what comes from the host is compared with its checksum."""


class Residency:
    """Frames and regions, and who has them.

    ``frame`` int32 ``[pages]``: the frame of each page, or -1. ``fetched`` are pages whose frames have to be filled
    from the host before the next step, which takes them.
    """

    def __init__(self, shape: HotShape, num_pages: int, page_size: int):
        self.shape = shape
        self.page_size = page_size
        self.frame = np.full(num_pages, -1, np.int32)
        self.frame[0] = 0
        self.fetched: dict[int, int] = {}
        self.computing: set[Sequence] = set()
        """Who has prompt tokens in the step that is being planned: all they choose is read from frames."""
        self.moved_out = self.moved_in = 0
        """Times a sequence became host-backed, and resident again."""
        self._needed = [0] * num_pages
        self._blank = list(range(shape.frames - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._regions = list(range(shape.regions - 1, -1, -1))

    @property
    def room(self) -> int:
        """Frames that can be taken."""
        return len(self._blank) + len(self._idle)

    @property
    def usable(self) -> int:
        return self.shape.frames - 1

    @property
    def usage(self) -> float:
        """Share of the frames that somebody needs."""
        return 1 - self.room / self.usable

    @property
    def host_backed(self) -> int:
        """Sequences that read from the host."""
        return self.shape.regions - len(self._regions)

    @property
    def has_region(self) -> bool:
        return bool(self._regions)

    def _lacking(self, pages: Iterable[int]) -> int:
        """Frames that have to be taken so that all of the pages are needed ones."""
        return sum(not self._needed[page] for page in pages)

    def settle(self, running: Many[Sequence]) -> None:
        """A step is to be planned. Let those of ``running`` change sides who should: out where the mode says so, in
        where there is room."""
        self.computing.clear()
        if self.shape.always:
            for seq in running:
                if self._regions and self._can_move_out(seq):
                    self.move_out(seq)
        elif (first := next((seq for seq in running if seq.region >= 0), None)) is not None:
            self.move_in(first)

    def enter(self, seq: Sequence, hit: Hit, *, host_backed: bool) -> None:
        """A sequence admitted with ``hit`` gets frames: for all its pages, or for the last ones and a region. Pages
        that are loaded or copied for it have their tokens in the host's page before the step."""
        (pages,) = seq.pages
        known, begun = set(hit.held), pages[: -(-hit.tokens // self.page_size)]
        seq.host_from = 0
        if host_backed:
            self._take_region(seq)
            seq.host_from = max(0, len(pages) - TAIL)
        for page in begun:
            if page not in known:
                self.drop(page)
        self._need(pages[seq.host_from :], filled=set(begun))

    def grow(self, seq: Sequence, count: int) -> None:
        """The last ``count`` pages of ``seq`` are new."""
        (pages,) = seq.pages
        self._need(pages[len(pages) - count :], filled=set())
        if seq.region >= 0:
            self._release_until(seq, max(seq.host_from, len(pages) - TAIL))

    def move_out(self, seq: Sequence) -> None:
        """A resident sequence becomes host-backed: its frames are there for others."""
        (pages,) = seq.pages
        self._take_region(seq)
        self._release_until(seq, max(0, len(pages) - TAIL))

    def move_in(self, seq: Sequence) -> bool:
        """A host-backed sequence becomes resident, where that leaves frames to spare."""
        (pages,) = seq.pages
        outside = pages[: seq.host_from]
        if self._lacking(outside) + self.shape.frames // SPARE > self.room:
            return False
        self._need(outside, filled=set(outside))
        self._give_region(seq)
        seq.host_from = 0
        self.moved_in += 1
        return True

    def leave(self, seq: Sequence) -> None:
        """``seq`` gives everything back; before its pages are given back."""
        (pages,) = seq.pages
        self._release_until(seq, len(pages))
        seq.host_from = 0
        if seq.region >= 0:
            self._give_region(seq)

    def make_room(self, need: int, running: Many[Sequence], pages: Many[int] = ()) -> bool:
        """Whether ``need`` frames can be taken, and those that the ``pages`` lack: the last in order of those who
        decode become host-backed for it."""
        for seq in reversed(running):
            if self.room >= need + self._lacking(pages) or not self._regions:
                break
            if self._can_move_out(seq):
                self.move_out(seq)
        return self.room >= need + self._lacking(pages)

    def _can_move_out(self, seq: Sequence) -> bool:
        decodes = not seq.prefilling and seq not in self.computing
        return decodes and seq.region < 0 and len(seq.pages[0]) > TAIL

    def drop(self, page: int) -> None:
        """What the page's frame holds is not the page's any more; nobody needs it."""
        if page in self._idle:
            del self._idle[page]
            self._blank.append(int(self.frame[page]))
            self.frame[page] = -1
            self.fetched.pop(page, None)

    def take_fetched(self) -> list[tuple[int, int]]:
        """Pages and frames to fill before the step that is planned."""
        pairs = [(page, frame) for page, frame in self.fetched.items() if self.frame[page] == frame]
        self.fetched.clear()
        return pairs

    def _need(self, pages: Many[int], filled: set[int]) -> None:
        """One more needs the pages' frames; those of ``filled`` ones that had none have to be fetched."""
        for page in pages:
            self._idle.pop(page, None)
        for page in pages:
            if self.frame[page] < 0:
                self.frame[page] = self._take()
                if page in filled:
                    self.fetched[page] = int(self.frame[page])
            self._needed[page] += 1

    def _take(self) -> int:
        if not self._blank:
            self.drop(next(iter(self._idle)))
        return self._blank.pop()

    def _release_until(self, seq: Sequence, end: int) -> None:
        """``seq`` needs its pages before number ``end`` no more; from the last to the first, which is kept longest. In
        the mode ``always`` none is kept."""
        for page in reversed(seq.pages[0][seq.host_from : end]):
            self._needed[page] -= 1
            if not self._needed[page]:
                self._idle[page] = None
                if self.shape.always:
                    self.drop(page)
        seq.host_from = end

    def _take_region(self, seq: Sequence) -> None:
        seq.region, seq.region_is_new = self._regions.pop(), True
        self.moved_out += 1

    def _give_region(self, seq: Sequence) -> None:
        self._regions.append(seq.region)
        seq.region, seq.region_is_new = -1, False

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raise AssertionError unless frames and regions are those of ``holders``, and none is missing."""
        needed = [0] * len(self._needed)
        regions = list(self._regions)
        for seq in holders:
            regions += [seq.region] if seq.region >= 0 else []
            for page in seq.pages[0][seq.host_from :]:
                needed[page] += 1
        if needed != self._needed:
            raise AssertionError("the frames' holders are not who they are thought to be")
        if sorted(regions) != list(range(self.shape.regions)):
            raise AssertionError(f"regions {sorted(regions)} are not 0 .. {self.shape.regions - 1}")
        framed = [page for page in range(1, len(needed)) if self.frame[page] >= 0]
        if sorted(framed) != sorted([*self._idle, *(page for page, n in enumerate(needed) if n)]):
            raise AssertionError("pages have frames that nobody keeps, or lack them")
        if sorted([*self._blank, *self.frame[framed].tolist()]) != list(range(1, self.shape.frames)):
            raise AssertionError("frames are lost, or held twice")
