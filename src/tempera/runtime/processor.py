"""What the processor computes fast, and in what dtype."""

import torch


def computes_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are fast on the device. On an x86 processor without
    AVX-512, and on GPUs before Ampere (T4, V100), they are computed at a small fraction of
    float32's speed.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a device computes with weights of a dtype. Few processors multiply float16
    numbers fast, so on a CPU weights rounded to float16 are computed with in float32.
    """
    widened = dtype == torch.float16 and device.type == "cpu"
    return torch.float32 if widened else dtype
