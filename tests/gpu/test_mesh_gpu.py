"""Models over two GPUs and more, on explicit meshes whose other axes have one device, against the same model on one.

python -m pytest tests/gpu/test_mesh_gpu.py -n 0
"""

from typing import Any

import jax
import pytest

from ejkernel_eqx import models
from tests import meshes
from tests.models.test_split_tokens import alone, model_of, over
from tests.nn.test_expert_parallel import check

if jax.default_backend() != "gpu":
    pytest.skip("needs GPUs", allow_module_level=True)
if jax.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

pytestmark = pytest.mark.gpu
MODELS: dict[str, tuple[tuple[str, ...], Any]] = {
    "attention and linear": (("attention", "gated_linear_attention") * 2, None),
    "recurrent": (("mamba2", "gated_delta_net") * 2, None),
    "scan and KDA": (("mamba1", "kimi_delta_attention") * 2, None),
    "latent and sparse": (("latent_attention", "native_sparse_attention"), None),
    "experts": (("attention",) * 2, models.MoEConfig({"hidden_dim": 32, "num_experts": 4, "top_k": 2})),
}


SPLITS = [{axis: 2} for axis in models.MESH_AXES]
SPLITS += [{"data": 2, "tensor": 2}, {"data": 2, "sequence": 2}, {"data": 2, "sequence": 2, "tensor": 2}]


@pytest.mark.few(30)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_mesh_trains_as_one_gpu(name, split):
    if (count := 2 ** len(split)) > jax.device_count():
        pytest.skip(f"needs {count} GPUs")
    mixers, mlp = MODELS[name]
    axis = None if "latent_attention" in mixers else "sequence"  # it needs all tokens of a row
    model = model_of(mixers, mlp, sequence_axis=axis, scan_layers=True, platform="triton")
    with jax.default_matmul_precision("highest"):
        result, _ = over(model, split)
        expected = alone(mixers, mlp)
    meshes.agree(result[0], expected[0])
    meshes.agree(result[1], expected[1], "gradient")


@pytest.mark.parametrize("exchange", ["auto", "ragged"])
@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_experts_of_two_gpus_are_those_of_one(kind, exchange):
    with jax.default_matmul_precision("highest"):
        check("exchanged", kind, "triton", exchange, shape=(1, 2, 1))
