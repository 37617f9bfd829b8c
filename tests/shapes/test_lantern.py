"""LANTERN's proximity on the shipped model is that of the vectors which its image decoder reads."""

import torch
from torch import Tensor

from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.shapes.networks import load_tokenizer


def vectors() -> Tensor:
    """What the decoder's first layer gets for each code, [V, D]."""
    tokenizer, seen = load_tokenizer(), list[Tensor]()
    hook = tokenizer.post_quant_conv.register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    codes = torch.arange(tokenizer.vocab_size)
    with torch.inference_mode(), hook:
        for code in codes.split(16):
            tokenizer.decode_codes(code[:, None, None].expand(-1, 4, 4))
    return torch.cat(seen)[:, :, 0, 0].double()


def test_neighbours_are_near_where_the_decoder_reads() -> None:
    rule = Parts.of(composed("eval", ["method=lantern", "k=8"])).rule()
    read = vectors()
    distances = torch.cdist(read, read)
    table = rule.neighbours.table
    assert table.shape == (len(read), 8) and table[:, 0].equal(torch.arange(len(read)))
    found = distances.gather(1, table)
    nearest = distances.topk(8, largest=False).values
    torch.testing.assert_close(found, nearest, rtol=1e-4, atol=1e-5)
    assert (nearest[:, -1] > 1e-3).all()
