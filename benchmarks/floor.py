"""The physical floor of a decoder on this machine: memory read bandwidth and float32 arithmetic, measured.

A decode step must read every weight once and every sequence's keys and values once, and do two operations a weight and
token; no engine that keeps its weights in memory goes faster. Run as a module it prints one JSON line, in a process of
its own so that thread settings are its own too.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MIB = 1 << 20


@dataclass(frozen=True)
class Machine:
    threads: int
    read_bytes_per_second: float
    float32_flops: float

    def best(self, other: "Machine") -> "Machine":
        """The better of two measurements, each in itself: whatever disturbs one only lowers it."""
        read = max(self.read_bytes_per_second, other.read_bytes_per_second)
        return Machine(self.threads, read, max(self.float32_flops, other.float32_flops))


@dataclass(frozen=True)
class ModelSize:
    """What a token costs: weights used for each token, how many of them are the head, elements of K and V kept."""

    parameters: int
    head_parameters: int
    kv_elements_per_token: int

    @classmethod
    def of(cls, model: str) -> "ModelSize":
        """Read off a checkpoint's headers; an untied embedding is left out, since a token reads one row of it."""
        import checkpoints

        with checkpoints.open_checkpoint(checkpoints.resolve_model(model)) as ckpt:
            config = ckpt.config
            untied = any(name.startswith("lm_head.") for name in ckpt.tensors)
            parameters = sum(
                int(np.prod(info.shape, dtype=np.int64))
                for name, info in ckpt.tensors.items()
                if not (untied and "embed_tokens" in name)
            )
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        head = config["vocab_size"] * config["hidden_size"]
        return cls(parameters, head, 2 * config["num_hidden_layers"] * heads * head_dim)

    def step_seconds(self, machine: Machine, batch: int, context: float, itemsize: int) -> float:
        """Least time of a decode step, ``batch`` sequences of ``context`` tokens: the larger of reading and computing.

        The arithmetic peak is float32's whatever the weights are; a machine with bf16 units can go below it.
        """
        read = (self.parameters + batch * context * self.kv_elements_per_token) * itemsize
        return max(read / machine.read_bytes_per_second, 2 * self.parameters * batch / machine.float32_flops)

    def prefill_seconds(self, machine: Machine, batch: int, tokens: int, itemsize: int) -> float:
        """Least time to prefill ``tokens`` in each of ``batch`` prompts; only the last needs the head.

        Attention's own arithmetic is not counted.
        """
        read = self.parameters * itemsize
        products = batch * ((self.parameters - self.head_parameters) * tokens + self.head_parameters)
        return max(read / machine.read_bytes_per_second, 2 * products / machine.float32_flops)

    def job_seconds(self, machine: Machine, batch: int, input_len: int, output_len: int, itemsize: int) -> float:
        """Least time of a whole job: prefill, which yields the first token, and the other tokens' steps."""
        decode = self.step_seconds(machine, batch, input_len + output_len / 2, itemsize) * (output_len - 1)
        return self.prefill_seconds(machine, batch, input_len, itemsize) + decode


def _rate(threads: int, work: Callable[[int], Any], amount: float, seconds: float) -> float:
    """Best rate over windows in which all threads repeat ``work(index)``, each call worth ``amount``."""
    best = 0.0
    for _ in range(5):
        counts = [0] * threads
        start = time.perf_counter()

        def loop(index: int, counts: list[int] = counts, start: float = start) -> None:
            while time.perf_counter() - start < seconds:
                work(index)
                counts[index] += 1

        pool = [threading.Thread(target=loop, args=(i,)) for i in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        best = max(best, sum(counts) * amount / (time.perf_counter() - start))
    return best


def measure_here(threads: int) -> Machine:
    """Measure in this process, which must have one BLAS thread."""
    size = 256 * MIB  # bytes a thread; far beyond the caches of most machines
    arrays = [np.ones(size // 4, np.float32) for _ in range(threads)]
    read = max(
        _rate(threads, lambda i: np.dot(arrays[i], arrays[i]), size, 0.4),
        _rate(threads, lambda i: arrays[i].max(), size, 0.4),
    )
    squares = [np.ones((768, 768), np.float32) for _ in range(threads)]
    products = [np.empty_like(square) for square in squares]
    flops = _rate(threads, lambda i: np.matmul(squares[i], squares[i], out=products[i]), 2 * 768**3, 0.4)
    return Machine(threads, read, flops)


def measure(threads: int) -> Machine:
    """Measure in a fresh process with one BLAS thread and numpy's own choice of kernels."""
    drop = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    env = {key: value for key, value in os.environ.items() if key not in drop}
    env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.floor", "--threads", str(threads)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return Machine(**json.loads(result.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    print(json.dumps(vars(measure_here(args.threads))))


if __name__ == "__main__":
    main()
