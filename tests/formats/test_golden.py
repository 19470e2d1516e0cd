"""The recorded cases of other projects, through the training-style forward and through the decoding cache; and that a
case which differs in any way fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import embedding

from carryover.decode.state import DraftCache
from carryover.drafter.modeling import Drafter
from carryover.errors import InputError
from carryover.formats import read_checkpoint
from carryover.formats.parity import TOLERANCE, ParityResult, run_case

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())


def test_all_seven_cases_are_here():
    assert CASES == ["deepspec_dflash", "deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dspark_vanilla",
                     "speculators_dflash", "speculators_dspark", "zlab_dflash"]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case_passes(case):
    result = run_case(GOLDEN / case)
    assert result.hidden_difference < TOLERANCE
    assert result.logits_difference < TOLERANCE
    assert result.tokens_equal
    assert result.passed
    if case == "deepspec_dspark_vanilla":
        assert result.confidence_difference is not None and result.confidence_difference < TOLERANCE
    else:
        assert result.confidence_difference is None


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_case_passes_through_the_decoding_cache(case):
    """Context appended in two pieces to the in-place cache, a stale block between them, as decoding does it."""
    checkpoint, io = read_checkpoint(GOLDEN / case), load_file(GOLDEN / case / "io.safetensors")
    drafter = Drafter.from_tensors(checkpoint.config, checkpoint.tensors)
    embed = io.get("embed", checkpoint.embed)
    assert embed is not None
    block, length = embedding(io["block_tokens"], embed), io["target_hidden"].shape[1]
    size = block.shape[1]
    cache = DraftCache(checkpoint.config, 1, length + 2 * size, torch.float32, torch.device("cpu"))
    for start, end in ((0, 11), (11, length)):
        rows = drafter.context(io["target_hidden"][:, start:end])
        cache.write(drafter.key_values(rows, torch.arange(start, end)[None]), 0, [start])
        cache.aim([end], size)
        hidden = drafter.block(block, torch.arange(end, end + size)[None], cache)
    assert (hidden - io["expected_hidden"]).abs().max() < TOLERANCE


@pytest.fixture
def case(tmp_path):
    """A copy of the richest case that tests may spoil."""
    return Path(shutil.copytree(GOLDEN / "deepspec_dspark_vanilla", tmp_path / "case"))


def spoil(case: Path, name: str, change) -> None:
    io = load_file(case / "io.safetensors")
    if change is None:
        del io[name]
    else:
        io[name] = change(io[name])
    save_file(io, case / "io.safetensors")


@pytest.mark.parametrize(
    "name", ["expected_hidden", "expected_draft_logits", "expected_confidence_logits", "expected_draft_tokens"]
)
def test_a_case_that_differs_fails(name, case):
    def off_by_little(recorded: torch.Tensor) -> torch.Tensor:
        changed = recorded.clone()
        changed[0, -1] += 1 if recorded.dtype == torch.int64 else 3e-4
        return changed

    spoil(case, name, off_by_little)
    assert not run_case(case).passed


def test_nan_and_wrong_shapes_fail(case):
    assert not ParityResult("x", float("nan"), 0.0, None, True).passed
    assert not ParityResult("x", 0.0, 0.0, float("nan"), True).passed
    assert ParityResult("x", 0.0, 1e-5, 1e-5, True).passed
    spoil(case, "expected_hidden", lambda t: t[:, :3])
    assert run_case(case).hidden_difference == float("inf")


def test_the_other_slot_convention_fails(case):
    """The test can tell: next-token checkpoints read as fill-in propose from other rows."""
    checkpoint = read_checkpoint(case)
    checkpoint.config.slots = "fill_in"
    assert checkpoint.config.num_proposals == 6
    shutil.rmtree(case)
    shutil.copytree(GOLDEN / "zlab_dflash", case)
    raw = json.loads((case / "config.json").read_text())
    raw["dflash_config"]["sample_from_anchor"] = True
    (case / "config.json").write_text(json.dumps(raw))
    assert not run_case(case).passed


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("target_hidden", None, "lacks target_hidden"),
        ("expected_confidence_logits", None, "lacks expected_confidence_logits"),
        ("target_hidden", lambda t: t[:, :9], "records 9 context rows for an anchor at 23"),
        ("block_tokens", lambda t: t + 1, "other block tokens"),
    ],
)
def test_incomplete_cases_are_named(name, change, words, case):
    spoil(case, name, change)
    with pytest.raises(InputError, match=words):
        run_case(case)


def test_a_case_without_embedding_is_named(tmp_path):
    case = Path(shutil.copytree(GOLDEN / "zlab_dflash", tmp_path / "case"))
    spoil(case, "embed", None)
    with pytest.raises(InputError, match="lacks an embedding or an LM head"):
        run_case(case)
