"""Plain autoregression: nothing is drafted, so every round draws one token from the target."""

from torch import Tensor

from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, Drafter
from tempera.decoding.trees import Tree


class NoDraft(Drafter):
    """The drafter of `method=ar`."""

    nodes = 0
    depth = 0
    tree = Tree.empty()

    def propose(self, images: Images, uniforms: Tensor) -> Draft:
        """The empty draft: tokens [B, 0]."""
        return Draft(images.tokens[:, :0], None, self.tree)
