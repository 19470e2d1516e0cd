"""`auto` is bf16 exactly where there are units for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_target

from carryover import notes, precision
from carryover.precision import fast_dtype, has_bf16_units
from carryover.target import Target


@pytest.mark.parametrize(
    "machine, told, bf16, amx, units",
    [
        ("x86_64", "AVX512", True, False, True),  # AMD Zen 4, Intel Cooper Lake
        ("x86_64", "AVX512", False, True, True),
        ("x86_64", "AVX512", False, False, False),  # Skylake
        ("AMD64", "AVX2", True, True, False),  # torch was told to use less than there is
        ("x86_64", "AVX2", False, False, False),
        ("aarch64", "DEFAULT", False, False, True),
    ],
)
def test_units(machine, told, bf16, amx, units, monkeypatch):
    monkeypatch.setattr(precision.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: told)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert has_bf16_units() is units
    assert fast_dtype("cpu") == (torch.bfloat16 if units else torch.float32)
    assert fast_dtype("cuda:0") == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("units", [True, False])
def test_auto_computes_what_is_stored_or_float32(stored, units, tmp_path: Path, monkeypatch, capsys):
    """A copy in float32 holds the same numbers; the choice is said once, and an explicit type is never changed."""
    monkeypatch.setattr(precision, "has_bf16_units", lambda: units)
    monkeypatch.setattr(notes, "_said", set())
    target = tiny_target("llama")
    target.model.to(stored).save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    kept = stored == torch.float32 or (stored == torch.bfloat16 and units)
    Target.load(tmp_path)
    loaded = Target.load(tmp_path)
    assert loaded.dtype == (stored if kept else torch.float32) == loaded.model.dtype
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(said) == (0 if kept else 1) and all("float32" in line for line in said)
    weights = dict(target.model.named_parameters())
    assert all(torch.equal(p, weights[n].to(p.dtype)) for n, p in loaded.model.named_parameters())
    assert Target.load(tmp_path, "bfloat16").dtype == torch.bfloat16
