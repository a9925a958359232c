"""Fault injection: plants one fault at a time in a copy of the repository and runs the tests of its room. A suite that tells the truth fails.

Run by hand: `python tests/mutants.py`. `tests/mutants.json` has the last results.
"""

import argparse
import ast
import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).parents[1]
_SOURCE = "src/ejkernel_eqx"
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", re.M)


class Fault(NamedTuple):
    """One fault: a name, a file below `src/ejkernel_eqx`, a function or `Class.method` of it, the text that is replaced, the new one, and the tests
    of the room, below `tests`."""

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: str


_WINDOWS = "attention/test_xla.py attention/test_flash.py attention/test_compose.py"
_KERNELS = "attention/test_triton_interpret.py attention/test_compose.py attention/test_flash.py attention/test_random_masks.py"
_MASKS = "attention/test_mask.py attention/test_tile_lists.py attention/test_random_masks.py attention/test_block_sparse.py"
_HOPPER = "attention/test_hopper.py attention/test_hopper_lists.py attention/test_hopper_numbers.py"

# fmt: off
FAULTS = (
    # attention on XLA, and what all its platforms share
    Fault("xla-window", "attention/xla.py", "_Call.visible", "j >= i - spec.left", "j > i - spec.left", _WINDOWS),
    Fault("xla-sum-not-faded", "attention/xla.py", "forward", "call.rows(total, pair, 3) * decay + weights", "call.rows(total, pair, 3) + weights", _WINDOWS),
    Fault("xla-cap-gradient", "attention/xla.py", "backward", "dscores *= 1 - bent * bent", "dscores *= 1 - bent", _WINDOWS),
    Fault("xla-bias-psum", "attention/xla.py", "_BiasGradient._over_mapped", "lax.psum(x, axes) if axes else x", "x", "attention/test_sharding.py attention/test_leading.py attention/test_xla.py parallel"),
    Fault("sink-gradient-lost", "attention/cotangents.py", "sinks_gradient", "share * delta", "0 * share * delta", _WINDOWS),
    Fault("lse-cotangent-sign", "attention/cotangents.py", "row_terms", "product - jnp.where(alone", "product + jnp.where(alone", _WINDOWS),
    Fault("merge-of-several-sinks", "attention/merge.py", "merge_attention", "jax.nn.logsumexp(sinks.astype(lses[0].dtype), axis=1)", "jnp.max(sinks.astype(lses[0].dtype), axis=1)", "attention/test_flash.py attention/test_compose.py"),
    Fault("cudnn-forgets-half-a-tile", "attention/cudnn.py", "_half_a_tile", "% 128 == 64", "% 128 == 96", "attention/test_cudnn_faults.py"),
    Fault("cudnn-ignores-sinks", "attention/cudnn.py", "unsupported", '("sinks", "sinks"),', "", "attention/test_choice.py attention/test_compose.py attention/test_arguments.py"),
    # its masks
    Fault("prefix-ignored", "attention/masks/row_ranges.py", "row_ranges", "jnp.maximum(behind, prefix)", "behind", _MASKS),
    Fault("whole-tile-too-long", "attention/masks/tile_table.py", "overlap", "earliest >= key + block_k", "earliest >= key + block_k - 1", _KERNELS),
    Fault("bounds-of-comparisons", "attention/masks/bounds/rules.py", "_monotone", "return function(*low)", "return function(*high)", _MASKS),
    Fault("last-tile-whole", "attention/masks/bounds/classify.py", "_of_head", "np.minimum(kinds[:, -1], PARTIAL)", "kinds[:, -1]", _MASKS),
    Fault("block-behind-a-tile", "attention/masks/call_lists.py", "_covered", "(np.minimum(first + tile, length) - 1) // block + 1", "np.minimum(first + tile, length) // block", _MASKS),
    # its Triton kernels
    Fault("triton-dropout-scale", "attention/triton/forward_kernel.py", "_attend_tiles", "p * scoring.KEEP_SCALE", "p", _KERNELS),
    Fault("triton-lse-unit", "attention/triton/forward_kernel.py", "forward_kernel", "(top + tl.log2(tl.where(some, total, 1.0))) * LN2", "(top + tl.log2(tl.where(some, total, 1.0)))", _KERNELS),
    Fault("triton-window", "attention/triton/tile.py", "visible", "seen = j <= position + masking.RIGHT", "seen = j < position + masking.RIGHT", _KERNELS),
    Fault("triton-score-gradient", "attention/triton/backward_kernels.py", "_score_gradient", "p * (dp - delta)", "p * (dp + delta)", _KERNELS),
    Fault("triton-dq-scale", "attention/triton/backward_kernels.py", "query_gradient_kernel", "(dq * SCALE).to(", "dq.to(", _KERNELS),
    # Hopper's host side
    Fault("hopper-no-end", "attention/triton/hopper/schedule.py", "dealt", "table[..., 0] = -1", "table[..., 0] = 0", _HOPPER),
    Fault("hopper-keys-of-groups", "attention/triton/hopper/lists.py", "seen_keys", "-1, shape.keys).any(2)", "-1, shape.keys).all(2)", _HOPPER),
    Fault("hopper-value-dim", "attention/triton/hopper/tile_sizes.py", "problem_unfit", "if dim % 8 or values % 8:", "if dim % 8:", _HOPPER),
    # ring, native sparse, latent
    Fault("ring-step-left-out", "attention/ring/schedule.py", "_pieces", "at - left >= columns)", "at - left >= columns - 1)", "ring"),
    Fault("ring-gradients-astray", "attention/ring/rotation.py", "backward", "ring.moved(travelled, -ring.runs[-1]", "ring.moved(travelled, ring.runs[-1]", "ring"),
    Fault("exchange-key-gradient", "attention/ring/exchange.py", "Exchange.gradient_to_tokens", ".sum(3)", ".mean(3)", "ring"),
    Fault("sparse-own-block", "native_sparse/selection.py", "best_blocks", "jnp.where(block == own, jnp.inf, score)", "jnp.where(block == own, score, score)", "native_sparse"),
    Fault("sparse-window-of-positions", "native_sparse/branches.py", "sliding", "last - (spec.window - 1)", "last - spec.window", "native_sparse"),
    Fault("sparse-value-gradient-lost", "native_sparse/branches.py", "combined_gradients", '"v": dv + wide(near.v)', '"v": dv', "native_sparse"),
    Fault("latent-neighbours", "paged/tokens.py", "alone", "ends[None] <= tokens[:, None]", "ends[None] < tokens[:, None]", "latent"),
    Fault("latent-shared-key-gradient", "attention/triton/backward_kernels.py", "_key_gradient_tiles", "dk_rope = tl.dot(ds, q_rope, dk_rope,", "dk_rope = tl.dot(-ds, q_rope, dk_rope,", "latent"),
    # paged attention and its cache
    Fault("paged-window", "paged/xla.py", "span_of", "jnp.maximum(i - left, lowest)", "jnp.maximum(i - left + 1, lowest)", "paged/test_xla.py paged/test_operations.py"),
    Fault("paged-value-scale", "paged/xla.py", "_values", "result if scale is None else result * scale[None, :, None, None, None].astype(result.dtype)", "result", "paged/test_xla.py paged/test_operations.py"),
    Fault("decode-sink-of-each-split", "paged/triton/decode_kernel.py", "decode_kernel", "if SINKS and SPLITS == 1:", "if SINKS:", "paged/test_triton_decode.py"),
    Fault("decode-window", "paged/triton/tile.py", "weights", "keys.j[None, :] >= queries.i - scoring.LEFT", "keys.j[None, :] > queries.i - scoring.LEFT", "paged/test_triton_decode.py paged/test_triton_prefill.py"),
    Fault("prefill-whole-tiles", "paged/triton/prefill_kernel.py", "prefill_kernel", "full_end = tl.maximum(tl.minimum(i_first + 1, room), 0)", "full_end = tl.maximum(tl.minimum(i_first + 2, room), 0)", "paged/test_triton_prefill.py"),
    Fault("write-mapped-scales", "paged/triton/write_kernel.py", "_scale_at", "at += group", "at += 0", "paged/test_triton_write.py paged/test_triton_bytes.py"),
    Fault("cache-write-nowhere", "paged/cache/write.py", "put", "(slots >= 0)", "(slots >= -1)", "paged/test_append.py paged/test_cache.py paged/test_cache_composition.py paged/test_edges.py"),
    Fault("cache-shared-page", "paged/cache/allocator.py", "PageTable.allocate", "self._users[own.pages[-1]] > 1", "self._users[own.pages[-1]] > 2", "paged/test_allocator.py"),
    Fault("quantise-rounds-down", "paged/cache/quantise.py", "quantise", "jnp.round(ratio)", "jnp.floor(ratio)", "paged/test_quantise.py paged/test_cache.py"),
    # recurrences, selective scan, cells
    Fault("recurrence-tail", "recurrence/xla.py", "_Local.write", "k = times(k, self.tail)", "k = times(k, self.head)", "recurrence/test_xla.py recurrence/test_operations.py"),
    Fault("rank-one-read", "recurrence/xla.py", "_Local.scores_before", "_to_next(scores, 0)", "scores", "recurrence/test_xla.py"),
    Fault("rwkv7-values", "nn/rwkv7.py", "RWKV7TimeMix._mix", "(wide(rows.beside[\"v_first\"]) - wide(v))", "wide(rows.beside[\"v_first\"])", "nn/test_rwkv.py"),
    Fault("writes-reversed", "recurrence/delta_product.py", "DeltaProduct._written", "0 if self.reverse else writes - 1", "writes - 1", "recurrence/test_operations.py"),
    Fault("split-mask-table", "convolution/arguments.py", "places_of", "rank * 0 + like(jnp.arange(length, dtype=jnp.int32), rank)", "jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), real.shape)", "nn/test_meshes.py"),
    Fault("trapezoid-weight", "recurrence/state_space_v3.py", "StateSpaceV3._computed", "weight + (1 - trap) * dt", "weight + trap * dt", "recurrence/test_trapezoid.py"),
    Fault("trapezoid-ranks", "recurrence/state_space_v3.py", "StateSpaceV3._computed", "np.triu(np.ones((ranks, ranks), bool), 1)", "np.triu(np.ones((ranks, ranks), bool))", "recurrence/test_trapezoid.py"),
    Fault("trapezoid-turns", "recurrence/neighbours.py", "turns", "(inside < 0)[..., None, None]", "(inside < size)[..., None, None]", "recurrence/test_trapezoid.py"),
    Fault("trapezoid-segments", "recurrence/neighbours.py", "neighbours_of", "real & (starts != tokens)", "real", "recurrence/test_trapezoid.py"),
    Fault("along-decay", "recurrence/along.py", "recur_along", "part[0] * state + part[1]", "state + part[1]", "recurrence/test_along.py recurrence/test_split_tokens.py"),
    Fault("along-initial-state", "core/along.py", "Along.carry", "state, entering = initial_state, {}", "state, entering = 0 * initial_state, {}", "recurrence/test_along.py recurrence/test_split_tokens.py selective_scan"),
    Fault("states-over-segments", "recurrence/triton/states_phase.py", "states_kernel", "carried = tl.where(start < 0, 1.0, 0.0)", "carried = tl.where(start < 0, 1.0, 1.0)", "recurrence/test_triton.py recurrence/test_packing.py"),
    Fault("decay-gradient-direction", "recurrence/triton/gradients.py", "gradients_kernel", "tl.cumsum(read, axis=0, reverse=True)", "tl.cumsum(read, axis=0, reverse=False)", "recurrence/test_triton.py recurrence/test_packing.py"),
    Fault("delta-sign", "recurrence/triton/delta_states.py", "delta_states_kernel", "input_precision=PRECISION) - read) * beta", "input_precision=PRECISION) + read) * beta", "recurrence/test_triton.py recurrence/test_packing.py"),
    Fault("step-slots", "recurrence/triton/step_kernel.py", "step_kernel", "(index >= 0) & (index < S)", "index < S", "recurrence/test_triton_step.py"),
    Fault("time-step-limits", "recurrence/gates.py", "time_step", "jnp.where(x < low, low, ", "jnp.where(x < low, x, ", "recurrence/test_gates.py recurrence/test_operations.py"),
    Fault("scan-gate", "selective_scan/xla.py", "_row", "jax.nn.silu(arrays.z", "jax.nn.sigmoid(arrays.z", "selective_scan"),
    Fault("scan-time-gradient-unit", "selective_scan/triton/backward_kernels.py", "backward_kernel", "ddt = ddt * LN2 + dx * x", "ddt = ddt + dx * x", "selective_scan"),
    Fault("gru-sign", "cells/formulas.py", "advance", "n + z * (hidden - n)", "n + z * (n - hidden)", "cells"),
    Fault("cells-recurrent-gradient", "cells/xla.py", "_run_jvp", "dproduct = dproduct + _product(dbefore[0], floats.weight, dtype)", "dproduct = dproduct", "cells"),
    Fault("cells-gradient-over-starts", "cells/triton/backward_kernel.py", "backward_kernel", "dh = tl.where(starts[:, None], 0.0, dh)", "dh = tl.where(starts[:, None], dh, dh)", "cells"),
    # convolution, norms, pooling, products, losses
    Fault("convolution-over-segments", "convolution/xla.py", "_packed", "places.first) >= places.first)[..., None]", "places.first) >= places.first - 1)[..., None]", "convolution"),
    Fault("convolution-initial-state", "convolution/triton/kernels.py", "_taps", "(place + w - first < WIDTH - 1)", "(place + w - first <= WIDTH - 1)", "convolution"),
    Fault("norm-gate-gradient", "normalization/triton/kernels.py", "backward_kernel", "dz = dx * x * slope", "dz = dx * h * slope", "normalization"),
    Fault("residual-gradient-lost", "normalization/triton/kernels.py", "backward_kernel", "dx = dsum + dx", "dx = dx", "residual"),
    Fault("pooling-ties", "pooling/xla.py", "_first_largest", "same & (i < j)", "same & (i > j)", "pooling"),
    Fault("pooling-last-count", "pooling/triton/kernels.py", "write_kernel", "count = tl.minimum(s * L + L, T) - s * L", "count = s * 0 + L", "pooling"),
    Fault("experts-up-bias", "matmul/triton/forward_kernel.py", "grouped_kernel", "bias_ptr, at + N, start, W - N", "bias_ptr, at, start, W - N", "matmul/test_grouped.py"),
    Fault("experts-weights-of-neighbours", "matmul/xla_loops.py", "groups", "mine = ((place >= start) & (place < end))[:, None]", "mine = ((place >= start) & (place <= end))[:, None]", "matmul/test_grouped.py matmul/test_sharding.py"),
    Fault("scales-of-the-first-group", "matmul/triton/quantised_products.py", "product_of_codes", "scales_ptr += index * blocks", "scales_ptr += index * 0", "matmul/test_quantised.py"),
    Fault("codes-scaled-by-neighbours", "matmul/triton/coded.py", "few_times_codes", "unit = start + tl.arange(0, units) * UNIT", "unit = start + tl.arange(0, units)", "matmul/test_quantised.py"),
    Fault("float8-blocks-of-the-least", "matmul/float8/triton/kernel.py", "round_kernel", "tl.max(top, 0)", "tl.min(top, 0)", "quantised/test_float8_training.py"),
    Fault("float8-scales-of-the-first-example", "matmul/float8/triton/kernel.py", "round_kernel", "* B + b) * N + n", "* B) * N + n", "quantised/test_float8_training.py"),
    Fault("float8-blocks-of-the-least-on-xla", "matmul/float8/reference.py", "quantised", "blocks.max(-3", "blocks.min(-3", "quantised/test_float8_training.py"),
    Fault("codes-of-the-gate-twice", "matmul/xla.py", "apply", "right_of(arrays, spec, up=True)", "right_of(arrays, spec)", "matmul/test_quantised.py"),
    Fault("z-loss-gradient", "losses/statistics.py", "slope_of", "of_loss * (2 * spec.z_loss)", "of_loss * spec.z_loss", "losses"),
    Fault("label-counted-twice", "losses/triton/kernels.py", "rows_kernel", "l = tl.where(v == place, float(\"-inf\"), l)", "l = tl.where(v == place, l, l)", "losses/test_linear_cross_entropy.py"),
    Fault("entropy-slope-in-a-kernel", "losses/triton/kernels.py", "rows_kernel", "of_p += of_p_log_p * entropy", "of_p += of_p_log_p * lse", "losses/test_statistics.py"),
    Fault("divergence-mean-in-a-slope", "losses/triton/divergence_kernel.py", "divergence_kernel", "s - lse_s - other - mean", "s - lse_s - other", "losses/test_divergence.py"),
    Fault("sum-of-chunks", "losses/triton/compiled.py", "_added", "jax.tree.map(jnp.add, sums, added)", "jax.tree.map(jnp.maximum, sums, added)", "losses/test_linear_cross_entropy.py"),
    Fault("token-weights-of-a-mean", "losses/statistics.py", "mean_of", "count = jnp.sum(weights)", "count = jnp.sum(weights != 0)", "losses"),
    Fault("entropy-of-merged-parts", "losses/statistics.py", "merged", "weighted + shift * each.exponentials", "weighted", "losses"),
    Fault("gradient-of-split-words", "losses/statistics.py", "summed", "lax.psum(x, spec.vocab_axis)", "x", "losses"),
    # layers
    Fault("rotary-sign", "rotary/embedding.py", "turn_neighbours", "b * cos + a * sin", "b * cos - a * sin", "nn/test_rotary.py nn/test_rotary_axes.py nn/test_rotary_config.py nn/test_rotary_lengths.py"),
    Fault("yarn-ramp", "rotary/scaling.py", "YarnScaling.frequencies", "math.floor(low), math.ceil(high)", "math.ceil(low), math.floor(high)", "nn/test_rotary_config.py nn/test_rotary.py"),
    Fault("router-correction-bias", "nn/moe/routing.py", "choose", "take_along(scores, indices", "take_along(ranked, indices", "nn/test_experts.py nn/test_router_statistics.py"),
    Fault("expert-sums-of-one-device", "nn/moe/by_token.py", "collected", "jnp.sum(back, axis=0, dtype=accumulator(x.dtype))", "back[0].astype(accumulator(x.dtype))", "nn/test_expert_parallel.py"),
    Fault("expert-rounds-beyond-room", "nn/moe/by_token.py", "routes_of", "(local >= 0) & (local < room)", "(local >= 0) & (local <= room)", "nn/test_expert_parallel.py"),
    Fault("kv-cache-padding", "nn/kv_cache.py", "KVCache._put", "running_count(mask, mask.ndim - 1) - 1", "running_count(mask, mask.ndim - 1)", "nn/test_kv_cache.py nn/test_attention_decode.py"),
    Fault("rolling-cache-oldest", "nn/rolling_cache.py", "RollingKVCache.append", "rank >= (count - self.window)", "rank >= (count - self.window + 2)", "nn/test_rolling_cache.py"),
    # models and published weights
    Fault("residual-scales-swapped", "models/layer.py", "_added", "zip((residual, branch), scales)", "zip((residual, branch), scales[::-1])", "models/test_decoder.py models/test_published.py"),
    Fault("encoder-norms-shifted", "models/filling_encoders.py", "filled_encoder", "form.norm.format(index - 1) if index", "form.norm.format(index) if index", "models/test_encoders.py"),
    Fault("encoder-first-position", "models/encoder.py", "Encoder.__call__", "embed(self.positions, at + first)", "embed(self.positions, at)", "models/test_encoders.py"),
    Fault("encoder-window-whole", "weights/attention_configs.py", "_both_ways", "(window // 2, window // 2)", "(window, window)", "models/test_encoders.py"),
    Fault("embed-order", "models/embeddings.py", "embed", "[np.argsort(order)]", "[np.array(order)]", "models/test_embeddings.py"),
    Fault("pooler-first", "models/pooler.py", "Pooler.__call__", "jnp.cumsum(real, axis=-1) == 1", "jnp.arange(x.shape[-2]) == 0", "models/test_embeddings.py"),
    Fault("generate-last-token", "models/steps.py", "begin", "x, count[:, None, None] - 1", "x, jnp.full_like(count, width - 1)[:, None, None]", "models/test_generate.py"),
    Fault("drafts-after-the-end", "models/steps.py", "take", "(drafts == token[:, :-1]) & ~ends[:, :-1]", "drafts == token[:, :-1]", "models/test_speculative.py"),
    Fault("drafts-in-the-state", "models/speculative.py", "_taken_back", 'new if hasattr(new, "copy_pages") else old', "new", "models/test_speculative.py"),
    Fault("sampling-top-p", "models/sampling.py", "candidates", "jnp.cumsum(mass) - mass", "jnp.cumsum(mass)", "models/test_sampling.py models/test_generate.py"),
    Fault("vocabulary-negative", "models/vocabulary.py", "_embed_few", "tokens + words, tokens)", "tokens, tokens)", "models/test_vocabulary.py"),
    Fault("config-sliding-layers", "weights/attention_configs.py", "default_type", '"gemma2": index % 2 == 0', '"gemma2": index % 2 == 1', "weights"),
    Fault("weights-unit-offset", "weights/view.py", "Weights.take_norm", "(1 + self.take(", "(0 + self.take(", "weights"),
    Fault("weights-heads-mixed", "weights/attention.py", "_head_by_head", "rows.reshape(heads, -1, *rows.shape[1:])", "rows.reshape(-1, heads, *rows.shape[1:]).swapaxes(0, 1)", "weights"),
    # dispatch, tuning, launch
    Fault("key-buckets", "dispatch/problem.py", "Problem.key", "(size - 1).bit_length()", "size.bit_length()", "dispatch/test_problem.py"),
    Fault("table-of-old-kernels", "dispatch/known.py", "fitting", "record.version == implementation.version", "record.version <= implementation.version", "dispatch/test_persistent.py dispatch/test_selection.py dispatch/test_shipped.py"),
    Fault("table-of-another-length", "dispatch/selection.py", "_if_it_runs", "known if reason is None else None", "known", "dispatch/test_selection.py dispatch/test_fastest.py dispatch/test_plan.py"),
    Fault("cache-file-overwritten", "dispatch/cache_file.py", "PersistentCache.update", "(*known, *added)", "added", "dispatch/test_cache_file.py"),
    Fault("cache-file-old-read", "dispatch/cache_file.py", "PersistentCache._load", "if known == stamp and", "if known is not None and", "dispatch/test_cache_file.py dispatch/test_persistent.py"),
    Fault("check-peak", "tuning/check.py", "all_errors", "measured.rms <= allowed.rms and measured.peak <= allowed.peak", "measured.rms <= allowed.rms", "tuning/test_check.py tuning/test_tuner.py"),
    Fault("check-second-seed", "tuning/search.py", "_Search._admit", "seeds=(0, 1)", "seeds=(0,)", "tuning/test_tuner.py tuning/test_models.py"),
    Fault("alias-error-dropped", "launch/launch.py", "_check_aliases", "if tuple(given.shape) != tuple(made.shape) or given.dtype", "if given.dtype", "launch/test_aliases.py launch/test_run.py"),
    # devices, tokens, files, functions, commands
    Fault("gradient-psum", "parallel/layout.py", "Layout._per_device", "jax.lax.psum(wide, tuple(over)).astype(x.dtype) if over else x", "wide.astype(x.dtype)", "parallel/test_partition.py parallel/test_operations.py"),
    Fault("device-number", "parallel/layout.py", "_device", "number * mesh[axis] + jax.lax", "number + jax.lax", "parallel attention/test_sharding.py"),
    Fault("split-cotangent", "parallel/tokens.py", "TokenSplit.gradient", "1 if TOKENS in self.results[name] else parts", "1", "recurrence/test_split_tokens.py nn/test_split_tokens.py models/test_split_tokens.py"),
    Fault("heads-of-another-device", "nn/heads_for_tokens.py", "HeadsForTokens.own", "lax.axis_index(self.axis) * size", "0 * size", "models/test_split_tokens.py"),
    Fault("heads-not-in-time", "nn/heads_for_tokens.py", "HeadsForTokens.to_heads", "self._in_time(x, heads - 1)", "x", "models/test_split_tokens.py"),
    Fault("zigzag-odd-chunk", "nn/token_order.py", "_sent", "(part(is_odd), part(1 - is_odd))", "(part(0), part(1))", "models/test_split_tokens.py"),
    Fault("parts-of-the-old-save", "serialisation/parts.py", "next_number", "number_in(folder, check()) + 1", "number_in(folder, check())", "models/test_checkpoints.py"),
    Fault("gradient-of-shared-axes", "core/kind.py", "like", "grad = jnp.sum(wide(grad), ones, keepdims=True)", "grad = jnp.mean(wide(grad), ones, keepdims=True)", "attention/test_flash.py attention/test_leading.py parallel custom"),
    Fault("packing-ends", "sequences/packing.py", "ended", "each <= index", "each < index", "test_sequences.py"),
    Fault("zigzag-order", "sequences/zigzag.py", "reorder_sequence", "jnp.flip(_part(x, 1, axis), axis)", "_part(x, 1, axis)", "test_sequences.py"),
    Fault("checksum-unread", "serialisation/file.py", "_verify", "if digest.digest() != expected:", "if len(digest.digest()) != len(expected):", "test_serialisation.py"),
    Fault("functions-keep-choices", "functional.py", "_module", ").as_edition()", ")", "test_functional.py"),
    Fault("custom-source", "custom/platforms.py", "CustomPlatform.SOURCE", "return source_digest(self.kernel)", "return None", "custom"),
    Fault("clear-every-device", "cli/cache.py", "rows", 'row.device.startswith(device or "")', "row.device", "cli/test_cache.py"),
    Fault("import-old-records", "cli/exchange.py", "take", "known.date >= record.date", "known.date <= record.date", "cli/test_cache.py"),
    Fault("prefix-of-one-page", "serving/prefixes.py", "Prefixes.digest", "before + page.tobytes()", "page.tobytes()", "serving/test_prefixes.py"),
    Fault("prefix-other-state", "serving/scheduler.py", "Scheduler._begin", "self.prefixes.state(digests[count - 1]), request.slot", "request.slot, request.slot", "serving/test_prefixes.py"),
    Fault("newest-content-goes-first", "serving/pages.py", "Pages.take", "popitem(last=False)", "popitem()", "serving/test_prefixes.py"),
    Fault("rejected-drafts-in-states", "serving/step.py", "verify", "jnp.sum(chosen >= 0, axis=1, dtype=jnp.int32)", "new_tokens(batch)", "serving/test_speculation.py"),
    Fault("drafts-behind-the-end", "serving/scheduler.py", "Scheduler._proposed", "request.last_length - len(request.tokens) - 1", "self.max_drafts", "serving/test_speculation.py"),
    Fault("stop-string-not-held", "serving/text/tokenizer.py", "TextStream._before_stop", "max(begun, default=0)", "0", "serving/test_text.py"),
)
# fmt: on


class Result(NamedTuple):
    """What the tests said about a fault."""

    name: str
    file: str
    caught_by: str | None
    """The first test that failed, by its id."""
    seconds: float
    problem: str | None = None
    """Why this is no answer."""


def span(tree: ast.Module, name: str) -> tuple[int, int]:
    """The first and the last line of a function, or of a method `Class.method`."""
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        nodes = [
            node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
        if len(nodes) != 1:
            raise ValueError(f"{name}: expected one definition of {part}, received {len(nodes)}.")
        body = nodes[0].body
    first = min([nodes[0].lineno, *(node.lineno for node in nodes[0].decorator_list)])
    return first, nodes[0].end_lineno or first


def planted(fault: Fault, root: pathlib.Path = _ROOT) -> str:
    """The text of the fault's file with the fault; `ValueError` if the old text does not stand exactly once in the function."""
    path = root / _SOURCE / fault.file
    if not path.exists():
        raise ValueError(f"{fault.file}: no such file.")
    text = path.read_text(encoding="utf-8")
    first, last = span(ast.parse(text), fault.function)
    lines = text.splitlines(keepends=True)
    before, inside, after = (
        "".join(lines[: first - 1]),
        "".join(lines[first - 1 : last]),
        "".join(lines[last:]),
    )
    if inside.count(fault.old) != 1:
        raise ValueError(
            f"{fault.file}, {fault.function}: the old text stands {inside.count(fault.old)} times."
        )
    changed = before + inside.replace(fault.old, fault.new) + after
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
        raise ValueError(f"{fault.file}, {fault.function}: the new text changes nothing.")
    return changed


def outdated() -> list[str]:
    """The faults that cannot be planted any more, and names and tests that are not as they should be."""
    messages = []
    names = [fault.name for fault in FAULTS]
    messages += [
        f"{name}: two faults have this name." for name in sorted(set(names)) if names.count(name) > 1
    ]
    for fault in FAULTS:
        try:
            planted(fault)
        except ValueError as error:
            messages.append(f"{fault.name}: {error}")
        messages += [
            f"{fault.name}: {test} does not exist."
            for test in fault.tests.split()
            if not (_ROOT / "tests" / test).exists()
        ]
    return messages


def copied(folder: pathlib.Path) -> pathlib.Path:
    """The tracked files, in a folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(_ROOT / name, target)
    return folder


def run_tests(copy: pathlib.Path, tests: list[str], slow: bool, limit: float) -> subprocess.CompletedProcess:
    """pytest over these tests of the copy, until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
    command += ["-m", "" if slow else "not slow", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


def tried(fault: Fault, copy: pathlib.Path, slow: bool, limit: float) -> Result:
    """The fault planted in the copy, its room's tests run, and the text restored. The test that fails must pass without the fault."""
    path, start = copy / _SOURCE / fault.file, time.monotonic()
    result = lambda caught_by=None, problem=None: Result(
        fault.name, fault.file, caught_by, round(time.monotonic() - start, 1), problem
    )
    path.write_text(planted(fault, copy), encoding="utf-8")
    try:
        done = run_tests(copy, [f"tests/{test}" for test in fault.tests.split()], slow, limit)
    except subprocess.TimeoutExpired:
        return result(problem=f"no answer within {limit:.0f} s")
    finally:
        shutil.copy2(_ROOT / _SOURCE / fault.file, path)
    if done.returncode == 0:
        return result()
    failures = _FAILURE.findall(done.stdout)
    if not failures:
        return result(problem=f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}")
    try:
        without = run_tests(copy, [failures[0]], True, limit)
    except subprocess.TimeoutExpired:
        return result(problem=f"without the fault, {failures[0]} gives no answer within {limit:.0f} s")
    if without.returncode != 0:
        return result(problem=f"{failures[0]} fails without the fault, too")
    return result(failures[0])


def trials(faults: list[Fault], jobs: int, slow: bool, limit: float):
    """The results, as they come."""
    with tempfile.TemporaryDirectory(prefix="ejkernel_eqx-mutants-") as folder:
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        for n in range(jobs):
            copies.put(copied(pathlib.Path(folder) / str(n)))

        def one(fault: Fault) -> Result:
            copy = copies.get()
            try:
                return tried(fault, copy, slow, limit)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(one, fault) for fault in faults]):
                yield done.result()


def write(path: pathlib.Path, results: list[Result], slow: bool) -> None:
    """Adds the results to those of the file: by fault, and by the part of the suite that was run."""
    described = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(described, cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
    # A test may be skipped with one and not with another.
    software = f"Python {platform.python_version()}, JAX {importlib.metadata.version('jax')}"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for result in results:
        said = result._asdict() | {"commit": commit, "software": software}
        name, file = said.pop("name"), said.pop("file")
        known[name] = known.get(name, {}) | {"file": file, "all" if slow else "default": said}
    kept = {fault.name: known[fault.name] for fault in FAULTS if fault.name in known}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def table(results: list[Result]) -> str:
    rows = [("name", "file", "caught by", "seconds")]
    rows += [(x.name, x.file, x.caught_by or x.problem or "NOTHING", f"{x.seconds:.0f}") for x in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only list the faults that cannot be planted any more"
    )
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each fault")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file to which the results are added")
    asked = parser.parse_args()
    if unknown := set(asked.only or ()) - {fault.name for fault in FAULTS}:
        parser.error(f"--only: no fault is named {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not asked.only or fault.name in asked.only]
    if asked.list:
        print("\n".join(f"{x.name}: {x.file}, {x.function}: {x.old!r} becomes {x.new!r}" for x in faults))
        return 0
    if messages := outdated():
        print("\n".join(messages))
        return 1
    if asked.check:
        return 0
    results: list[Result] = []
    for result in trials(faults, asked.jobs, asked.slow, asked.limit):
        results.append(result)
        verdict = result.caught_by or result.problem or "NOTHING"
        print(f"[{len(results)}/{len(faults)}] {result.name}: {verdict} ({result.seconds:.0f} s)", flush=True)
        if asked.out:
            write(asked.out, [result], asked.slow)
    print(f"\n{table(results)}")
    print(f"\n{sum(result.caught_by is not None for result in results)} of {len(results)} caught")
    return 0 if all(result.caught_by for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
