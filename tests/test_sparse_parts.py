"""Parts of sparse latent attention without an engine: its weights, its config, and steps of many kinds of rows."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import FIXTURES

import checkpoints
from jaxserve import models, params, sparse
from jaxserve.buckets import StepBucket
from jaxserve.config import ModelConfig
from jaxserve.context import Selected, Setting, context
from jaxserve.declare import declare
from jaxserve.layer_spec import Latent
from jaxserve.random_weights import RandomWeights
from jaxserve.sharding import Parallel, make_mesh

SIZE, WIDTH = 8, 5


def known(family: str) -> dict:
    return json.loads((FIXTURES / family / "config.json").read_text())


def first_layer(dtype: str) -> tuple[ModelConfig, params.Params, RandomWeights]:
    """Of DeepSeek V3.2, loaded as ``dtype`` from a source of float32."""
    source = checkpoints.open_config(str(FIXTURES / "deepseek_v32"))
    cfg = dataclasses.replace(models.model_config(source.config), layers=models.model_config(source.config).layers[:1])
    specs = declare(cfg, Parallel(), source, "float32")
    weights = RandomWeights(specs, "float32")
    return cfg, params.load(specs, weights, dtype, make_mesh(1))["layers"][0], weights


def test_what_gates_the_heads_stays_float32() -> None:
    _, layer, source = first_layer("bfloat16")
    (name,) = (name for name in source.tensors if name.endswith("indexer.weights_proj.weight"))
    assert layer["index_gates"].dtype == jnp.float32
    np.testing.assert_array_equal(layer["index_gates"], source.read(name))
    assert layer["index_q"].dtype == layer["index_k"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("family", "default"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
def test_how_the_indexer_rotates(family: str, default: bool) -> None:
    """As the config says, otherwise as the family does; latent attention itself goes by a field of its own."""
    for fields, pairs in (
        ({}, default),
        ({"indexer_rope_interleave": True}, True),
        ({"indexer_rope_interleave": False}, False),
    ):
        config = known(family)
        config.pop("indexer_rope_interleave", None)
        mixers = [layer.mixer for layer in models.model_config(config | fields).layers]
        chosen = [mixer.indexer for mixer in mixers if isinstance(mixer, Latent) and mixer.indexer is not None]
        assert chosen
        assert {indexer.pairs for indexer in chosen} == {pairs}


def test_every_row_of_a_step_goes_by_its_own_pages() -> None:
    """Rows that decode and blocks of prompts in one step: what a row's pages hold sways its choice alone."""
    cfg, layer, _ = first_layer("float32")
    spec, bucket = cfg.layers[0].mixer, StepBucket(2, 2, 4)
    assert isinstance(spec, Latent)
    assert spec.indexer is not None
    rng = np.random.default_rng(0)
    x, *pages = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in (
            (bucket.tokens, cfg.hidden_size),
            (bucket.rows * WIDTH + 1, SIZE, spec.rank + spec.rope.dim),
            (bucket.rows * WIDTH + 1, SIZE, spec.indexer.dim),
        )
    )
    tables = 1 + np.arange(bucket.rows * WIDTH, dtype=np.int32).reshape(1, bucket.rows, WIDTH)
    spans = np.array([[30, 21, 17, 26], [1, 1, 4, 3]], np.int32)

    @jax.jit
    def attend(x: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, Selected]:
        at, ctx = Setting(cfg, bucket, make_mesh(1)), context(cfg, bucket, SIZE, jnp.array(tables), jnp.array(spans))
        out, _, chosen = sparse.attend(at, spec, 0, layer, pages, x, ctx, None)
        return out, chosen

    out, chosen = attend(x, tuple(pages))
    assert chosen.counts.tolist() == [8] * 9 + [0]
    assert (chosen.positions[:9] <= np.array([30, 21, 17, 18, 19, 20, 26, 27, 28])[:, None]).all()
    for row, mine in enumerate(([0], [1], [2, 3, 4, 5], [6, 7, 8])):
        others = [token for token in range(bucket.tokens) if token not in mine]
        changed = [
            np.where(np.isin(np.arange(len(part)), tables[0, row])[:, None, None], -part, part) for part in pages
        ]
        found, picked = attend(x, tuple(changed))
        assert (picked.positions != chosen.positions)[jnp.array(mine)].any(axis=1).all()
        np.testing.assert_array_equal(picked.positions[jnp.array(others)], chosen.positions[jnp.array(others)])
        np.testing.assert_array_equal(found[jnp.array(others)], out[jnp.array(others)])
