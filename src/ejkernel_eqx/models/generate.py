"""Texts continued token by token, a batch of them at once."""

import reprlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._signatures import explained
from ..nn.arguments import check_key, check_sizes, check_tokens, is_known, read_array
from ..nn.projection import mesh_of
from .decoder import Decoder
from .sampling import sample, Sampling, SamplingArrays

# To a multiple of this, lists of tokens are padded and room is made for new tokens, so that few lengths are compiled.
_ROUNDING = 64


class Generated(NamedTuple):
    """The result of [`generate`][ejkernel_eqx.models.generate]."""

    tokens: Array
    """Int32 `[..., max_new_tokens]`: the new tokens, a stop token included; -1 behind them, which is no token: `texts` leaves it out, and a model
    that is called with these tokens needs `padding_mask=tokens >= 0`."""
    lengths: Array
    """Int32 `[...]`: how many there are."""
    finite: Array
    """Bool `[...]`: False where the model gave NaN or infinite logits. Such a row ends before that token."""

    def texts(self) -> list[list[int]]:
        """The new tokens of each row, as lists."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths).reshape(-1)
        return [row[:n].tolist() for row, n in zip(tokens.reshape(lengths.size, -1), lengths)]


@explained(sampling=Sampling)
def generate(
    model: Decoder,
    prompts: Array | np.ndarray | Sequence[Sequence[int] | Array | np.ndarray],
    *,
    max_new_tokens: int,
    padding_mask: Array | None = None,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_dtype: DTypeLike | None = None,
    key: Array | None = None,
) -> Generated:
    """Continues prompts: each is read in one pass, then written to token by token from the caches, until it emits a stop token or
    `max_new_tokens` are reached. Few lengths are compiled: prompts are padded to a power of two or a multiple of 64 tokens, and there is room for a
    multiple of 64 new ones.

    **Arguments:**

    - `model`: a [`Decoder`][ejkernel_eqx.models.Decoder].
    - `prompts`: integers `[..., T]`; or a list with a list or array of tokens for each prompt, of any lengths, which are padded on the left.
    - `max_new_tokens`: the maximum number of new tokens per row.
    - `padding_mask`: bool `[..., T]`, True for real tokens, side by side in each row; for an array of prompts of unequal lengths.
    - `sampling`: a [`Sampling`][ejkernel_eqx.models.Sampling]; default greedy. Each row draws by itself: row 0 with the seed of
        `sampling`, and others with seeds that follow from it.
    - `stop_tokens`: tokens that end a row; default those of `model.config`.
    - `cache_dtype`: of keys and values, by default what the layers compute in.
    - `key`: a PRNG key, in place of the seed; only with a temperature above 0.

    **Returns:** a `Generated`, the tokens and how many there are in each row. A row whose logits are not finite ends there and is reported: in
    `finite`, and outside `jit` by a `RuntimeWarning`.

    **Raises:** `ValueError` for an empty prompt, tokens that the model does not have, or arguments that do not fit.
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"model: expected an ejx.models.Decoder, received {type(model).__name__}; from_pretrained reads one."
        )
    check_sizes(max_new_tokens=max_new_tokens)
    tokens, mask = _read_prompts(prompts, padding_mask, model.config.vocab_size)
    lead = tokens.shape[:-1]
    tokens, mask = _widened(tokens.reshape(-1, tokens.shape[-1]), mask.reshape(-1, mask.shape[-1]))
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling: expected a Sampling, received {type(sampling).__name__}; Sampling(temperature=1.0) draws."
        )
    if key is not None and sampling.temperature == 0:
        raise ValueError(
            "key: expected None without sampling, received a key, though the likeliest token is always taken; pass "
            "sampling=Sampling(temperature=1.0) to draw."
        )
    rows = SamplingArrays.of([(sampling, 0)] * tokens.shape[0], tokens.shape[0])
    rows = rows._replace(seed=_seeds(sampling.seed, key, tokens.shape[0]))
    stop = _read_stop(
        model.config.stop_tokens if stop_tokens is None else stop_tokens, model.config.vocab_size
    )
    call = _Call(model, tokens, mask, rows, stop, jnp.asarray(max_new_tokens, jnp.int32))
    new, lengths, finite = _run(call, _rounded(max_new_tokens), cache_dtype)
    if is_known(finite) and not np.all(finite):
        broken = np.flatnonzero(~np.asarray(finite)).tolist()
        warnings.warn(
            f"generate: the logits of rows {broken} are not finite, so these rows ended early; look for NaN in the weights.",
            RuntimeWarning,
            stacklevel=2,
        )
    new = _first(new, max_new_tokens)
    return Generated(new.reshape(*lead, max_new_tokens), lengths.reshape(lead), finite.reshape(lead))


def _rounded(count: int) -> int:
    return -(-count // _ROUNDING) * _ROUNDING


def _widened(*rows: Array) -> tuple[Array, ...]:
    """Tokens `[N, T]` and their mask, with padding on the left up to a power of two or a multiple of 64. Where they are traced or on several
    devices, as they are."""
    if not all(is_known(x) and len(x.sharding.device_set) == 1 for x in rows):
        return rows
    length = rows[0].shape[1]
    before = min(1 << (length - 1).bit_length(), _rounded(length)) - length
    return tuple(jax.device_put(np.pad(np.asarray(x), ((0, 0), (before, 0))), x.sharding) for x in rows)


def _first(new: Array, count: int) -> Array:
    """The first columns. Without a program for each number of them where one device has them all."""
    if not is_known(new) or len(new.sharding.device_set) > 1:
        return new[:, :count]
    return jax.device_put(np.asarray(new)[:, :count], new.sharding)


def _seeds(seed: int, key: Array | None, count: int) -> Array:
    if key is not None:
        check_key(key)
        return jax.random.bits(key, (count,), jnp.uint32)
    return jnp.uint32(seed) + jnp.arange(count, dtype=jnp.uint32)


def _read_stop(stop: Any, vocabulary: int) -> Array:
    if not isinstance(stop, Sequence | np.ndarray | Array):
        raise ValueError(
            f"stop_tokens: expected a sequence of tokens, received {stop!r}; (2,) is one, and () stops at none."
        )
    stop = tuple(stop if isinstance(stop, Sequence) else np.asarray(stop).reshape(-1))
    for token in stop:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
            raise ValueError(
                f"stop_tokens: expected tokens from 0 to {vocabulary - 1}, received {token!r}; () stops at none."
            )
    return jnp.asarray(stop, jnp.int32).reshape(-1)


def _read_prompts(prompts: Any, padding_mask: Any, vocabulary: int) -> tuple[Array, Array]:
    """Tokens and whether each is real, `[..., T]`."""
    if isinstance(prompts, Array | np.ndarray):
        tokens = read_array("prompts", prompts, "integers", "[..., T]")
        if tokens.ndim < 1 or tokens.shape[-1] == 0:
            raise ValueError(
                f"prompts: expected at least one token [..., T], received shape {tokens.shape}; give it some text."
            )
        check_tokens("padding_mask", padding_mask, "booleans", "prompts", tokens[..., None])
        mask = jnp.ones(tokens.shape, bool) if padding_mask is None else jnp.asarray(padding_mask)
    else:
        if padding_mask is not None:
            raise ValueError(
                "padding_mask: expected None with lists of tokens, received one; their lengths say it."
            )
        tokens, mask = _padded(prompts)
    if is_known(tokens) and is_known(mask):
        _check_values(np.asarray(tokens), np.asarray(mask), vocabulary)
    return tokens.astype(jnp.int32), mask


def _padded(prompts: Any) -> tuple[Array, Array]:
    rows = _rows_of(prompts)
    width = _rounded(max(map(len, rows))) or 1
    tokens = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, True
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(mask)


def _rows_of(prompts: Any) -> list[list[int]]:
    """The tokens of each prompt, from lists or arrays of them."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    if is_list and any(isinstance(row, int | np.integer) for row in prompts):
        raise ValueError(
            "prompts: expected a list of tokens for each prompt, received one list of integers; put it into a list, [[1, 2, 3]]."
        )
    if not is_list or not prompts:
        raise _not_tokens(prompts, "")
    rows: list[Any] = [
        row.tolist() if isinstance(row, Array | np.ndarray) and row.ndim else row for row in prompts
    ]
    for i, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str | bytes):
            raise _not_tokens(row, f" as prompts[{i}]")
        for token in row:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise _not_tokens(token, f" in prompts[{i}]")
    return [list(row) for row in rows]


def _not_tokens(value: Any, where: str) -> ValueError:
    is_text = isinstance(value, str | bytes)
    remedy = "a tokenizer makes tokens of texts" if is_text else "tokens are integers, such as [[1, 2, 3]]"
    return ValueError(
        f"prompts: expected integers [..., T] or lists of tokens, received {type(value).__name__} {reprlib.repr(value)}{where}; {remedy}."
    )


def _check_values(tokens: np.ndarray, mask: np.ndarray, vocabulary: int) -> None:
    if not np.all(mask.any(axis=-1)):
        raise ValueError(
            "prompts: expected at least one token in each, received an empty one; give it some text, or the model's first token."
        )
    begins = np.diff(mask.astype(np.int8), axis=-1, prepend=0) > 0
    if np.any(begins.sum(axis=-1) > 1):
        raise ValueError(
            "padding_mask: expected the real tokens of each row side by side, received padding between them; take it out of the row."
        )
    wrong = tokens[mask & ((tokens < 0) | (tokens >= vocabulary))]
    if wrong.size:
        raise ValueError(
            f"prompts: expected tokens from 0 to {vocabulary - 1}, received {int(wrong[0])}; use the tokenizer of this model."
        )


class _Call(NamedTuple):
    """The arguments of a call, read."""

    model: Decoder
    tokens: Array  # int32 [N, T]
    mask: Array  # bool [N, T]
    sampling: SamplingArrays
    stop: Array  # int32 [...]
    most: Array  # int32 []


@eqx.filter_jit
def _run(call: _Call, room: int, cache_dtype: Any) -> tuple[Array, Array, Array]:
    arrays, static = eqx.partition(call, eqx.is_array)
    run = lambda arrays: _continued(eqx.combine(arrays, static), room, cache_dtype)
    if (mesh := mesh_of(arrays)) is None:
        return run(arrays)
    # The compiler places what is in the loop: caches grow out of empty ones, whose layout no type says.
    whole = NamedSharding(mesh, PartitionSpec())
    on_mesh: Any = jax.sharding.auto_axes(run, out_sharding=(whole, whole, whole))
    return on_mesh(arrays)


class _Texts(NamedTuple):
    done: Array  # bool [N]
    finite: Array  # bool [N]: all logits so far
    written: Array  # int32 [N, room]


def _continued(call: _Call, room: int, cache_dtype: Any) -> tuple[Array, Array, Array]:
    """At most `most` new tokens of each row, in arrays with `room` for more."""
    model, tokens, mask, sampling, stop, most = call
    rows, width = tokens.shape
    cache = model.init_cache(rows, width + room, cache_dtype)
    x, cache = model.features(jnp.where(mask, tokens, 0), cache, padding_mask=mask)
    last = width - 1 - jnp.argmax(mask[:, ::-1], axis=-1)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]

    def choose(step: Array, x: Array, texts: _Texts) -> tuple[Array, _Texts]:
        logits = model.logits(x)
        token = sample(logits, sampling._replace(position=jnp.full(rows, step)))
        finite = texts.finite & (texts.done | jnp.all(jnp.isfinite(logits), axis=-1))
        new = jnp.where(texts.done | ~finite, -1, token)
        written = jax.lax.dynamic_update_index_in_dim(texts.written, new, step, 1)
        done = texts.done | ~finite | jnp.any(token[:, None] == stop[None], axis=-1)
        return token, _Texts(done, finite, written)

    def body(carry: Any) -> Any:
        step, token, cache, texts = carry
        # Rows that have ended stand still.
        x, cache = model.features(token[:, None], cache, padding_mask=~texts.done[:, None])
        token, texts = choose(step, x[:, 0], texts)
        return step + 1, token, cache, texts

    begun = _Texts(jnp.zeros(rows, bool), jnp.ones(rows, bool), jnp.full((rows, room), -1, jnp.int32))
    token, texts = choose(jnp.int32(0), x, begun)
    goes_on = lambda carry: (carry[0] < most) & ~jnp.all(carry[3].done)
    *_, texts = jax.lax.while_loop(goes_on, body, (jnp.int32(1), token, cache, texts))
    return texts.written, jnp.sum(texts.written >= 0, axis=-1).astype(jnp.int32), texts.finite
