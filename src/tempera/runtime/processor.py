"""What the processor computes fast."""

import torch


def computes_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are fast on the device. On an x86 processor without
    AVX-512 they are computed number by number, at a small fraction of float32's speed.
    """
    if device.type != "cpu":
        return True
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
