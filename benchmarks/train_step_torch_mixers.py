"""Recurrent mixers for the decoder of `train_step_torch.py`, on the kernels of flash-linear-attention and mamba_ssm.

Each has the parameters of the layer of `ejkernel_eqx.nn` beside it, and computes as flash-linear-attention's layer of that name, or
mamba_ssm's: convolutions, gates and norms are those packages' kernels, too. Projections of one input are one product where the layers of
the package have it so.
"""

import importlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor


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
"""As flash-linear-attention's layers call its kernels."""


class Linear(nn.Linear):
    """In float32, computed in the dtype of its input."""

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


class GatedDeltaNet(nn.Module):
    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.z, self.o = (Linear(features, features) for _ in range(5))
        self.a, self.b = Linear(features, heads), Linear(features, heads)
        self.convolutions = nn.ModuleList(Convolution(features) for _ in range(3))
        self.A_log, self.dt_bias = _log_rates(heads, 1e-4), nn.Parameter(torch.ones(heads))
        self.norm = nn.Parameter(torch.ones(features // heads))

    def forward(self, x: Tensor) -> Tensor:
        by_head = lambda a: a.unflatten(-1, (self.heads, -1))
        q, k, v = (by_head(c(p(x))) for c, p in zip(self.convolutions, (self.q, self.k, self.v), strict=True))
        given = {"A_log": self.A_log, "dt_bias": self.dt_bias, **IN_KERNELS}
        out = kernel(
            "fla.ops.gated_delta_rule.chunk_gated_delta_rule", q, k, v, self.a(x), self.b(x), **given
        )[0]
        out = kernel(NORM, out, by_head(self.z(x)), self.norm, None, activation="swish")
        return self.o(out.flatten(-2))


class KimiDeltaAttention(nn.Module):
    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads, dim = heads, features // heads
        self.q, self.k, self.v, self.o = (Linear(features, features) for _ in range(4))
        self.convolutions = nn.ModuleList(Convolution(features) for _ in range(3))
        self.f_a, self.f_b = Linear(features, dim), Linear(dim, features)
        self.g_a, self.g_b = Linear(features, dim), Linear(dim, features)
        self.b = Linear(features, heads)
        self.A_log, self.dt_bias = _log_rates(heads), _step_bias(features)
        self.norm = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        by_head = lambda a: a.unflatten(-1, (self.heads, -1))
        q, k, v = (by_head(c(p(x))) for c, p in zip(self.convolutions, (self.q, self.k, self.v), strict=True))
        given = {"A_log": self.A_log, "dt_bias": self.dt_bias, **IN_KERNELS}
        decay = by_head(self.f_b(self.f_a(x)))
        out = kernel("fla.ops.kda.chunk_kda", q, k, v, decay, self.b(x), **given)[0]
        gate = by_head(self.g_b(self.g_a(x)))
        out = kernel(NORM, out, gate, self.norm, None, activation="sigmoid", eps=1e-5)
        return self.o(out.flatten(-2))


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
        given: dict[str, Any] = {"chunk_size": 256, "D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True}
        x, A = x.unflatten(-1, (self.heads, self.dim)), -self.A_log.exp()
        y = kernel("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined", x, dt, A, B, C, **given)
        norm = "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn"
        y = kernel(norm, y.flatten(-2), self.norm, None, z=z, eps=1e-5, norm_before_gate=False)
        return self.o(y)


MIXERS = {"gated_deltanet": GatedDeltaNet, "kda": KimiDeltaAttention, "mamba2": Mamba2}
