"""The carry interface: a fresh one is the identity, the sites are what they claim, the projector has the stated
size."""

from __future__ import annotations

import pytest
import torch
from drafters import config, noise, random_drafter, rms_norm

from carryover.drafter.modeling import Drafter

FRESH = [
    {"carry": "embedding", "carry_site": "pre_norm"},
    {"carry": "embedding", "carry_site": "post_norm"},
    {"carry": "projector", "carry_projector": "fc_copy"},
    {"carry": "projector", "carry_projector": "bottleneck"},
]


@pytest.mark.parametrize("interface", FRESH)
@torch.no_grad()
def test_fresh_carry_rows_are_context_rows_bit_for_bit(interface):
    torch.manual_seed(0)
    fresh = Drafter(config(**interface))
    plain = Drafter(config(carry="plain"))
    plain.load_state_dict({k: v for k, v in fresh.state_dict().items() if not k.startswith("carry.")})
    features = noise(2, 7, 96)
    assert torch.equal(fresh.carried(features), plain.carried(features))
    assert torch.equal(fresh.carried(features), fresh.context(features))


@torch.no_grad()
def test_starting_on_a_trained_fc_is_the_identity_too():
    drafter = random_drafter(carry="projector")
    assert not torch.equal(drafter.carried(noise(1, 3, 96)), drafter.context(noise(1, 3, 96)))
    drafter.carry.start_from(drafter.fc)
    assert torch.equal(drafter.carried(noise(1, 3, 96)), drafter.context(noise(1, 3, 96)))


@torch.no_grad()
def test_pre_norm_mark_is_a_mark_on_the_features_before_fc():
    """`fc` is wide, so some e' on the features has W_fc e' = e; adding it there must give the same carry rows."""
    drafter, features = random_drafter(carry="embedding"), noise(1, 4, 96)
    on_features = torch.linalg.pinv(drafter.fc.weight) @ drafter.carry.embedding
    torch.testing.assert_close(drafter.carried(features), drafter.context(features + on_features), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_the_sites_differ_and_are_the_formulas():
    features = noise(1, 1, 96)
    for site in ("pre_norm", "post_norm"):
        drafter = random_drafter(carry="embedding", carry_site=site)
        fused, e, weight = drafter.fc.weight @ features[0, 0], drafter.carry.embedding, drafter.hidden_norm.weight
        pre, post = rms_norm(fused + e, weight, 1e-6), rms_norm(fused, weight, 1e-6) + e
        expected, other = (pre, post) if site == "pre_norm" else (post, pre)
        torch.testing.assert_close(drafter.carried(features)[0, 0], expected, atol=1e-5, rtol=1e-5)
        assert (drafter.carried(features)[0, 0] - other).abs().max() > 0.1


@torch.no_grad()
def test_projectors_are_the_formulas():
    features, h = noise(1, 1, 96), noise(1, 1, 96)[0, 0]
    copy = random_drafter(carry="projector", carry_projector="fc_copy")
    expected = rms_norm(copy.carry.fc.weight @ h, copy.hidden_norm.weight, 1e-6)
    torch.testing.assert_close(copy.carried(features)[0, 0], expected, atol=1e-5, rtol=1e-5)
    narrow = random_drafter(carry="projector", carry_projector="bottleneck")
    fused = narrow.fc.weight @ h + narrow.carry.up.weight @ (narrow.carry.down.weight @ h)
    expected = rms_norm(fused, narrow.hidden_norm.weight, 1e-6)
    torch.testing.assert_close(narrow.carried(features)[0, 0], expected, atol=1e-5, rtol=1e-5)


def test_projector_of_the_paper_has_19_7_million_parameters():
    with torch.device("meta"):
        carry = Drafter(config(hidden_size=2560, target_layer_ids=[1, 2, 3], carry="projector")).carry
    assert sum(p.numel() for p in carry.parameters()) == 3 * 2560**2
    with torch.device("meta"):
        assert [p.shape for p in Drafter(config(carry="embedding")).carry.parameters()] == [(32,)]
        assert list(Drafter(config(carry="plain")).carry.parameters()) == []
        assert not hasattr(Drafter(config()), "carry")
