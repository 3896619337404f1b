"""Every kernel's time beside the floor of its device, and beside the reference's.

The floor is what cannot be spared: bytes that have to be read and written, at the speed of a copy, or products, at the
speed of a large product of matrices, whichever takes longer; both speeds are measured first. A case is repeated inside
one program, so that launching it does not count. Made for a GPU; on a CPU it measures references alone, with NAMES of
small cases.
"""

import argparse
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
from pallas_kernels.dispatch import REFERENCE, KernelError, Kernels

HELP = "each kernel's share of the roofline of this device"
NOMINAL = {"NVIDIA H200": (4.8e12, 990e12)}
"""Bytes, and products of 16-bit numbers, a second."""


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median, once warm."""
    jax.block_until_ready(call())
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begun)
    return median(found)


def ceilings(rounds: int, side: int) -> tuple[float, float]:
    """Bytes and products of bfloat16 a second: of copying ``side`` squared of them, and of their own product."""
    x = jnp.ones((side, side), jnp.bfloat16)
    words = jnp.ones((side, side // 2), jnp.int32)
    copy, multiply = jax.jit(lambda x: x + 1), jax.jit(lambda x: x @ x)
    moved = 2 * words.nbytes / seconds(lambda: copy(words), rounds)
    return moved, 2 * side**3 / seconds(lambda: multiply(x), rounds)


def arguments(call: Call, seed: int) -> list[Any]:
    """Numbers that are none too large in any format."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)

    def one(number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if number in call.numbers:
            return jnp.asarray(call.numbers[number](rng), leaf.dtype)
        if leaf.dtype == jnp.uint8:  # 1 to 1.9 in e4m3, about 0.01 in wider ones
            return jax.random.randint(key, leaf.shape, 0x38, 0x40, jnp.uint8)
        return (jax.random.normal(key, leaf.shape, jnp.bfloat16) / 8).astype(leaf.dtype)

    return [jax.tree.map(partial(one, number), tree) for number, tree in enumerate(call.shapes)]


def repeated(call: Call, kernels: Kernels, times: int, values: list[Any]) -> Callable[[], Any]:
    """The case ``times`` times over ``values``, each of which waits for the one before: through the pages it writes, or
    through its first argument of floats, to which a zero of the result is added."""
    first = next(i for i, tree in enumerate(call.shapes) if _is_floats(tree))

    def run(*args: Any) -> Any:
        def step(_: int, carry: Any) -> Any:
            if call.donated:
                return call.function(kernels, carry, *args[1:])
            mine = [*args]
            mine[first] = mine[first] + carry
            out = jax.tree.leaves(call.function(kernels, *mine))[0]
            return lax.optimization_barrier(out.reshape(-1)[0].astype(args[first].dtype)) * 0

        begin = args[0] if call.donated else jnp.zeros((), args[first].dtype)
        return lax.fori_loop(0, times, step, begin)

    program = jax.jit(run, donate_argnums=call.donated)

    def once() -> Any:
        out = program(*values)
        if call.donated:
            values[0] = out
        return out

    return once


def _is_floats(tree: Any) -> bool:
    return isinstance(tree, jax.ShapeDtypeStruct) and tree.dtype == jnp.float32


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
    moved, multiplied = ceilings(args.rounds, args.side)
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
                once = repeated(call, kernels, args.times, arguments(call, 0))
                found[name] = seconds(once, args.rounds) / args.times
            except (KernelError, jax.errors.JaxRuntimeError) as error:  # the others are still measured
                found[f"{name} error"] = str(error)[:200]
        figures.append(found)
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
