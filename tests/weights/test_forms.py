"""The forms that one layer is published in: each, written down from the same weights, gives the same layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.tolerances import assert_close
from tests.weights.published import array
from tests.weights.test_strict import published, refused

KEY = jax.random.key(0)


def abstract(layer, *args, **options):
    """A layer that has only shapes, which is all that loading looks at."""
    return eqx.filter_eval_shape(lambda: layer(*args, **options, platform="xla", key=KEY))


def attention(**options):
    return abstract(ejx.nn.MultiHeadAttention, 8, **{"num_heads": 2, "head_dim": 4} | options)


def same(layer, named, **forms):
    """Every form loads as the names of the fields do."""
    expected = ejx.load_published(layer, named)
    for name, given in forms.items():
        assert eqx.tree_equal(ejx.load_published(layer, given, "a"), expected), name


def under(given):
    return {f"a.{name}": x for name, x in given.items()}


def renamed(given, **names):
    """With the first parts of names replaced."""
    heads = {name: name.partition(".") for name in given}
    return under(
        {names.get(head, head) + dot + tail: given[name] for name, (head, dot, tail) in heads.items()}
    )


def rows(given, kind):
    return [given[f"{name}_proj.{kind}"] for name in "qkv"]


@pytest.mark.parametrize("use_bias", [False, True])
def test_attention(use_bias):
    layer = attention(use_qkv_bias=use_bias, use_output_bias=use_bias)
    named = published(layer)
    kinds = ["weight", "bias"] if use_bias else ["weight"]
    output = {f"o_proj.{kind}": named[f"o_proj.{kind}"] for kind in kinds}
    stacked = {kind: np.concatenate(rows(named, kind)) for kind in kinds}
    by_head = {
        kind: np.stack([x.reshape(2, 4, *x.shape[1:]) for x in rows(named, kind)], 1) for kind in kinds
    }
    masks = {"bias": np.ones((1, 1, 4, 4), bool), "masked_bias": np.zeros(())}
    out = lambda name: {f"{name}.{kind}": named[f"o_proj.{kind}"] for kind in kinds}
    same(
        layer,
        named,
        opt=renamed(named, o_proj="out_proj"),
        phi=renamed(named, o_proj="dense"),
        equinox=renamed(
            named, q_proj="query_proj", k_proj="key_proj", v_proj="value_proj", o_proj="output_proj"
        ),
        phi3=under({f"qkv_proj.{kind}": stacked[kind] for kind in kinds} | output),
        gpt_neox=under(
            {f"query_key_value.{kind}": by_head[kind].reshape(24, *by_head[kind].shape[3:]) for kind in kinds}
            | out("dense")
            | masks
        ),
        gpt2=under(
            {f"c_attn.{kind}": stacked[kind].T for kind in kinds}
            | {f"c_proj.{kind}": named[f"o_proj.{kind}"].T for kind in kinds}
            | masks
        ),
        torch=under({f"in_proj_{kind}": stacked[kind] for kind in kinds} | out("out_proj")),
        torch_separate=under(
            {f"{name}_proj_weight": named[f"{name}_proj.weight"] for name in "qkv"}
            | ({"in_proj_bias": stacked["bias"]} if use_bias else {})
            | out("out_proj")
        ),
    )


def test_grouped_heads_in_one_projection():
    layer = attention(num_kv_heads=1, qk_norm=True)
    named = published(layer)
    kept = {name: x for name, x in named.items() if name[0] in "o" or "norm" in name}
    same(layer, named, phi3=under({"qkv_proj.weight": np.concatenate(rows(named, "weight"))} | kept))


def test_equinox_attention():
    theirs = eqx.nn.MultiheadAttention(
        2, 8, use_query_bias=True, use_output_bias=True, use_key_bias=True, use_value_bias=True, key=KEY
    )
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(theirs, eqx.is_array))
    given = {".".join(part.name for part in path): x for path, x in leaves}
    layer = attention(use_qkv_bias=True, use_output_bias=True, causal=False)
    x = jnp.asarray(array("x", (5, 8)))
    ours = ejx.load_published(layer, given)
    assert_close(*eqx.filter_jit(lambda ours, theirs, x: (ours(x), theirs(x, x, x)))(ours, theirs, x))


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}])
def test_torch_attention(options):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, **options)
    layer = attention(use_qkv_bias=True, use_output_bias=True, causal=False, kv_embed_dim=options.get("kdim"))
    x, y = array("x", (1, 5, 8)), array("y", (1, 7, options.get("kdim", 8)))
    expected = theirs(*map(torch.from_numpy, (x, y, y)))[0].detach().numpy()
    assert_close(
        ejx.load_published(layer, theirs.state_dict())(jnp.asarray(x), kv_input=jnp.asarray(y)), expected
    )


def test_one_projection_of_another_layer():
    named = published(attention(use_qkv_bias=True))
    one = {f"qkv_proj.{kind}": np.concatenate(rows(named, kind)) for kind in ("weight", "bias")}
    one["o_proj.weight"] = named["o_proj.weight"]
    refused("nothing takes its 'qkv_proj.bias'", like=attention(), given=one)
    refused(
        "'qkv_proj.weight'",
        "expected shape (16, 8), received (24, 8)",
        like=attention(num_kv_heads=1),
        given=one,
    )
    refused(
        "it has no 'qkv_proj.bias'",
        like=attention(use_qkv_bias=True),
        given={k: x for k, x in one.items() if k[-4:] != "bias"},
    )
    turned = {"c_attn.weight": one["qkv_proj.weight"], "c_proj.weight": named["o_proj.weight"]}
    refused("'c_attn.weight'", "expected shape (8, 24), received (24, 8)", like=attention(), given=turned)


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_of_falcon(heads):
    """For each key head its queries, its key and its value."""
    layer, width = ejx.nn.MultiHeadAttention(8, num_heads=4, num_kv_heads=heads, key=KEY), 2
    parts = [getattr(layer, f"{name}_proj").weight.reshape(heads, -1, width, 8) for name in "qkv"]
    given = {
        "query_key_value.weight": jnp.concatenate(parts, 1).reshape(-1, 8),
        "dense.weight": np.asarray(layer.o_proj.weight),
    }
    found = ejx.load_published(layer, given)
    for name in "qkv":
        np.testing.assert_array_equal(*(getattr(m, f"{name}_proj").weight for m in (found, layer)))


def test_one_projection_into_another_module():
    layer = eqx.tree_at(lambda m: m.q_proj, attention(), eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=KEY)]))
    refused(
        "'qkv_proj.weight'",
        "received Sequential, Linear, Linear",
        like=layer,
        given={"qkv_proj.weight": np.zeros((24, 8))},
    )


@pytest.mark.parametrize("output_gate", [False, True])
def test_gated_linear_attention(output_gate):
    options = {"num_heads": 2, "use_short_conv": True, "use_conv_bias": True, "output_gate": output_gate}
    layer = abstract(ejx.nn.GatedLinearAttention, 16, **options)
    named = published(layer)
    name = "g_norm_swish_gate" if output_gate else "g_norm"
    same(layer, named, fla=renamed(named, g_norm=name))


@pytest.mark.parametrize("use_bias", [False, True])
def test_kimi_delta_attention(use_bias):
    layer = abstract(
        ejx.nn.KimiDeltaAttention, 8, num_heads=2, head_dim=4, use_gate_bias=use_bias, use_conv_bias=use_bias
    )
    named = published(layer)
    fla = {"f_a_proj": "f_proj.0", "f_b_proj": "f_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"}
    spread = named | {"A_log": named["A_log"].reshape(1, 1, 2, 1)}
    gate = {
        name: f"forget_gate.{name}"
        for name in named
        if name.split(".")[0] in ("A_log", "dt_bias", "f_a_proj", "f_b_proj")
    }
    kinds = ["weight", "bias"] if use_bias else ["weight"]
    loaded = {gate.get(name, name): x for name, x in spread.items() if "conv1d" not in name}
    for kind in kinds:
        loaded[f"conv1d.{kind}"] = np.concatenate([named[f"{name}_conv1d.{kind}"] for name in "qkv"])
    same(layer, named, moonshot=under(spread), fla=renamed(named, **fla), transformers=under(loaded))
    wrong = named | {"A_log": np.zeros((1, 1, 4, 1), np.float32)}
    refused("'A_log'", "expected shape (2,), received (1, 1, 4, 1)", like=layer, given=wrong)


def _renamed(given, **parts):
    """With these parts of names replaced."""
    for part, other in parts.items():
        given = {name.replace(part, other): x for name, x in given.items()}
    return given


def _by_author(named, low):
    """A projection of low rank by its author's names: the bias, and both matrices as `[in, out]`."""
    parts = [named.get(f"{low}.{part}") for part in ("up.bias", "down.weight", "up.weight")]
    return [x.T if x is not None and x.ndim == 2 else x for x in parts]


_NAMES = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output", "g_norm": "ln_x"}


@pytest.mark.parametrize("residual", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rwkv7(residual):
    ranks = {f"{name}_low_rank_dim": n for n, name in enumerate(("decay", "a", "v", "gate"), 2)}
    layer = abstract(ejx.nn.RWKV7TimeMix, 8, head_dim=4, v_head_dim=2, value_residual=residual, **ranks)
    named = published(layer)
    low = {name: x for name, x in named.items() if "_lora" in name}
    plain = {name: x for name, x in named.items() if name not in low and name != "x_mix"}
    split = dict(zip((f"x_{name}" for name in "rwkvag"), named["x_mix"][:, None, None]))
    fla = plain | _renamed(low, down="lora.0", up="lora.2")
    author = _renamed(plain, **_NAMES) | split
    author |= {name: plain[name][None, None] for name in ("k_k", "k_a")}
    for name in "wavg":
        pieces = zip(range(3), _by_author(named, f"{name}_lora"))
        author |= {f"{name}{n}": x for n, x in pieces if x is not None}
    if not residual:  # published, and not used
        author |= {"v0": np.zeros((1, 1, 4), np.float32), "v1": np.zeros((8, 4), np.float32)}
    forms = {"fla": fla | split, "first": fla | {"x_x": named["x_mix"]}, "author": author}
    same(layer, named, **{name: under(form) for name, form in forms.items()})
    wrong = fla | split | {"k_k": np.zeros((1, 2, 8), np.float32)}
    refused("'k_k'", "expected shape (8,), received (1, 2, 8)", like=layer, given=wrong)


def test_rwkv7_channels():
    layer = abstract(ejx.nn.RWKV7ChannelMix, 8, inner_dim=6)
    named = published(layer)
    same(layer, named, author=under(named | {"x_k": named["x_k"][None, None]}))


@pytest.mark.slow
def test_rwkv6():
    layer = abstract(ejx.nn.RWKV6TimeMix, 8, num_heads=2, proj_low_rank_dim=3, gate_low_rank_dim=5)
    named = published(layer)
    mixes = ("x_mu", "x_bias", "x_down.weight", "x_up")
    plain = {name: x for name, x in named.items() if name not in mixes and "_lora" not in name}
    fla = {name.replace("_proj", "_proj.linear") if name[0] != "o" else name: x for name, x in plain.items()}
    low = {name: x for name, x in named.items() if "_lora" in name}
    fla |= _renamed(low, w_lora="w_proj.linear", down="lora.0", up="lora.2")
    fla |= {"x_bias": named["x_bias"], "x_proj.0.mu": named["x_mu"]}
    fla["x_proj.0.linear.weight"] = named["x_down.weight"]
    fla["x_proj.2.weight"] = named["x_up"].transpose(2, 0, 1).reshape(8, 15)
    author = _renamed(plain, **_NAMES, g_proj="gate", bonus="time_faaaa")
    order = [1, 2, 3, 0, 4]  # w, k, v, r, g
    author |= {f"time_maa_{name}": x[None, None] for name, x in zip("rwkvg", named["x_bias"])}
    author["time_maa_x"] = named["x_mu"][None, None]
    author["time_maa_w1"] = named["x_down.weight"].reshape(5, 3, 8)[order].reshape(15, 8).T
    author["time_maa_w2"] = named["x_up"][order]
    author |= dict(zip(("time_decay", "time_decay_w1", "time_decay_w2"), _by_author(named, "w_lora")))
    same(layer, named, fla=under(fla), author=under(author))


def test_gated_delta_net():
    layer = abstract(ejx.nn.GatedDeltaNet, 8, num_k_heads=2, num_v_heads=4, head_dim=4, v_head_dim=6)
    named = published(layer)
    widths = [4, 4, 12, 12]  # of one key head
    q, k, v, z = (
        part.reshape(-1, 8)
        for part in np.split(named["in_proj_qkvz.weight"].reshape(2, -1, 8), np.cumsum(widths)[:-1], axis=1)
    )
    b, a = (part.reshape(-1, 8) for part in np.split(named["in_proj_ba.weight"].reshape(2, -1, 8), 2, axis=1))
    apart = {name: x for name, x in named.items() if not name.startswith("in_proj")}
    apart |= {"in_proj_qkv.weight": np.concatenate([q, k, v]), "in_proj_z.weight": z}
    apart |= {"in_proj_b.weight": b, "in_proj_a.weight": a}
    same(layer, named, qwen3_5=under(apart))


def test_gated_delta_product():
    """Rows of each projection by write, then by head."""
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 4, "v_head_dim": 6, "num_householder": 2}
    layer = abstract(ejx.nn.GatedDeltaNet, 8, **sizes)
    named = published(layer)
    parts = np.split(named["in_proj_qkvz.weight"].reshape(2, -1, 8), [4, 8, 12, 24, 36], axis=1)
    q, *kv, z = (part.reshape(-1, 8) for part in parts)
    *b, a = (
        part.reshape(-1, 8) for part in np.split(named["in_proj_ba.weight"].reshape(2, -1, 8), 3, axis=1)
    )
    fla = {"q_proj": q, "k_proj": np.concatenate(kv[:2]), "v_proj": np.concatenate(kv[2:]), "g_proj": z}
    fla |= {"b_proj": np.concatenate(b), "a_proj": a, "o_proj": named["out_proj.weight"]}
    fla |= dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), np.split(named["conv1d.weight"], [8, 24])))
    fla = {f"{name}.weight": x for name, x in fla.items()} | {"o_norm.weight": named["norm.weight"]}
    same(layer, named, fla=under(fla | {name: named[name] for name in ("A_log", "dt_bias")}))


def test_buffers_of_lightning_attention():
    layer = ejx.nn.LightningAttention(8, num_heads=2, num_layers=3, platform="xla", key=KEY)
    named = published(layer)
    buffers = {name: np.zeros(2) for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")}
    same(layer, named, transformers=under(named | buffers))


def test_one_projection_of_two_inputs():
    layer = attention(kv_embed_dim=6)
    refused("[8, 6, 6] features", like=layer, given={"in_proj_weight": np.zeros((24, 8), np.float32)})


@pytest.mark.parametrize("use_bias", [False, True])
def test_mixture_of_experts(use_bias):
    options = {"num_experts": 3, "top_k": 2, "use_bias": use_bias, "use_router_bias": use_bias}
    layer = abstract(ejx.nn.MixtureOfExperts, 8, 6, shared_dim=4, **options)
    named = published(layer)
    rest = {name: x for name, x in named.items() if not name.startswith("experts.")}
    kinds = [("", "weight"), ("_bias", "bias")] if use_bias else [("", "weight")]
    parts = lambda suffix: [named[f"experts.{name}_proj{suffix}"] for name in ("gate", "up", "down")]

    def single(*names):
        return under(rest) | {
            f"a.experts.{i}.{name}.{kind}": x[i]
            for suffix, kind in kinds
            for name, x in zip(names, parts(suffix))
            for i in range(3)
        }

    forms = {"Mixtral": single("w1", "w3", "w2"), "Qwen": single("gate_proj", "up_proj", "down_proj")}
    gate, up, down = parts("")
    if use_bias:
        turned = np.stack([gate, up], 2).reshape(3, 12, 8).swapaxes(1, 2)
        biases = parts("_bias")
        forms["GPT-OSS"] = renamed(rest, gate="router") | {
            "a.experts.gate_up_proj": turned,
            "a.experts.gate_up_proj_bias": np.stack(biases[:2], 2).reshape(3, 12),
            "a.experts.down_proj": down.swapaxes(1, 2),
            "a.experts.down_proj_bias": biases[2],
        }
    else:
        fused = {"a.experts.gate_up_proj": np.concatenate([gate, up], 1), "a.experts.down_proj": down}
        forms["transformers"] = under(rest) | fused
        forms["DeepSeek"] = renamed(rest, shared_expert="shared_experts") | fused
    same(layer, named, **forms)


def test_the_correction_bias_in_both_places():
    layer = abstract(
        ejx.nn.MixtureOfExperts, 8, 6, num_experts=3, top_k=2, use_correction_bias=True, scoring="sigmoid"
    )
    named = published(layer)
    beside = {name.replace("gate.e_score", "e_score"): x for name, x in named.items()}
    same(layer, named, DeepSeek=under(named), MiniMax=under(beside))


def test_an_expert_that_is_missing():
    layer = abstract(ejx.nn.MixtureOfExperts, 8, 6, num_experts=2, top_k=1)
    named = published(layer)
    files = {"gate.weight": named["gate.weight"]} | {
        f"experts.0.{name}.weight": named[f"experts.{name}"][0]
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    refused("it has no 'experts.1.gate_proj.weight'", like=layer, given=files)
