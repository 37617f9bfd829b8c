"""LANTERN's Table 4: are near codes interchangeable? Replace every token by one drawn from its
nearest codes and evaluate the pictures.
"""

import hashlib

import torch
from torch import Tensor

from tempera.decoding.interfaces import Target
from tempera.evaluation.pipeline import ImageDecoder, Method, Pipeline
from tempera.image_tokenizers.vq import VQModel
from tempera.rules.codebook_neighbours import Neighbours


class Replacing:
    """An image decoder that first replaces each code by one drawn uniformly from its nearest codes,
    itself included.

    Codes are replaced in the finished image, so the tokens keep the target's law; the paper leaves
    open whether later tokens see the replacements. An image's draws depend only on its codes and
    the seed.

    Args:
        decoder: what generates.
        neighbours: the nearest codes of every code.
        seed: of the draws.
    """

    def __init__(self, decoder: ImageDecoder, neighbours: Neighbours, seed: int) -> None:
        self.decoder, self.neighbours, self.seed = decoder, neighbours, seed

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] -> images [B, 3, H, W] in [−1, 1]."""
        table = self.neighbours.table.to(codes.device)
        replaced = []
        for image in codes:
            digest = hashlib.sha256(repr((self.seed, image.tolist())).encode()).digest()
            draws = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            ranks = torch.randint(table.shape[1], image.shape, generator=draws).to(codes.device)
            replaced.append(table[image, ranks])
        return self.decoder.decode_codes(torch.stack(replaced))


def replacing_pipeline(
    target: Target,
    method: Method,
    image_decoder: VQModel,
    device: torch.device,
    seed: int,
    replace: int = 1,
) -> Pipeline:
    """A pipeline that replaces each token by one of the `replace` codes nearest to it; 1 replaces
    none.

    Raises:
        TemperaError: there are fewer codes.
    """
    neighbours = Neighbours.build(image_decoder.quantize.codebook, replace)
    return Pipeline(target, method, Replacing(image_decoder, neighbours, seed), seed, device)
