"""What tempera takes from transformers, which must be imported through here.

transformers imports torchvision on the way to its models, and next to a CPU-only torch that import fails unless it was mended before.
"""

from tempera.evaluation.torchvision_ops import import_torchvision

import_torchvision()

from transformers import LlamaConfig, LlamaModel  # noqa: E402
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding  # noqa: E402

__all__ = ["Cache", "CacheLayerMixin", "LlamaConfig", "LlamaDecoderLayer", "LlamaModel", "LlamaRotaryEmbedding"]
