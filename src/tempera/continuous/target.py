"""MAR as a target or a draft: class labels, guidance and its schedule, temperature and respaced
denoising around the network.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from tempera.continuous.diffusion import Denoiser, DiffusionSampling, Kernel, NoiseSchedule
from tempera.continuous.loop import Context, Model
from tempera.continuous.mar import MAR, DiffusionHead
from tempera.errors import NoSmallerModel, TemperaError
from tempera.runtime.network_identity import identity_of
from tempera.targets.prompt_state import Conditioner, PromptConditioner

_ROWS = 128
"""Rows of the head that are modulated at once: few enough to stay in a cache, many enough for one
row to have its stages in one product.
"""


class GuidedHead(Denoiser):
    """A diffusion head with guidance and temperature.

    A condition is the decoder's vector, under guidance followed by that of no class and the scale:
    [N, W] or [N, 2W + 1].

    Args:
        head: the network.
        sampling: how it is sampled.
    """

    def __init__(self, head: DiffusionHead, sampling: DiffusionSampling) -> None:
        self.head, self.sampling = head, sampling
        self.stages, self.last_noise = sampling.denoising_steps, sampling.last_noise
        self.channels = head.input_proj.in_features
        self.schedule = NoiseSchedule(self.stages, start=sampling.denoising_start)
        self._times = self.schedule.times.flip(0)

    def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
        """See `Denoiser`."""
        told, scale = self._told(condition)
        modulations = self.head.modulations(
            told + self._time()[stage].repeat(self.sampling.rows, 1)
        )
        return self._guided(modulations, scale, x, self.stages - 1 - stage)

    def steps(self, condition: Tensor, first: int = 0) -> Iterator[Callable[[Tensor], Kernel]]:
        """See `Denoiser`: few rows are modulated for many stages in one product."""
        told, scale = self._told(condition)
        time = self._time().unsqueeze(1)
        size = max(1, _ROWS // len(told))
        for start in range(first, self.stages, size):
            ahead = self.head.modulations(told + time[start : start + size])
            for stage, *modulations in zip(
                range(start, min(start + size, self.stages)), *ahead, strict=True
            ):
                yield partial(self._guided, modulations, scale, t=self.stages - 1 - stage)

    def _told(self, condition: Tensor) -> tuple[Tensor, Tensor]:
        """A condition as the head embeds it, [N, W'] or, rows of no class last, [2N, W']; and the
        scale, [N, 1].
        """
        embed = self.head.cond_embed
        vectors = condition[:, : self.sampling.rows * embed.in_features].split(
            embed.in_features, -1
        )
        return embed(torch.cat(vectors).to(embed.weight.dtype)), condition[:, -1:]

    def _time(self) -> Tensor:
        """Embeddings of all stages, [S, W']."""
        self._times = self._times.to(self.head.input_proj.weight.device)
        time: Tensor = self.head.time_embed(self._times)
        return time

    def _guided(
        self, modulations: list[Tensor], scale: Tensor, x: Tensor, t: Tensor | int
    ) -> Kernel:
        """Under guidance the noise is u + s (c − u), the variance the conditional one's."""
        rows = x.to(self.head.input_proj.weight.dtype).repeat(self.sampling.rows, 1)
        output = self.head.predict(rows, modulations).float()
        if self.sampling.rows == 2:
            (conditional, null), split = output.chunk(2), self.channels
            noise = torch.lerp(null[:, :split], conditional[:, :split], scale)
            output = torch.cat([noise, conditional[:, split:]], -1)
        return self.schedule.kernel(output, x.float(), t).widened(self.sampling.temperature)


class MARTarget:
    """A masked autoregressive network that is accelerated, or drafts. Implements `Model`.

    Args:
        network: the network.
        conditioner: turns prompts into class numbers, int64 [B]; its mask does not matter.
        sampling: how tokens are drawn.
        identity: names the weights.
    """

    compiled = False

    def __init__(
        self,
        network: MAR,
        conditioner: Conditioner,
        sampling: DiffusionSampling,
        identity: str = "mar",
    ) -> None:
        self.network, self.sampling, self.identity = network, sampling, identity
        self.conditioner = PromptConditioner(conditioner)
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

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """See `interfaces.ImageModel.encoded`."""
        return self.conditioner.encoded(prompts)

    def begin(self, prompts: list[str]) -> None:
        """See `Model`.

        Raises:
            TemperaError: a prompt is no class, or a class that the network was not trained on.
        """
        labels = self.conditioner(prompts)[0].to(self.device)
        classes = self.network.config.classes
        if len(labels) and int(labels.max()) >= classes:
            raise TemperaError(
                f"class {int(labels.max())} is not one of the network's {classes}; give a number "
                f"from 0 to {classes - 1}."
            )
        self._labels = labels

    def conditions(self, context: Context, places: Tensor, after: Tensor) -> Tensor:
        """See `Model`; what `GuidedHead` wants, float32 [R, M, W] or [R, M, 2W + 1]."""
        count = self.sampling.rows
        tokens = context.tokens[:, : context.reach].to(self.dtype).repeat(count, 1, 1)
        order, known, asked = (
            part.repeat(count, *[1] * (part.dim() - 1))
            for part in (context.order, context.known, places)
        )
        drop = torch.arange(len(tokens), device=tokens.device) >= len(context.rows)
        embedding = self.network.class_embedding(self._labels[context.rows].repeat(count), drop)
        vectors: Tensor = self.network(tokens, order, known, embedding, asked)
        if count == 1:
            return vectors.float()
        scale = self.sampling.scale(after, self.length).unsqueeze(-1)
        return torch.cat([*vectors.float().chunk(2), scale], -1)


def draft(target: Model, network: MAR | None) -> MARTarget:
    """A smaller network as the draft of a target: with the target's class labels and sampling, on
    its device in its precision.

    Raises:
        TemperaError: there is no network, or it does not fit the target.
    """
    if not isinstance(target, MARTarget):
        raise TemperaError(
            "a draft with continuous tokens needs a target with continuous tokens; give it a MAR"
        )
    if network is None:
        raise NoSmallerModel
    classes = (network.config.classes, target.network.config.classes)
    if classes[0] != classes[1]:
        raise TemperaError(
            f"the draft knows {classes[0]} classes and the target {classes[1]}; take a draft of "
            "the target's family."
        )
    identity = identity_of(network)
    network = network.to(target.device, target.dtype).eval().requires_grad_(False)
    return MARTarget(network, target.conditioner, target.sampling, identity)
