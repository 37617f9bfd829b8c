"""How good a draft is: on held-out images under teacher forcing, and in a short real decode."""

from dataclasses import replace

import torch
from torch import Tensor

from tempera.data.shards import CodedImages
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.standard import Exact
from tempera.targets.transformer import TransformerTarget
from tempera.training.teacher_forcing import teach


@torch.no_grad()
def imitation(
    draft: DraftNetwork, target: TransformerTarget, images: CodedImages, batch_size: int = 4
) -> Tensor:
    """How well the draft predicts the next token of held-out images, under teacher forcing.

    p and q are the distributions that decoding draws from, after guidance and temperature. The
    accuracies are after guidance only, so they are comparable between greedy and truncated
    sampling.

    Returns:
        float64 [4], sums over image tokens: their number; how often the target's most probable
            token is also the draft's, and how often it is among the draft's three most probable;
            total variation between p and q.
    """
    ranking = replace(target.sampling, temperature=1.0, top_k=0, top_p=1.0)
    sums = torch.zeros(4, dtype=torch.float64, device=target.device)
    rows = target.sampling.rows
    for start in range(0, len(images), batch_size):
        batch = images[range(start, min(start + batch_size, len(images)))]
        lesson = teach(
            target,
            batch.captions * rows,
            batch.tokens.repeat(rows, 1),
            torch.arange(rows * len(batch)) >= len(batch),
            draft.features,
        )
        predicted = draft(
            lesson.embeds.float(), lesson.previous.float(), lesson.mask.float(), lesson.positions
        )
        mine, true = (
            target.head.lm_logits(states[:, lesson.start :].to(target.dtype))
            for states in (predicted, lesson.hidden)
        )
        best = ranking.distribution(true).argmax(-1, keepdim=True)
        found = ranking.distribution(mine).topk(3, -1).indices == best
        distance = (
            target.sampling.distribution(true) - target.sampling.distribution(mine)
        ).abs().sum(-1) / 2
        sums += torch.stack(
            [
                torch.tensor(best.numel(), device=sums.device),
                found[..., 0].sum(),
                found.sum(),
                distance.sum(),
            ]
        ).double()
    return sums


def metrics_of(sums: Tensor) -> dict[str, float]:
    """The sums of `imitation` as means: top-1 and top-3 accuracy and TV(p, q)."""
    count, top1, top3, distance = sums.tolist()
    return {"top1": top1 / count, "top3": top3 / count, "tv": distance / count}


def accepted_length(
    draft: DraftNetwork, target: TransformerTarget, captions: list[str], depth: int, seed: int = 0
) -> float:
    """Tokens per round when these captions are really decoded, with exact chains of `depth` drafted
    tokens.
    """
    drafter = StaticTreeDrafter(EagleDraft(draft, target), Tree.chain(depth))
    streams = RandomStreams(
        seed, [f"validation-{index}" for index in range(len(captions))], target.device
    )
    output = decode(target, drafter, Exact(), streams, captions)
    return output.tokens.numel() / float(output.trace.rounds.sum())
