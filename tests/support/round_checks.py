"""A target's rounds against forward passes without a cache."""

import torch
from tiny_networks import (
    full_hidden,
    node_paths,
    random_draft,
    random_verdict,
)

from tempera.decoding.trees import Tree


def per_row_tree(batch: int, generator: torch.Generator) -> Tree:
    rows = []
    for _ in range(batch):
        parents, depths = list[int](), list[int]()
        for _ in range(6):
            deepest = max(depths, default=0)
            choices = [-1, *range(len(parents))]
            allowed = [
                parent for parent in choices if (0 if parent < 0 else depths[parent]) + 1 >= deepest
            ]
            parents.append(allowed[int(torch.randint(len(allowed), (), generator=generator))])
            depths.append(1 if parents[-1] < 0 else depths[parents[-1]] + 1)
        rows.append(parents)
    return Tree.from_parents(torch.tensor(rows))


def check_rounds(target, prompts, tree_of_round, generator, forced=None):
    """Random rounds to the end of every image; every score is compared with a forward pass over the
    whole sequence.
    """
    batch = len(prompts)
    images = [torch.zeros(0, dtype=torch.int64) for _ in prompts]
    while min(map(len, images)) < target.length:
        draft = random_draft(tree_of_round(), batch, generator, target.vocab_size)
        scores = target.score(draft)
        assert scores.p.shape == (batch, 1 + draft.tree.nodes, target.vocab_size)
        check_scores(target, prompts, draft, scores, images, forced)
        verdict = random_verdict(draft, generator, target.vocab_size)
        emitted = torch.tensor(
            [
                min(int(verdict.accepted[row]) + 1, target.length - len(images[row]))
                for row in range(batch)
            ]
        )
        target.commit(draft, verdict, emitted)
        images = [
            torch.cat([image, verdict.tokens[row, : emitted[row]]])
            for row, image in enumerate(images)
        ]
        assert target.session.prompt.lengths.tolist() == [len(image) for image in images]


def check_scores(target, prompts, draft, scores, images, forced):
    nodes = [
        (row, node, torch.cat([images[row], draft.tokens[row, path]]))
        for row in range(len(prompts))
        for node, path in paths(draft, row)
    ]
    nodes = [
        (row, node, image) for row, node, image in nodes if len(image) < target.length
    ]  # past the image, a score is not used
    references = full_hidden(
        target, [prompts[row] for row, _, _ in nodes], [image for _, _, image in nodes]
    )
    for (row, node, image), states in zip(nodes, references, strict=True):
        torch.testing.assert_close(
            scores.hidden[row :: len(prompts), node], states[:, -1], atol=1e-5, rtol=1e-4
        )
        token = None if forced is None else forced[len(image)][None]
        p = target.sampling.distribution(target.head.lm_logits(states[:, -1]), token)[0]
        torch.testing.assert_close(scores.p[row, node], p, atol=1e-5, rtol=1e-4)


def paths(draft, row):
    return enumerate(node_paths(draft.tree, row))
