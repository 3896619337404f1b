"""The page pool: who holds which KV page. Policy only; imports no jax.

A page is free, held by one sequence or several, or kept: held by none, its content remembered for whoever comes with
the same tokens (see ``prefix_cache``). Kept pages count as free: they are taken, the longest unused first, when the
others have run out.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxserve.windows import Windows


class PagePool:
    """Page numbers ``1 .. num_pages - 1``; page 0 is the dump that padding writes to and is never handed out.

    Groups of layers with the given ``windows`` all take from it: a page belongs to one of them at a time. ``forget`` is
    called with every kept page that is taken for something else.
    """

    def __init__(self, num_pages: int, page_size: int, windows: tuple[int | None, ...] = (None,)):
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages, got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows = Windows(windows, page_size)
        self.forget: Callable[[int], None] = lambda page: None
        self._holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def usable(self) -> int:
        """Pages that sequences can hold in all."""
        return self.num_pages - 1

    @property
    def usage(self) -> float:
        """Share of the usable pages that sequences hold."""
        return 1 - self.free / self.usable

    def holders(self, page: int) -> int:
        return self._holders[page]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages for one holder, or None (and nothing taken) where fewer can be had."""
        if count > self.free:
            return None
        while len(self._blank) < count:
            page, _ = self._kept.popitem(last=False)
            self.forget(page)
            self._blank.append(page)
        taken = self._blank[len(self._blank) - count :]
        del self._blank[len(self._blank) - count :]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One holder more for pages that are held or kept."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def give(self, pages: Sequence[int], keep: Callable[[int], bool] = lambda page: False) -> None:
        """One holder less, from the last page to the first. A page that nobody holds is blank, or kept if ``keep``.

        From the last to the first, so that the end of a text is taken before its beginning.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if keep(page):
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def oldest(self) -> Iterator[int]:
        """Kept pages in the order in which they will be taken."""
        return iter(self._kept)

    def touch(self, page: int) -> None:
        """If it is kept, let it be taken after all other kept pages."""
        if page in self._kept:
            self._kept.move_to_end(page)

    def check(self, held: Iterable[int] = ()) -> None:
        """Raise AssertionError unless ``held`` (a page once for each holder) is what is held, and none is missing."""
        holders = Counter(held)
        if holders != Counter({page: n for page, n in enumerate(self._holders) if n}):
            raise AssertionError("the pages' holders are not who they are thought to be")
        together = sorted([*self._blank, *self._kept, *holders])
        if together != list(range(1, self.num_pages)):
            raise AssertionError(f"{len(together)} of {self.usable} pages are accounted for, or some twice")
