"""Python's garbage collector while an engine starts: next to nothing of what is made then is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Look for no garbage meanwhile (that takes a tenth of a start). What was made counts as old afterwards: else the
    first collection would look through all of it, in the middle of the first request."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        if was_on:
            gc.enable()
