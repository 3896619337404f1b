"""How far back the groups of layers look, and the pages they need for it. Policy only; imports no jax."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """For each group how many tokens its layers look back, the token itself included (None: all), in pages of ``size``
    tokens."""

    tokens: tuple[int | None, ...]
    size: int

    def __len__(self) -> int:
        """Groups."""
        return len(self.tokens)

    def first(self, group: int, position: int) -> int:
        """Number of the first page that the token at ``position`` looks at."""
        window = self.tokens[group]
        return 0 if window is None else max(0, position - window + 1) // self.size

    def most(self, start: int, end: int, step: int) -> list[int]:
        """Pages that each group holds at most while the tokens ``[start, end)`` are computed, ``step`` at a time."""
        found = []
        for group, window in enumerate(self.tokens):
            whole = -(-end // self.size) - self.first(group, start)
            found.append(whole if window is None else min(whole, -(-(window - 1 + step) // self.size) + 1))
        return found

    def longest(self, pages: int, step: int, limit: int) -> int:
        """Tokens of the longest sequence, ``limit`` at most, for which there are enough pages."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if sum(self.most(0, middle, step)) <= pages:
                low = middle
            else:
                high = middle - 1
        return low

    def fit(self, pages: int, step: int, limit: int) -> int:
        """Tokens of as many sequences of ``limit`` as there are pages for, and of one more as far as it goes."""
        limit = -(-limit // self.size) * self.size
        count, left = divmod(pages, sum(self.most(0, limit, step)))
        return count * limit + self.longest(left, step, limit)
