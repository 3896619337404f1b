"""Where the latents that each query chose lie on the device: in frames, in the row's hot region, or not yet there.

``resolve`` is the public function. Latents that do not fit the device have their authoritative copies in a host pool of
pages. The device keeps some pages in *frames*, and behind them, in one array ``latents [F + R * B / G, G, bytes]``, R
hot regions of B rows, each of one sequence. A row's choice is resolved to rows of that array, and what is missing is to
be fetched (``pallas_kernels.host_rows``) before they are read.

positions: int32 ``[N, Q, k]``, what each of Q queries of a row chose, as positions in its sequence; -1 is none.
pages, frames: int32 ``[N, W]``, for each page of the row's sequence the page of the host pool, and the frame, or -1
where the device has none. regions: int32 ``[N]``, the row's region; ``NO_REGION``; or ``emptied(region)``: what it
holds belongs to another sequence, or to a text that has changed, and is forgotten first. No two rows of a call have one
region. page_size: G. first: the row at which the regions begin, ``F * G``.

The rules. A position whose page has a frame is read there. The others of a row are taken once, however many queries
chose them. One that the region holds is a *hit* and stays in its slot. The misses, in order of query and rank, get the
slots that were unused for longest and are not hit by this call. Slots are then ordered: those neither hit nor filled,
those filled, those hit, each in the order they had. Nothing depends on what else is in the batch. B >= k
(``ValueError``). A position that is neither on the device nor has a region, that lies beyond the tables, or that finds
no slot because the queries of the row have chosen more than B, is *lost*: its row is -1 and it is counted; whoever
places pages must not let that happen.

Layers that share a choice share a plan, and have one ``Hot`` between them: their records lie alike.

``reference`` (jnp) runs everywhere, ``foreign`` (CUDA) on a GPU whose library has been built.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Choice, Kernels
from pallas_kernels.resolver import foreign, reference
from pallas_kernels.resolver.plan import NO_REGION, Case, Hot, Plan, emptied, empty

__all__ = ["NO_REGION", "Case", "Hot", "Plan", "choose", "emptied", "empty", "resolve"]


def resolve(
    positions: jax.Array,
    pages: jax.Array,
    frames: jax.Array,
    regions: jax.Array,
    hot: Hot,
    *,
    page_size: int,
    first: int,
    kernels: Kernels = REFERENCE,
) -> tuple[Plan, Hot]:
    """The plan for what was chosen, and what the regions hold after it."""
    case, top_k = Case.of(positions, hot), positions.shape[-1]
    if case.slots < top_k:
        raise ValueError(f"a hot region of {case.slots} rows cannot hold the {top_k} rows of one query")
    module: Any = choose(case, kernels).module
    return module.resolve(positions, pages, frames, regions, hot, page_size=page_size, first=first)


def choose(case: Case, kernels: Kernels) -> Choice:
    """What runs a case. The kernel is no matter of ``mosaic``: it is taken where it can run, but for ``reference``."""
    reason = "kernels is reference" if kernels.mode == "reference" else foreign.declines(case, kernels)
    if reason is None:
        return Choice("foreign", foreign)
    return Choice("reference", reference, (("foreign", reason),))
