"""LANTERN's Table 4: are near codes interchangeable? Replace every token by one drawn from its
nearest codes, and evaluate the pictures.
"""

import hashlib

import torch
from torch import Tensor

from tempera.decoding.interfaces import ImageTarget
from tempera.evaluation.pipeline import ImageDecoder, Method, Pipeline
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.rules.codebook_neighbours import Neighbours


class Replacing:
    """An image decoder that first replaces each code by one drawn uniformly from a set, such as its
    nearest codes, including itself.

    Codes are replaced in the finished image, so the tokens keep the target's law; the paper does
    not say whether later tokens see the replacements. An image's draws depend only on its codes and
    the seed.

    Args:
        decoder: the image decoder that is wrapped.
        table: the codes that may replace each code, int64 [V, k].
        seed: seed of the draws.
    """

    def __init__(self, decoder: ImageDecoder, table: Tensor, seed: int) -> None:
        self.decoder = decoder
        self.table = table
        self.seed = seed

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] -> images [B, 3, H, W] in [−1, 1]."""
        table = self.table.to(codes.device)
        replaced = []
        for image in codes:
            digest = hashlib.sha256(repr((self.seed, image.tolist())).encode()).digest()
            draws = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            ranks = torch.randint(table.shape[1], image.shape, generator=draws).to(codes.device)
            replaced.append(table[image, ranks])
        return self.decoder.decode_codes(torch.stack(replaced))


def replacing_pipeline(
    target: ImageTarget,
    method: Method,
    image_decoder: ImageTokenizer,
    device: torch.device,
    seed: int,
    replace: int,
) -> Pipeline:
    """A pipeline that replaces each token of a finished image.

    Args:
        target: as in `Pipeline`, like the next four.
        method: how tokens are decoded.
        image_decoder: the image tokenizer; distances are in its codebook.
        device: where to compute.
        seed: seed of decoding and of the draws.
        replace: draw from this many nearest codes, including the code itself; 1 replaces none.

    Raises:
        TemperaError: the codebook has fewer codes.
    """
    table = Neighbours.build(image_decoder.codebook, replace).table
    return Pipeline(target, method, Replacing(image_decoder, table, seed), seed, device)
