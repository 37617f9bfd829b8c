"""A transformers model that its user holds, as a target. It is looked at again before every batch:
what has changed since works or is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.held.network import HeldHead, HeldNetwork
from tempera.runtime.network_identity import UNNAMED
from tempera.targets.family import HeldFamily
from tempera.targets.prompt_state import Conditioner, PromptConditioner
from tempera.targets.shared_vocabulary import PADDING
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget


class HeldTarget(TransformerTarget):
    """A model of transformers as a target.

    Args:
        model: the model.
        family: where its parts are.
        spec: format of its sequences.
        conditioner: see `TransformerTarget`.
        sampling: see `TransformerTarget`.

    Raises:
        TemperaError: the model cannot be decoded as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        family: HeldFamily,
        spec: ModelSpec,
        conditioner: Conditioner,
        sampling: Sampling,
    ) -> None:
        check_model(model, family)
        self._model = model
        self._family = family
        held = HeldNetwork(model, family, spec)
        head = HeldHead(held, spec, sampling)
        network: Any = held  # nobody sets its head
        super().__init__(network, conditioner, sampling, identity=UNNAMED, head=head)
        self.spec = spec
        self._seen = self._state()

    def _state(self) -> dict[str, object]:
        """What the cache was made for."""
        decoder: Any = self.network.model
        norm = next(decoder.norm.parameters())
        dtype = str(norm.dtype).removeprefix("torch.")
        return {"layers": len(decoder.layers), "dtype": dtype, "device": norm.device}

    @override
    def begin(self, prompts: list[str], nodes: int) -> None:
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
        super().begin(prompts, nodes)

    @contextmanager
    def reading(self, condition: Tensor) -> Iterator[None]:
        """Inside the `with` block every batch has these prompts.

        Args:
            condition: ids of the prompts and of their null prompts, int64 [B, 2, T], padded on the
                left with `PADDING`.
        """
        usual = self.conditioner
        self.conditioner = PromptConditioner(lambda _: (condition, condition[:, 0] != PADDING))
        try:
            yield
        finally:
            self.conditioner = usual


DYNAMIC = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long a sequence has become."""
COUPLED = "torch.ao.nn.quantized.dynamic"
"""Layers that round inputs by the largest one of a pass, so that a draft changes the logits of the
tokens before it.
"""
TRANSFORMERS = "transformers."


def check_model(model: nn.Module, family: HeldFamily) -> None:
    """Raise TemperaError for a model that cannot be decoded as it is."""
    for name, module in model.named_modules():
        if module.training:
            raise TemperaError(
                f"{name or 'the model'} is in training mode: call model.eval() first."
            )
    decoder: Any = model.get_submodule(family.decoder)
    rope = decoder.config.rope_parameters.get("rope_type", "default")
    if rope in DYNAMIC:
        raise TemperaError(
            f"rope_type={rope} is not supported, because its angles change with the length."
        )
    attention = decoder.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise TemperaError(
            f"the model's attention is {attention}, which takes no mask of a draft: call "
            "model.set_attn_implementation('sdpa') first."
        )
    layers = [f"{family.decoder}.layers.{number}" for number in range(len(decoder.layers))]
    called = [*family.called, *layers]
    _check_around(model, called)
    _check_weights(model, called)


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
                f"{name} has {what}, and an accelerated model calls the modules inside it, so that "
                "it would not run: take it away, or put it on a layer."
            )


def _sits_on(module: Any) -> str:
    """What would run when a module is called besides what transformers wrote; empty for nothing."""
    if module._forward_pre_hooks or module._forward_hooks:
        return "a forward hook"
    hook = vars(module).get("_hf_hook")
    if type(hook).__name__ == "AlignDevicesHook" and not hook.offload:
        return ""  # it moves inputs to the device that they are on
    if "forward" in vars(module):
        return "a forward method of its own (of offloading, a wrapper or torch.compile)"
    if not type(module).forward.__module__.startswith(TRANSFORMERS):
        return "another forward method than transformers'"
    return ""


def _check_weights(model: nn.Module, called: list[str]) -> None:
    """Raise TemperaError unless the weights of the modules that are called are on one device, and
    their layers work for every token alone.
    """
    devices = set[torch.device]()
    for path in called:
        for name, module in model.get_submodule(path).named_modules():
            devices |= {weight.device for weight in module.parameters(recurse=False)}
            if type(module).__module__.startswith(COUPLED):
                raise TemperaError(
                    f"{f'{path}.{name}'.rstrip('.')} is dynamically quantised: it rounds the "
                    "inputs of a whole pass together, so that drafts would change the law. Leave "
                    "the model whole, or quantise its weights alone."
                )
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise TemperaError(
            f"the model's weights are on {', '.join(sorted(map(str, devices)))}: put all of them "
            "on one device, without offloading."
        )
