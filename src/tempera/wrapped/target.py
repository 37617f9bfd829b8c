"""A transformers model that its user holds, as a target. It is looked at again before every batch:
what has changed since works or is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.runtime.network_identity import UNNAMED
from tempera.targets.family import Asked, Read, WrappedFamily
from tempera.targets.prompt_encoder import PADDING
from tempera.targets.prompt_state import Conditioner, PromptConditioner
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget
from tempera.wrapped.network import WrappedHead, WrappedNetwork


class WrappedTarget(TransformerTarget):
    """A model of transformers as a target.

    Args:
        model: the model.
        family: where its parts are.
        spec: format of its sequences.
        conditioner: see `TransformerTarget`.
        sampling: see `TransformerTarget`.
        usual: what the sampling takes from the model's generation_config, by the names of
            `Sampling`.

    Raises:
        TemperaError: the model cannot be decoded as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        family: WrappedFamily,
        spec: ModelSpec,
        conditioner: Conditioner,
        sampling: Sampling,
        usual: Callable[[], dict[str, object]],
    ) -> None:
        check_model(model, family)
        self._model = model
        self._usual = usual
        self._family = family
        held = WrappedNetwork(model, family, spec)
        head = WrappedHead(held, spec, sampling)
        network: Any = held  # nobody sets its head
        super().__init__(network, conditioner, sampling, identity=UNNAMED, head=head)
        self.spec = spec
        self.reads_pictures = spec.pictures
        self.architectures = [family.model_class]
        self.embeds_ids = family.embedding == (f"{family.decoder}.embed_tokens",)
        self._seen = self._state()

    def _state(self) -> dict[str, object]:
        """What the cache and the sampling were made for."""
        decoder: Any = self.network.model
        norm = next(decoder.norm.parameters())
        dtype = str(norm.dtype).removeprefix("torch.")
        now = {"layers": len(decoder.layers), "dtype": dtype, "device": norm.device}
        return now | self._usual()

    @override
    def begin(self, prompts: list[str], nodes: int, rows: Tensor | None = None) -> None:
        """See `TransformerTarget.begin`.

        Raises:
            TemperaError: also if the model has changed in a way that needs another target.
        """
        check_model(self._model, self._family)
        now = self._state()
        for name, seen in self._seen.items():
            if now[name] != seen:
                raise TemperaError(
                    f"the model's {name} was {seen} when it was accelerated, and is {now[name]}: "
                    "call tempera.accelerate again."
                )
        super().begin(prompts, nodes, rows)

    def read(self, ids: Tensor, mask: Tensor, given: Mapping[str, Tensor | None]) -> Read:
        """See `read_pictures`."""
        return read_pictures(self._model, self._family, self.spec, ids, mask, given)

    @override
    def positions(self, condition: Tensor) -> Tensor | None:
        """The positions that a condition states behind the ids."""
        return condition[:, 2:] if condition.shape[1] > 2 else None

    @contextmanager
    def reading(self, condition: Tensor) -> Iterator[None]:
        """Inside the `with` block every batch has these prompts.

        Args:
            condition: ids of the prompts and of their null prompts, int64 [B, 2, T], padded on the
                left with `PADDING`; and the positions of `prompt_state.Prefix`, [B, 5, T], if there
                are any.
        """
        usual = self.conditioner
        self.conditioner = PromptConditioner(lambda _: (condition, condition[:, 0] != PADDING))
        try:
            yield
        finally:
            self.conditioner = usual


@torch.no_grad()
def read_pictures(
    model: Any,
    family: WrappedFamily,
    spec: ModelSpec,
    ids: Tensor,
    mask: Tensor,
    given: Mapping[str, Tensor | None],
) -> Read:
    """Prompts with pictures, as a processor makes them; for the arguments see `family.Asked`.

    Raises:
        TemperaError: pictures are not possible, or are not what the processor makes.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for name in found:
        if name not in family.given:
            why = f"it takes {', '.join(family.given)}"
            if not family.given:
                why = "transformers also draws its images only from text, so leave it out"
            raise TemperaError(f"{name} is not possible with a {family.model_class}: {why}.")
    missing = [name for name in family.given if name not in {"pixel_values", *found}]
    if missing and found:
        raise TemperaError(
            f"{', '.join(found)} come without {missing[0]}: give all that the processor returns."
        )
    if not found:
        return Read(ids)
    device = next(model.get_submodule(family.decoder).norm.parameters()).device
    found = {name: value.to(device) for name, value in found.items()}
    return family.read(Asked(model, spec, ids.to(device), mask.to(device), found))


DYNAMIC = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long a sequence has become."""
ORDINARY = {"sliding_window": None, "is_causal": True}
"""Settings of a decoder that change what its tokens see, with the values that do not."""
TRANSFORMERS = "transformers."


def check_model(model: nn.Module, family: WrappedFamily) -> None:
    """Raise TemperaError for a model that cannot be decoded as it is."""
    for name, module in model.named_modules():
        if module.training:
            raise TemperaError(
                f"{name or 'the model'} is in training mode: call model.eval() first."
            )
    decoder: Any = model.get_submodule(family.decoder)
    _check_decoder(decoder, family)
    layers = [f"{family.decoder}.layers.{number}" for number in range(len(decoder.layers))]
    called = [*family.called, *layers]
    _check_around(model, called)
    _check_weights(model, called)
    _check_alone(model, called, next(decoder.norm.parameters()))


def _check_decoder(decoder: Any, family: WrappedFamily) -> None:
    """Raise TemperaError for a decoder that does more than `WrappedDecoder` has it do."""
    names = [kind.__name__ for kind in type(decoder).__mro__]
    if not any(name in family.decoders for name in names):
        raise TemperaError(
            f"the model's decoder is a {names[0]}, which is not supported: give a model around "
            f"one of {', '.join(family.decoders)}."
        )
    config = decoder.config
    for name, usual in ORDINARY.items():
        value = getattr(config, name, usual)
        if value != usual:
            raise TemperaError(
                f"the model's decoder has {name}={value}, which is not supported: give a model "
                f"with {name}={usual}."
            )
    if config.num_hidden_layers < len(decoder.layers):
        raise TemperaError(
            f"the configuration of the model's decoder states {config.num_hidden_layers} layers, "
            f"but the decoder has {len(decoder.layers)}: delete the others."
        )
    rope = config.rope_parameters.get("rope_type", "default")
    if rope in DYNAMIC:
        raise TemperaError(
            f"rope_type={rope} is not supported, because its angles change with the length."
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise TemperaError(
            f"the model's attention is {attention}, which does not support the mask of a draft: "
            "call model.set_attn_implementation('sdpa') first."
        )


def _check_around(model: nn.Module, called: list[str]) -> None:
    """Raise TemperaError for what sits on a module around those that are called: it would not run.

    Args:
        model: the model.
        called: paths of the modules that are called.
    """
    pieces = [path.split(".") for path in called]
    around = {".".join(path[:end]) for path in pieces for end in range(len(path))}
    for path in sorted(around - set(called)):
        module = model.get_submodule(path)
        if isinstance(module, nn.ModuleList):
            continue  # nobody calls it
        if what := _sits_on(module):
            name = path or type(model).__name__
            raise TemperaError(
                f"{name} has {what}, which would not run, because an accelerated model calls the "
                "modules inside it: remove it, or put it on a layer."
            )


def _sits_on(module: Any) -> str:
    """What would run when a module is called besides what transformers wrote; empty for nothing."""
    if module._forward_pre_hooks or module._forward_hooks:
        return "a forward hook"
    hook = vars(module).get("_hf_hook")
    if type(hook).__name__ == "AlignDevicesHook" and not hook.offload:
        return ""  # it moves inputs to the device that they are on
    if "forward" in vars(module):
        return "a replaced forward method (by offloading, a wrapper or torch.compile)"
    if not type(module).forward.__module__.startswith(TRANSFORMERS):
        return "a forward method that is not transformers'"
    return ""


def _check_weights(model: nn.Module, called: list[str]) -> None:
    """Raise TemperaError unless the weights of the modules that are called are on one device."""
    devices = set[torch.device]()
    for path in called:
        devices |= {weight.device for weight in model.get_submodule(path).parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise TemperaError(
            f"the weights of the model's decoder are on {', '.join(sorted(map(str, devices)))}: "
            "put it, with the embedding and the head, on one device, without offloading (a "
            "device_map may place other parts elsewhere), or quantise the weights."
        )


def _check_alone(model: nn.Module, called: list[str], like: Tensor) -> None:
    """Raise TemperaError for layers that compute a token by what else is in its pass, as those do
    that round all inputs by the largest one. Two passes that differ in the other token alone tell,
    to the bit.

    Args:
        model: the model.
        called: paths of the modules that are called.
        like: has dtype and device of their inputs.
    """
    numbers = torch.Generator().manual_seed(0)
    for path in called:
        for name, module in model.get_submodule(path).named_modules():
            width = getattr(module, "in_features", None)
            if width is None or _is_plain(module):
                continue
            layer: Any = module
            pair = torch.randn(1, 2, int(width), generator=numbers).to(like)
            alone = layer.forward(pair)[:, 0]
            if not torch.equal(alone, layer.forward(pair * pair.new_tensor([[1], [1e3]]))[:, 0]):
                raise TemperaError(
                    f"{f'{path}.{name}'.rstrip('.')} is quantised so that a token depends on the "
                    "others in its pass, so drafts, batches and prompts would change the output "
                    "distribution: quantise only the weights, or the inputs of each token "
                    "separately (torchao's PerRow; bitsandbytes with llm_int8_threshold=0)."
                )


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is PyTorch's own linear layer with PyTorch's own weight."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter
