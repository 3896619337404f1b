"""Where latents are the host's: who has frames and regions, over the simulated device."""

import json
import random
import re

import pytest
from simulation import Wish, World
from tiny import FIXTURES

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.declare import declare_cache
from jaxserve.hot_size import hot_shape
from jaxserve.models import model_config
from jaxserve.residency import TAIL, HotShape

SIZE = 4


def wishes(rng: random.Random, count: int) -> list[Wish]:
    """Some share a text, some are aborted, some are more urgent than others."""
    return [
        Wish(
            prompt=rng.randint(1, 60),
            output=rng.randint(1, 40),
            turn=rng.randint(0, 60),
            priority=rng.choice([0, 0, 0, 1]),
            abort_after=rng.choice([None, None, None, rng.randint(0, 60)]),
            stops_at=rng.choice([None, None, rng.randint(1, 10)]),
            topic=rng.choice([None, 1, 2]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_every_token_read_is_in_its_frame_or_on_the_host(seed: int) -> None:
    """Under pages, frames and regions that are short by turns; the world asserts what a step reads."""
    rng = random.Random(seed)
    pages = rng.randint(25, 80)
    hot = HotShape(rng.randint(5, 40), rng.randint(1, 4), 16, rng.randint(1, 8), always=rng.random() < 0.4)
    records = rng.choice([0, 0, 30])
    reuse = bool(records) or rng.random() < 0.8
    world = World(pages, SIZE, rng.randint(1, 5), rng.randint(1, 4), rng.randint(0, 1), reuse, records, hot=hot)
    asked = wishes(rng, 12)
    for seq, wish in zip(world.run(asked), asked, strict=True):
        whole = wish.abort_after is None and wish.stops_at is None
        assert len(seq) == seq.limit or not whole
    assert world.residency.room == world.residency.usable
    assert world.residency.host_backed == 0


def test_sequences_move_out_when_frames_run_short_and_back_when_there_is_room() -> None:
    """Six of up to 20 pages over 50 frames: the last ones in order go out, and come back when the first have ended."""
    world = World(200, SIZE, 6, 8, 1, hot=HotShape(51, 6, 16, 4))
    seqs = world.run([Wish(40, 40, topic=t, stops_at=3 if t < 3 else None) for t in range(6)])
    assert world.residency.moved_out >= 2
    assert world.residency.moved_in >= 1
    assert [seq.preemptions for seq in seqs] == [0] * 6


def test_without_need_nobody_moves_out_unless_always() -> None:
    for always in (False, True):
        world = World(200, SIZE, 4, 8, 1, hot=HotShape(200, 4, 16, 4, always=always))
        world.run([Wish(40, 40, topic=t) for t in range(4)])
        assert world.residency.moved_out == (4 if always else 0)


def test_a_prompt_longer_than_all_frames_is_computed_a_little_at_a_time() -> None:
    world = World(60, SIZE, 2, 8, 1, hot=HotShape(9, 2, 16, 3))
    (seq,) = world.run([Wish(100, 20)])
    assert len(seq) == 120
    assert world.residency.moved_out == 1
    assert seq.preemptions == 0


def test_a_known_text_comes_to_frames_from_the_host() -> None:
    """What was computed before is known though its frames have gone to others: it is fetched, not computed."""
    world = World(100, SIZE, 1, 8, 1, hot=HotShape(20, 1, 16, 4))
    world.run([Wish(64, 1, topic=1), Wish(64, 1, topic=2, turn=20), Wish(64, 1, topic=1, turn=40)])
    assert world.prompt_tokens == 64 + 64 + 1


def test_the_bytes_that_are_said_to_do_would_do() -> None:
    """Just so many are enough, and one page of keys less is not; more never make it impossible."""
    config = EngineConfig(model="x", sparse_host="auto", page_size=SIZE, hot_buffer_tokens=8)
    model = model_config(json.loads((FIXTURES / "glm_moe_dsa" / "config.json").read_text()))
    cache = declare_cache(model, config, "float32")

    def shape(budget: int) -> HotShape:
        sizes = {"budget": budget, "pool": 1 << 20, "longest": 96, "max_num_seqs": 3}
        return hot_shape(config, model, cache, **sizes, block=32)[0]

    with pytest.raises(ConfigError, match="100 bytes of KV cache are too few") as refused:
        shape(100)
    least = int(re.search(r"(\d+) would do", str(refused.value)).group(1))
    with pytest.raises(ConfigError):
        shape(least - 1)
    for budget in range(least, 5 * least, 997):
        assert shape(budget).frames > TAIL
