"""A fresh drafter that begins with the target's own last layers, or with another drafter, instead of random weights.

From the target: draft layer i of n takes the weights of target layer L - n + i. The fusion passes on the last captured
layer alone, so a context row is what that layer hands to the next, and its keys and values are nearly the target's own.
Everything is trained afterwards; this only saves the steps in which a drafter learns to speak the target's vocabulary,
which is most of a training that a small machine can afford.

Letters: `D` hidden size, `L` target layers, `M` captured layers. A lever of ours, not of the paper; measured in
docs/smollm2.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..drafter.modeling import Drafter
from ..errors import InputError
from ..target import Target

SHARED = ("fc", "hidden_norm", "layers", "norm", "draft_vocab")  # parts of a drafter that another can begin with
ALIKE = ("target_layer_ids", "num_hidden_layers", "draft_vocab_size", "mask_token_id", "hidden_act", "rope_parameters")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MATRICES = (
    *(f"self_attn.{name}" for name in (*PROJECTIONS, "o_proj")),
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@torch.no_grad()
def start_from_target(drafter: Drafter, target: Target) -> None:
    """Copies the target's last layers and final norm into a fresh drafter.

    A block row passes its layer's input norm and a context row passes `hidden_norm`, which all layers share; the
    target has one norm per layer for both. So the norms' weights move into the projections that read them.

    Raises InputError where a draft layer has another shape than a layer of the target.
    """
    sources = list(target.decoder.layers)[-len(drafter.layers) :]
    d = drafter.config.hidden_size
    if len(sources) < len(drafter.layers):
        raise InputError(f"drafter.start: target needs as many layers in the target; it has {len(sources)}.")
    for layer, source in zip(drafter.layers, sources, strict=True):
        _copy_layer(layer, source)
    drafter.norm.weight.copy_(_scale(target.decoder.norm, d))
    drafter.hidden_norm.weight.fill_(1.0)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -d:] = torch.eye(d)


@torch.no_grad()
def start_from_drafter(drafter: Drafter, other: Drafter, name: str) -> None:
    """Copies layers, norms, fusion and draft vocabulary of `other` into a fresh drafter, and its heads where they fit.

    What may differ is what leaves the weights their meaning: block size, slots, windows, heads, carry. So a DFlash
    drafter can begin where a Markov drafter ended, and the other way round. The Markov head is taken over whole or not
    at all. name: where `other` lies, for messages.

    Raises InputError where layers, fusion, captured target layers, rotation, mask token or draft vocabulary differ.
    """
    mine, theirs = drafter.state_dict(), other.state_dict()
    for field in ALIKE:
        wanted, there = getattr(drafter.config, field), getattr(other.config, field)
        if wanted != there:
            raise InputError(
                f"drafter.start: {name} has {field} {there}, and the recipe {wanted}, so its weights would mean "
                "something else; make the recipe's the same."
            )
    for key in sorted(key for key in mine.keys() | theirs.keys() if key.split(".")[0] in SHARED):
        shapes = [list(tensors[key].shape) if key in tensors else "missing" for tensors in (theirs, mine)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"drafter.start: {name} has other layers: {key} is {shapes[0]} there and {shapes[1]} in the recipe; "
                "leave the widths out or name those of that drafter."
            )
        mine[key].copy_(theirs[key])
    heads = [(d.config.markov_rank, d.config.markov_kind, d.config.slots) for d in (drafter, other)]
    for head in ("markov_head", "confidence_head"):
        pairs = {key: theirs.get(key) for key in mine if key.startswith(f"{head}.")}
        if heads[0] == heads[1] and all(v is not None and v.shape == mine[key].shape for key, v in pairs.items()):
            for key, value in pairs.items():
                mine[key].copy_(value)


def _copy_layer(layer: Any, source: Any) -> None:
    for name in MATRICES:
        mine, theirs = layer.get_submodule(name), _find(source, name)
        if mine.weight.shape != theirs.weight.shape:
            raise InputError(
                f"drafter.start: target copies layers, so their shapes must agree: {name} is "
                f"{list(mine.weight.shape)} in the drafter and {list(theirs.weight.shape)} in the target; leave the "
                "widths of the drafter out."
            )
        mine.weight.copy_(theirs.weight)
    d = layer.input_layernorm.weight.shape[0]
    before_attention = _scale(_find(source, "input_layernorm"), d)
    for name in PROJECTIONS:
        layer.get_submodule(f"self_attn.{name}").weight.mul_(before_attention)
    layer.input_layernorm.weight.fill_(1.0)
    layer.post_attention_layernorm.weight.copy_(_scale(_find(source, "post_attention_layernorm"), d))
    for mine, name in ((layer.self_attn.q_norm, "q"), (layer.self_attn.k_norm, "k")):
        theirs = getattr(source.self_attn, f"{name}_norm", None)
        if theirs is not None:
            mine.weight.copy_(_scale(theirs, layer.self_attn.head_dim))
        else:  # of a target without norms of queries and keys: the size they have for isotropic inputs
            mine.weight.fill_(layer.get_submodule(f"self_attn.{name}_proj").weight.square().sum(1).mean().sqrt())


def _find(source: nn.Module, name: str) -> Any:
    try:
        return source.get_submodule(name)
    except AttributeError as error:
        raise InputError(f"drafter.start: target cannot copy this family's layers: they have no {name}.") from error


def _scale(norm: Any, width: int) -> Tensor:
    """The factor a norm multiplies with, whatever convention its weight has (Gemma adds one)."""
    return norm(torch.ones(width, dtype=torch.float32)).float()
