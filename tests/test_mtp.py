"""Multi-token prediction: the predictors' logits are the reference's, in blocks and token by token, through pages."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny import FIXTURES, reference, tiny

import checkpoints
import jaxserve
from jaxserve import decoder, models, mtp, params
from jaxserve.buckets import StepBucket
from jaxserve.config import ConfigError
from jaxserve.context import Setting, context
from jaxserve.declare import declare, declare_cache
from jaxserve.params import WeightError
from jaxserve.sharding import Parallel, make_mesh, sharding

FAMILIES = ("deepseek_v3", "glm4_moe")
BLOCK, PAGE = 32, 8


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_references(family: str, devices: int) -> None:
    """40 tokens in blocks of 32, then 7 one by one; a predictor's hidden row is what the reference says too."""
    ref, mesh = reference(family), make_mesh(devices)
    with checkpoints.open_checkpoint(FIXTURES / family) as source:
        cfg = models.model_config(source.config)
        specs = declare(cfg, Parallel(devices), source, "float32", predictors=True)
        weights = params.load(specs, source, "float32", mesh)
    cache = declare_cache(cfg, jaxserve.EngineConfig(model="x", tensor_parallel=devices), "float32")
    (kind,) = cache.planes[-1]  # the layers' planes are alike
    pages = (jax.device_put(jnp.zeros((9, *kind.page(PAGE))), sharding(mesh, (None, *kind.axes))),)
    following, rows = ref["mtp_input_ids"][0], ref[f"hidden_{cfg.num_layers:02d}"][:-1]
    table = np.arange(8, 0, -1)[None, None]  # one group, one sequence

    def run(bucket, pages, x, tokens, starts, counts):
        tables = jnp.broadcast_to(table, (1, bucket.rows, table.shape[2]))
        ctx = context(cfg, bucket, PAGE, tables, jnp.array([starts, counts]))
        pages, out = mtp.predict(Setting(cfg, bucket, mesh), 0, 0, weights, pages, x, tokens, ctx)
        return pages, out, decoder.logits(cfg, weights, out)

    step = jax.jit(run, static_argnums=0)
    blocks, single = StepBucket(0, 2, BLOCK), StepBucket(1, 0, BLOCK)
    pad = 2 * BLOCK - 40
    x, tokens = np.pad(rows[:40], ((0, pad), (0, 0))), np.pad(following[:40], (0, pad))
    pages, out, logits = step(blocks, pages, x, tokens, [0, BLOCK], [BLOCK, 40 - BLOCK])
    hidden, seen = [out[:40]], [logits[:40]]
    for position in range(40, len(following)):
        here = slice(position, position + 1)
        pages, out, logits = step(single, pages, rows[here], following[here], [position], [1])
        hidden.append(out)
        seen.append(logits)
    vocab = cfg.vocab_size
    np.testing.assert_allclose(np.concatenate(seen)[:, :vocab], ref["mtp_logits"], atol=1e-3)
    np.testing.assert_allclose(np.concatenate(hidden), ref["mtp_hidden"], atol=1e-3)


def changed(folder: Path, family: str, names: dict[str, str | None]) -> Path:
    """A copy of a checkpoint with the same tensors under more names (a value is whose copy it is; None: taken out)."""
    shutil.copytree(FIXTURES / family, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, like in names.items():
        if like is None:
            del tensors[name]
        else:
            tensors[name] = tensors[like]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def declared(folder: Path, *, predictors: bool) -> params.Specs:
    with checkpoints.open_checkpoint(folder) as source:
        return declare(models.model_config(source.config), Parallel(), source, "float32", predictors=predictors)


@pytest.mark.parametrize("family", FAMILIES)
def test_predictors_are_loaded_where_they_are_wanted(family: str, tmp_path: Path) -> None:
    """Published checkpoints hold copies of the embedding and the head beside them, which are the model's own."""
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    folder = changed(tmp_path / "full", family, {f"model.layers.3.{n}.weight": like for n, like in copies.items()})
    assert "predictors" not in declared(folder, predictors=False)
    (predictor,) = declared(folder, predictors=True)["predictors"]
    assert {"embed_norm", "hidden_norm", "join", "norm", "attn_norm", "router"} < set(predictor)
    lacking = changed(tmp_path / "lacking", family, {"model.layers.3.eh_proj.weight": None})
    declared(lacking, predictors=False)
    with pytest.raises(WeightError, match=r"missing tensor model\.layers\.3\.eh_proj\.weight"):
        declared(lacking, predictors=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(WeightError, match=r"unexpected tensor model\.layers\.3\."):
        declared(folder, predictors=False)
    with pytest.raises(ConfigError, match="mtp: this .* has no layers for multi-token prediction"):
        declared(folder, predictors=True)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="mtp needs weights from the checkpoint"):
        jaxserve.EngineConfig(model="x", mtp=True, sidecar="auto")
    with pytest.raises(ConfigError, match="mtp must be true or false"):
        jaxserve.EngineConfig(model="x", mtp=1)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_report_says_what_became_of_them(wanted: bool, programs_dir: str) -> None:
    with tiny(programs_dir, "glm4_moe", mtp=wanted) as llm:
        assert llm.report()["model"]["mtp_layers"] == ("1, loaded" if wanted else "1, not loaded")
        assert ("predictors" in llm._built.runner.weights) is wanted
