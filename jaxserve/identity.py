"""What KV pages belong to: a hash of the weights and of everything else that decides what a page holds.

The weights are read whole, on the devices, a moment's work for memory that they have just been put into: file names,
sizes and dates would not tell two fine-tunes of one model apart.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executables import ExecutableStore, Program
from jaxserve.params import Params
from jaxserve.programs import ProgramSet


def identity(programs: ProgramSet, weights: Params, store: ExecutableStore) -> str:
    """Hexadecimal; equal only for engines that compute the same pages: weights, layout, programs, devices."""
    sums = []
    built: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
        about = f"{leaf.shape} {leaf.dtype} {leaf.sharding}"
        if about not in built:
            name = f"fingerprint {hashlib.sha256(about.encode()).hexdigest()[:16]}"
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            built[about] = store.build(Program(name, fingerprint, (shape,)))
        sums.append((jax.tree_util.keystr(path), about, built[about](leaf)))
    found = [(path, about, np.asarray(value).tolist()) for path, about, value in sums]
    layout = (programs.record_shape, programs.cache.dtype, programs.page_size)
    facts = [str(programs.cfg), str(layout), str(dict(programs.mesh.shape)), store.environment, found]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(array: jax.Array) -> jax.Array:
    """Two sums, uint32 ``[2]``, over every bit of an array and where it stands."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
    where, stride = jnp.uint32(0), 1
    for axis in reversed(range(array.ndim)):
        where = where + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= array.shape[axis]
    mixed = (bits ^ (where * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 13)
    again = (mixed + where) * jnp.uint32(0x27D4EB2F)
    return jnp.stack([mixed.sum(dtype=jnp.uint32), (again ^ (again >> 16)).sum(dtype=jnp.uint32)])
