"""The arithmetic of latents on the host, and the patterns that are replayed through the resolver."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import hisparse_copies, hisparse_model
from benchmarks.hisparse_model import Bus, Deployment, break_even, fits, host_gather, step, throughput

AT = Deployment()
PCIE = Bus("PCIe 5", 55e9)


def speed(at: Deployment, batch: int, tokens: int, bus: Bus, hits: float, *, ahead: bool = False) -> float:
    return throughput(at, batch, step(at, batch, tokens, bus=bus, hits=hits, ahead=ahead).seconds)


def test_hits_and_bandwidth_only_help():
    for ahead in (False, True):
        by_hits = [speed(AT, 40, 32768, PCIE, hits / 10, ahead=ahead) for hits in range(11)]
        by_rate = [
            speed(AT, 40, 32768, replace(PCIE, rate=rate * 1e9), 0.5, ahead=ahead) for rate in (10, 50, 400, 4e3)
        ]
        assert all(less < more for less, more in pairwise(by_hits))
        assert all(less < more for less, more in pairwise(by_rate))
    assert speed(AT, 40, 32768, PCIE, 0.5) < speed(AT, 40, 32768, PCIE, 0.5, ahead=True)
    assert speed(AT, 40, 32768, PCIE, 1.0) == speed(AT, 40, 32768, PCIE, 1.0, ahead=True)


def test_nothing_missing_costs_what_plain_decode_costs_and_the_resolver():
    plain, hosted = step(AT, 20, 32768), step(AT, 20, 32768, bus=PCIE, hits=1.0)
    assert hosted.seconds - plain.seconds == pytest.approx(61 * AT.resolver)
    free = replace(AT, resolver=0.0)
    assert step(free, 20, 32768, bus=PCIE, hits=1.0) == step(free, 20, 32768)


def test_copies_are_what_crosses_the_bus():
    copies = step(AT, 3, 131072, bus=PCIE, hits=0.75).copies
    assert copies == pytest.approx(3 * 512 * 61 * 656 / (55e9 * 0.7))
    assert step(AT, 3, 1000, bus=PCIE, hits=0.0).copies == pytest.approx(3 * 1000 * 61 * 656 / (55e9 * 0.7))
    endless = replace(PCIE, rate=1e30)
    assert step(AT, 3, 131072, bus=endless, hits=0.0).seconds == step(AT, 3, 131072, bus=endless, hits=1.0).seconds


def test_the_parameters_are_those_of_v3_2():
    whole = hisparse_model.weight_bytes(replace(AT, gpus=1)) - hisparse_model.HEAD
    assert whole == pytest.approx(671.9e9, rel=2e-3)
    assert hisparse_model.weight_bytes(replace(AT, ways=8)) * 8 == pytest.approx(whole + hisparse_model.HEAD)


@pytest.mark.parametrize("tokens", [32768, 131072])
def test_what_fits(tokens):
    plain, small, large = (fits(AT, tokens, buffer) for buffer in (None, 2048, 4096))
    assert plain < large < small
    room = AT.memory - AT.reserve - hisparse_model.weight_bytes(AT)
    for batch, buffer in ((plain, None), (small, 2048), (large, 4096)):
        each = hisparse_model.sequence_bytes(tokens, buffer)
        assert batch * each <= room < (batch + 1) * each
    assert fits(replace(AT, host_memory=8 * 3.5 * 61 * tokens * 656), tokens, 2048) == 3  # of the host's memory
    assert fits(replace(AT, memory=90e9), tokens, None) == 0


def test_more_sequences_at_once_are_never_slower_in_sum():
    for hits in (0.0, 0.9):
        found = [speed(AT, batch, 32768, PCIE, hits) for batch in range(1, 120)]
        assert all(less < more for less, more in pairwise(found))


@pytest.mark.parametrize("ways", [1, 8])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_break_even_is_where_both_are_equal(ways, ahead):
    at = replace(AT, ways=ways)
    found = break_even(at, 32768, 2048, PCIE, ahead=ahead)
    assert found is not None
    assert 0 < found < 1
    few, many = fits(at, 32768, None), fits(at, 32768, 2048)
    plain = throughput(at, few, step(at, few, 32768).seconds)
    assert speed(at, many, 32768, PCIE, found, ahead=ahead) == pytest.approx(plain)
    assert speed(at, many, 32768, PCIE, found - 0.01, ahead=ahead) < plain


def test_the_ends_of_the_break_even():
    assert break_even(AT, 32768, 2048, replace(PCIE, rate=1e12)) == 0.0
    assert break_even(AT, 2048, 32768, PCIE) is None  # regions larger than the texts
    needed = [break_even(AT, 32768, 2048, replace(PCIE, share=share)) or 0.0 for share in (0.2, 0.4, 0.8)]
    assert needed == sorted(needed, reverse=True)
    assert 0 < needed[2] < needed[0]


def test_a_gather_on_the_host_costs_as_if_all_missed_at_full_rate():
    whole = replace(PCIE, share=1.0)
    resolved = step(replace(AT, resolver=0.0), 20, 32768, bus=whole, hits=0.0).seconds
    assert host_gather(AT, 20, 32768, PCIE, round_trip=0.0) == pytest.approx(resolved)


@pytest.mark.parametrize("zipf", [0.0, 1.0])
def test_so_many_choices_stay_as_are_asked_for(zipf):
    sizes = {"tokens": 300, "top_k": 40, "steps": 6, "zipf": zipf}
    for stays in (0.0, 0.5, 1.0):
        chosen = hisparse_copies.choices(np.random.default_rng(1), stays=stays, **sizes)
        assert all(len(set(row)) == 40 and row.min() >= 0 and row.max() < 300 for row in chosen)
        assert [len({*a} & {*b}) for a, b in pairwise(chosen)] == [40 * stays] * 5


def test_a_region_of_top_k_hits_what_stays_and_a_larger_one_more():
    chosen = hisparse_copies.choices(np.random.default_rng(2), tokens=512, top_k=64, steps=32, stays=0.75, zipf=1.0)
    least, more = (hisparse_copies.replay(chosen[:, None], tokens=512, buffer=buffer).hits for buffer in (64, 128))
    assert least == 0.75 < more


def test_a_replay_notices_a_copy_that_is_missing(monkeypatch):
    monkeypatch.setattr(hisparse_copies, "copy_step", lambda pool, sources, latents, targets: latents)
    chosen = hisparse_copies.choices(np.random.default_rng(2), tokens=512, top_k=64, steps=4, stays=0.5, zipf=0.0)
    with pytest.raises(RuntimeError, match="what was chosen"):
        hisparse_copies.replay(chosen[:, None], tokens=512, buffer=64)
