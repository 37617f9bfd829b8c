"""An image tokenizer whose lines of codes end with an extra token."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.image_tokenizers.interface import ImageTokenizer


class LinedTokenizer(ImageTokenizer):
    """An image tokenizer for targets with line-end tokens: every line of codes has one more token,
    without pixels.

    Args:
        vq: the image tokenizer.
    """

    def __init__(self, vq: ImageTokenizer) -> None:
        super().__init__()
        self.vq = vq
        self.config = vq.config
        self.vocab_size = vq.vocab_size + 1

    @property
    @override
    def codebook(self) -> Tensor:
        """[V + 1, D], as encoder and decoder use it; the line end is far from every code."""
        codes = self.vq.codebook
        line_end = 10 * codes.abs().max() * codes.new_ones(1, codes.shape[1])
        return torch.cat([codes, line_end])

    @override
    def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Height and width in pixels of an image of these lines and columns of tokens."""
        return self.vq.image_size((grid[0], grid[1] - 1))

    @override
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [−1, 1] → tokens int64 [B, h, w + 1]."""
        return nn.functional.pad(self.vq.encode(images), (0, 1), value=self.vq.vocab_size)

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Tokens int64 [B, h, w + 1] → images [B, 3, H, W] in [−1, 1]."""
        without_ends = codes[..., :-1].clamp(max=self.vq.vocab_size - 1)
        return self.vq.decode_codes(without_ends)
