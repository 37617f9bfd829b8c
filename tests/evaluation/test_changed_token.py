"""SJD-PAC's Figure 2: one token of a picture is drawn uniformly, and all others from the target."""

import pytest
import torch
from tiny_networks import PROMPTS, VOCAB, tiny_target

from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.jacobi import sjd
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation.changed_token import Changing
from tempera.rules.standard import Exact


@pytest.mark.parametrize("compiled", [False, True])
def test_pictures_are_the_same_up_to_the_changed_token(compiled: bool) -> None:
    target, prompts = tiny_target(), PROMPTS * 50
    if compiled:
        target.compile()
    names = [str(row) for row in range(len(prompts))]
    plain, changed = (
        Changing(NoDraft(), Exact(), share).decode(target, RandomStreams(0, names), prompts).tokens
        for share in (1.0, 0.5)
    )
    place = target.length // 2
    assert plain[:, :place].equal(changed[:, :place])
    counts = torch.bincount(changed[:, place], minlength=VOCAB)
    assert counts.min() > 0.3 * len(prompts) / VOCAB
    assert not plain[:, place + 1 :].equal(changed[:, place + 1 :])


def test_it_is_for_plain_autoregression() -> None:
    with pytest.raises(TemperaError, match="method=ar"):
        Changing(sjd(tiny_target(), 4), Exact(), 0.5)
