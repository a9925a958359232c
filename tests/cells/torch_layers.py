"""PyTorch's recurrent layers with drawn weights, and what they give: live, and for the golden file."""

import dataclasses
import json
import pathlib
import zlib
from typing import Any

import numpy as np

PATH = pathlib.Path(__file__).parent / "golden.json"
B, T, I, H = 3, 6, 4, 5
LENGTHS = (6, 4, 1)  # PyTorch has none of 0


@dataclasses.dataclass(frozen=True)
class Layer:
    kind: str
    layers: int = 1
    bidirectional: bool = False
    bias: bool = True
    activation: str = "tanh"
    packed: bool = False  # whether rows have the `LENGTHS`


LAYERS = {
    "lstm": Layer("LSTM"),
    "lstm, all options": Layer("LSTM", 2, True, packed=True),
    "lstm, no bias": Layer("LSTM", bidirectional=True, bias=False),
    "gru": Layer("GRU", packed=True),
    "gru, all options": Layer("GRU", 2, True),
    "gru, no bias": Layer("GRU", 3, bias=False),
    "rnn": Layer("RNN", 2, True, packed=True),
    "rnn, relu": Layer("RNN", 2, activation="relu"),
}


def drawn(name: str, *shape: int, scale: float = 1.0) -> np.ndarray:
    """The same numbers for the same name, everywhere."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def shapes_of(layer: Layer) -> dict[str, tuple[int, ...]]:
    """The parameters of PyTorch's layer, by name."""
    gates, directions = {"LSTM": 4, "GRU": 3, "RNN": 1}[layer.kind] * H, 2 if layer.bidirectional else 1
    found: dict[str, tuple[int, ...]] = {}
    for k in range(layer.layers):
        for end in ("", "_reverse")[:directions]:
            found[f"weight_ih_l{k}{end}"] = (gates, I if k == 0 else directions * H)
            found[f"weight_hh_l{k}{end}"] = (gates, H)
            if layer.bias:
                found |= {f"bias_ih_l{k}{end}": (gates,), f"bias_hh_l{k}{end}": (gates,)}
    return found


def weights_of(layer: Layer) -> dict[str, np.ndarray]:
    return {name: drawn(name, *shape, scale=0.5) for name, shape in shapes_of(layer).items()}


def inputs_of(layer: Layer) -> dict[str, np.ndarray]:
    """The inputs `[B, T, I]`, and states `[B, L, H]`."""
    count = layer.layers * (2 if layer.bidirectional else 1)
    return {
        "x": drawn("x", B, T, I),
        "hidden": drawn("hidden", B, count, H),
        "cell": drawn("cell", B, count, H),
    }


def loss_weights(y: Any) -> np.ndarray:
    return drawn("cotangent", *y.shape)


def live(layer: Layer) -> dict[str, np.ndarray]:
    """The output, the final states, and the gradients of everything, by PyTorch in float64."""
    import torch  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = dict(
        num_layers=layer.layers, bidirectional=layer.bidirectional, bias=layer.bias, batch_first=True
    )
    options |= {"nonlinearity": layer.activation} if layer.kind == "RNN" else {}
    module = getattr(torch.nn, layer.kind)(I, H, **options, dtype=torch.float64)
    module.load_state_dict({name: torch.tensor(w).double() for name, w in weights_of(layer).items()})
    given = {
        name: torch.tensor(x).double().requires_grad_()
        for name, x in inputs_of(layer).items()
        if name != "cell" or layer.kind == "LSTM"
    }
    states = [given[name].transpose(0, 1) for name in ("hidden", "cell") if name in given]
    x = given["x"]
    if layer.packed:
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True)
    y, final = module(x, tuple(states) if layer.kind == "LSTM" else states[0])
    if layer.packed:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
    finals = [s.transpose(0, 1) for s in (final if layer.kind == "LSTM" else [final])]
    loss = sum((torch.tensor(loss_weights(a)).double() * a).sum() for a in [y, *finals])
    named = given | dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    found = {"y": y, **dict(zip(("final_hidden", "final_cell"), finals))}
    found |= {f"d_{name}": g for name, g in zip(named, gradients)}
    return {name: a.detach().numpy() for name, a in found.items()}


def golden() -> dict[str, dict[str, np.ndarray]]:
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return {name: {k: np.array(x) for k, x in results.items()} for name, results in content["layers"].items()}


def main() -> None:
    """Writes the golden file: `python -m tests.cells.torch_layers`. Needs the extra `transformers`."""
    import torch  # pyright: ignore[reportMissingImports]

    found = {
        name: {k: np.round(x, 7).tolist() for k, x in live(layer).items()} for name, layer in LAYERS.items()
    }
    content = {"torch": torch.__version__, "layers": found}
    PATH.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
    print(f"{PATH}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
