"""Which drafters the plugin takes, how vLLM sees them, and what is refused; needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafters import SETTINGS, random_drafter

from carryover.errors import InputError
from carryover.formats import save_drafter
from carryover.formats.files import read_json
from carryover.vllm.checkpoint import ARCHITECTURE, Shape, check_servable, drafter_config, is_ours, load, served_config

TARGET = Shape(hidden_size=32, vocab_size=96, num_layers=6, max_length=512)


def ours(folder: Path) -> bool:
    return is_ours(lambda name: read_json(folder / name) if (folder / name).exists() else None)


@pytest.mark.parametrize(
    ("form", "settings", "expected"),
    [
        ("carryover", {}, True),  # nobody else reads this format
        ("carryover", {"carry": "embedding", "markov_rank": 4}, True),
        ("zlab", {}, False),  # stock vLLM serves it, and exactly
        ("zlab", {"carry": "embedding"}, True),
        ("speculators", {"carry": "plain", "markov_rank": 4}, True),
        ("speculators", {"markov_rank": 4}, False),
    ],
)
def test_which_drafters_are_ours(tmp_path: Path, form: str, settings: dict[str, Any], expected: bool) -> None:
    drafter = random_drafter(**settings)
    save_drafter(drafter, tmp_path / "d", form)
    assert ours(tmp_path / "d") is expected
    assert load(str(tmp_path / "d")).carry == drafter.config.carry


def test_a_foreign_checkpoint_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}')
    assert not ours(tmp_path)
    assert not ours(tmp_path / "missing")


def test_vllm_sees_a_qwen3_with_the_zlab_keys() -> None:
    config = random_drafter(carry="embedding", carry_site="post_norm", markov_rank=4).config
    seen = served_config(config)
    assert seen.architectures == [ARCHITECTURE]
    assert seen.dflash_config == {"target_layer_ids": [1, 3, 4], "mask_token_id": 7}
    assert (seen.hidden_size, seen.head_dim, seen.rope_parameters["rope_theta"]) == (32, 8, 10000.0)
    again = drafter_config(seen)
    assert again is not None
    assert {key: getattr(again, key) for key in SETTINGS} == {key: getattr(config, key) for key in SETTINGS}
    assert (again.carry, again.carry_site, again.markov_rank) == ("embedding", "post_norm", 4)
    del seen.carryover
    assert drafter_config(seen) is None


def test_what_cannot_be_served_is_said_in_one_sentence() -> None:
    config = random_drafter(carry="embedding").config
    check_servable(config, TARGET, "llama", 4)
    with pytest.raises(InputError, match="num_speculative_tokens is 5, but the drafter was trained to propose 4"):
        check_servable(config, TARGET, "llama", 5)
    with pytest.raises(InputError, match=r"does not fit the target: its vocabulary has 96 rows, the target's 100"):
        check_servable(config, TARGET._replace(vocab_size=100), "llama", 4)
    with pytest.raises(InputError, match="gemma3_text"):
        check_servable(config, TARGET, "gemma3_text", 4)
    sliding = random_drafter(carry="plain", layer_types=["sliding_attention"] * 2, sliding_window=8).config
    with pytest.raises(InputError, match="only full_attention"):
        check_servable(sliding, TARGET, "llama", 4)
