"""MAR as a target or a draft: class labels, guidance and its schedule, temperature, and respaced
denoising.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from tempera.continuous.diffusion import Denoiser, DiffusionSampling, Kernel, NoiseSchedule
from tempera.continuous.loop import Context
from tempera.continuous.mar import MAR, DiffusionHead
from tempera.decoding.compiled import persistent
from tempera.errors import TemperaError
from tempera.runtime.network_identity import identity_of
from tempera.targets.prompt_state import Conditioner, PromptConditioner

_ROWS = 128
"""Rows for which the head computes modulations at once: few enough for the processor's cache,
enough to compute many stages of one row in one product.
"""


class GuidedHead(Denoiser):
    """A diffusion head with guidance and temperature.

    A condition is the decoder's output, [N, W]. With guidance it is followed by the null class's
    output and the guidance scale: [N, 2W + 1].

    Args:
        head: the network.
        sampling: guidance, temperature and denoising steps.
    """

    def __init__(self, head: DiffusionHead, sampling: DiffusionSampling) -> None:
        self.head = head
        self.sampling = sampling
        self.stages = sampling.denoising_steps
        self.last_noise = sampling.last_noise
        self.channels = head.input_proj.in_features
        schedule = NoiseSchedule(self.stages, start=sampling.denoising_start)
        self.schedule = schedule.to(head.input_proj.weight.device)

    def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
        """See `Denoiser`."""
        embedding, scale = self._embed_condition(condition)
        time = self._time()[stage].repeat(self.sampling.rows, 1)
        modulations = self.head.modulations(embedding + time)
        return self._guided(modulations, scale, x, self.stages - 1 - stage)

    def steps(self, condition: Tensor) -> Iterator[Callable[[Tensor], Kernel]]:
        """See `Denoiser`. For few rows, the modulations of many stages are computed at once."""
        embedding, scale = self._embed_condition(condition)
        time = self._time().unsqueeze(1)
        size = max(1, _ROWS // len(embedding))
        for start in range(0, self.stages, size):
            by_layer = self.head.modulations(embedding + time[start : start + size])
            for index in range(len(by_layer[0])):
                modulations = [layer[index] for layer in by_layer]
                step = self.stages - 1 - start - index
                yield partial(self._guided, modulations, scale, t=step)

    def _embed_condition(self, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Embed a condition for the head: [N, W'], or with guidance [2N, W'] with the null class
        last; and the guidance scale, [N, 1].
        """
        embed = self.head.cond_embed
        width = embed.in_features
        vectors = condition[:, : self.sampling.rows * width].split(width, dim=-1)
        embedding = embed(torch.cat(vectors).to(embed.weight.dtype))
        return embedding, condition[:, -1:]

    def _time(self) -> Tensor:
        """Embeddings of all stages, [S, W']."""
        out: Tensor = self.head.time_embed(self.schedule.times.flip(0))
        return out

    def _guided(
        self, modulations: list[Tensor], scale: Tensor, x: Tensor, t: Tensor | int
    ) -> Kernel:
        """With guidance the noise is u + s (c − u), and the variance is the conditional row's."""
        rows = x.to(self.head.input_proj.weight.dtype).repeat(self.sampling.rows, 1)
        output = self.head.predict(rows, modulations).float()
        if self.sampling.rows == 2:
            conditional, null = output.chunk(2)
            channels = self.channels
            noise = torch.lerp(null[:, :channels], conditional[:, :channels], scale)
            output = torch.cat([noise, conditional[:, channels:]], dim=-1)
        return self.schedule.kernel(output, x.float(), t).widened(self.sampling.temperature)


class MARTarget:
    """A masked autoregressive network as target or draft. Implements `Model`.

    Args:
        network: the network.
        conditioner: turns prompts into class numbers, int64 [B]; its mask is ignored.
        sampling: guidance, temperature and denoising steps.
        identity: identity of the weights.
    """

    compiled = False

    def __init__(
        self,
        network: MAR,
        conditioner: Conditioner,
        sampling: DiffusionSampling,
        identity: str = "mar",
    ) -> None:
        self.network = network
        self.sampling = sampling
        self.identity = identity
        self.conditioner = PromptConditioner(conditioner)
        self.length = network.config.length
        self.channels = network.config.token_channels
        self.grid = network.config.grid
        self.denoiser: Denoiser = GuidedHead(network.head, sampling)
        self._labels = torch.zeros(0, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        """The network's device."""
        return self.network.mask_token.device

    @property
    def dtype(self) -> torch.dtype:
        """The network's dtype; states are float32 and densities float64."""
        return self.network.mask_token.dtype

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """See `interfaces.ImageModel.encoded`."""
        return self.conditioner.encoded(prompts)

    def begin(self, prompts: list[str], rows: Tensor | None = None) -> None:
        """See `Model`.

        Raises:
            TemperaError: a prompt is not a class number, or the network has fewer classes.
        """
        labels, _ = self.conditioner(prompts)
        classes = self.network.config.classes
        if len(labels) and int(labels.max()) >= classes:
            raise TemperaError(
                f"class {int(labels.max())} is not one of the network's {classes}; give a number "
                f"from 0 to {classes - 1}."
            )
        self._labels = persistent(self._labels, labels.to(self.device), rows)

    def conditions(self, context: Context, indices: Tensor, after: Tensor) -> Tensor:
        """See `Model`: conditions for `GuidedHead`, float32 [R, M, W] or [R, M, 2W + 1]."""
        count = self.sampling.rows
        tokens = context.tokens[:, : context.reach].to(self.dtype).repeat(count, 1, 1)
        order = context.order.repeat(count, 1)
        lengths = context.lengths.repeat(count)
        predicted = indices.repeat(count, 1)
        drop = torch.arange(len(tokens), device=tokens.device) >= len(context.rows)
        embedding = self.network.class_embedding(self._labels[context.rows].repeat(count), drop)
        vectors = self.network(tokens, order, lengths, embedding, predicted)
        if count == 1:
            out: Tensor = vectors.float()
            return out
        scale = self.sampling.scale(after, self.length).unsqueeze(-1)
        return torch.cat([*vectors.float().chunk(2), scale], -1)


def draft(target: MARTarget, network: MAR | None) -> MARTarget:
    """A smaller network as the draft of a target, with the target's class labels, sampling, device
    and dtype.

    Raises:
        TemperaError: there is no network, or it does not fit the target.
    """
    if network is None:
        raise TemperaError(
            "this model has no smaller model to draft for it: choose another model or drafter "
            "(such as drafter=mar_base)",
            option="drafter",
        )
    for name in ("grid", "token_channels", "classes"):
        of_draft = getattr(network.config, name)
        of_target = getattr(target.network.config, name)
        if of_draft != of_target:
            raise TemperaError(
                f"the draft has {name}={of_draft}, but the target has {of_target}: choose a draft "
                "of the target's family",
                option="drafter",
            )
    identity = identity_of(network)
    network = network.to(target.device, target.dtype).eval().requires_grad_(False)
    return MARTarget(network, target.conditioner, target.sampling, identity)
