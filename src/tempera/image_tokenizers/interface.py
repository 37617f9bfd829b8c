"""What all image tokenizers have, and the pixels of their images: an image is in [−1, 1], a picture
is its uint8.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tempera.errors import TemperaError


class ImageTokenizer(nn.Module):
    """Images ↔ codes. A subclass decodes; if it has no codebook or no encoder, methods that need
    them are refused.

    Attributes:
        config: its sizes.
        vocab_size: V, number of codes.
        factor: pixels of a code along each side.
        decode_codes: codes int64 [B, h, w] → images [B, 3, H, W] in [−1, 1].
    """

    config: Any
    vocab_size: int
    factor: int
    decode_codes: Callable[..., Tensor]

    @property
    def codebook(self) -> Tensor:
        """The vectors of the codes, [V, D].

        Raises:
            TemperaError: it has none.
        """
        raise TemperaError(
            "this model's image tokenizer has no codebook, so its codes cannot be compared: "
            "choose a rule without neighbours, such as exact or relaxed.",
            option="rule",
        )

    def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Height and width in pixels of an image of these lines and columns of codes."""
        return grid[0] * self.factor, grid[1] * self.factor

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [−1, 1] → codes int64 [B, h, w].

        Raises:
            TemperaError: it has no encoder.
        """
        raise TemperaError(
            "this model cannot encode images, because its image tokenizer has no encoder: choose "
            "encoder=target.",
            option="encoder",
        )


def to_pictures(images: Tensor) -> NDArray[np.uint8]:
    """Images in [−1, 1] as uint8 of the same shape."""
    pixels = (images.float().clamp(-1, 1) + 1) * 127.5
    return pixels.round().to(torch.uint8).cpu().numpy()


def to_images(pictures: Tensor) -> Tensor:
    """uint8 as images in [−1, 1], float32 of the same shape."""
    return pictures.float() / 127.5 - 1
