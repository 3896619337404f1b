"""Threefry, the counter-based function behind the sampler's noise, in plain operators. Imports no jax."""

from typing import Any

import numpy as np


def threefry(key_low: Any, key_high: Any, high: Any, low: Any) -> Any:
    """First word of Threefry-2x32-20 (Salmon et al., SC 2011) of the counter (high, low); uint32, all broadcast.

    Of numpy's arrays or jax's. Unrolled, so that it fuses into one pass: jax's own loops over whole arrays on a CPU,
    ten times slower here.
    """
    keys = (key_low, key_high, key_low ^ key_high ^ np.uint32(0x1BD11BDA))
    a, b = high + keys[0], low + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ ((b << np.uint32(turn)) | (b >> np.uint32(32 - turn)))
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a
