"""Short names of a network's weights."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch


def identity_of(network: Any) -> str:
    """16 hexadecimal digits that name a network, a module with a `config`: a hash of its
    configuration and of its weights.

    Weights are rounded to bfloat16 first, so that a network is the same one in float32 and in
    bfloat16 (float16 rounds otherwise: take the identity before converting to it), and only about
    4,096 evenly spaced entries of a large tensor are hashed.
    """
    digest = hashlib.sha256(json.dumps(config_dict(network), sort_keys=True, default=str).encode())
    for name, tensor in sorted(network.state_dict().items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 4096)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def config_dict(network: Any) -> dict[str, Any]:
    """The sizes and options of a network, from its dataclass or Hugging Face configuration."""
    config = network.config
    if hasattr(config, "to_diff_dict"):
        values: dict[str, Any] = config.to_diff_dict()
        passing = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
        return {name: value for name, value in values.items() if name not in passing}
    return asdict(config)
