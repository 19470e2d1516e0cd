"""The target against plain Hugging Face forwards, for every family: features, logits, branches, caches, refusals.

The reference is always the whole model without a cache on exactly one document, `model(input_ids)`, which knows nothing
of this project's masks, caches or hooks. Tolerances are for fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    SLIDING_FAMILIES,
    TEXT_FAMILIES,
    WINDOW,
    WRAPPED_FAMILIES,
    save_target,
    tiny_target,
)
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from carryover.errors import InputError
from carryover.layer_ids import LayerIds
from carryover.rows import Rows, branch_rows, context_rows
from carryover.target import Target

IDS = LayerIds([-1, 0, 2, 4])  # with the embedding output; 2 and 5 are the full layers of the sliding families
VARIANTS: dict[str, Callable[[], Target]] = {
    **{family: (lambda family=family: tiny_target(family)) for family in TEXT_FAMILIES + WRAPPED_FAMILIES},
    "qwen3 sliding": lambda: tiny_target("qwen3", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    "gemma4_text plain": lambda: tiny_target(
        "gemma4_text", num_kv_shared_layers=0, hidden_size_per_layer_input=0, attention_k_eq_v=False
    ),
    "gemma4_text experts": lambda: tiny_target(
        "gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16
    ),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def any_target(request: pytest.FixtureRequest) -> Target:
    return VARIANTS[request.param]()


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randint(5, 96, shape, generator=torch.Generator().manual_seed(seed))


def reference(target: Target, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(features `[S, M*D]` of IDS, normed states `[S, D]`, logits `[S, V]`) of one document, by Hugging Face alone."""
    with torch.no_grad():
        out = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[i + 1] for i in IDS], dim=-1)
    return features[0], out.hidden_states[-1][0], out.logits[0]


def close(a: Tensor, b: Tensor) -> None:
    """Equal to 3e-5 of the largest value (raw states of Gemma reach 10 and more; a wrong mask errs by 1e-2)."""
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 3e-5 * max(1.0, b.abs().max().item())


# ---- features and logits -------------------------------------------------------------------------------------------
def test_features_and_logits_are_hugging_faces(any_target: Target):
    tokens = draw(1, 2, 20)
    out = any_target.forward(tokens, layer_ids=IDS)
    assert out.features is not None and out.features.shape == (2, 20, len(IDS) * any_target.hidden_size)
    for b in range(2):
        features, hidden, logits = reference(any_target, tokens[b].tolist())
        close(out.features[b], features)
        close(out.hidden[b], hidden)
        close(any_target.head(out.hidden[b]), logits)


def test_embed_is_the_input_of_the_first_layer(any_target: Target):
    tokens = draw(2, 1, 7)
    out = any_target.forward(tokens, layer_ids=LayerIds([-1]))
    assert out.features is not None
    assert torch.equal(any_target.embed(tokens), out.features)


def test_logits_carry_gradient_to_the_states_and_to_no_weight(any_target: Target):
    hidden = torch.randn(3, any_target.hidden_size, requires_grad=True)
    any_target.head(hidden).sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert all(p.grad is None and not p.requires_grad for p in any_target.model.parameters())


def test_hooks_are_gone_after_a_failed_forward(target: Target):
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[10**6]]), layer_ids=IDS)
    assert not any(module._forward_hooks for module in target.model.modules())


# ---- caches --------------------------------------------------------------------------------------------------------
def test_continuation_in_pieces_is_one_forward(any_target: Target):
    """Far past the sliding window, in steps of one and of several tokens, with Hugging Face's own masks."""
    tokens, cache = draw(3, 2, 4 * WINDOW), any_target.new_cache()
    pieces = [any_target.forward(piece, cache, IDS) for piece in tokens.split([9, 1, 1, 5, 1, 7], dim=1)]
    assert all(layer.keys.shape[2] == 4 * WINDOW for layer in cache.layers), "a cache that forgets cannot be cropped"
    for b in range(2):
        features, hidden, _ = reference(any_target, tokens[b].tolist())
        close(torch.cat([p.features for p in pieces if p.features is not None], dim=1)[b], features)
        close(torch.cat([p.hidden for p in pieces], dim=1)[b], hidden)


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_rejected_tokens_leave_no_trace(any_target: Target, kept: int):
    """Decoding's pattern: verify five tokens, crop to those kept, go on."""
    committed, rejected, following = draw(4, 1, 15), draw(5, 1, 5), draw(6, 1, 6)
    cache = any_target.new_cache()
    any_target.forward(committed, cache)
    any_target.forward(rejected, cache)
    any_target.crop(cache, 15 + kept)
    assert cache.get_seq_length() == 15 + kept
    out = any_target.forward(following, cache, IDS)
    tokens = torch.cat((committed, rejected[:, :kept], following), dim=1)
    features, hidden, _ = reference(any_target, tokens[0].tolist())
    assert out.features is not None
    close(out.features[0], features[-6:])
    close(out.hidden[0], hidden[-6:])


def test_selected_requests_go_on_alone(any_target: Target):
    tokens, cache = draw(16, 3, 14), any_target.new_cache()
    any_target.forward(tokens[:, :10], cache)
    any_target.select(cache, torch.tensor([2, 0]))
    out = any_target.forward(tokens[[2, 0], 10:], cache)
    for row, request in enumerate((2, 0)):
        close(out.hidden[row], reference(any_target, tokens[request].tolist())[1][10:])


def test_crop_beyond_the_end_and_to_nothing(target: Target):
    cache = target.new_cache()
    target.forward(draw(7, 1, 6), cache)
    target.crop(cache, 9)
    assert cache.get_seq_length() == 6
    target.crop(cache, 0)
    assert cache.get_seq_length() == 0
    tokens = draw(8, 1, 4)
    close(target.forward(tokens, cache).hidden[0], reference(target, tokens[0].tolist())[1])


# ---- packed documents and branches ---------------------------------------------------------------------------------
class Packed:
    """Two batch entries of packed documents with padding behind them, longer than any sliding window."""

    lengths = ((13, 17), (25, 3))
    width = 32

    def __init__(self) -> None:
        self.documents = [
            [draw(100 * b + d, n).tolist() for d, n in enumerate(row)] for b, row in enumerate(self.lengths)
        ]
        self.tokens = torch.zeros(2, self.width, dtype=torch.long)
        self.position = torch.zeros(2, self.width, dtype=torch.long)
        self.document = torch.full((2, self.width), -1)
        for b, row in enumerate(self.documents):
            start = 0
            for d, document in enumerate(row):
                end = start + len(document)
                self.tokens[b, start:end] = torch.tensor(document)
                self.position[b, start:end] = torch.arange(len(document))
                self.document[b, start:end] = d
                start = end

    @property
    def rows(self) -> Rows:
        return context_rows(self.position, self.document)

    def run(self, target: Target, cache: Any = None) -> Any:
        return target.forward(self.tokens, cache, IDS, self.position, target.masks(self.rows, self.rows))


def test_packed_documents_do_not_see_each_other(any_target: Target):
    packed = Packed()
    out = packed.run(any_target)
    assert torch.isfinite(out.hidden).all(), "padding must stay finite: it shares kernels with real rows"
    for b, row in enumerate(packed.documents):
        for d, document in enumerate(row):
            features, hidden, _ = reference(any_target, document)
            close(out.features[b, packed.document[b] == d], features)
            close(out.hidden[b, packed.document[b] == d], hidden)


# Anchors repeat, their branches overlap, one starts its document, one ends it (its branch runs past the document).
ANCHOR = torch.tensor([[12, 12, 16, 0, 10, 7], [24, 20, 22, 2, 0, 24]])
DOCUMENT = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]])
P = 9  # more than the window: late proposals no longer see their anchor in a sliding layer


def test_branches_together_equal_branches_alone(any_target: Target):
    packed, proposals, cache = Packed(), draw(9, 2, 6, P), any_target.new_cache()
    packed.run(any_target, cache)
    out = any_target.verify_branches(proposals, ANCHOR, DOCUMENT, packed.rows, cache, IDS)
    assert out.features is not None
    together, states = out.features.unflatten(1, (6, P)), out.hidden.unflatten(1, (6, P))
    for b in range(2):
        for i in range(6):
            prefix = packed.documents[b][DOCUMENT[b, i]][: int(ANCHOR[b, i]) + 1]
            features, hidden, logits = reference(any_target, prefix + proposals[b, i].tolist())
            close(together[b, i], features[-P:])
            close(states[b, i], hidden[-P:])
            close(any_target.head(states[b, i]), logits[-P:])


def test_branches_in_one_forward_with_their_prefix(any_target: Target):
    """Without a cache: committed rows and branch rows side by side."""
    packed, proposals = Packed(), draw(10, 2, 6, P)
    branches = branch_rows(ANCHOR, DOCUMENT, P)
    everything = Rows(*(torch.cat(fields, dim=1) for fields in zip(packed.rows, branches, strict=True)))
    tokens = torch.cat((packed.tokens, proposals.flatten(1)), dim=1)
    out = any_target.forward(tokens, None, IDS, everything.position, any_target.masks(everything, everything))
    close(out.hidden[:, : packed.width], packed.run(any_target).hidden)
    cache = any_target.new_cache()
    packed.run(any_target, cache)
    cached = any_target.verify_branches(proposals, ANCHOR, DOCUMENT, packed.rows, cache, IDS)
    close(out.hidden[:, packed.width :], cached.hidden)


def test_verification_leaves_the_cache_as_it_was(any_target: Target):
    packed, cache = Packed(), any_target.new_cache()
    packed.run(any_target, cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    any_target.verify_branches(draw(11, 2, 6, P), ANCHOR, DOCUMENT, packed.rows, cache, IDS)
    assert len(cache.layers) == len(before) > 0
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_decoding_goes_on_after_branches(any_target: Target):
    tokens, cache = draw(12, 1, 18), any_target.new_cache()
    any_target.forward(tokens[:, :14], cache)
    rows = context_rows(torch.arange(14)[None], torch.zeros(1, 14, dtype=torch.long))
    any_target.verify_branches(draw(13, 1, 2, P), torch.tensor([[13, 5]]), torch.tensor([[0, 0]]), rows, cache, IDS)
    out = any_target.forward(tokens[:, 14:], cache)
    close(out.hidden[0], reference(any_target, tokens[0].tolist())[1][14:])


@pytest.mark.parametrize("family", SLIDING_FAMILIES)
def test_the_window_matters_in_these_tests(family: str):
    """Guards the guards: with the window ignored, the same checks would fail."""
    tokens = draw(14, 1, 20)
    exact, ignored = tiny_target(family), tiny_target(family, sliding_window=100)
    assert exact.fingerprint() == ignored.fingerprint()
    assert (exact.forward(tokens).hidden - ignored.forward(tokens).hidden).abs().max() > 1e-2


# ---- what it says of itself ----------------------------------------------------------------------------------------
def test_sizes_and_stop_ids(any_target: Target):
    assert (any_target.num_layers, any_target.hidden_size, any_target.vocab_size) == (6, 32, 96)
    assert any_target.max_length == 512
    assert any_target.stop_ids == {2}
    any_target.model.generation_config.eos_token_id = [2, 7]
    assert any_target.stop_ids == {2, 7}
    any_target.model.generation_config.eos_token_id = 2


def test_fingerprint_identifies_the_weights(any_target: Target, tmp_path: Path):
    fingerprint = any_target.fingerprint()
    folder = save_target(any_target, tmp_path / "fp32")
    half = Target.load(folder, dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.fingerprint() == fingerprint
    save_target(half, tmp_path / "bf16")
    assert Target.load(tmp_path / "bf16", dtype="float32").fingerprint() == fingerprint


def test_fingerprint_differs_for_other_weights():
    one, other, tuned = tiny_target(seed=0), tiny_target(seed=1), tiny_target(seed=0)
    tuned.decoder.layers[3].mlp.up_proj.weight.data *= 1.02  # as a merged adapter would: one matrix, nothing else
    assert len({one.fingerprint(), other.fingerprint(), tuned.fingerprint()}) == 3
    assert tiny_target(seed=0).fingerprint() == one.fingerprint()


@pytest.mark.parametrize("family", WRAPPED_FAMILIES)
def test_wrapped_and_text_only_models_share_a_fingerprint(family: str):
    wrapped, text = tiny_target(family), tiny_target(f"{family}_text", seed=1)
    assert wrapped.fingerprint() != text.fingerprint()
    text.decoder.load_state_dict(wrapped.decoder.state_dict())
    assert wrapped.fingerprint() == text.fingerprint()


# ---- loading -------------------------------------------------------------------------------------------------------
def test_a_saved_target_loads_as_it_was(any_target: Target, tmp_path: Path):
    loaded = Target.load(str(save_target(any_target, tmp_path)))
    same = Target(deepcopy(any_target.model))
    weights = dict(same.model.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.model.named_parameters())
    tokens = draw(15, 1, 12)
    assert torch.equal(loaded.forward(tokens).hidden, same.forward(tokens).hidden)
    assert loaded.name == str(tmp_path) and loaded.dtype == torch.float32
    assert loaded.tokenizer is not None and loaded.tokenizer.chat_template


def test_eager_attention_is_replaced(target: Target, tmp_path: Path):
    """Eager attention adds its mask to the scores, so a boolean one would mask nothing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_target(target, tmp_path), attn_implementation="eager")
    packed = Packed()
    close(packed.run(Target(model)).hidden, packed.run(target).hidden)


def refused(name: Any, match: str, **kwargs: Any) -> None:
    with pytest.raises(InputError, match=match) as error:
        Target.load(name, **kwargs)
    assert "\n" not in str(error.value)


def test_unsupported_family_is_named(tmp_path: Path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(InputError, match="family 'gpt2' is not supported; supported are llama, "):
        Target(model)
    model.save_pretrained(tmp_path)
    refused(tmp_path, "family 'gpt2' is not supported")


def test_missing_and_empty_folders_are_refused(tmp_path: Path):
    refused(tmp_path / "nothing here", "there is no target folder")
    refused(tmp_path, "cannot load the target")


@pytest.mark.parametrize("damage", ["truncated", "garbage", "absent"])
def test_damaged_weights_are_refused(target: Target, tmp_path: Path, damage: str):
    file = save_target(target, tmp_path) / "model.safetensors"
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:2000] if damage == "truncated" else b"not a checkpoint at all")
    refused(tmp_path, "cannot load the target")


def test_damaged_config_is_refused(target: Target, tmp_path: Path):
    (save_target(target, tmp_path) / "config.json").write_text("{")
    refused(tmp_path, "cannot load the target")


def test_missing_weights_are_not_made_up(target: Target, tmp_path: Path):
    """Hugging Face fills weights that a checkpoint lacks with random numbers and warns; here it is an error."""
    config_file = save_target(target, tmp_path) / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "num_hidden_layers": 7}))
    refused(tmp_path, "lacks 9 weights .the first is model.layers.6")


def test_a_target_needs_its_tokenizer(target: Target, tmp_path: Path):
    target.model.save_pretrained(tmp_path)
    refused(tmp_path, "cannot load the target")


def test_bad_dtype_and_device_are_refused(target: Target, tmp_path: Path):
    save_target(target, tmp_path)
    refused(tmp_path, "cannot load the target", dtype="float99")
    refused(tmp_path, "there is no device .warp.", device="warp")
    refused(tmp_path, "the device meta holds no numbers", device="meta")
