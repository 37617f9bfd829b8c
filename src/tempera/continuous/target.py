"""MAR as a target or a draft: class labels, guidance and its schedule, temperature and respaced denoising around the network."""

from collections.abc import Callable

import torch
from torch import Tensor

from tempera.continuous.decode import Context, Model
from tempera.continuous.diffusion import Denoiser, Kernel, Sampling, Schedule
from tempera.continuous.mar import MAR, DiffusionHead
from tempera.errors import TemperaError
from tempera.targets.adapter import identity_of

Labels = Callable[[list[str]], tuple[Tensor, Tensor]]
"""Prompts -> class numbers int64 [B], and a mask that does not matter here."""


class GuidedHead:
    """A diffusion head with guidance and temperature. Implements `Denoiser`.

    A condition is the decoder's vector, under guidance followed by that of no class and the scale: [N, W] or [N, 2W + 1].

    Args:
        head: the network.
        sampling: how it is sampled.
    """

    def __init__(self, head: DiffusionHead, sampling: Sampling) -> None:
        self.head, self.sampling = head, sampling
        self.stages, self.last_noise = sampling.denoising_steps, sampling.last_noise
        self.channels = head.input_proj.in_features
        self.schedule = Schedule(self.stages, start=sampling.denoising_start)
        self._times = self.schedule.times

    def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
        """See `Denoiser`: under guidance the noise is u + s (c − u), the variance the conditional one's."""
        self._times = self._times.to(x.device)
        t = self.stages - 1 - stage
        dtype = self.head.input_proj.weight.dtype
        count, x_in, times = self.sampling.rows, x.to(dtype), self._times[t]
        width = self.head.cond_embed.in_features
        conditions = torch.cat(condition[:, : count * width].split(width, -1)).to(dtype)
        output = self.head(x_in.repeat(count, 1), times.repeat(count), conditions).float()
        if count == 2:
            (conditional, null), scale = output.chunk(2), condition[:, -1:]
            noise = torch.lerp(null[:, : self.channels], conditional[:, : self.channels], scale)
            output = torch.cat([noise, conditional[:, self.channels :]], -1)
        kernel = self.schedule.kernel(output, x.float(), t)
        return kernel.widened(self.sampling.temperature)


class MARTarget:
    """A masked autoregressive network that is accelerated, or drafts. Implements `Model`.

    Args:
        network: the network.
        conditioner: turns prompts into class numbers.
        sampling: how tokens are drawn.
        identity: names the weights.
    """

    def __init__(self, network: MAR, conditioner: Labels, sampling: Sampling, identity: str = "mar") -> None:
        self.network, self.conditioner, self.sampling, self.identity = network, conditioner, sampling, identity
        config = network.config
        self.length, self.channels, self.grid = config.length, config.token_channels, config.grid
        self.denoiser: Denoiser = GuidedHead(network.head, sampling)
        self._labels = torch.zeros(0, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.network.mask_token.device

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; densities and states are float32 and float64."""
        return self.network.mask_token.dtype

    def begin(self, prompts: list[str]) -> None:
        """See `Model`.

        Raises:
            TemperaError: a prompt is no class, or a class that the network was not trained on.
        """
        labels = self.conditioner(prompts)[0].to(self.device)
        classes = self.network.config.classes
        if len(labels) and int(labels.max()) >= classes:
            raise TemperaError(f"class {int(labels.max())} is not one of the network's {classes}; give a number from 0 to {classes - 1}.")
        self._labels = labels

    def conditions(self, context: Context, places: Tensor, after: Tensor) -> Tensor:
        """See `Model`; what `GuidedHead` wants, float32 [R, M, W] or [R, M, 2W + 1]."""
        count = self.sampling.rows
        tokens = context.tokens[:, : context.reach].to(self.dtype).repeat(count, 1, 1)
        order, known, asked = (part.repeat(count, *[1] * (part.dim() - 1)) for part in (context.order, context.known, places))
        drop = torch.arange(len(tokens), device=tokens.device) >= len(context.rows)
        embedding = self.network.class_embedding(self._labels[context.rows].repeat(count), drop)
        vectors: Tensor = self.network(tokens, order, known, embedding, asked)
        if count == 1:
            return vectors.float()
        scale = self.sampling.scale(after, self.length).unsqueeze(-1)
        return torch.cat([*vectors.float().chunk(2), scale], -1)


def draft(target: Model, network: MAR | None) -> MARTarget:
    """A smaller network as the draft of a target: with the target's class labels and sampling, on its device in its precision.

    Raises:
        TemperaError: there is no network, or it does not fit the target.
    """
    if not isinstance(target, MARTarget):
        raise TemperaError("a draft with continuous tokens needs a target with continuous tokens; choose a model=mar_… preset.")
    if network is None:
        raise TemperaError("this model has no smaller one to draft for it; choose another model, or the draft with drafter=mar_base.")
    classes = (network.config.classes, target.network.config.classes)
    if classes[0] != classes[1]:
        raise TemperaError(f"the draft knows {classes[0]} classes and the target {classes[1]}; take a draft of the target's family.")
    identity = identity_of(network)
    network = network.to(target.device, target.dtype).eval().requires_grad_(False)
    return MARTarget(network, lambda prompts: target.conditioner(prompts), target.sampling, identity)
