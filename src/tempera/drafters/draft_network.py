"""The interface of draft networks for training and decoding.

Shapes: R rows, S positions, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import sha256_file
from tempera.runtime.network_directory import WEIGHTS, read_network, sized_network, write_network
from tempera.runtime.pretrained import RANDOM, are_sizes_enough
from tempera.targets.cache import KVCache
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class DraftConfig:
    """Configuration of a draft network; subclasses add fields.

    Attributes:
        hidden_size: H of the target.
        vocab_size: V of the target.
        target: identity of the target's weights (`tempera.runtime.network_identity.identity_of`).
        model: the target's name, shown in messages.
    """

    hidden_size: int
    vocab_size: int
    target: str
    model: str


class DraftStep(nn.Module, ABC):
    """A draft network's forward pass for decoding, with a KV cache."""

    @abstractmethod
    def rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary embedding of positions int64 [R, S], as `forward` takes it."""

    @abstractmethod
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
    ) -> Tensor:
        """Like `DraftNetwork.forward`: [R, S, H]."""


class DraftNetwork(nn.Module, ABC):
    """A network that predicts the target's next hidden state from its last one and a token.

    A draft network of your own is a subclass with `configure`, `forward` and `drafting`; a YAML in
    `conf/draft/` makes it an option of training.

    Attributes:
        identity: of the weights file that the draft was read from; None for one in training.
        features: layers of the target whose inputs it reads behind the hidden state, K of them.
        slots: number of tokens that one pass drafts: 1, or more if the network needs no drafted
            token to predict the next one.
        cached_layers: decoder layers, each with keys and values of its own.
        drafter: the choice in `conf/drafter/` that drafts with such a network.
    """

    identity: str | None = None
    features: tuple[int, ...] = ()
    slots: int = 1
    cached_layers: int = 1
    drafter: ClassVar[str] = "eagle"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    @abstractmethod
    def configure(cls, values: dict[str, Any]) -> Any:
        """The contents of `config.json` → the network's configuration."""

    @abstractmethod
    def forward(
        self, embeds: Tensor, hidden: Tensor, mask: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """Predict hidden states over whole sequences.

        Args:
            embeds: embedding of token t, [R, S, H].
            hidden: the target's hidden state at token t − 1 and its `features` there, [R, S,
                (1 + K)·H]; or a draft's prediction, [R, S, H], or that with zeros for features. A
                network of several slots takes fewer states than embeddings: it drafts at the
                positions without one.
            mask: additive, [R, 1, S, S].
            position_ids: place of token t in prefix + image, int64 [R, S].

        Returns:
            the predicted hidden state at token t, [R, S, H].
        """

    @abstractmethod
    def drafting(self, device: torch.device, dtype: torch.dtype) -> DraftStep:
        """The forward pass for decoding, with its own copy of the weights."""

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors` atomically.

        Raises:
            TemperaError: the directory cannot be written.
        """
        write_network(Path(directory), self.state_dict(), asdict(self.config))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load a draft that `save_pretrained` wrote; its sizes alone where they are enough.

        Raises:
            TemperaError: a file is missing, truncated, a pickle, or does not hold such a draft.
        """
        place = Path(directory)
        described: tuple[Callable[[dict[str, Any]], Self], str, str] = (
            lambda values: cls(cls.configure(values)),
            f"a draft of the kind {cls.drafter}",
            "give a draft's directory that training wrote whole",
        )
        if are_sizes_enough():
            return sized_network(place, *described)
        network = read_network(place, *described)
        network.identity = sha256_file(place / WEIGHTS)[:16]
        return network

    def initialise_linears(self) -> None:
        """Start linear layers as `transformers` does: weights normal with σ = 0.02, biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def check(self, target: TransformerTarget) -> None:
        """Refuse a target this draft was not trained for.

        Raises:
            TemperaError: hidden size, vocabulary or identity differ.
        """
        config = self.config
        sizes = {
            "hidden size": (config.hidden_size, target.head.hidden_size),
            "vocabulary": (config.vocab_size, target.vocab_size),
        }
        for what, (own, other) in sizes.items():
            if own != other:
                raise TemperaError(
                    f"the draft, made for {config.model}, has {what} {own}, the target {other}: "
                    "give a draft for this target."
                )
        if config.target != target.identity and not are_sizes_enough():
            raise TemperaError(
                f"the draft was trained for {config.model} with weights {config.target}, but the "
                f"target's weights are {target.identity}: "
                "train a draft for this target, or load the target it was trained for."
            )


DraftDtype = Literal["float32", "bfloat16", "float16"]
"""Names of dtypes that a draft can compute in."""


def torch_dtype(name: DraftDtype | None) -> torch.dtype | None:
    """The dtype of a name."""
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return None if name is None else kinds[name]


Network = TypeVar("Network", bound=DraftNetwork)


def trained_or_random(
    path: str,
    target: TransformerTarget,
    trained: Callable[[str], Network],
    untrained: Callable[..., Network],
    **sizes: int,
) -> Network:
    """Load the draft of a directory; if `path` is `random`, build an untrained one and print a
    warning. It costs as much as a trained one of these sizes, but almost none of its tokens are
    accepted.

    Args:
        path: directory with `config.json` and `model.safetensors`, or `random`.
        target: the draft's target.
        trained: loads a draft from a directory.
        untrained: makes one for a network, its name, vocabulary and identity, as `EagleModel.of`.
        sizes: further arguments of `untrained`.
    """
    if path != RANDOM:
        return trained(path)
    if not are_sizes_enough():
        print(
            "draft: random weights, to measure the cost of drafting; almost none of its tokens "
            "will be accepted"
        )
    name = "any model: it is random"
    with target.device:
        return untrained(target.network, name, target.vocab_size, target.identity, **sizes)
