"""Attention over the KV cache.

Shapes: R rows, S tokens of a pass, K visible keys, D head size.
"""

import math
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tempera.decoding.compiled import constant
from tempera.runtime.card_times import TIMED_ENTRIES, card_times, nanoseconds
from tempera.targets.few_rows import is_supported

HIDDEN = -30000.0
"""Score of a key that `SharedMask.padding` hides: its weight is 0 in float32 and bfloat16."""

LEAST_BYTES = 2**20
"""Of keys and values of a layer: fewer take a GPU less time than the launch of a kernel."""


class SharedMask(NamedTuple):
    """A mask of many rows, in the memory of one.

    Attributes:
        visible: the keys that queries attend to in every row, bool [S, K]; each attends to some.
        padding: keys that are hidden in a row, bool [R, K]. A query that sees no other keys attends
            to hidden ones.
    """

    visible: Tensor
    padding: Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | SharedMask,
    scale: float,
    spread: bool | None = None,
    reached: Tensor | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ + mask)·v by PyTorch's fused attention.

    On CUDA its fast kernels with a mask support neither grouped keys nor head sizes that are no
    multiple of 8. So groups are made into rows, and queries are padded to the head size of the
    cache (`cache.head_size`).

    Args:
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D or more].
        mask: additive, [R, 1, S, K]; or shared by all rows.
        scale: factor of the products.
        spread: whether the queries of a group stay heads of their own that share their keys, so
            that a GPU has a block for each (64 for two rows of Emu3), or follow each other as if
            they were further tokens, with which a CPU reads the keys once (1.5 times as fast for
            one token). By default as suits the device.
        reached: number of keys that a row has reached, int64 [R]; the mask hides later ones, and
            `flexible_attention.attend_reached` skips them, in compiled rounds alone. By default
            all are loaded.

    Returns:
        [R, heads, S, D].
    """
    if isinstance(mask, SharedMask):
        return _attend_shared(query, keys, values, mask, scale)
    if reached is not None:
        return _attend_reached(query, keys, values, mask, reached, scale)
    groups = query.shape[1] // keys.shape[1]
    padding = keys.shape[-1] - query.shape[-1]
    heads = query
    if groups > 1 and (keys.is_cuda if spread is None else spread):
        heads = query.unflatten(1, (-1, groups)).flatten(0, 1)
        mask = mask.repeat_interleave(keys.shape[1], 0)
        keys = _shared(keys, groups)
        values = _shared(values, groups)
    elif groups > 1:
        heads = query.unflatten(1, (-1, groups)).flatten(2, 3)
        mask = mask.repeat(1, 1, groups, 1)
    if padding:
        heads = nn.functional.pad(heads, (0, padding))
    mixed = nn.functional.scaled_dot_product_attention(
        heads, keys, values, attn_mask=mask, scale=scale
    )
    if padding:
        mixed = mixed[..., : query.shape[-1]]
    return mixed.reshape(query.shape) if groups > 1 else mixed


def _attend_shared(
    query: Tensor, keys: Tensor, values: Tensor, mask: SharedMask, scale: float
) -> Tensor:
    """`attend` with a mask for all rows. Eight more numbers of each query and key hide a row's
    padding: their product is `HIDDEN` for hidden keys, and 0 for others.
    """
    groups = query.shape[1] // keys.shape[1]
    size = query.shape[-1]
    hidden = (HIDDEN / scale) * mask.padding.to(keys.dtype)
    hidden = nn.functional.pad(hidden[:, None, :, None], (0, 7)).expand(-1, keys.shape[1], -1, -1)
    query = nn.functional.pad(nn.functional.pad(query, (0, 1), value=1.0), (0, 7))
    mixed = nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([keys, hidden], -1).repeat_interleave(groups, 1),
        nn.functional.pad(values, (0, 8)).repeat_interleave(groups, 1),
        attn_mask=mask.visible,
        scale=scale,
    )
    return mixed[..., :size]


def _shared(keys: Tensor, groups: int) -> Tensor:
    """Keys of one head a row, which the heads of a group share without a copy: [R, key-value heads,
    K, D] -> [R·key-value heads, groups, K, D].
    """
    return keys.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)


def skips(mask: Tensor, heads: int, cache: tuple[int, ...]) -> bool:
    """Whether a pass skips keys that its rows have not reached: in compiled rounds without
    gradients, where that is faster on this GPU.

    Args:
        mask: of the pass, [R, 1, S, K].
        heads: number of heads of queries.
        cache: shape of the keys, R, key-value heads, K and D.
    """
    return (
        torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and skipping_is_faster(mask.shape[2], heads, cache, mask.dtype, mask.device)
    )


def _attend_reached(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, reached: Tensor, scale: float
) -> Tensor:
    from tempera.targets.flexible_attention import attend_reached

    size, stored = query.shape[-1], keys.shape[-1]
    if stored > size:
        query = nn.functional.pad(query, (0, stored - size))
    mixed: Tensor = attend_reached(query, keys, values, mask, reached, scale)
    return mixed[..., :size]


@constant
def skipping_is_faster(
    tokens: int, heads: int, cache: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether it takes less time to skip keys, if rows have reached half of them. Timed once for a
    number of tokens up to the next power of two. For the arguments see `skips`.
    """
    if 2 * dtype.itemsize * math.prod(cache) < LEAST_BYTES or not is_supported(device):
        return False
    tokens = 1 << (tokens - 1).bit_length()
    kind = str(dtype).removeprefix("torch.")
    name = f"{tokens} tokens, {heads} heads, keys {'x'.join(map(str, cache))} {kind}"
    shape = tokens, heads, cache, dtype
    times = card_times("attention", name, device, lambda: _times(shape, device))
    return min(times, key=times.__getitem__) == "reached"


def _times(
    shape: tuple[int, int, tuple[int, ...], torch.dtype], device: torch.device
) -> dict[str, int]:
    """Nanoseconds of attention to all keys and to reached ones, if PyTorch can compile that."""
    tokens, heads, cache, dtype = shape
    rows, _, slots, size = cache
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    query = torch.ones(rows, tokens, heads, size, **like).transpose(1, 2)
    mask = torch.zeros(rows, 1, tokens, slots, **like)
    half = torch.full((rows,), slots // 2, device=device)
    count = max(1, TIMED_ENTRIES // (2 * math.prod(cache)))
    caches = [torch.ones(2, *cache, **like) for _ in range(count)]
    compiled = partial(torch.compile, fullgraph=True, dynamic=False)
    attending = compiled(lambda cache: attend(query, cache[0], cache[1], mask, 1.0))
    skipping = compiled(lambda cache: attend(query, cache[0], cache[1], mask, 1.0, reached=half))
    with torch.no_grad():
        times = {"all": nanoseconds(attending, caches)}
        with suppress(torch._dynamo.exc.TorchDynamoException):  # as on a card that is too small
            times["reached"] = nanoseconds(skipping, caches)
    return times
