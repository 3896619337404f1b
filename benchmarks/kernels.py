"""Every kernel's time beside the floor of its device, and beside the reference's.

The floor is what cannot be spared: bytes that have to be read and written, at the speed of a copy, or products, at the
speed of a large product of matrices, whichever takes longer; both speeds are measured first. A case is repeated inside
one program, so that launching it does not count. Made for a GPU; on a CPU it measures references alone, with NAMES of
small cases.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import report
from benchmarks.kernel_cases import KERNELS, Call
from benchmarks.stats import median
from pallas_kernels.dispatch import REFERENCE, Kernels

HELP = "each kernel's share of the roofline of this device"
NOMINAL = {"NVIDIA H200": (4.8e12, 990e12)}
"""Bytes, and products of 16-bit numbers, a second."""
LONG = 5.0
"""Seconds, after which a case is not repeated."""
MOST = 1 << 30
"""Random numbers that are made at once; of more, all have the same along their first axis."""


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median, once warm; of fewer rounds where they take long, as loops of many small programs do on a GPU."""
    jax.block_until_ready(call())
    found: list[float] = []
    while len(found) < rounds and sum(found) < LONG:
        begun = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begun)
    return median(found)


def ceilings(rounds: int, side: int, times: int) -> tuple[float, float]:
    """Bytes and products of bfloat16 a second: of copying ``side`` squared of them, and of a product of two such
    matrices (of random numbers: a device slows down for them), ``times`` times in one program."""
    words = jnp.ones((side, side // 2), jnp.int32)
    x, y = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
    y = y * side**-0.5  # so that products stay as large
    copy = jax.jit(lambda words: lax.fori_loop(0, times, lambda _, words: lax.optimization_barrier(words + 1), words))
    multiply = jax.jit(lambda x, y: lax.fori_loop(0, times, lambda _, x: x @ y, x))
    moved = 2 * words.nbytes * times / seconds(lambda: copy(words), rounds)
    return moved, 2 * side**3 * times / seconds(lambda: multiply(x, y), rounds)


def arguments(call: Call, seed: int) -> list[Any]:
    """Numbers that are none too large in any format."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)

    def one(number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if number in call.numbers:
            return jnp.asarray(call.numbers[number](rng), leaf.dtype)
        if leaf.dtype == jnp.uint8:  # 1 to 1.9 in e4m3, about 0.01 in wider ones
            return jax.random.randint(key, leaf.shape, 0x38, 0x40, jnp.uint8)
        shape = leaf.shape if leaf.size <= MOST else leaf.shape[1:]
        return jnp.broadcast_to((jax.random.normal(key, shape, jnp.bfloat16) / 8).astype(leaf.dtype), leaf.shape)

    return [jax.tree.map(partial(one, number), tree) for number, tree in enumerate(call.shapes)]


def repeated(call: Call, kernels: Kernels, times: int, values: list[Any]) -> Callable[[], Any]:
    """The case ``times`` times over ``values``, each of which waits for the one before: to its first argument of floats
    a zero of the result is added, so that nothing of it can be done once for all. All of a result is made, though one
    number of it is read."""
    first = next(i for i, tree in enumerate(call.shapes) if _is_floats(tree, donated=i in call.donated))

    def run(*args: Any) -> Any:
        def step(_: int, carry: Any) -> Any:
            kept, zero = carry
            mine = [*args]
            mine[: len(kept)] = kept
            mine = list(lax.optimization_barrier((mine, zero))[0])
            mine[first] = mine[first] + zero
            out = lax.optimization_barrier(call.function(kernels, *mine))
            leaf = jax.tree.leaves(out)[0]
            zero = leaf[(0,) * leaf.ndim].astype(zero.dtype) * 0
            return ((out,) if call.donated else ()), zero

        begin = args[: len(call.donated)], jnp.zeros((), args[first].dtype)
        kept, zero = lax.fori_loop(0, times, step, begin)
        return kept[0] if call.donated else zero

    program = jax.jit(run, donate_argnums=call.donated)

    def once() -> Any:
        out = program(*values)
        if call.donated:
            values[0] = out
        return out

    return once


def _is_floats(tree: Any, *, donated: bool) -> bool:
    return not donated and isinstance(tree, jax.ShapeDtypeStruct) and tree.dtype == jnp.float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=10, help="a case runs in a round")
    parser.add_argument("--side", type=int, default=8192, help="of the matrix that the ceilings are measured with")
    parser.add_argument("--no-reference", action="store_true", help="measure the kernels alone")
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    device = jax.devices()[0]
    report.warn_if_busy()
    where = report.environment() | {"device": device.device_kind}
    moved, multiplied = ceilings(args.rounds, args.side, args.times)
    nominal = NOMINAL.get(device.device_kind)
    said = f" (nominal {nominal[0] / 1e12:.1f} and {nominal[1] / 1e12:.0f})" if nominal else ""
    print(f"{device.device_kind}: copies {moved / 1e12:.3f} TB/s, products {multiplied / 1e12:.2f} TFLOP/s{said}")
    contenders = {"mosaic": Kernels.of(device, "mosaic"), "reference": REFERENCE}
    if device.platform == "cpu":
        del contenders["mosaic"]  # the interpreter's time means nothing
    elif args.no_reference:
        del contenders["reference"]
    rows, figures = [], []
    for kernel in KERNELS:
        if args.names and not any(name in kernel.name for name in args.names):
            continue
        call = kernel.call()
        floor = max(call.nbytes / moved, call.flops / multiplied)
        found: dict[str, Any] = {"name": kernel.name, "floor": floor, "bound": "bytes"}
        if call.flops / multiplied > call.nbytes / moved:
            found["bound"] = "products"
        for name, kernels in contenders.items():
            try:
                found[name] = seconds(repeated(call, kernels, args.times, arguments(call, 0)), args.rounds) / args.times
            except Exception as error:  # whatever a compiler raises: the others are still measured
                found[f"{name} error"] = f"{type(error).__name__}: {error}"[:200]
        figures.append(found)
        print(json.dumps(found), flush=True)  # at once: a kernel may hang, or leave the device useless to the others
        times = [found.get(name) for name in ("mosaic", "reference")]
        shares = [None if took is None else floor / took for took in times]
        micro = [None if took is None else 1e6 * took for took in (floor, *times)]
        rows.append([kernel.name, found["bound"], *micro, *shares])
    columns = ["", "bound by", "floor, us", "kernel, us", "reference, us", "of the floor", "the reference's"]
    report.show(f"{device.device_kind}: microseconds, and the share of the floor (asked: 0.7 in decode)", columns, rows)
    for found in figures:
        for name in contenders:
            if f"{name} error" in found:
                print(f"{found['name']}: {name}: {found[f'{name} error']}")
    report.save_json(args.json, {"benchmark": "kernels", "environment": where, "cases": figures})
