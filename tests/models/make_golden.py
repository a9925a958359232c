"""Makes `golden.json` again: what `transformers` gives for the configurations in it. Needs the extra `transformers`.

python tests/models/make_golden.py
python tests/models/make_golden.py configs.json  # and for other kinds: an object with the configuration of each
python tests/models/make_golden.py --encoders    # encoders.json
"""

import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from tests.models.cases import drawn, encoder_inputs, ENCODERS, GOLDEN, PATH, tokens

MEANT = ("q_lora_rank",)  # where null says something
VISION = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16}


def published(given: dict):
    """The model of `transformers`, with the weights drawn for it. Of one of images and text, those of the text model are drawn."""
    if "time_step_limit" in given:  # infinity, as transformers writes it
        limit = [math.inf if isinstance(x, dict) else x for x in given["time_step_limit"]]
        given = given | {"time_step_limit": limit}
    has_parts = "text_config" in given
    if has_parts:
        given = given | {"vision_config": VISION | {"out_hidden_size": given["text_config"]["hidden_size"]}}
    config = transformers.CONFIG_MAPPING[given["model_type"]].from_dict(given)
    config._attn_implementation = "eager"
    kind = transformers.AutoModelForImageTextToText if has_parts else transformers.AutoModelForCausalLM
    if given in [case["config"] for case in ENCODERS.values()]:
        kind = transformers.AutoModel
    with torch.no_grad():
        model = kind.from_config(config, dtype=torch.float32).eval()
        state = model.state_dict()
        tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
        shapes = {name: list(value.shape) for name, value in state.items() if name not in tied}
        buffers = ("slope_rate", "_decay", "inv_freq", "embed_scale")
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(buffers)}
        shapes = {name: shape for name, shape in shapes.items() if "visual" not in name}
        weights = drawn(shapes)
        missing, unexpected = model.load_state_dict(
            {k: torch.tensor(v) for k, v in weights.items()}, strict=False
        )
        assert not unexpected, unexpected
        assert all(name in tied or name.endswith(buffers) or "visual" in name for name in missing), missing
        model.tie_weights()
    return model, shapes


def logits_of(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long), use_cache=False).logits


def greedy(model, row: list[int], count: int = 5) -> list[int]:
    """By a whole pass for each token."""
    row = list(row)
    for _ in range(count):
        row.append(int(logits_of(model, [row])[0, -1].argmax()))
    return row[-count:]


def without_nulls(config: dict) -> dict:
    """The entries that say something."""
    kept = {k: v for k, v in config.items() if not k.startswith("_") and (v is not None or k in MEANT)}
    kept.pop("vision_config", None)
    inner = kept.get("text_config")
    return kept if inner is None else kept | {"text_config": without_nulls(inner)}


def features_of(model, given: dict) -> torch.Tensor:
    """Those of real tokens, one after the other."""
    ids, real, types = (torch.tensor(array.astype("int64")) for array in encoder_inputs(given))
    more = {} if given.get("type_vocab_size", 1) < 2 else {"token_type_ids": types}
    with torch.no_grad():
        return model(ids, attention_mask=real, **more).last_hidden_state[real.bool()]


def encoders() -> None:
    path = PATH.with_name("encoders.json")
    for case in ENCODERS.values():
        model, shapes = published(case["config"])
        features = features_of(model, case["config"])
        rounded = [[round(float(x), 6) for x in row] for row in features[::5, ::5]]
        config = without_nulls(json.loads(model.config.to_json_string(use_diff=False)))
        case |= {"config": config, "shapes": shapes, "features": rounded, "norm": float(features.norm())}
    path.write_text(json.dumps(ENCODERS, indent=None, separators=(",", ":"), sort_keys=True) + "\n")
    print(f"{path}: {path.stat().st_size} bytes, transformers {transformers.__version__}")


def main() -> None:
    ids, golden = tokens(), {}
    configs = {kind: case["config"] for kind, case in GOLDEN.items()}
    if len(sys.argv) == 2:
        golden, configs = dict(GOLDEN), json.loads(pathlib.Path(sys.argv[1]).read_text())
    for kind, given in configs.items():
        model, shapes = published(given)
        logits = logits_of(model, ids)
        config: dict = json.loads(model.config.to_json_string(use_diff=False))
        # Of the last tokens, every third one: enough to tell, small enough to keep.
        rounded = [[round(float(x), 6) for x in row] for row in logits[:, -1, ::3]]
        golden[kind] = {"config": without_nulls(config), "shapes": shapes, "logits": rounded}
        golden[kind] |= {"norm": float(logits.norm())}
        golden[kind] |= {"greedy": [greedy(model, row) for row in (ids[0].tolist(), ids[1, :7].tolist())]}
        print(kind, len(shapes), float(logits.abs().max()))
    PATH.write_text(json.dumps(golden, indent=None, separators=(",", ":"), sort_keys=True) + "\n")
    print(f"{PATH}: {PATH.stat().st_size} bytes, transformers {transformers.__version__}")


if __name__ == "__main__":
    encoders() if "--encoders" in sys.argv else main()
