"""Peak speeds of GPUs, from which model FLOPs utilisation (MFU) is computed."""

import re

import torch

PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 operations per second, by words in the GPU's name (vendor's data sheets); the first match counts."""


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of bfloat16 products in operations per second; None if it is not known."""
    if device.type != "cuda":
        return None

    name = torch.cuda.get_device_name(device)
    return next((flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)
