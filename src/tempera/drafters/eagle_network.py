"""The EAGLE draft (Li et al. 2024, EAGLE-1): one decoder layer that predicts the target's next
hidden state.

At step t it reads the pair (embedding of token t, the target's hidden state at token t − 1) and
predicts the hidden state at token t, which the target's own head turns into the distribution of
token t + 1. Embedding and head are the target's and are not stored here.

Shapes: R rows, S sequence, T prefix tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import read_json, replacing, sha256_file, write_json
from tempera.runtime.huggingface import Cache
from tempera.runtime.network_identity import config_dict, identity_of
from tempera.targets.network import DecoderLayer, TargetNetwork, decoder_layer

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class EagleConfig:
    """What a draft is and which target it belongs to.

    Attributes:
        hidden_size: H of the target.
        vocab_size: V of the target.
        target: identity of the target's weights (`tempera.runtime.network_identity.identity_of`).
        model: the target's name, for people.
        family: whose decoder layer and rotary embedding the draft has, see `TargetNetwork.family`.
        network: the target network's own configuration.
    """

    hidden_size: int
    vocab_size: int
    target: str
    model: str
    family: str
    network: dict[str, Any]

    @classmethod
    def of(
        cls,
        network: TargetNetwork,
        model: str,
        vocab_size: int | None = None,
        identity: str | None = None,
    ) -> Self:
        """Configuration of a draft for a target network.

        Args:
            network: the target's network.
            model: its name.
            vocab_size: image tokens, where the network's vocabulary holds more than those.
            identity: of the target, where it is known; else it is taken from the network's weights.
        """
        vocab = network.config.vocab_size if vocab_size is None else vocab_size
        return cls(
            network.config.hidden_size,
            vocab,
            identity or identity_of(network),
            model,
            network.family,
            config_dict(network),
        )


class EagleModel(nn.Module):
    """fc: 2H → H on [embedding ; hidden state], then one decoder layer of the target's class, with
    the target's rotary embedding.

    Args:
        config: sizes, and the target that it belongs to.
        make_layer: builds the decoder layer and its rotary embedding; by default the
            configuration says how.

    Attributes:
        identity: of the weights file that the draft was read from; None for one in training.
    """

    identity: str | None = None

    def __init__(
        self, config: EagleConfig, make_layer: Callable[[], DecoderLayer] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer, self.rotary = (
            decoder_layer(config.family, config.network) if make_layer is None else make_layer()
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Predict hidden states, in training over whole sequences and in drafting over the tokens
        of one step.

        Args:
            embeds: embedding of token t, [R, S, H].
            hidden: the target's hidden state at token t − 1 (`shifted`), [R, S, H]; the draft's own
                prediction where none is known yet.
            mask: additive, [R, 1, S, keys].
            position_ids: place of token t in prefix + image, int64 [R, S].
            cache: where keys and values of earlier tokens are.
            rotation: (cos, sin), instead of `position_ids`.

        Returns:
            the predicted hidden state at token t, [R, S, H].
        """
        rotation = self.rotary(embeds, position_ids) if rotation is None else rotation
        x = self.fc(torch.cat([embeds, hidden], -1))
        out: Tensor = self.layer(
            x,
            attention_mask=mask,
            position_embeddings=rotation,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out

    @classmethod
    def of(
        cls,
        network: TargetNetwork,
        model: str,
        vocab_size: int | None = None,
        identity: str | None = None,
    ) -> Self:
        """An untrained draft for a target network; see `EagleConfig.of`."""
        config = EagleConfig.of(network, model, vocab_size, identity)
        return cls(config, network.decoder_layer)

    @classmethod
    def untrained(cls, target: Any) -> Self:
        """A draft of random weights for a `TransformerTarget`: it costs what a trained one does,
        and proposes hardly anything likely.
        """
        name = "any model: it is random"
        return cls.of(target.network, name, target.vocab_size, target.identity)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors`; each is whole or absent. Raises TemperaError
        where that is not possible.
        """
        directory = Path(directory)
        weights = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        with replacing(directory / WEIGHTS) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
        write_json(directory / CONFIG, asdict(self.config))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Read what `save_pretrained` wrote.

        Raises:
            TemperaError: a file is missing, truncated, a pickle, or does not hold a draft.
        """
        directory = Path(directory)
        _refuse_pickle(directory)
        model = _build(cls, directory / CONFIG)
        path = directory / WEIGHTS
        weights = _read_weights(path)
        expected = model.state_dict()
        wrong = [
            name
            for name in expected
            if name not in weights or weights[name].shape != expected[name].shape
        ]
        wrong += [name for name in weights if name not in expected]
        if wrong:
            raise TemperaError(
                f"{path} does not fit {directory / CONFIG} (first at {wrong[0]}): take both "
                "files from one training run."
            )
        model.load_state_dict(weights)
        model.identity = sha256_file(path)[:16]
        return model

    def check(self, target: Any) -> None:
        """Refuse a target this draft was not trained for.

        Args:
            target: a `TransformerTarget`.

        Raises:
            TemperaError: hidden size, vocabulary or identity differ.
        """
        config = self.config
        sizes = {
            "hidden size": (config.hidden_size, target.hidden_size),
            "vocabulary": (config.vocab_size, target.vocab_size),
        }
        for what, (own, other) in sizes.items():
            if own != other:
                raise TemperaError(
                    f"the draft, made for {config.model}, has {what} {own}, the target {other}: "
                    "give a draft for this target."
                )
        if config.target != target.identity:
            raise TemperaError(
                f"the draft was trained for {config.model} with weights {config.target}, but the "
                f"target's weights are {target.identity}: "
                "train a draft for this target, or load the target it was trained for."
            )


DraftType = TypeVar("DraftType", bound=EagleModel)


def shifted(hidden: Tensor, keep: Tensor) -> Tensor:
    """The hidden state before each token, zero where that is nothing or padding.

    Args:
        hidden: the target's hidden states from the first prefix token on, [R, S, H].
        keep: False on padded prefix tokens, bool [R, T], T ≤ S + 1.

    Returns:
        [R, S + 1, H]; entry t belongs to token t.
    """
    covered = min(keep.shape[1], hidden.shape[1])
    real = hidden[:, :covered] * keep[:, :covered, None]
    return torch.cat(
        [hidden.new_zeros(len(hidden), 1, hidden.shape[-1]), real, hidden[:, covered:]], 1
    )


def _refuse_pickle(path: Path) -> None:
    """One sentence for a draft that is missing or is a pickle."""
    if path.suffix.lower() in _PICKLES:
        raise TemperaError(
            f"{path} is a pickle, which can run code when it is read: give a draft's directory "
            f"with {CONFIG} and {WEIGHTS}."
        )
    if not path.is_dir():
        raise TemperaError(
            f"there is no draft directory {path}: give one that training wrote, with {CONFIG} "
            f"and {WEIGHTS}."
        )
    if not (path / WEIGHTS).is_file():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix.lower() in _PICKLES)
        if pickles:
            raise TemperaError(
                f"{path} holds a pickle ({pickles[0]}) where {WEIGHTS} is expected: convert it "
                "to safetensors."
            )
        raise TemperaError(
            f"{path} holds no {WEIGHTS}: give a draft's directory that training wrote whole."
        )


def _build(cls: type[DraftType], path: Path) -> DraftType:
    """A draft with the sizes of `config.json`, its weights still random."""
    values = read_json(path)
    try:
        return cls(EagleConfig(**values))  # type: ignore[arg-type]
    except TemperaError:
        raise
    except Exception as problem:  # whatever sizes or fields a wrong file holds
        raise TemperaError(
            f"{path} does not describe an EAGLE draft ({problem}): give a directory that "
            "training wrote."
        ) from problem


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as problem:
        with path.open("rb") as file:
            head = file.read(2)
        if head in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise TemperaError(
                f"{path} is a pickle by its content, whatever its name: convert it to safetensors."
            ) from problem
        raise TemperaError(
            f"{path} is truncated or no safetensors file ({problem}): copy it again or train the "
            "draft again."
        ) from problem
