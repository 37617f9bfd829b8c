"""Drafts for other programs: the format of the `speculators` library, which vLLM reads."""

from pathlib import Path
from typing import Any

import torch

from tempera.api import LoadedModel
from tempera.drafters.draft_files import check_target, read_draft
from tempera.drafters.eagle3 import (
    HEAD,
    NAMES,
    TO_DRAFT,
    TO_TARGET,
    WAYS,
    Eagle3Model,
    ids_of,
    layer_config,
)
from tempera.errors import TemperaError
from tempera.runtime.network_directory import write_network
from tempera.runtime.tensor_files import renamed
from tempera.wrapped.target import WrappedTarget

VERSION = "0.9.0"
"""Of `speculators`, whose format it is."""


@torch.no_grad()
def export_draft(
    draft: str | Path, fast: LoadedModel, directory: str | Path, verifier: str, depth: int = 5
) -> None:
    """Write a draft that was trained with `draft=eagle3` in the format of `speculators`: its
    config.json and model.safetensors. The embedding is left out, which its reader takes from the
    target; the head is the target's rows of the tokens that images have.

    Args:
        draft: a directory of training, or `owner/name` of the hub.
        fast: its target, as `tempera.accelerate` returns it.
        directory: is written; created if necessary.
        verifier: what the target is called there: `owner/name` of the hub, or a directory.
        depth: tokens that the reader drafts in a round.

    Raises:
        TemperaError: the draft is of another kind or another target's, or the format cannot say
            what the target does.
    """
    target: Any = fast.pipeline.target
    if not isinstance(target, WrappedTarget):
        raise TemperaError(
            "export_draft reads the target's head: give it the model that tempera.accelerate "
            "returned."
        )
    network = read_draft(Eagle3Model, draft)
    check_target(network, target)
    if not target.embeds_ids:
        raise TemperaError(
            "this target embeds the codes of images separately from text, which the speculators "
            "format cannot describe: its drafts cannot be written in this format."
        )
    ids, _ = ids_of(target)
    text = target.network.config
    config: dict[str, Any] = {
        **WAYS,
        "architectures": ["Eagle3Speculator"],
        "speculators_version": VERSION,
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(network.features),
        "transformer_layer_config": {
            **layer_config(target),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": text.max_position_embeddings,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": verifier, "architectures": target.architectures},
        },
    }
    to_draft = torch.zeros(text.vocab_size, dtype=torch.bool)
    to_draft[ids] = True
    tensors = renamed(network.state_dict(), NAMES)
    tensors[HEAD] = target.network.lm_head.weight[ids.to(target.device)].to(torch.float32)
    tensors[TO_DRAFT], tensors[TO_TARGET] = to_draft, ids - torch.arange(len(ids))
    write_network(Path(directory), tensors, config)
