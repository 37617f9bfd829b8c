"""SJD-PAC's Figure 4: one pass over two copies is a pass over a cache without one entry."""

import pytest
import torch
from tiny_networks import llamagen, tiny_target
from transformers import DynamicCache

from tempera.decoding.probabilities import Sampling, total_variation
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.evaluation.masked_attention import Masking
from tempera.rules.standard import Exact
from tempera.training.teacher_forcing import teach

PROMPTS = ["two", "a"]


@pytest.mark.parametrize("masked", [1, 3])
def test_a_masked_query_reads_the_cache_without_one_entry(masked: int) -> None:
    """Token by token, over Hugging Face's cache of the tokens before it."""
    target = tiny_target(Sampling(2.0), llamagen())
    streams = RandomStreams(0, ["0", "1"], torch.device("cpu"))
    method = Masking(NoDraft(), Exact(), masked)
    output = method.decode(target, streams, PROMPTS, diagnostics=True)
    found = output.trace.tv
    assert found is not None and found[:, : 1 + masked].isnan().all()
    drop = torch.tensor([False, False, True, True])
    lesson = teach(target, PROMPTS * 2, output.tokens.repeat(2, 1), drop)
    for token in range(1 + masked, target.length):
        query = lesson.start + token
        cache, mask = DynamicCache(), lesson.mask[:, :, : query + 1, : query + 1].clone()
        decoder, turns = target.network.model, lesson.rotation
        decoder(lesson.embeds[:, :query], mask[:, :, :query, :query], turns[:, :, :query], cache)
        mask[:, :, query, query - masked] = torch.finfo(mask.dtype).min
        embeds, turn = (part.narrow(-2, query, 1) for part in (lesson.embeds, turns))
        state = decoder(embeds, mask[:, :, query:], turn, cache)
        without, whole = (
            target.head.distribution(
                one, torch.full((2,), token), torch.zeros(1, dtype=torch.int64)
            )
            for one in (state, lesson.hidden[:, query : query + 1])
        )
        torch.testing.assert_close(found[:, token], total_variation(without, whole)[:, 0])
    assert (found.nan_to_num() > 1e-3).any()
