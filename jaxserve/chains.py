"""Keys of pages: equal keys mean equal texts from the start, in the same group of layers. Imports no jax."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Chain:
    """The keys of one sequence's pages. ``keys[g][i]`` belongs to page i of group g, which is full; they grow with the
    text."""

    roots: list[bytes]
    keys: list[list[bytes]]
    entered: int = 0
    """Full pages that have been put into the cache, or were found there."""

    @classmethod
    def begin(cls, groups: int, layout: str, salt: str) -> "Chain":
        """The keys of no text yet. Different layouts, salts and groups share nothing."""
        root = hashlib.sha256(f"{layout}\0{salt}".encode("utf-8", "surrogatepass")).digest()
        others = [hashlib.sha256(root + bytes([group])).digest() for group in range(1, groups)]
        return cls([root, *others], [[] for _ in range(groups)])

    def before(self, group: int, page: int) -> bytes:
        """The key that page number ``page`` builds upon."""
        return self.keys[group][page - 1] if page else self.roots[group]

    def extend(self, tokens: Sequence[int], size: int) -> None:
        """Add the keys of the pages of ``size`` tokens that ``tokens`` (all of the sequence's) fill by now."""
        for page in range(len(self.keys[0]), len(tokens) // size):
            text = array("I", tokens[page * size : (page + 1) * size]).tobytes()
            for group, keys in enumerate(self.keys):
                keys.append(hashlib.sha256(self.before(group, page) + text).digest())


def tail_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a page that ``tokens`` fill in part, or wholly, after the text of key ``before``."""
    return hashlib.sha256(before + array("I", tokens).tobytes()).digest()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens agree from the start."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
