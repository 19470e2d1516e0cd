"""The floating-point type that a device computes fast: what `auto` means, and what Muon's iteration runs in.

A processor without bf16 units emulates them, up to twenty times as slowly as float32 (docs/speed.md).
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from .notes import note


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 in hardware: AVX-512 BF16 or AMX on x86, BF16 on ARM."""
    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        told = torch.backends.cpu.get_cpu_capability()  # what torch may use (ATEN_CPU_CAPABILITY), or what there is
        there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return bool(told.startswith("AVX512") and there)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """bf16 where the device has units for it, float32 on a CPU without."""
    return torch.bfloat16 if torch.device(device).type != "cpu" or has_bf16_units() else torch.float32


def quick_dtype(stored: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What weights of this type are computed in on a device: as they are, or in float32 on a CPU that would emulate it
    (with a note). Every number of a shorter type is one of float32's."""
    emulated = stored == torch.float16 or (stored == torch.bfloat16 and fast_dtype(device) == torch.float32)
    if torch.device(device).type != "cpu" or not emulated:
        return stored
    name = str(stored).removeprefix("torch.")
    other = " (--dtype bfloat16 keeps it)" if stored == torch.bfloat16 else ""
    note(f"this processor has no units for {name}, so the target is computed in float32{other}.")
    return torch.float32
