"""The page pool: which KV pages are free. Policy only; imports no jax."""

from collections.abc import Iterable


class PagePool:
    """Page numbers ``1 .. num_pages - 1``; page 0 is the dump that padding writes to and is never handed out."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages, got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usable(self) -> int:
        """Pages that sequences can hold in all."""
        return self.num_pages - 1

    @property
    def usage(self) -> float:
        """Share of the usable pages that is in use."""
        return 1 - self.free / self.usable

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    def check(self, in_use: Iterable[int] = ()) -> None:
        """Raise AssertionError unless free pages and those ``in_use`` are exactly all pages, each once."""
        together = sorted([*self._free, *in_use])
        if together != list(range(1, self.num_pages)):
            raise AssertionError(f"{len(together)} of {self.usable} pages are accounted for, or some twice")
