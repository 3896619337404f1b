"""Mixtures of experts: who is chosen, what comes out, what it costs."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
import pytest
from hopper import MOSAIC
from safetensors.numpy import load_file
from tiny import FIXTURES, idle, reference, tiny

import jaxserve
from jaxserve import experts, models
from jaxserve.layer_spec import Activation, Dense, Moe, Router
from jaxserve.layers import gated
from jaxserve.moe import moe, route
from jaxserve.quantization import MxArray, QuantArray
from jaxserve.sharding import make_mesh, partition
from pallas_kernels import grouped_matmul
from pallas_kernels.dispatch import REFERENCE

SILU = functools.partial(gated, Activation())


def test_the_numpy_reading_is_right() -> None:
    """What our own fixture's numbers come from gives the numbers of another implementation."""
    hf = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())
    ref = reference("qwen3_moe")
    tensors = load_file(FIXTURES / "qwen3_moe" / "model.safetensors")
    assert np.abs(numpy_moe.forward(hf, tensors, ref["input_ids"][0]) - ref["logits"]).max() < 1e-4


ROUTERS = {
    "softmax": Router("softmax", 3),
    "softmax, renormalized": Router("softmax", 3, renormalize=True),
    "softmax of the chosen": Router("chosen_softmax", 3),
    "sigmoid": Router("sigmoid", 3, renormalize=True, scale=2.5, correction=True),
    "sigmoid in groups": Router("sigmoid", 3, True, 2.5, correction=True, groups=4, top_groups=2),
    "softmax in groups by their best": Router("softmax", 3, scale=16.0, groups=4, top_groups=2, group_score="max"),
    "square root of softplus": Router("sqrt_softplus", 3, renormalize=True, scale=1.5, correction=True),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_and_weigh(name: str) -> None:
    """Against a reading of the rules in plain Python, expert by expert."""
    router = ROUTERS[name]
    rng = np.random.default_rng(len(name))
    logits = rng.standard_normal((40, 12)).astype(np.float32) * 2
    bias = rng.standard_normal(12).astype(np.float32) if router.correction else None
    ids, weights = route(router, jnp.asarray(logits), None if bias is None else jnp.asarray(bias))
    for row, got_ids, got in zip(logits.astype(np.float64), np.asarray(ids), np.asarray(weights), strict=True):
        score = {
            "softmax": numpy_moe.softmax(row),
            "chosen_softmax": row,
            "sigmoid": 1 / (1 + np.exp(-row)),
            "sqrt_softplus": np.sqrt(np.log1p(np.exp(row))),
        }[router.score]
        choice = score + (0 if bias is None else bias)
        size = 12 // router.groups
        tops = [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(router.groups)]
        values = [max(t) if router.group_score == "max" else sum(t) for t in tops]
        open_groups = np.argsort(values)[-router.top_groups :]
        allowed = [e for e in range(12) if e // size in open_groups]
        best = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert got_ids.tolist() == best
        wanted = numpy_moe.softmax(score[best]) if router.score == "chosen_softmax" else score[best]
        wanted = wanted / (wanted.sum() if router.renormalize else 1) * router.scale
        np.testing.assert_allclose(got, wanted, rtol=1e-4)


def weights_of(spec: Moe, hidden: int, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (spec.experts, hidden),
        "gate_up": (spec.experts, 2, spec.width, hidden),
        "down": (spec.experts, hidden, spec.width),
    }
    if spec.bias:
        shapes |= {"gate_up_bias": (spec.experts, 2, spec.width), "down_bias": (spec.experts, hidden)}
    if spec.shared:
        wide = spec.shared.width
        shapes |= {"shared_gate": (wide, hidden), "shared_up": (wide, hidden), "shared_down": (hidden, wide)}
    return {n: jnp.asarray(rng.standard_normal(s) * s[-1] ** -0.5, jnp.float32) for n, s in shapes.items()}


def plainly(spec: Moe, params: dict[str, jax.Array], x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Every token through every one of its experts, one at a time."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        for e, weight in zip(ids[t], weights[t], strict=True):
            gate, up = p["gate_up"][e] @ row + (p["gate_up_bias"][e] if spec.bias else 0)
            one = p["down"][e] @ (gate / (1 + np.exp(-gate)) * up) + (p["down_bias"][e] if spec.bias else 0)
            out[t] += weight * one
        if spec.shared:
            gate = p["shared_gate"] @ row
            out[t] += p["shared_down"] @ (gate / (1 + np.exp(-gate)) * (p["shared_up"] @ row))
    return out


SKEWS = {"even": 0.0, "to a few": 3.0, "all to one": 100.0}


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("tokens", [1, 5, 40, 200])
def test_every_token_goes_through_its_experts(tokens: int, skew: str) -> None:
    """Whatever the load of the experts is; rows that are not real come out as 0, and reach nobody."""
    spec = Moe(8, 24, Router("softmax", 3, renormalize=True), bias=True, shared=Dense(16))
    params = weights_of(spec, 16)
    rng = np.random.default_rng(tokens)
    params["router_bias"] = jnp.asarray(-SKEWS[skew] * np.arange(8), jnp.float32)
    x = rng.standard_normal((tokens, 16)).astype(np.float32)
    real = rng.random(tokens) < 0.7
    real[0] = True
    mesh = make_mesh(1)
    got = np.asarray(jax.jit(functools.partial(moe, spec, mesh))(params, jnp.asarray(x), jnp.asarray(real)))
    logits = x @ np.asarray(params["router"]).T + np.asarray(params["router_bias"])
    ids, weights = route(spec.router, jnp.asarray(logits))
    wanted = plainly(spec, params, x, np.asarray(ids), np.asarray(weights))
    np.testing.assert_allclose(got[real], wanted[real], atol=2e-5)
    assert not got[~real].any()
    poisoned = jnp.where(jnp.asarray(real)[:, None], x, jnp.nan)
    again = np.asarray(jax.jit(functools.partial(moe, spec, mesh))(params, poisoned, jnp.asarray(real)))
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("parallel", [(2, 1), (2, 2), (4, 2), (8, 1), (8, 8), (8, 4)], ids=str)
def test_devices_share_experts_by_width_and_by_number(parallel: tuple[int, int]) -> None:
    spec = Moe(16, 24, Router("sigmoid", 4, renormalize=True, correction=True), bias=True, shared=Dense(16))
    params = weights_of(spec, 16) | {"correction": jnp.linspace(-0.5, 0.5, 16)}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((33, 16)), jnp.float32)
    real = jnp.arange(33) < 30
    one = jax.jit(functools.partial(moe, spec, make_mesh(1)))(params, x, real)
    many = jax.jit(functools.partial(moe, spec, make_mesh(*parallel)))(params, x, real)
    np.testing.assert_allclose(many, one, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 4, 8, 64, 128, 512])
def test_cost_follows_the_choices(tokens: int) -> None:
    """Of 64 experts, 4 a token: the compiled block's flops, times the blocks that run, stay within 1.3 of the choices'
    own (in steps of hundreds of tokens, where larger blocks are quicker, within 2), and no more than a tile of weights
    and the choices' rows is ever held beside the arguments."""
    spec = Moe(64, 256, Router("softmax", 4))
    hidden, choices = 128, tokens * 4
    rng = np.random.default_rng(tokens)
    params = weights_of(spec, hidden)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.float32)
    chosen = jnp.asarray([rng.permutation(64)[:4] for _ in range(tokens)], jnp.int32)
    run = jax.jit(lambda p, x, c: experts.mix(p, x, c, jnp.ones(c.shape), SILU, "tensor"))
    compiled = run.lower({n: params[n] for n in ("gate_up", "down")}, x, chosen).compile()
    rows = experts.block_rows(choices, 64)
    blocks = int(experts.cut(chosen.reshape(-1), 64, rows).total)
    row_flops = 2 * 3 * spec.width * hidden
    tiles = spec.width // experts.tile_width(spec.width, 2 * hidden * 4)
    # The compiler counts the body of a loop once, and everything else as it is.
    overhead = compiled.cost_analysis()["flops"] - rows * row_flops / tiles
    assert overhead < 0.3 * choices * row_flops
    assert blocks * rows <= (1.3 if tokens <= 128 else 2) * choices
    row_bytes = (choices + rows) * hidden * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * row_bytes + 2 * experts.TILE_BYTES


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss_mxfp4"])
def test_an_engine_whose_devices_hold_different_experts(family: str, programs_dir: str) -> None:
    """Two groups of two devices give the reference's tokens, to a prompt alone and in company."""
    ref = reference(family)
    prompt = ref["input_ids"][0].tolist()
    options = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    with tiny(programs_dir, family, tensor_parallel=4, expert_parallel=2) as llm:
        (alone,) = llm.generate([prompt], **options)
        together = llm.generate([prompt[:5], prompt, prompt[9:]], **options)
        assert alone.outputs[0].token_ids == ref["greedy_ids"].tolist()
        assert together[1].outputs[0].token_ids == ref["greedy_ids"].tolist()
        idle(llm)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4, 6]),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 2}, [4, 6]),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 3}, [0, 3, 6]),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 1}, [2, 3, 4, 5, 6]),
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5, 6]),
        ({"first_k_dense_replace": 2, "moe_layer_freq": [1, 0, 0, 1, 0, 1, 0]}, [0, 3, 5]),
    ],
)
def test_which_layers_have_experts(fields: dict, layers: list[int]) -> None:
    known = json.loads((FIXTURES / "deepseek_v3" / "config.json").read_text())
    cfg = models.model_config(known | {"num_hidden_layers": 7, "mlp_layer_types": None, "layer_types": None} | fields)
    assert [number for number, layer in enumerate(cfg.layers) if isinstance(layer.ffn, Moe)] == layers


def test_groups_of_devices_must_be_equal() -> None:
    with pytest.raises(jaxserve.ConfigError, match=r"expert_parallel \(3\) must divide tensor_parallel \(4\)"):
        jaxserve.EngineConfig(tensor_parallel=4, expert_parallel=3)


def test_quantized_experts_equal_their_dequantized_selves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a width are cut where blocks end, whether scales belong to squares or to rows of 32; and in whole
    blocks, the way of kernels."""
    monkeypatch.setattr(experts, "TILE_BYTES", 1)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((9, 64)), jnp.float32)
    chosen = jnp.asarray([rng.permutation(4)[:2] for _ in range(9)], jnp.int32)
    data = {"gate_up": (4, 2, 96, 64), "down": (4, 64, 96)}
    fp8 = {
        name: QuantArray(
            jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn),
            jnp.asarray(rng.random([size // block for size, block in zip(shape, blocks, strict=True)]), jnp.float32),
            blocks,
            "float32",
        )
        for (name, shape), blocks in zip(data.items(), ((1, 1, 24, 16), (1, 16, 24)), strict=True)
    }
    mx = {
        name: MxArray(
            jnp.asarray(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)), jnp.uint8),
            jnp.asarray(rng.integers(120, 126, (*shape[:-1], shape[-1] // 32)), jnp.uint8),
        )
        for name, shape in data.items()
    }

    def run(params, by_kernel=False):
        monkeypatch.setattr(experts, "kernel", lambda weight, kernels: by_kernel)
        return jax.jit(lambda p: experts.mix(p, x, chosen, jnp.ones(chosen.shape), SILU, "tensor"))(params)

    for packed in (fp8, mx):
        wanted = run({name: weight.dequantize() for name, weight in packed.items()})
        for by_kernel in (False, True):
            got = run(packed, by_kernel)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("skew", ["even", "all to one", "none"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_whole_blocks_bring_what_tiles_bring(tokens: int, skew: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of kernels, with the reference in a kernel's place: what blocks that there are not bring is NaN, and
    comes through to nobody. Some choices are of no expert."""
    spec = Moe(8, 24, Router("softmax", 3), bias=True)
    params = weights_of(spec, 16)
    rng = np.random.default_rng(tokens)
    chosen = {
        "even": np.stack([rng.permutation(9)[:3] for _ in range(tokens)]),
        "all to one": np.full((tokens, 3), 5),
        "none": np.full((tokens, 3), 8),
    }[skew]
    x = jnp.asarray(rng.standard_normal((tokens, 16)), jnp.float32)
    weights = jnp.asarray(rng.random((tokens, 3)), jnp.float32)
    product = grouped_matmul.grouped_matmul

    def poisoned(x, data, scale, group, total, *, kernels, **options):
        out = product(x, data, scale, group, total, kernels=REFERENCE, **options)
        return jnp.where((jnp.arange(len(x)) < total)[:, None, None], out, jnp.nan)

    monkeypatch.setattr(grouped_matmul, "grouped_matmul", poisoned)
    whole = partition((None,))

    def both(params, x, chosen, weights):
        found = []
        for by_kernel in (True, False):
            monkeypatch.setattr(experts, "kernel", lambda weight, kernels, answer=by_kernel: answer)
            found.append(experts.mix(params, x, chosen, weights, SILU, "tensor"))
        return jnp.stack(found)

    run = jax.shard_map(both, mesh=make_mesh(1), in_specs=whole, out_specs=whole, check_vma=False)
    got, want = jax.jit(run)(params, x, jnp.asarray(chosen, jnp.int32), weights)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert (skew == "none") == (not np.asarray(want).any())


def test_the_kernel_for_hopper_mixes_quantized_experts() -> None:
    """In the interpreter; the products of experts that nobody chose are not looked at."""
    rng = np.random.default_rng(4)
    chosen = jnp.asarray([[2], [2]], jnp.int32)
    x = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)
    params = {
        name: QuantArray(
            jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn).at[1].set(jnp.nan),
            jnp.asarray(rng.random([size // block for size, block in zip(shape, blocks, strict=True)]), jnp.float32),
            blocks,
            "bfloat16",
        )
        for name, shape, blocks in (("gate_up", (4, 2, 32, 64), (1, 1, 32, 64)), ("down", (4, 64, 32), (1, 64, 32)))
    }
    weights = jnp.asarray(rng.random(chosen.shape), jnp.float32)
    run = jax.jit(lambda kernels: experts.mix(params, x, chosen, weights, SILU, "tensor", kernels), static_argnums=0)
    got, want = run(MOSAIC), run(REFERENCE)
    np.testing.assert_allclose(got, want, atol=1e-2 * float(jnp.abs(want).max()))
    assert np.isfinite(want).all()
