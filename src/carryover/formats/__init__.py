"""Drafter checkpoints of every known format, read strictly and written so that their own projects can read them.

`carryover` is this project's format (`Drafter.save_pretrained`), one folder with everything. `zlab`, `speculators` and
`deepspec` are published ones; there the carry weights lie in a sidecar folder (see `sidecar.py`).

Letters: `V` vocabulary, `D` hidden size. Source: SPEC 4.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from ..drafter.config import DrafterConfig
from ..drafter.modeling import Drafter
from ..errors import InputError
from . import deepspec, sidecar, speculators, zlab
from .files import WEIGHTS, dtype_name, locate, read_json, read_tensors, write_json, write_safetensors

if TYPE_CHECKING:
    from ..target import Target
from ..weights import OF_DRAFTER, arrange

Format = Literal["carryover", "zlab", "speculators", "deepspec"]
PUBLISHED = {"zlab": zlab, "speculators": speculators, "deepspec": deepspec}
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
SAMPLED_ROWS = 64  # rows of a stored embedding that are compared with the target's


@dataclass
class Checkpoint:
    """A checkpoint as read. tensors: the drafter's own weights under its own names. embed, head: copies of the target's
    embedding and LM head `[V, D]`, where the format stores them; the drafter uses the target's."""

    format: Format
    config: DrafterConfig
    tensors: dict[str, Tensor]
    embed: Tensor | None
    head: Tensor | None


# ---- reading ---------------------------------------------------------------------------------------------------------
def load_drafter(
    path: str | Path,
    target: Target | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Drafter:
    """The drafter in a folder or hub id of any known format, in evaluation mode.

    dtype: None keeps the stored one. target: if given, the drafter must fit it. Raises InputError, one sentence, for a
    checkpoint that is damaged, of an unknown or unsupported kind, or made for another target.
    """
    checkpoint = read_checkpoint(locate(path))
    config = checkpoint.config
    if target is not None:
        if not config.num_target_layers:
            config.num_target_layers = target.num_layers
        _check_embedding(checkpoint, target)
        check_fits(config, target)
    drafter: Any = Drafter.from_tensors(config, checkpoint.tensors)  # Any: transformers hides the types of `to`
    return drafter.to(device=device, dtype=dtype or drafter.dtype)


def decoding_drafter(path: str | Path, target: Target) -> Drafter:
    """The drafter in the target's dtype and place, its weights stored as few rows are multiplied fastest: to decode
    with, not to train."""
    drafter = load_drafter(path, target, target.dtype, target.device)
    arrange(drafter, OF_DRAFTER)
    return drafter


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads a folder of any known format without building the drafter. Raises InputError."""
    raw = read_json(folder / "config.json")
    form = detect_format(raw)
    try:
        config = DrafterConfig.from_dict(raw) if form == "carryover" else PUBLISHED[form].read_config(raw)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder / 'config.json'} is malformed: {error}.") from error
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"the weights {name} in {folder} are not all numbers; such a drafter cannot be used.")
    if form == "carryover":
        return Checkpoint(form, config.checked(), tensors, None, None)
    carry = sidecar.read(folder, config)
    embed, head = tensors.pop(EMBED, None), tensors.pop(HEAD, None)
    if form == "speculators":
        speculators.read_vocabulary(tensors, config)
    elif "d2t" in tensors or "t2d" in tensors:
        raise InputError(f"the drafter in {folder} has d2t or t2d, which only speculators checkpoints have.")
    return Checkpoint(form, config.checked(), {**tensors, **carry}, embed, head)


def detect_format(raw: dict[str, Any]) -> Format:
    """Which format a parsed `config.json` has. Raises InputError for one that is no block drafter's."""
    architectures = raw.get("architectures") or [None]
    architecture = str(architectures[0] if isinstance(architectures, list) else architectures)
    if raw.get("model_type") == DrafterConfig.model_type:
        return "carryover"
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return "speculators"
    if "dflash_config" in raw or architecture == "DFlashDraftModel":
        return "zlab"
    if architecture.endswith("DSparkModel"):
        return "deepspec"
    raise InputError(
        f"this config.json (architecture {architecture}, model_type {raw.get('model_type')}) is no block drafter's; "
        f"known are {', '.join(get_args(Format))}."
    )


# ---- does it fit the target? -----------------------------------------------------------------------------------------
class Shape(Protocol):
    """What must be known of a target to see whether a drafter was made for one like it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_length(self) -> int: ...


def mismatches(config: DrafterConfig, target: Target) -> list[str]:
    """Every way in which the drafter does not fit the target, one clause each; none if it fits."""
    found = shape_mismatches(config, target)
    if not found and config.target_fingerprint and config.target_fingerprint != target.fingerprint():
        name = config.target_name or config.target_fingerprint
        found.append(f"it was trained for another target ({name}) of the same shape")
    return found


def shape_mismatches(config: DrafterConfig, target: Shape) -> list[str]:
    """Those that show without looking at the target's weights."""
    c, layers = config, target.num_layers
    found = []
    for name in ("hidden_size", "target_hidden_size"):
        if getattr(c, name) != target.hidden_size:
            found.append(f"its {name} is {getattr(c, name)}, the target's hidden size {target.hidden_size}")
    if c.vocab_size != target.vocab_size:
        found.append(f"its vocabulary has {c.vocab_size} rows, the target's {target.vocab_size}")
    if c.num_target_layers not in (0, layers):
        found.append(f"it was made for a target of {c.num_target_layers} layers, this one has {layers}")
    if c.layer_ids[-1] > layers - 2:
        found.append(
            f"it reads target layer {c.layer_ids[-1]}, and of {layers} layers the last usable one is {layers - 2}"
        )
    if not 0 <= c.mask_token_id < target.vocab_size:
        found.append(f"its mask token {c.mask_token_id} is no row of the target's embedding")
    if c.max_position_embeddings < target.max_length:
        found.append(f"it knows positions up to {c.max_position_embeddings}, the target up to {target.max_length}")
    return found


def check_fits(config: DrafterConfig, target: Target) -> None:
    """Raises InputError naming every mismatch between a drafter and the target."""
    found = mismatches(config, target)
    if found:
        raise InputError(f"the drafter does not fit the target {target.name!r}: {'; '.join(found)}.")


def _check_embedding(checkpoint: Checkpoint, target: Target) -> None:
    """Raises InputError where the target's embedding is not what a published drafter was trained on."""
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    if checkpoint.format != "carryover" and scale != 1.0 and not checkpoint.config.target_fingerprint:
        raise InputError(
            f"the target {target.name!r} scales its embedding (by {scale:g}), and {checkpoint.format} checkpoints do "
            "not say whether the drafter was trained on scaled rows; only drafters trained here can be used with it."
        )
    for name, stored, module in (("embedding", checkpoint.embed, embedding), ("LM head", checkpoint.head, head)):
        vocabulary = checkpoint.tensors.get("draft_vocab") if stored is checkpoint.head else None
        size = len(module.weight) if vocabulary is None else len(vocabulary)
        if stored is None or stored.shape != (size, module.weight.shape[1]):
            continue  # another shape is another vocabulary or width, which check_fits names
        rows = torch.linspace(0, size - 1, min(SAMPLED_ROWS, size)).long()
        tokens = rows if vocabulary is None else vocabulary[rows].clamp(0, len(module.weight) - 1)
        own = module.weight[tokens.to(module.weight.device)].to("cpu", torch.bfloat16)
        if not torch.equal(stored[rows].bfloat16(), own):
            raise InputError(
                f"the {name} stored with the drafter is not that of {target.name!r}; it was trained for another."
            )


# ---- writing ---------------------------------------------------------------------------------------------------------
def save_drafter(drafter: Drafter, path: str | Path, format: str = "carryover", target: Target | None = None) -> None:
    """Writes the drafter. target: needed by `deepspec`, whose checkpoints hold the embedding and the LM head, and by
    `speculators` for a reduced draft vocabulary, with which they hold the head's rows.

    A published format is refused, InputError, when it cannot say what this drafter computes, or when `path` holds files
    that would mix with it.
    """
    folder = Path(path)
    if format == "carryover":
        drafter.save_pretrained(folder)
        return
    if format not in PUBLISHED:
        raise InputError(f"there is no drafter format {format!r}; known are {', '.join(get_args(Format))}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not an empty folder; name a new one, so that no files of two checkpoints mix.")
    raw = {**PUBLISHED[format].write_config(drafter.config), "dtype": dtype_name(drafter.dtype)}
    _check_expressed(drafter.config, PUBLISHED[format].read_config(raw), format)
    tensors = {name: t.cpu() for name, t in drafter.state_dict().items()}
    carry = {name: tensors.pop(name) for name in list(tensors) if name.startswith(sidecar.PREFIX)}
    if format == "deepspec":
        tensors |= _target_copies(target, drafter)
    if format == "speculators" and drafter.draft_vocab is not None:
        head = _target_copies(target, drafter)[HEAD]
        speculators.write_vocabulary(tensors, drafter.config)
        tensors[HEAD] = head[drafter.draft_vocab.cpu()].clone()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_json(folder / "config.json", raw)
        write_safetensors(folder / WEIGHTS, tensors)
        sidecar.write(folder, drafter.config, carry)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # a half-written checkpoint is worse than none
        raise InputError(f"cannot write the drafter to {folder}: {error}.") from error


def _check_expressed(config: DrafterConfig, again: DrafterConfig, form: str) -> None:
    """Raises InputError if a reader of the written config would compute something else."""
    unused = {*sidecar.FIELDS, sidecar.HINT}
    if "sliding_attention" not in (config.layer_types or ()):
        unused |= {"sliding_window", "sliding_causal", "sliding_window_from_anchor"}
    unused |= set() if config.markov_rank else {"markov_kind"}
    unused |= set() if config.confidence else {"confidence_with_markov"}
    for field in DrafterConfig.__annotations__:
        ours, theirs = getattr(config, field), getattr(again, field)
        if field not in unused and ours != theirs:
            raise InputError(
                f"the {form} format cannot express {field} = {ours!r} of this drafter (it would read {theirs!r})."
            )


def _target_copies(target: Target | None, drafter: Drafter) -> dict[str, Tensor]:
    if target is None:
        raise InputError("this format holds copies of the target's LM head or embedding; name the target too.")
    check_fits(drafter.config, target)
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    if getattr(embedding, "scalar_embed_scale", 1.0) != 1.0 or getattr(target.config, "final_logit_softcapping", None):
        raise InputError(
            f"copies of the scaled embedding or capped head of targets like {target.name!r} cannot be written in this "
            "format; convert to another."
        )
    return {EMBED: embedding.weight.to("cpu", drafter.dtype), HEAD: head.weight.to("cpu", drafter.dtype).clone()}
