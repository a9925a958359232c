"""The decoder of `train_step.py` in PyTorch, compiled, as a process that times steps on request.

After the line `begin` it reads one number per line, runs that many steps, and answers with one line of JSON; `train_step.py` starts it.
The same model and arithmetic as the JAX one: parameters in float32, computed in bfloat16, norms and the loss in float32; AdamW, clipping by
the global norm.

Kernels of recurrent mixers are tuned after `begin`, and until then run as they come, in a model of few layers: a process can compile while
others use the device. Steps with such kernels are one CUDA graph, where that can be captured. With `--process` and `--processes` it is one
of several that only compile them.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import math
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.nn.attention import sdpa_kernel, SDPBackend

from benchmarks import processes

# Recurrent mixers. Each has the parameters of the layer of `ejkernel_eqx.nn` beside it, and computes as flash-linear-attention's layer of that
# name, or mamba_ssm's: convolutions, gates and norms are those packages' kernels, too.


@torch.compiler.disable
def kernel(name: str, *given: Any, **options: Any) -> Any:
    """The result of a package's function, which launches its own kernels."""
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), function)(*given, **options)


CONVOLUTION = "fla.modules.causal_conv1d.causal_conv1d"
NORM = "fla.modules.norm.fused_norm_gate.rms_norm_gated"
IN_KERNELS: dict[str, Any] = dict.fromkeys(
    ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"), True
)
"""Options with which flash-linear-attention's layers call its kernels."""


class Linear(nn.Linear):
    """A linear layer in float32, computed in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Convolution(nn.Module):
    """A causal convolution of every channel with a width of 4, and SiLU."""

    def __init__(self, channels: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 4).uniform_(-0.5, 0.5))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-0.5, 0.5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return kernel(CONVOLUTION, x, self.weight.to(x.dtype), bias, activation="silu")[0]


def _log_rates(heads: int, low: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.empty(heads).uniform_(low, 16.0).log())


def _step_bias(size: int) -> nn.Parameter:
    """Biases whose softplus is log-uniform from 1e-3 to 1e-1."""
    steps = torch.empty(size).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(steps + torch.log(-torch.expm1(-steps)))


class _Delta(nn.Module):
    """What the delta rules share: queries, keys and values, each with a convolution; a gated norm; and the last projection."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (Linear(features, features) for _ in range(4))
        self.convolutions = nn.ModuleList(Convolution(features) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(features // heads))

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def mixed(self, x: Tensor, name: str, *gates: Tensor) -> Tensor:
        pairs = zip(self.convolutions, (self.q, self.k, self.v), strict=True)
        q, k, v = (self.by_head(c(p(x))) for c, p in pairs)
        arguments = {"A_log": self.A_log, "dt_bias": self.dt_bias, **IN_KERNELS}
        return kernel(name, q, k, v, *gates, **arguments)[0]

    def normed(self, out: Tensor, gate: Tensor, **options: Any) -> Tensor:
        out = kernel(NORM, out, self.by_head(gate), self.norm, None, **options)
        return self.o(out.flatten(-2))


class GatedDeltaNet(_Delta):
    def __init__(self, features: int, heads: int):
        super().__init__(features, heads)
        self.z = Linear(features, features)
        self.a, self.b = Linear(features, heads), Linear(features, heads)
        self.A_log, self.dt_bias = _log_rates(heads, 1e-4), nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        out = self.mixed(x, "fla.ops.gated_delta_rule.chunk_gated_delta_rule", self.a(x), self.b(x))
        return self.normed(out, self.z(x), activation="swish")


class KimiDeltaAttention(_Delta):
    def __init__(self, features: int, heads: int):
        super().__init__(features, heads)
        dim = features // heads
        self.f_a, self.f_b = Linear(features, dim), Linear(dim, features)
        self.g_a, self.g_b = Linear(features, dim), Linear(dim, features)
        self.b = Linear(features, heads)
        self.A_log, self.dt_bias = _log_rates(heads), _step_bias(features)

    def forward(self, x: Tensor) -> Tensor:
        decay = self.by_head(self.f_b(self.f_a(x)))
        out = self.mixed(x, "fla.ops.kda.chunk_kda", decay, self.b(x))
        return self.normed(out, self.g_b(self.g_a(x)), activation="sigmoid", eps=1e-5)


class Mamba2(nn.Module):
    def __init__(self, features: int, heads: int):
        super().__init__()
        self.inner, self.dim = 2 * features, features // heads
        self.state, self.heads = 2 * self.dim, self.inner // self.dim
        mixed = self.inner + 2 * self.state
        self.inputs = Linear(features, self.inner + mixed + self.heads)
        self.convolution = Convolution(mixed, bias=True)
        self.dt_bias, self.A_log = _step_bias(self.heads), _log_rates(self.heads)
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.Parameter(torch.ones(self.inner))
        self.o = Linear(self.inner, features)

    def forward(self, x: Tensor) -> Tensor:
        z, mixed, dt = self.inputs(x).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        x, B, C = self.convolution(mixed).split([self.inner, self.state, self.state], -1)
        B, C = B.unsqueeze(-2), C.unsqueeze(-2)
        arguments: dict[str, Any] = {"chunk_size": 256, "dt_softplus": True}
        arguments |= {"D": self.D, "dt_bias": self.dt_bias}
        x, A = x.unflatten(-1, (self.heads, self.dim)), -self.A_log.exp()
        y = kernel("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined", x, dt, A, B, C, **arguments)
        norm = "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn"
        y = kernel(norm, y.flatten(-2), self.norm, None, z=z, eps=1e-5, norm_before_gate=False)
        return self.o(y)


MIXERS = {"gated_deltanet": GatedDeltaNet, "kda": KimiDeltaAttention, "mamba2": Mamba2}


class Norm(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-5).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [B, T, H, D]`, rotated by halves."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (Linear(features, features) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v)), is_causal=True)
        return self.o(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, features: int, heads: int, hidden: int, mixer: str):
        super().__init__()
        self.mixer_norm, self.mlp_norm = Norm(features), Norm(features)
        self.mixer = (Attention if mixer == "attention" else MIXERS[mixer])(features, heads)
        self.gate, self.up = Linear(features, hidden), Linear(features, hidden)
        self.down = Linear(hidden, features)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        h = self.mixer_norm(x)
        x = x + (self.mixer(h, *tables) if isinstance(self.mixer, Attention) else self.mixer(h))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, sizes: argparse.Namespace):
        super().__init__()
        width = sizes.embed_dim
        hidden = -(-8 * width // 3 // 32) * 32
        dim = width // sizes.num_heads
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        mixers = itertools.islice(itertools.cycle(sizes.mixer.split(",")), sizes.num_layers)
        self.layers = nn.ModuleList(Layer(width, sizes.num_heads, hidden, mixer) for mixer in mixers)
        self.norm, self.head = Norm(width), Linear(width, sizes.vocabulary)
        # Tables, as in most code for PyTorch: in the compiled layers, sines and cosines were computed again for every head of every token,
        # which took 32 of 125 ms a step.
        rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = (torch.arange(sizes.seq, dtype=torch.float32)[:, None] * rates)[:, None]  # [T, 1, D / 2]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of `tokens [B, T + 1]`."""
        x = self.embedding(tokens[:, :-1]).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.loss(x, tokens[:, 1:])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Compiled as one, also where kernels that the compiler does not know keep it from taking all layers at once."""
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def attention() -> contextlib.AbstractContextManager[Any]:
    """cuDNN's kernels where there are any, which are the fastest on Hopper, else FlashAttention-2."""
    known = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(known, set_priority=True)


def compile_mixers(sizes: argparse.Namespace) -> None:
    """Compiles this process's share of the kernels of recurrent mixers, on memory without contents."""
    processes.compile_only(sizes.process, sizes.processes)
    for name in dict.fromkeys(sizes.mixer.split(",")):
        if name != "attention":
            mixer = MIXERS[name](sizes.embed_dim, sizes.num_heads).to("cuda")
            shape = (sizes.batch, sizes.seq, sizes.embed_dim)
            x = torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            out = mixer(x)
            out.backward(torch.empty_like(out))


def compile_layers(sizes: argparse.Namespace) -> None:
    """Compiles the layers, each for itself, where kernels that the compiler does not know keep it from taking all at once: with a model of
    one turn of the mixers, which needs little memory."""
    few = argparse.Namespace(**vars(sizes) | {"num_layers": len(sizes.mixer.split(","))})
    model = torch.compile(Model(few).to("cuda"), dynamic=False)
    with attention():
        model(torch.zeros((sizes.batch, sizes.seq + 1), dtype=torch.int64, device="cuda")).backward()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("embed-dim", "num-layers", "num-heads", "vocabulary", "batch", "seq"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mixer", default="attention", help="of the layers in turn, by commas")
    parser.add_argument("--kernels", help="file for the device's time by kernel in one more step")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


class Steps:
    """The model, its optimiser, and the tokens of its steps; as one CUDA graph after `capture`."""

    def __init__(self, sizes: argparse.Namespace):
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = device.type == "cuda"
        self.model = Model(sizes).to(device)
        options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "weight_decay": 0.01}
        options |= {"fused": True, "capturable": self.on_gpu}
        self.optimiser = torch.optim.AdamW(self.model.parameters(), **options)
        self.compiled = torch.compile(self.model, dynamic=False) if self.on_gpu else self.model
        random = np.random.default_rng(0)
        tokens = random.integers(0, sizes.vocabulary, (4, sizes.batch, sizes.seq + 1))
        self.batches = torch.from_numpy(tokens).to(device)
        self.graph: Any = None
        self.bytes = 0  # the most that steps allocated; replays of a graph allocate nothing

    def step(self, tokens: Tensor) -> Tensor:
        with attention():
            loss = self.compiled(tokens)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def capture(self) -> None:
        """Makes the step one CUDA graph: the host takes longer than the device to launch kernels that the compiler does not know."""
        self.run(1)
        self.given = self.batches[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step(self.given)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.step(self.given)
        self.graph = graph

    def run(self, count: int) -> float:
        """The loss before the last of so many steps."""
        loss = torch.zeros(())
        if self.graph is None and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for tokens in itertools.islice(itertools.cycle(self.batches), count):
            if self.graph is None:
                loss = self.step(tokens)
            else:
                self.given.copy_(tokens)
                self.graph.replay()
                loss = self.loss
        result = float(loss)  # waits
        if self.graph is None and self.on_gpu:
            self.bytes = torch.cuda.max_memory_allocated()
        return result

    def timed(self, count: int) -> dict[str, float]:
        start = time.perf_counter()
        self.run(count)
        ms = 1e3 * (time.perf_counter() - start) / count
        return {"ms": ms, "bytes": self.bytes}

    def write_kernels(self, path: str) -> None:
        with torch.profiler.profile() as trace:
            self.run(1)
        order = "cuda_time_total" if self.on_gpu else None
        pathlib.Path(path).write_text(trace.key_averages().table(sort_by=order, row_limit=60))


def main() -> int:
    sizes = parse()
    if sizes.process is not None:
        compile_mixers(sizes)
        return 0
    start, later = time.perf_counter(), None
    steps: Steps | None = None
    loss: float | None = None
    if torch.cuda.is_available() and set(sizes.mixer.split(",")) != {"attention"}:
        later = processes.Later()
        compile_layers(sizes)
    else:
        with processes.held():  # of processes that compile, one at a time has activations
            steps = Steps(sizes)
            loss = steps.run(1)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(json.dumps({"compile_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        if line.strip() != "begin":
            assert steps is not None
            print(json.dumps(steps.timed(int(line))), flush=True)
            continue
        start = time.perf_counter()
        if later is not None:
            later.tune()
        steps = steps or Steps(sizes)
        loss = steps.run(1) if loss is None else loss
        assert math.isfinite(loss)
        if later is not None:
            try:
                steps.capture()
            except RuntimeError as error:
                print(f"not as a CUDA graph: {error}", file=sys.stderr, flush=True)
        count = sum(p.numel() for p in steps.model.parameters())
        seconds = {"begin_seconds": time.perf_counter() - start}
        ready = {"loss": loss, "parameters": count, "graph": steps.graph is not None, **seconds}
        print(json.dumps(ready), flush=True)
    if sizes.kernels and steps is not None:
        steps.write_kernels(sizes.kernels)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
