"""A reduced draft vocabulary: the same drafter that may propose fewer tokens, in decoding, training and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import noise, random_drafter

from carryover.drafter.modeling import Drafter
from carryover.errors import InputError
from carryover.formats import load_drafter, save_drafter
from carryover.formats.files import read_json, write_json, write_safetensors

KEPT = torch.tensor([2, 3, 5, 7, 11, 40, 94, 95])


def reduced(**overrides: object) -> tuple[Drafter, Drafter]:
    """A drafter of all 96 tokens, and the same one restricted to `KEPT`."""
    full = random_drafter(slots="next_token", **overrides)
    return full, full.restricted(KEPT)


def test_restricting_twice_is_restricting_once_and_nothing_comes_back() -> None:
    full, few = reduced(markov_rank=5)
    once, twice = full.restricted(KEPT[2:5]), few.restricted(KEPT[2:5])
    assert once.digest() == twice.digest() and once.config.draft_vocab_size == 3
    with pytest.raises(InputError, match="cannot propose"):
        few.restricted(torch.tensor([2, 4]))


def test_ids_and_indices_are_inverse_and_what_is_missing_is_minus_one() -> None:
    full, few = reduced()
    tokens = torch.arange(96)
    index = few.vocabulary_index(tokens)
    assert index.tolist() == [KEPT.tolist().index(t) if t in KEPT else -1 for t in range(96)]
    assert few.token_ids(index[KEPT]).tolist() == KEPT.tolist()
    assert full.vocabulary_index(tokens) is tokens and full.token_ids(tokens) is tokens


@pytest.mark.parametrize("overrides", [{}, {"markov_rank": 5}, {"markov_rank": 5, "markov_kind": "rnn"}])
def test_logits_are_those_of_the_kept_tokens_and_proposals_the_best_of_them(overrides: dict) -> None:
    full, few = reduced(**overrides)
    hidden, lm_head, anchor = noise(2, 5, 32), noise(96, 32, seed=3), torch.tensor([4, 40])
    allowed = torch.full((96,), -torch.inf).index_fill(0, KEPT, 0.0)
    slow, _ = full.propose(hidden, anchor, lambda h: h @ lm_head.T, lambda x: (x + allowed).argmax(-1))
    tokens, logits = few.propose(hidden, anchor, lambda h: h @ lm_head[KEPT].T, lambda x: few.token_ids(x.argmax(-1)))
    assert torch.equal(tokens, slow) and set(tokens.flatten().tolist()) <= set(KEPT.tolist())
    previous = torch.cat((anchor[:, None], tokens[:, :-1]), dim=1)
    rows = few.proposing(hidden)
    assert torch.allclose(logits, full.logits(rows, previous, lambda h: h @ lm_head.T)[..., KEPT], atol=1e-5)
    assert torch.allclose(logits, few.logits(rows, previous, lambda h: h @ lm_head[KEPT].T), atol=1e-5)


def test_the_checkpoint_keeps_it_whatever_the_precision(tmp_path: Path) -> None:
    _, few = reduced(markov_rank=5)
    save_drafter(few, tmp_path / "d")
    for loaded in (load_drafter(tmp_path / "d", dtype=torch.bfloat16), Drafter.from_pretrained(tmp_path / "d")):
        assert loaded.config.draft_vocab_size == 8
        assert loaded.draft_vocab is not None and torch.equal(loaded.draft_vocab, KEPT)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.bool, torch.complex64])
def test_ids_of_another_type_are_refused(dtype: torch.dtype) -> None:
    _, few = reduced()
    with pytest.raises(InputError, match="ascending token ids"):
        Drafter.from_tensors(few.config, {**few.state_dict(), "draft_vocab": KEPT.to(dtype)})


@pytest.mark.parametrize(
    "ids", [[3, 2, 5, 7, 11, 40, 94, 95], [2, 2, 5, 7, 11, 40, 94, 95], [2, 3, 5, 7, 11, 40, 94, 96], [-1, *range(7)]]
)
def test_a_vocabulary_that_is_none_is_refused(ids: list[int], tmp_path: Path) -> None:
    _, few = reduced()
    save_drafter(few, tmp_path / "d")
    write_safetensors(tmp_path / "d" / "model.safetensors", {**few.state_dict(), "draft_vocab": torch.tensor(ids)})
    with pytest.raises(InputError, match="ascending token ids"):
        load_drafter(tmp_path / "d")


def test_a_size_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, few = reduced()
    with pytest.raises(InputError, match="more than the target's 96"):
        random_drafter(draft_vocab_size=97)
    save_drafter(few, tmp_path / "d")
    write_json(tmp_path / "d" / "config.json", {**read_json(tmp_path / "d" / "config.json"), "draft_vocab_size": 0})
    with pytest.raises(InputError, match="draft_vocab"):
        load_drafter(tmp_path / "d")


def test_formats_that_have_no_place_for_it_refuse_it(tmp_path: Path) -> None:
    full = random_drafter(draft_vocab_size=8)
    with pytest.raises(InputError, match="cannot express draft_vocab_size"):
        save_drafter(full, tmp_path / "z", "zlab")
