"""What ``benchmarks/startup.py`` makes of starts that were measured."""

from benchmarks.startup import asked


def start(door: str, case: str, *totals: float) -> list[dict]:
    return [{"door": door, "case": case, "phases": {}, "total": total} for total in totals]


def test_peers_are_told_as_multiples_of_our_start_beside_what_was_asked():
    starts = [
        *start("python", "cold", 60),
        *start("python", "warm", 4.0),
        *start("python", "sidecar", 2.0, 9.0, 1.0),
        *start("vllm float32", "peer", 120.0),
        *start("llama_cpp bfloat16", "peer", 1.0),
    ]
    assert asked(starts) == [
        ["python, sidecar", None, "2.00 s", "at most 2.5 s"],
        ["python, sidecar", "vllm float32", "60.0x", "at least 30x"],
        ["python, sidecar", "llama_cpp bfloat16", "0.5x", None],
        ["python, warm", None, "4.00 s", None],
        ["python, warm", "vllm float32", "30.0x", None],
        ["python, warm", "llama_cpp bfloat16", "0.2x", None],
    ]
    assert asked(start("import jax", "floor", 0.7)) == []
