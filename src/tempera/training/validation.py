"""How good a draft is: on held-out images under teacher forcing, and in a short real decode."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tempera.data.shards import CodedImages
from tempera.decoding.loop import Output, decode
from tempera.decoding.probabilities import total_variation
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.standard import Exact
from tempera.targets.transformer import TransformerTarget
from tempera.training.teacher_forcing import teach


@torch.no_grad()
def imitation(
    draft: DraftNetwork,
    target: TransformerTarget,
    images: CodedImages,
    batch_size: int = 4,
    stopped: Callable[[], bool] = lambda: False,
) -> Tensor:
    """How well the draft predicts the next token of held-out images, under teacher forcing; a draft
    of several slots predicts it in each of them.

    p and q are the distributions that decoding draws from, after guidance and temperature. The
    accuracies are after guidance only, so they are comparable between greedy and truncated
    sampling. Between batches `stopped` is asked whether to leave it at that.

    Returns:
        float64 [4], sums over image tokens and slots: their number; how often the target's most
            probable token is also the draft's, and how often it is among the draft's three most
            probable; total variation between p and q.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=target.device)
    rows = target.sampling.rows
    for start in range(0, len(images), batch_size):
        if stopped():
            break
        batch = images[range(start, min(start + batch_size, len(images)))]
        lesson = teach(
            target,
            batch.captions * rows,
            batch.tokens.repeat(rows, 1),
            torch.arange(rows * len(batch)) >= len(batch),
            draft.features,
        )
        predicted = draft(*lesson.unrolled([lesson.previous], draft.visible(draft.slots)))
        for slot in predicted.split(lesson.hidden.shape[1], 1):
            sums += _compared(target, slot[:, lesson.start :], lesson.hidden[:, lesson.start :])
    return sums


def _compared(target: TransformerTarget, predicted: Tensor, hidden: Tensor) -> Tensor:
    """The sums of `imitation` over hidden states of draft and target, [R, S, H]."""
    ranking = replace(target.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    draft_logits = target.head.lm_logits(predicted.to(target.dtype))
    target_logits = target.head.lm_logits(hidden.to(target.dtype))
    best = ranking.distribution(target_logits).argmax(-1, keepdim=True)
    is_best = ranking.distribution(draft_logits).topk(3, dim=-1).indices == best
    p = target.sampling.distribution(target_logits)
    q = target.sampling.distribution(draft_logits)
    count = torch.tensor(best.numel(), device=best.device)
    sums = [count, is_best[..., 0].sum(), is_best.sum(), total_variation(p, q).sum()]
    return torch.stack(sums).double()


def metrics_of(sums: Tensor) -> dict[str, float]:
    """The sums of `imitation` as means: top-1 and top-3 accuracy and TV(p, q)."""
    count, top1, top3, distance = sums.tolist()
    return {"top1": top1 / count, "top3": top3 / count, "tv": distance / count}


def accepted_length(output: Output) -> float:
    """Tokens per round."""
    return output.tokens.numel() / float(output.trace.rounds.sum())


def decoded(
    draft: DraftNetwork, target: TransformerTarget, captions: list[str], depth: int, seed: int = 0
) -> Output:
    """An image of each caption, really decoded with exact chains of `depth` drafted tokens, or of
    as many as the draft can draft. A seed gives the same images.
    """
    model = draft.draft_model(draft, target)
    drafter = StaticTreeDrafter(model, Tree.chain(min(depth, model.longest or depth)))
    names = [f"validation-{index}" for index in range(len(captions))]
    streams = RandomStreams(seed, names, target.device)
    return decode(target, drafter, Exact(), streams, captions)
