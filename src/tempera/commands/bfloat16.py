"""What bfloat16 would give where a target computes in float32."""

from collections.abc import Sequence
from math import prod

import torch

from tempera.decoding.loop import Decoding
from tempera.decoding.timing import now
from tempera.evaluation.pipeline import Method
from tempera.runtime.processor import Placement, computes_bfloat16
from tempera.targets.packed_linear import TIMED_ENTRIES, PackedLinear
from tempera.targets.transformer import TransformerTarget


def tell_bfloat16(placement: Placement, target: object, method: Decoding) -> None:
    """Print how long the matrix products of a pass would take in bfloat16, as a share of their time
    in float32; nothing where that is not faster, where the device emulates bfloat16, and for other
    dtypes, quantised weights and continuous tokens.

    Args:
        placement: of the target.
        target: its weights are packed.
        method: decodes it; a pass has the rows of one image.
    """
    is_float32 = placement.dtype == torch.float32 and placement.quantised is None
    if not is_float32 or not computes_bfloat16(placement.device):
        return
    if not isinstance(target, TransformerTarget) or not isinstance(method, Method):
        return
    least = target.sampling.rows
    rows = least * (1 + method.drafter.nodes)
    share = _share(_products(target), rows, least, placement.device)
    if share < 1:
        name = "GPU" if placement.device.type == "cuda" else "processor"
        print(
            f"dtype=bfloat16 would take {share:.2f} of float32's time for the matrix products of a "
            f"pass over {rows} rows on this {name}"
        )


def _products(target: TransformerTarget) -> list[PackedLinear]:
    """Those of the first layers, of so many that most caches do not hold their weights."""
    found: list[PackedLinear] = []
    for layer in target.network.model.layers:
        found += [one for one in layer.modules() if isinstance(one, PackedLinear)]
        if sum(prod(one.weight.shape) for one in found) >= TIMED_ENTRIES:
            break
    return found


@torch.inference_mode()
def _share(products: Sequence[PackedLinear], rows: int, least: int, device: torch.device) -> float:
    """The least time of the products in bfloat16 ÷ that in float32, in five turns after a first."""
    both = {
        torch.float32: products,
        torch.bfloat16: [one.to_dtype(torch.bfloat16, least) for one in products],
    }
    times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in both}
    for _ in range(6):
        for dtype, kind in both.items():
            widths = [one.weight.shape[1] for one in kind]
            inputs = [torch.ones(rows, width, dtype=dtype, device=device) for width in widths]
            begun = now(device)
            for one, x in zip(kind, inputs, strict=True):
                one(x)
            times[dtype].append(now(device) - begun)
    float32, bfloat16 = (min(seconds[1:]) for seconds in times.values())
    return bfloat16 / float32
