"""The host benchmark: a real engine over a device that answers at once."""

from benchmarks.host import measure
from jaxserve.request import SamplingParams


def test_every_full_decode_step_is_counted_and_none_costs_much():
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    seconds = measure(None, 1000, seqs=4, input_len=32, output_len=64, params=params)
    assert 50 <= len(seconds) <= 64
    assert 0 < sorted(seconds)[len(seconds) // 2] < 0.05
