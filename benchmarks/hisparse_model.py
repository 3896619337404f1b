"""What a decode step costs where latents are on the host: arithmetic over assumed rates, nothing measured.

Eight GPUs serve DeepSeek V3.2. A step is what its parts take one after another: weights, exchanges of experts, fixed
costs of a layer, keys, chosen latents, and copies from the host. A part that reads and computes takes the longer of
both. Seconds, bytes and tokens a second throughout; batches are sequences of one GPU.
"""

from dataclasses import dataclass

LAYERS, EXPERT_LAYERS, TOP_K = 61, 58, 2048
HIDDEN, HEADS, EXPERTS, CHOSEN = 7168, 128, 256, 8
KEY, LATENT, REMEMBERED, TAIL = 132, 656, 8, 64
"""Bytes of a token and layer, what the resolver remembers of a row, and tokens that stay in frames."""
EXPERT = 3 * HIDDEN * 2048
"""Parameters of one expert in one layer, a byte each."""
MIXING = 187.1e6 + 14.0e6
"""Of a layer's attention with its indexer, likewise."""
OTHERS = EXPERT_LAYERS * EXPERT + 3 * 3 * HIDDEN * 18432
"""Of the shared experts and the dense layers."""
HEAD = 2 * 129280 * HIDDEN
"""Bytes of the head in bf16, and of the embedding, which is not read."""
ACTIVE = 37e9


@dataclass(frozen=True)
class Deployment:
    """Eight GPUs and what they are assumed to reach."""

    gpus: int = 8
    ways: int = 1
    """GPUs that share each sequence's attention, and each hold its latents: 1 is data-parallel, 8 tensor-parallel."""
    memory: float = 141e9
    reserve: float = 8e9
    """For activations, programs and exchanges."""
    host_memory: float = 2e12
    """Of the machine, for pools."""
    read: float = 0.8 * 4.8e12
    fp8: float = 0.5 * 1979e12
    bf16: float = 0.4 * 989e12
    exchange: float = 300e9
    layer: float = 40e-6
    """Launches and exchanges of a layer, whatever the batch."""
    resolver: float = 15e-6
    """The resolver and the launch of the copy, a layer."""


@dataclass(frozen=True)
class Bus:
    """From the host to one GPU."""

    name: str
    rate: float
    """For large copies."""
    share: float = 0.7
    """Of it that rows of 656 bytes reach."""


BUSES = {"PCIe 5": 55.0, "NVLink-C2C": 400.0}
"""GB a second to a GPU that large copies reach."""


@dataclass(frozen=True)
class Step:
    """Seconds of a decode step's parts, of a batch on each GPU."""

    weights: float
    layers: float
    attention: float
    copies: float
    ahead: bool = False
    """Whether each layer's copies run beside the layer before. The first layer's cannot."""

    @property
    def seconds(self) -> float:
        rest = self.weights + self.layers + self.attention
        if self.ahead:
            return max(rest, self.copies) + self.copies / LAYERS
        return rest + self.copies


def weight_bytes(at: Deployment) -> float:
    """Of one GPU: its share of the experts and the head, and of the rest all or, where attention is shared, a part."""
    experts = EXPERT_LAYERS * EXPERTS * EXPERT / at.gpus
    return experts + (LAYERS * MIXING + OTHERS) / at.ways + 2 * HEAD / at.gpus


def sequence_bytes(tokens: int, buffer: int | None) -> float:
    """Of a sequence on a device; ``buffer`` is the rows of its region, None where its latents are all there."""
    if buffer is None:
        return LAYERS * tokens * (KEY + LATENT)
    return LAYERS * (tokens * KEY + (buffer + TAIL) * LATENT + buffer * REMEMBERED)


def fits(at: Deployment, tokens: int, buffer: int | None) -> int:
    """Sequences that one GPU holds at once."""
    device = int(max(0.0, at.memory - at.reserve - weight_bytes(at)) / sequence_bytes(tokens, buffer))
    if buffer is None:
        return device
    return min(device, int(at.host_memory / pool_bytes(at, 1, tokens)))


def pool_bytes(at: Deployment, batch: int, tokens: int) -> float:
    """Of the machine's memory: latents of all, once for the GPUs that share them."""
    return batch * at.gpus / at.ways * LAYERS * tokens * LATENT


def step(
    at: Deployment,
    batch: int,
    tokens: int,
    *,
    bus: Bus | None = None,
    hits: float = 1.0,
    ahead: bool = False,
) -> Step:
    """A step of ``batch`` sequences of ``tokens`` on each GPU. Without ``bus`` their latents are all on it."""
    everywhere = batch * at.gpus / at.ways
    touched = 1 - (1 - CHOSEN / EXPERTS) ** everywhere  # an even router
    experts = touched * EXPERT_LAYERS * EXPERTS * EXPERT / at.gpus
    read = experts + (LAYERS * MIXING + OTHERS) / at.ways + HEAD / at.gpus
    weights = max(read / at.read, 2 * ACTIVE * everywhere / at.gpus / at.fp8)
    sent = EXPERT_LAYERS * CHOSEN * 3 * HIDDEN * everywhere / at.gpus / at.exchange  # fp8 to an expert, bf16 back

    keys = max(batch * tokens * KEY / at.read, batch * tokens * 64 * 128 * 2 / at.fp8)
    rows = min(TOP_K, tokens)
    products = batch * rows * HEADS / at.ways * 2 * (576 + 512)
    attention = LAYERS * (keys + max(batch * rows * LATENT / at.read, products / at.bf16))

    fixed = LAYERS * (at.layer + (at.resolver if bus else 0.0)) + sent
    copied = LAYERS * batch * rows * (1 - hits) * LATENT
    return Step(weights, fixed, attention, copied / (bus.rate * bus.share) if bus else 0.0, ahead)


def throughput(at: Deployment, batch: int, seconds: float) -> float:
    """Tokens a second of all GPUs."""
    return batch * at.gpus / at.ways / seconds


def host_gather(at: Deployment, batch: int, tokens: int, bus: Bus, round_trip: float = 20e-6) -> float:
    """Seconds of a step whose rows the host gathers for nothing: all of them cross, since the shape of what it answers
    is fixed, at the rate of large copies, after the choice of each layer has gone to the host."""
    plain = step(at, batch, tokens)
    return plain.seconds + LAYERS * (batch * min(TOP_K, tokens) * LATENT / bus.rate + round_trip)


def break_even(at: Deployment, tokens: int, buffer: int, bus: Bus, *, ahead: bool = False) -> float | None:
    """The share of hits from which on a full GPU decodes as much as one with all latents on it; None where it never
    does, 0.0 where it always does."""
    few, many = fits(at, tokens, None), fits(at, tokens, buffer)
    wanted = throughput(at, few, step(at, few, tokens).seconds)

    def reaches(hits: float) -> bool:
        return throughput(at, many, step(at, many, tokens, bus=bus, hits=hits, ahead=ahead).seconds) >= wanted

    if not many or not reaches(1.0):
        return None
    if reaches(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
