"""Short hashes that identify a network's weights."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch

UNNAMED = "held"
"""In place of the identity of weights that a user holds, of which nothing tells the published."""


def identity_of(network: Any) -> str:
    """Hash the configuration and the weights of a network into 16 hexadecimal digits.

    Weights are rounded to bfloat16 first, so a network has the same identity in float32 and in
    bfloat16. Rounding to float16 differs: take the identity before converting to float16. Of a
    large tensor only about 4,096 evenly spaced entries are hashed.

    Args:
        network: a module with a `config`; one on the meta device has no weights to tell it by.
    """
    if any(tensor.is_meta for tensor in network.state_dict().values()):
        return "unread"
    digest = hashlib.sha256(json.dumps(config_dict(network), sort_keys=True, default=str).encode())
    for name, tensor in sorted(network.state_dict().items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 4096)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def config_dict(network: Any) -> dict[str, Any]:
    """Sizes and options of a network, from its Hugging Face or dataclass configuration."""
    config = network.config
    if hasattr(config, "to_diff_dict"):  # of transformers; a dataclass too, with other values
        ignored = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
        values = config.to_diff_dict()
        return {name: value for name, value in values.items() if name not in ignored}
    return asdict(config)
