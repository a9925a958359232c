"""The table of the guide "Several devices": what one more layer sends in a training step, by the axis of the mesh."""

import pathlib
from typing import Any

import pytest

from ejkernel_eqx import models
from tests import meshes

from .test_split_tokens import batch, EXPERTS, GLA, gradient_of, LATENT, mesh_of, model_of, SPARSE

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "sharding.md"
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Axes and layer as in the table; sizes of the axes, mixer, MLP.
ROWS: dict[tuple[str, str], tuple[dict[str, int], str, Any]] = {
    ("`data`", "attention"): ({"data": 2}, "attention", None),
    ("`tensor`", "attention"): ({"tensor": 2}, "attention", None),
    ("`sequence`", "attention, heads for tokens"): ({"sequence": 2}, "attention", None),
    ("`sequence`", "attention, a ring of 8"): ({"sequence": 8}, "attention", None),
    ("`sequence`", "latent attention"): ({"sequence": 2}, LATENT, None),
    ("`sequence`", "native sparse attention"): ({"sequence": 2}, SPARSE, None),
    ("`sequence`", "gated linear attention"): ({"sequence": 2}, GLA, None),
    ("all three", "attention"): ({"data": 2, "sequence": 2, "tensor": 2}, "attention", None),
    ("`data`", "attention and experts over `data`"): ({"data": 2}, "attention", EXPERTS),
}


def table() -> dict[tuple[str, str], list[int]]:
    lines = PAGE.read_text().splitlines()
    begin = next(
        n for n, line in enumerate(lines) if line.startswith("| axis | layer | " + " | ".join(KINDS))
    )
    rows = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            return rows
        axis, layer, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        rows[axis, layer] = [int(number or 0) for number in numbers]
    return rows


def test_rows_of_the_table():
    assert table().keys() == ROWS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_one_more_layer_sends(row):
    sizes, mixer, mlp = ROWS[row]
    mesh = mesh_of(sizes)

    def sent(layers: int) -> list[int]:
        model = model_of((mixer,) * layers, mlp, platform="xla", sequence_axis="sequence")
        gradient, arrays = gradient_of(model, models.split_cross_entropy)
        lowered = gradient.lower(models.place(arrays, model, mesh), *models.place_tokens(batch(), mesh))
        counts = meshes.collectives(lowered.compile())
        assert not set(counts) - set(KINDS)
        return [counts[kind] for kind in KINDS]

    assert [more - one for one, more in zip(sent(1), sent(2), strict=True)] == table()[row]
