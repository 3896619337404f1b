"""What implementations of cache writes choose by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The facts of a call that matter."""

    dtype: str
    """Of the pages; uint8: fp8 records."""
    row: int
    """Bytes a token takes in a row of a page: of one head's keys, of its latent, of its index key."""
