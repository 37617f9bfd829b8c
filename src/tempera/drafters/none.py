"""Plain autoregression: nothing is drafted, so every round draws one token from the target."""

from torch import Tensor

from tempera.decoding.interfaces import Draft, Drafter
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import Tree


class NoDraft(Drafter):
    """The drafter of `method=ar`."""

    nodes = 0
    depth = 0
    tree = Tree.empty()
    compiles = False  # there is nothing to compile

    def propose(self, sequences: Sequences, uniforms: Tensor) -> Draft:
        """The empty draft: tokens [B, 0]."""
        return Draft(sequences.tokens[:, :0], None, self.tree)
