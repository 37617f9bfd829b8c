"""Tiny random networks for tests, and their drafts' distributions without a cache."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from random_drafts import new_sequences
from torch import Tensor, nn

from tempera.decoding.interfaces import Draft, Drafter, Verdict
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.drafters.dflash import DFlashModel
from tempera.drafters.draft_network import normed_features, shifted
from tempera.drafters.eagle3 import Eagle3Model
from tempera.drafters.eagle_network import EagleModel
from tempera.drafters.medusa import MedusaModel
from tempera.drafters.parallel_network import ParallelModel
from tempera.targets.emu3 import EMU3
from tempera.targets.family import Family, load_network
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.masks import causal_mask
from tempera.targets.prompt_encoder import PADDING
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget

VOCAB, GRID, PREFIX, WIDTH = 11, (4, 5), 5, 6
LENGTH = GRID[0] * GRID[1]
TREE = Tree.from_paths(
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]
)
PROMPTS = ["a", "bb", "ccc", "dddd"]


def lively(module: nn.Module, seed: int = 0) -> Any:
    """Weights large enough for the outputs to depend on everything."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator)
                    / parameter.shape[-1] ** 0.5
                    * 1.3
                )
    return module.eval()


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
"""Sizes that weights of four bits are possible for."""


def llamagen(seed: int = 0, **changes: Any) -> LlamaGen:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "grid": GRID, "num_hidden_layers": 3, **SIZES}
    sizes |= {"prefix_length": PREFIX, "caption_dim": WIDTH, **changes}
    return lively(LlamaGen(LlamaGenConfig(**sizes)), seed)


def captions(prompts: list[str]) -> tuple[Tensor, Tensor]:
    """As many real condition tokens as the prompt has letters."""
    seeded = (torch.Generator().manual_seed(len(prompt)) for prompt in prompts)
    features = torch.stack([torch.randn(PREFIX, WIDTH, generator=one) for one in seeded])
    keep = torch.stack([torch.arange(PREFIX) >= PREFIX - len(prompt) for prompt in prompts])
    return features * keep[..., None], keep


def tiny_target(
    sampling: Sampling | None = None,
    network: Any = None,
    conditioner: Any = captions,
    **options: Any,
) -> TransformerTarget:
    network, sampling = network or llamagen(), sampling or Sampling(3.0)
    return TransformerTarget(network, conditioner, sampling, **options)


def text_ids(prompts: list[str]) -> tuple[Tensor, Tensor]:
    """An id for every letter and a start of the image; the null prompt has one id and the start."""
    width = 1 + max(map(len, prompts))
    pairs = [([*([1] * len(prompt)), 3], [2, 3]) for prompt in prompts]
    rows = [[[PADDING] * (width - len(ids)) + ids for ids in pair] for pair in pairs]
    return torch.tensor(rows), torch.tensor(rows)[:, 0] != PADDING


def text_target(
    sampling: Sampling,
    lines: int = GRID[0],
    columns: int = GRID[1],
    codes: int = VOCAB,
    family: Family = EMU3,
    line_end: int | None = None,
    **sizes: Any,
) -> TransformerTarget:
    """A language model of 20 ids, of which the codes are those from 4 on. Emu3 has grouped keys."""
    spec = ModelSpec(lines, columns, codes, 4, ("{text}", 3), (2, 3), 64, line_end=line_end)
    common = {**SIZES, "vocab_size": 20, "num_hidden_layers": 2, "rope_theta": 10000.0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    network = load_network(family, spec, "random", [], "", common | heads | special | sizes)
    return tiny_target(sampling, lively(network), text_ids)


def tiny_eagle(
    target: TransformerTarget, seed: int = 1, features: tuple[int, ...] = ()
) -> EagleModel:
    model = EagleModel.of(target.network, "tiny", target.vocab_size, target.identity, features)
    return lively(model, seed)


def tiny_eagle3(
    target: TransformerTarget, seed: int = 1, features: tuple[int, ...] = ()
) -> Eagle3Model:
    model = Eagle3Model.of(target.network, "tiny", target.vocab_size, target.identity, features)
    return lively(model, seed)


def tiny_parallel(target: TransformerTarget, seed: int = 1, **sizes: Any) -> ParallelModel:
    sizes = {"rank": 4, "length": 4, **sizes}
    model = ParallelModel.of(target.network, "tiny", target.vocab_size, target.identity, **sizes)
    generator = torch.Generator().manual_seed(seed)
    for vector in (model.mask_embed, model.mask_hidden):
        nn.init.normal_(vector, generator=generator)
    return lively(model, seed)


def tiny_dflash(target: TransformerTarget, seed: int = 1, **sizes: Any) -> DFlashModel:
    sizes = {"length": 4, **sizes}
    model = DFlashModel.of(target.network, "tiny", target.vocab_size, target.identity, **sizes)
    nn.init.normal_(model.mask_embed, generator=torch.Generator().manual_seed(seed))
    return lively(model, seed)


def tiny_medusa(target: TransformerTarget, seed: int = 1, **sizes: int) -> MedusaModel:
    sizes = {"length": 4, **sizes}
    model = MedusaModel.of(target.network, "tiny", target.vocab_size, target.identity, **sizes)
    return lively(model, seed)


def random_draft(tree: Tree, batch: int, generator: torch.Generator, vocab: int = VOCAB) -> Draft:
    tokens = torch.randint(vocab, (batch, tree.nodes), generator=generator)
    return Draft(tokens, torch.zeros(batch, tree.nodes, vocab), tree)


def random_verdict(draft: Draft, generator: torch.Generator, vocab: int = VOCAB) -> Verdict:
    """A random path down every row's tree; -1 and nonsense past its end."""
    batch, depth = len(draft.tokens), draft.tree.max_depth
    path = torch.full((batch, depth), -1)
    tokens = torch.randint(vocab, (batch, depth + 1), generator=generator)
    parents = draft.tree.parents.expand(batch, -1).tolist()
    accepted = torch.zeros(batch, dtype=torch.int64)
    for row in range(batch):
        node, line = int(torch.randint(-1, draft.tree.nodes, (), generator=generator)), list[int]()
        while node >= 0:
            line.insert(0, node)
            node = parents[row][node]
        path[row, : len(line)] = torch.tensor(line, dtype=torch.int64)
        tokens[row, : len(line)] = draft.tokens[row, line]
        accepted[row] = len(line)
    visited = torch.nn.functional.pad(1 + path, (1, 0))
    stop = visited.gather(1, accepted[:, None])[:, 0]
    nothing = torch.zeros_like(tokens)
    return Verdict(
        stop,
        visited,
        accepted,
        tokens,
        tokens.gather(1, accepted[:, None])[:, 0],
        origin=nothing.to(torch.int8),
        logprob=nothing.float(),
        broken=torch.zeros(2, len(tokens), dtype=torch.bool),
    )


def random_rounds(
    target: TransformerTarget, drafter: Drafter, prompts: list[str], generator: torch.Generator
) -> Iterator[Any]:
    """Rounds with random verdicts until every image is complete: each one's draft, and the images
    as they are before it.
    """
    sequences = new_sequences(len(prompts), target.length, drafter.depth)
    target.begin(prompts, drafter.nodes)
    drafter.begin(prompts, sequences, torch.empty(len(prompts), 0), None)
    while not sequences.complete:
        uniforms = torch.rand(len(prompts), drafter.uniforms, generator=generator)
        draft = drafter.propose(sequences, uniforms)
        yield (
            draft,
            [
                row[:count].clone()
                for row, count in zip(sequences.tokens, sequences.counts, strict=True)
            ],
        )
        scores = target.score(draft, sequences.longest)
        verdict = random_verdict(draft, generator, target.vocab_size)
        sequences.tell(
            sequences.append(verdict.tokens, verdict.accepted + 1, verdict.broken),
            verdict.tokens.shape[1],
        )
        target.commit(draft, verdict, sequences.emitted)
        drafter.observe(sequences, draft, verdict, scores)


def check_q(draft: Draft, row: int, law: Callable[[list[int]], Tensor], longest: int) -> None:
    """Every node of a static tree was drawn from the law after its parent without its elder
    siblings; `law` is asked with the tokens of a path, `longest` is the longest one that is inside
    the image.
    """
    paths, tokens = node_paths(draft.tree, row), draft.tokens[row]
    for path in paths[1:]:
        *above, node = path
        if len(above) > longest:
            continue
        q = law(tokens[above].tolist())
        elders = [other[-1] for other in paths[1:] if other[:-1] == above and other[-1] < node]
        q = q.index_fill(0, tokens[elders], 0.0)
        q = q / q.sum()
        torch.testing.assert_close(draft.q[row, node], q, atol=2e-5, rtol=1e-3)


def node_paths(tree: Tree, row: int) -> list[list[int]]:
    """The nodes from the top down to each node, after the empty path of the root."""
    parents = (tree.parents[row] if tree.per_row else tree.parents).tolist()
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents):
        paths.append([*paths[1 + parent], node])
    return paths


def full_hidden(
    target: TransformerTarget,
    prompts: list[str],
    sequences: list[Tensor],
    features: tuple[int, ...] = (),
) -> list[Tensor]:
    """Hidden states, and behind them inputs of layers, over the prefix and the tokens of each
    image, int64 [n], without a cache: [R of one prompt, T + n, …] each.
    """
    condition, keep = target.conditioner(prompts)
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    halves = []
    for drop in (False, True)[: target.sampling.rows]:
        dropped = torch.full((len(prompts),), drop)
        prefix, seen = target.network.embed_prefix(condition, keep, dropped)
        embeds = torch.cat([prefix, plain_embed(target, tokens)], 1)
        mask = causal_mask(seen, embeds.shape[1], embeds.dtype)
        rotation = turns(target, seen, embeds.shape[1])
        halves.append(target.network.model(embeds, mask, rotation, features=features))
    return [
        torch.stack([half[i, : keep.shape[1] + len(image)] for half in halves])
        for i, image in enumerate(sequences)
    ]


def turns(target: TransformerTarget, keep: Tensor, count: int) -> Tensor:
    """The rotary embedding of the first positions behind a prefix with `keep`, [2, 1, count, D]."""
    table = target.network.model.rotary.table(count, keep.shape[1], keep.device)
    return table[:, None].to(target.dtype)


def draft_inputs(
    draft: EagleModel | ParallelModel | DFlashModel,
    target: TransformerTarget,
    prompt: str,
    image: Tensor,
    path: list[int],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each row of a prompt: embeddings of prefix ‖ image ‖ path, the target's true hidden state
    before each token up to the root, whose own is not known yet, and which prefix tokens are real.
    """
    tokens = torch.cat([image, torch.tensor(path, dtype=torch.int64)])[None]
    hidden = full_hidden(target, [prompt], [image], draft.features)[0]
    for drop, states in zip((False, True), hidden, strict=False):
        condition = target.conditioner([prompt])
        prefix, keep = target.network.embed_prefix(*condition, torch.tensor([drop]))
        embeds = torch.cat([prefix, plain_embed(target, tokens)], 1)
        yield embeds, shifted(states[None], keep)[:, :-1], keep


def full_draft(
    eagle: EagleModel,
    target: TransformerTarget,
    prompts: list[str],
    image: Tensor,
    row: int,
    path: list[int],
) -> Tensor:
    """The draft's prediction at the last token of image ‖ path, from the target's true hidden
    states up to the image's last token.

    image: int64 [n] tokens of prompt `row`; path: drafted tokens after it. Returns [R of one
    prompt, H].
    """
    outputs = []
    for embeds, previous, keep in draft_inputs(eagle, target, prompts[row], image, path):
        while True:
            count = previous.shape[1]
            mask = causal_mask(keep, count, embeds.dtype)
            rotation = turns(target, keep, count)
            predicted = eagle(embeds[:, :count], previous, mask, rotation)[:, -1:]
            if count == embeds.shape[1]:
                break
            blank = previous.shape[-1] - predicted.shape[-1]
            previous = torch.cat([previous, nn.functional.pad(predicted, (0, blank))], 1)
        outputs.append(predicted[0, 0])
    return torch.stack(outputs)


def full_parallel(
    parallel: ParallelModel,
    target: TransformerTarget,
    prompts: list[str],
    image: Tensor,
    row: int,
    path: list[int],
) -> Tensor:
    """The prediction of the slot behind image ‖ path, as `full_draft` computes it: masks from the
    image's last token on, and the drafted token before the slot in its Markov head.
    """
    outputs = []
    for embeds, previous, keep in draft_inputs(parallel, target, prompts[row], image, path):
        mask = causal_mask(keep, embeds.shape[1], embeds.dtype)
        rotation = turns(target, keep, embeds.shape[1])
        outputs.append(parallel(embeds, previous, mask, rotation)[0, -1])
    return torch.stack(outputs)


def full_dflash(
    dflash: DFlashModel,
    target: TransformerTarget,
    prompts: list[str],
    image: Tensor,
    row: int,
    path: list[int],
) -> Tensor:
    """The prediction of the token of a block behind image ‖ path: layer by layer, without masks or
    caches, for the image's last token and masks behind it.
    """
    outputs = []
    for embeds, previous, keep in draft_inputs(dflash, target, prompts[row], image, path):
        root = previous.shape[1] - 1
        known = nn.functional.pad(keep, (0, root - keep.shape[1]), value=True)[:, :root]
        read = normed_features(previous[:, 1:], embeds.shape[-1])
        injected = dflash.norm(dflash.fc(read))[:, known[0]]
        rotation = turns(target, keep, root + dflash.slots)
        before, here = rotation[:, :, :root][:, :, known[0]], rotation[:, :, root:]
        x = dflash.mask_embed.repeat(1, dflash.slots, 1)
        x[:, :1] = embeds[:, root : root + 1]
        for layer in dflash.layers:
            attention = layer.self_attn
            q, *block = attention.project(layer.input_layernorm(x), here)
            pairs = zip(attention.project(injected, before)[1:], block, strict=True)
            groups = attention.heads // attention.kv_heads
            k, v = (torch.cat(pair, 2).repeat_interleave(groups, 1) for pair in pairs)
            shares = (q @ k.mT * attention.head_dim**-0.5).softmax(-1)
            x = x + attention.o_proj((shares @ v).transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out = x[0, len(path)]
        if dflash.markov_out is not None and path:
            out = out + dflash.markov_out(dflash.markov(embeds[0, -1]))
        outputs.append(out)
    return torch.stack(outputs)


def full_medusa(
    medusa: MedusaModel,
    target: TransformerTarget,
    prompts: list[str],
    image: Tensor,
    row: int,
    path: list[int],
) -> Tensor:
    """What head len(path) gives for the true hidden state before the image's last token, and, with
    columns, for the one a row above the drafted token.
    """
    k = len(path)
    columns = medusa.config.columns
    weight = medusa.fc.weight.unflatten(0, (medusa.slots, -1))[k]  # type: ignore[operator]
    bias = medusa.fc.bias.unflatten(0, (medusa.slots, -1))[k]  # type: ignore[union-attr]
    outputs = []
    for _, previous, _ in draft_inputs(medusa, target, prompts[row], image, path):  # type: ignore[arg-type]
        h = previous[0, -1]
        block = weight @ h + bias
        beside = torch.zeros_like(h)
        place = previous.shape[1] + 1 + k - columns  # behind the token above the drafted one
        if columns and place >= 0:
            block = block + medusa.above_in[k] @ previous[0, place]
            beside = medusa.above_out[k] @ previous[0, place]
        outputs.append(medusa.out[k] @ (h + nn.functional.silu(block)) + beside)
    return torch.stack(outputs)


def plain_embed(target: TransformerTarget, tokens: Tensor) -> Tensor:
    return target.head.embed(tokens)[: len(tokens)]
