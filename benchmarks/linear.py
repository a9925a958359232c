"""The linear-time family compared with flash-linear-attention and mamba_ssm, if installed, and its decoding steps.

    python -m benchmarks linear --json linear.json --plot linear.png
    python -m benchmarks linear --problems 'KDA|gated' --time-limit 300
    python -m benchmarks linear --apart --problems 'B4 T4096|T65536' --json linear.json   # a process for each member
    python -m benchmarks linear --render linear.json --plot linear.png --markdown linear.md

The reference is the recurrence, token by token. Peers are timed as CUDA graphs, without Python's launch overhead. Steps update their state in
place and are compared with an XLA pass that reads and writes a state of that size in place; without a GPU, the peer is a `lax.scan` over time.
With `--apart` peers tune themselves briefly; with `--compile-peers` several processes compile what they tune before.
"""

import dataclasses
import functools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import peers, prepare, problems, runner
from benchmarks.peers import TorchPeer
from benchmarks.prepare import Arrays, BOTH, DIRECTIONS, Implementation, Inputs, Others, Prepared, Row
from benchmarks.runner import Errors

STEP = "step"
_WRITES = 2  # per token, of a delta product


@dataclasses.dataclass(frozen=True)
class LinearProblem(problems.Problem):
    """`B` rows of `T` tokens, or one decoding step of `B` rows if `T` is 0, for one member of the family.

    `H` heads of `D` key channels (state size of a state space) and `V` values. The selective scan has no heads: `V` counts its channels.
    """

    member: str
    B: int
    T: int
    H: int
    D: int
    V: int

    @property
    def is_step(self) -> bool:
        return self.T == 0

    @property
    def directions(self) -> tuple[str, ...]:
        return (STEP,) if self.is_step else DIRECTIONS

    def words(self) -> list[str]:
        size = f"B{self.B}" if self.is_step else f"B{self.B} T{self.T}"
        heads = f"H{self.H} D{self.D}" + ("" if self.V == self.D else f" V{self.V}")
        by_member = {
            "selective scan": f"I{self.V} N{self.D}",
            "SSD": f"H{self.H} P{self.V} N{self.D}",
        }
        return [self.member, "step" if self.is_step else "", size, by_member.get(self.member, heads)]


PROBLEMS = problems.load("linear", LinearProblem)


class Member(NamedTuple):
    """The specifics of one member of the family.

    - `make(problem, lead, normal, uniform)`: its inputs, `lead` the axes before the heads; `normal(*shape)` and `uniform(*shape)` draw float32.
    - `build(platform=)`: our operation.
    - `positional`: the inputs passed by position; the others are passed by name.
    - `plain(learned, state, block)`: `(out, state)` of `[B, T, ...]` float32 arrays, by the recurrence, token by token.
    """

    make: Callable[..., Arrays]
    build: Callable[..., Any]
    positional: tuple[str, ...]
    plain: Callable[[Arrays, Array, int], tuple[Array, Array]]

    def call(self, operation: Callable[..., Any], learned: Arrays, *more: Array) -> tuple[Array, Array]:
        named = {name: x for name, x in learned.items() if name not in self.positional}
        return operation(*(learned[name] for name in self.positional), *more, **named)


# Inputs


def _qkv(problem: LinearProblem, lead: tuple[int, ...], normal: Callable[..., Array]) -> Arrays:
    sizes = {"q": problem.D, "k": problem.D, "v": problem.V}
    return {name: normal(*lead, problem.H, size).astype(problem.dtype) for name, size in sizes.items()}


def _unit_keys(learned: Arrays) -> Arrays:
    def unit(x: Array) -> Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.sum(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    return learned | {name: unit(learned[name]) for name in "qk"}


def _make_gla(problem, lead, normal, uniform) -> Arrays:
    g = jax.nn.log_sigmoid(normal(*lead, problem.H, problem.D)) / 16
    return _qkv(problem, lead, normal) | {"g": g.astype(problem.dtype)}


def _make_scalar(problem, lead, normal, uniform) -> Arrays:
    return _qkv(problem, lead, normal) | {"g": jax.nn.log_sigmoid(normal(*lead, problem.H))}


def _make_kda(problem, lead, normal, uniform) -> Arrays:
    # Rates of 1 to 16 and steps around 0.03, as in a new layer. A peer is faster if g >= -5 is guaranteed.
    rate = 1 + 15 * uniform(*(1,) * len(lead), problem.H, 1)
    g = jnp.maximum(-rate * jax.nn.softplus(normal(*lead, problem.H, problem.D) - 3.5), -5.0)
    beta = jax.nn.sigmoid(normal(*lead, problem.H))
    learned = _unit_keys(_qkv(problem, lead, normal))
    return learned | {"g": g.astype(problem.dtype), "beta": beta.astype(problem.dtype)}


def _make_rank_one(problem, lead, normal, uniform) -> Arrays:
    # RWKV-7's own: it removes what a key of length one holds, a part of every channel; the strongest decay is exp(-1/2).
    learned = _unit_keys(_qkv(problem, lead, normal))
    a = normal(*lead, problem.H, problem.D)
    a = a * lax.rsqrt(jnp.sum(a**2, -1, keepdims=True))
    b = a * jax.nn.sigmoid(normal(*lead, problem.H, problem.D))
    g = -math.exp(-0.5) * jax.nn.sigmoid(normal(*lead, problem.H, problem.D) - 2)
    return learned | {name: x.astype(problem.dtype) for name, x in (("a", -a), ("b", b), ("g", g))}


def _make_gated_delta(problem, lead, normal, uniform) -> Arrays:
    learned = _unit_keys(_qkv(problem, lead, normal))
    beta = jax.nn.sigmoid(normal(*lead, problem.H)).astype(problem.dtype)
    return learned | {"g": jax.nn.log_sigmoid(normal(*lead, problem.H)), "beta": beta}


def _make_product(problem, lead, normal, uniform) -> Arrays:
    writes = (*lead, _WRITES)
    k, beta = normal(*writes, problem.H, problem.D), jax.nn.sigmoid(normal(*writes, problem.H))
    k = k * lax.rsqrt(jnp.sum(k**2, -1, keepdims=True))
    learned = {"q": normal(*lead, problem.H, problem.D), "k": k, "v": normal(*writes, problem.H, problem.V)}
    learned |= {"beta": beta, "g": jax.nn.log_sigmoid(normal(*lead, problem.H))}
    return {name: x if name == "g" else x.astype(problem.dtype) for name, x in learned.items()}


def _make_ssd(problem, lead, normal, uniform) -> Arrays:
    tokens = {"x": (problem.H, problem.V), "dt": (problem.H,), "B": (1, problem.D), "C": (1, problem.D)}
    learned = {name: normal(*lead, *shape).astype(problem.dtype) for name, shape in tokens.items()}
    # Steps around 0.02, as in a new layer.
    return learned | {
        "A": -1 - 15 * uniform(problem.H),
        "D": normal(problem.H),
        "dt_bias": normal(problem.H) - 4,
    }


def _make_scan(problem, lead, normal, uniform) -> Arrays:
    channels, states = problem.V, problem.D
    tokens = {"x": channels, "dt": channels, "B": states, "C": states, "z": channels}
    learned = {name: normal(*lead, size).astype(problem.dtype) for name, size in tokens.items()}
    rates = jnp.broadcast_to(-jnp.arange(1.0, states + 1), (channels, states))
    return learned | {"A": rates, "D": normal(channels), "dt_bias": normal(channels) - 4}


# The reference


def _over_tokens(
    token: Callable[[Array, Arrays], tuple[Array, Array]], state: Array, tokens: Arrays, block: int
) -> tuple[Array, Array]:
    """Applies `token(state, tokens) -> (state, out)` along `[B, T, ...]`. The backward pass keeps all states or, with `block`, those between
    blocks of at most so many tokens."""
    first = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
    length = next(iter(first.values())).shape[0]
    if block == 0:
        state, out = lax.scan(token, state, first)
        return jnp.moveaxis(out, 0, 1), state
    size = math.gcd(length, block)
    blocks = {name: x.reshape(-1, size, *x.shape[1:]) for name, x in first.items()}
    state, out = lax.scan(jax.checkpoint(lambda state, x: lax.scan(token, state, x)), state, blocks)
    return jnp.moveaxis(out.reshape(length, *out.shape[2:]), 0, 1), state


def _recur(
    tokens: Arrays, state: Array, block: int, *, scale: float | None = None, delta: bool = False
) -> tuple[Array, Array]:
    """`S = e^g S`; `S += beta k (v - S^T k)^T` (delta) or `S += beta k v^T`; `o = scale S^T q`. `g` has the axes of the state; `beta` is
    optional. With `a` and `b`, `S += b (a^T S)` of the state before its decay."""
    factor = tokens["q"].shape[-1] ** -0.5 if scale is None else scale

    def token(state: Array, at: Arrays) -> tuple[Array, Array]:
        read = at["b"][..., :, None] * _apply(at["a"], state)[..., None, :] if "a" in at else 0
        state, v = jnp.exp(at["g"]) * state + read, at["v"]
        if delta:
            v = v - _apply(at["k"], state)
        v = at["beta"][..., None] * v if "beta" in at else v
        state = state + at["k"][..., :, None] * v[..., None, :]
        return state, factor * _apply(at["q"], state)

    return _over_tokens(token, state, tokens, block)


def _apply(x: Array, state: Array) -> Array:
    return (x[..., None, :] @ state)[..., 0, :]


def _plain(
    axes: int, delta: bool = False, scale: float | None = None
) -> Callable[[Arrays, Array, int], tuple[Array, Array]]:
    """The recurrence of a decay that lacks so many of the state's axes."""

    def run(learned: Arrays, state: Array, block: int) -> tuple[Array, Array]:
        tokens = learned | {"g": learned["g"][(..., *[None] * axes)]}
        return _recur(tokens, state, block, scale=scale, delta=delta)

    return run


def _plain_lightning(learned: Arrays, state: Array, block: int) -> tuple[Array, Array]:
    rows, length, heads = learned["q"].shape[:3]
    # The slope of the first layer: 8 / H * (1 - 0 / L) * h.
    g = -8.0 / heads * jnp.arange(heads, dtype=jnp.float32)[:, None, None]
    return _recur(learned | {"g": jnp.broadcast_to(g, (rows, length, heads, 1, 1))}, state, block)


def _plain_product(learned: Arrays, state: Array, block: int) -> tuple[Array, Array]:
    """A token for each write, of which the first has the decay and the last one's output counts."""
    tokens = {
        name: learned[name].reshape(*learned["q"].shape[:1], -1, *learned[name].shape[3:])
        for name in ("k", "v", "beta")
    }
    decays = jnp.pad(learned["g"][:, :, None], ((0, 0), (0, 0), (0, _WRITES - 1), (0, 0)))
    tokens["g"] = decays.reshape(*tokens["beta"].shape, 1, 1)
    tokens["q"] = jnp.repeat(learned["q"], _WRITES, axis=1)
    out, state = _recur(tokens, state, _WRITES * block, delta=True)
    return out[:, _WRITES - 1 :: _WRITES], state


def _plain_ssd(learned: Arrays, state: Array, block: int) -> tuple[Array, Array]:
    x = learned["x"]
    dt = jax.nn.softplus(learned["dt"] + learned["dt_bias"][None, None])
    tokens = {"q": learned["C"], "k": learned["B"], "v": x, "beta": dt}
    tokens["g"] = (dt * learned["A"][None, None])[..., None, None]
    out, state = _recur(tokens, jnp.swapaxes(state, -1, -2), block, scale=1.0)
    return out + learned["D"][None, None, :, None] * x, jnp.swapaxes(state, -1, -2)


def _plain_scan(learned: Arrays, state: Array, block: int) -> tuple[Array, Array]:
    tokens = {name: learned[name] for name in ("x", "B", "C")}
    tokens["dt"] = jax.nn.softplus(learned["dt"] + learned["dt_bias"][None, None])

    def token(state: Array, at: Arrays) -> tuple[Array, Array]:
        write = (at["dt"] * at["x"])[..., None] * at["B"][:, None]  # [B, I, N]
        state = jnp.exp(at["dt"][..., None] * learned["A"][None]) * state + write
        return state, jnp.einsum("bin,bn->bi", state, at["C"])

    out, state = _over_tokens(token, state, tokens, block)
    return (out + learned["D"][None, None] * learned["x"]) * jax.nn.silu(learned["z"]), state


_DELTA = ("KDA", "gated delta rule", "delta product", "DPLR", "RWKV-7")
_WHOLE = ("A", "D", "dt_bias")
"""Learned inputs without tokens."""
_SEGMENT = 4096


def _in_segments(problem: LinearProblem, learned: Arrays, block: int) -> tuple[Array, Array]:
    """`plain` from a state of zeros, in segments of a long row that are computed side by side. What each makes of a zero state and of the
    identity gives the state before the next; with it, each is computed again."""
    segments = max(1, problem.T // _SEGMENT)
    each, plain = dataclasses.replace(problem, B=problem.B * segments), MEMBERS[problem.member].plain
    if segments == 1:
        return plain(learned, _no_state(problem), block)

    def cut(name: str, x: Array) -> Array:
        return x if name in _WHOLE else x.reshape(each.B, -1, *x.shape[2:])

    def join(state: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        local, passed = at
        return local + (passed @ state if problem.member in _DELTA else passed * state), state

    tokens = {name: cut(name, x) for name, x in learned.items()}
    written = "v" if "v" in tokens else "x"
    nothing = tokens | {written: jnp.zeros_like(tokens[written])}
    unit = jnp.eye(problem.D) if problem.member in _DELTA else jnp.ones(())
    passed = plain(nothing, jnp.broadcast_to(unit, state_shape(each)), block)[1]
    local = plain(tokens, _no_state(each), block)[1]
    local, passed = (
        jnp.moveaxis(x.reshape(problem.B, segments, *x.shape[1:]), 1, 0) for x in (local, passed)
    )
    last, before = lax.scan(join, _no_state(problem), (local, passed))
    out, _ = plain(tokens, jnp.moveaxis(before, 0, 1).reshape(state_shape(each)), block)
    return out.reshape(problem.B, -1, *out.shape[2:]), last


_QKVG = ("q", "k", "v", "g")
_RANK_ONE = ("q", "k", "v", "a", "b", "g")
_SCAN = ("x", "dt", "A", "B", "C")
MEMBERS: Mapping[str, Member] = {
    "GLA": Member(_make_gla, ejx.GatedLinearAttention, _QKVG, _plain(1)),
    "lightning": Member(
        lambda problem, lead, normal, uniform: _qkv(problem, lead, normal),
        functools.partial(ejx.LightningAttention, slopes="fla", num_layers=24),
        ("q", "k", "v"),
        _plain_lightning,
    ),
    "scalar decay": Member(_make_scalar, ejx.LinearAttention, ("q", "k", "v"), _plain(2)),
    "KDA": Member(_make_kda, ejx.KernelDeltaAttention, (*_QKVG, "beta"), _plain(1, delta=True)),
    "gated delta rule": Member(
        _make_gated_delta, ejx.GatedDeltaRule, (*_QKVG, "beta"), _plain(2, delta=True)
    ),
    "delta product": Member(_make_product, ejx.DeltaProduct, ("q", "k", "v", "beta"), _plain_product),
    "DPLR": Member(_make_rank_one, ejx.DPLRDeltaRule, _RANK_ONE, _plain(1)),
    "RWKV-7": Member(
        _make_rank_one, functools.partial(ejx.DPLRDeltaRule, scale=1.0), _RANK_ONE, _plain(1, scale=1.0)
    ),
    "SSD": Member(_make_ssd, functools.partial(ejx.StateSpaceV2, dt_softplus=True), _SCAN, _plain_ssd),
    "selective scan": Member(
        _make_scan, functools.partial(ejx.StateSpaceV1, dt_softplus=True), _SCAN, _plain_scan
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def make_inputs(problem: LinearProblem, seed: int = 0) -> Inputs:
    """Normal operands, with decays and steps as in layers; different for every seed."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def draw(kind: Callable[..., Array], *shape: int) -> Array:
        return kind(next(keys), shape, jnp.float32)

    normal, uniform = (functools.partial(draw, kind) for kind in (jax.random.normal, jax.random.uniform))
    lead = (problem.B,) if problem.is_step else (problem.B, problem.T)
    learned = MEMBERS[problem.member].make(problem, lead, normal, uniform)
    values = learned["v" if "v" in learned else "x"].shape
    state = normal(*state_shape(problem)) if problem.is_step else None
    return Inputs(learned, normal(*lead, *values[len(lead) :][-2:]).astype(problem.dtype), {}, state)


def state_shape(problem: LinearProblem) -> tuple[int, ...]:
    """The total of all rows."""
    if problem.member == "selective scan":
        return problem.B, problem.V, problem.D
    sizes = (problem.V, problem.D) if problem.member == "SSD" else (problem.D, problem.V)
    return problem.B, problem.H, *sizes


def _no_state(problem: LinearProblem) -> Array:
    return jnp.zeros(state_shape(problem), jnp.float32)


def directed(forward: Callable[[Arrays], tuple[Array, Array]], direction: str) -> Callable[[Inputs], Arrays]:
    """The measured function, from `forward(learned) -> (out, state)`: both results, or the gradients of everything learned."""

    def only_forward(inputs: Inputs) -> Arrays:
        return dict(zip(("out", "state"), forward(inputs.learned)))

    def both(inputs: Inputs) -> Arrays:
        (_, state), pull = jax.vjp(forward, inputs.learned)
        return pull((inputs.cotangent, jnp.zeros_like(state)))[0]

    return both if direction == BOTH else only_forward


def ours(problem: LinearProblem, platform: str | None) -> Callable[..., tuple[Array, Array]]:
    """Our operation as a function of the learned inputs and, for a step, of the state."""
    member = MEMBERS[problem.member]
    operation = member.build(platform=platform)
    call = operation.step if problem.is_step else operation

    def run(learned: Arrays, *state: Array) -> tuple[Array, Array]:
        return member.call(call, learned, *state)

    return run


def plain(problem: LinearProblem) -> Callable[[Arrays], tuple[Array, Array]]:
    """The recurrence as a `lax.scan` over time, from a state of zeros."""

    def run(learned: Arrays) -> tuple[Array, Array]:
        out, state = MEMBERS[problem.member].plain(learned, _no_state(problem), 0)
        return out.astype(problem.dtype), state

    return run


_PART = 4
_MOST_WHOLE = 16384  # tokens


def _part(problem: LinearProblem, name: str, x: Array) -> Array:
    """Takes, of many tokens, every fourth head (or channel of the selective scan), which takes a quarter of the memory."""
    heads = (
        3 if problem.member == "delta product" and name in ("k", "v", "beta") else 2
    )  # behind the writes of a token
    axis = {"A": 0, "D": 0, "dt_bias": 0, "state": 1}.get(name, heads)
    if problem.B * problem.T <= _MOST_WHOLE or name in ("B", "C"):
        return x
    return lax.slice_in_dim(x, 0, None, _PART, axis)


def _part_of(problem: LinearProblem) -> LinearProblem:
    """The problem of that part."""
    if problem.B * problem.T <= _MOST_WHOLE:
        return problem
    if problem.member == "selective scan":
        return dataclasses.replace(problem, V=problem.V // _PART)
    return dataclasses.replace(problem, H=problem.H // _PART)


@prepare.reference
def expected_results(problem: LinearProblem, inputs: Inputs) -> Arrays:
    """The results of the reference in float32. Of more than 16,384 tokens, those of every fourth head, and none that sums over all heads."""
    member, part, (learned, cotangent, _, state) = MEMBERS[problem.member], _part_of(problem), inputs
    if problem.is_step:
        tokens = {name: x if name in _WHOLE else x[:, None] for name, x in learned.items()}
        out, state = member.plain(tokens, state, 0)
        return {"out": out[:, 0], "state": state}

    learned = {name: _part(problem, name, x) for name, x in learned.items()}
    (out, state), pull = jax.vjp(lambda learned: _in_segments(part, learned, 64), learned)
    gradients = pull((_part(problem, "out", cotangent), jnp.zeros_like(state)))[0]
    if part != problem:
        gradients = {name: x for name, x in gradients.items() if name not in ("B", "C")}
    return {"out": out, "state": state, **gradients}


def of_part(problem: LinearProblem, results: Arrays, expected: Mapping[str, Array]) -> Arrays:
    """The part of results that the reference has."""
    return {name: _part(problem, name, x) for name, x in results.items() if name in expected}


_USUAL = 4096


PEERS = peers.listed("linear")


def in_place(sets: Sequence[Inputs], direction: str) -> Prepared:
    """Only reads and writes the state."""
    step = lambda learned, state: (0.999 * state, {})
    return prepare.ready_in_place(step, [inputs.learned for inputs in sets], sets[0].state)


class Linear(runner.Family):
    name, title, description, lists = "linear", "The linear-time family", __doc__, PROBLEMS
    groups = ("anchors", "long", "steps")
    extremes, packages = (runner.MEMORY,), peers.PACKAGES

    def directed(self, problem: LinearProblem, forward: Any, direction: str) -> Callable[[Inputs], Arrays]:
        return directed(forward, direction)

    def ready(self, problem: LinearProblem, platform: Any, sets: Sequence[Any], direction: str) -> Prepared:
        if not problem.is_step:
            return super().ready(problem, platform, sets, direction)
        function = self.ours(problem, platform)

        def step(learned: Arrays, state: Any) -> tuple[Any, Arrays]:
            out, state = function(learned, state)
            return state, {"out": out}

        return prepare.ready_in_place(step, [inputs.learned for inputs in sets], sets[0].state)

    def beside(self, problem: LinearProblem, options: Namespace, direction: str) -> Others:
        if problem.is_step:
            yield Implementation("in place", in_place, prepare.PEER, is_checked=False)
        elif jax.default_backend() == "cpu":
            yield self.in_jax(problem, "lax.scan", plain(problem))

    def peers(self, problem: LinearProblem) -> Iterator[TorchPeer]:
        """The installed peers that support many tokens of this member; of longer rows than the anchors', one of each package, the first."""
        packages: set[str] = set()
        for peer in peers.installed(*(() if problem.is_step else PEERS.get(problem.member, ()))):
            if not (problem.T > _USUAL and peer.package in packages):
                packages.add(peer.package)
                yield peer

    def errors(self, problem: LinearProblem, row: Row, results: Arrays, expected: Arrays) -> Errors:
        return runner.errors_of(problem.dtype, of_part(problem, results, expected), expected)

    def complete(self, problem: Any, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        """Bytes are those of reading every input once and writing every result once."""
        learned, out = prepare.nbytes(inputs.learned), prepare.nbytes(inputs.cotangent)
        more = learned if direction == BOTH else 2 * prepare.nbytes(inputs.state)
        runner.rate(rows, bytes=learned + out + more)

    def apart(self, problem: LinearProblem) -> str:
        return problem.member


FAMILY = Linear(make_inputs=make_inputs, expected=expected_results, ours=ours)
