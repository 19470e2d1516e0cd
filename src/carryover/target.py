"""The target: a frozen Hugging Face causal LM that yields features of chosen layers, and verifies proposals.

Features come from forward hooks on the captured decoder layers, never from `output_hidden_states`; logits come from the
model's own final norm, LM head and soft-capping. All cache handling of transformers lives here: caches keep every row
of every layer (sliding layers are masked, not truncated), so that verification can always be undone by cropping.

Letters: `b` batch, `S` sequence, `Q` new tokens, `K` cached and new rows, `N` anchors, `P` proposals, `M` captured
layers, `D` target hidden size, `V` vocabulary. Source: SPEC 1.2, 6.2 (stage 0 and 2).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .attention import GROUPED
from .compiled import compile_layers
from .errors import InputError
from .layer_ids import LayerIds
from .precision import quick_dtype
from .rows import Rows, TargetRule, branch_rows, concat, context_rows, dense
from .slots import SlotCache
from .weights import Products, arrange, described, products_of, restore

# Of multimodal checkpoints (the names without `_text`) only the language model runs. The 12B of Gemma 4 is `_unified`.
FAMILIES = (
    "llama",
    "qwen3",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "gemma4_unified_text",
    "gemma4_unified",
)
Cache = DynamicCache
FINGERPRINT_VALUES = 256  # weights read per parameter


class TargetOutput(NamedTuple):
    """hidden: `[b, Q, D]` after the final norm; features: `[b, Q, M*D]` of the captured layers, raw, or None."""

    hidden: Tensor
    features: Tensor | None


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise InputError(f"the target family {family!r} is not supported; supported are {', '.join(FAMILIES)}.")


def default_device() -> str:
    """This process's GPU, where transformers' Trainer puts the drafter as well, or the CPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _check_device(device: str | torch.device) -> None:
    try:
        if torch.device(device).type == "meta":
            raise InputError("the device meta holds no numbers; name cpu, cuda, or one of several as cuda:1.")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"the device {str(device)!r} needs a CUDA build of torch and a GPU; use --device cpu.")
    except RuntimeError as error:
        raise InputError(f"there is no device {str(device)!r}; name cpu, cuda, or one of several as cuda:1.") from error


class Target:
    """A frozen target: no method changes a weight, and only `head` lets a gradient through."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None = None, name: str = "") -> None:
        """Wraps a loaded model. Raises InputError for a family whose masks and head are not known to be exact."""
        _check_family(model.config.model_type)
        model.set_attn_implementation(GROUPED)  # the masks of rows.py are boolean; eager attention would add them
        self.model = model.eval().requires_grad_(False)
        self.decoder: Any = getattr(model.model, "language_model", model.model)
        self.config = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.device: torch.device = model.device  # asking the model walks its weights
        self.dtype: torch.dtype = model.dtype
        self._fingerprint: str | None = None
        self._head: Products | None = None

    @classmethod
    def load(cls, name: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu") -> Target:
        """Loads a folder, a hub id, or an embedded target (`smollm2`, `lab`).

        dtype: `auto` keeps the checkpoint's, but on a CPU without bf16 units takes float32; `float32` is what exactness
        tests use. Raises InputError when there is no such model, its files are damaged or incomplete, or its family is
        not supported.
        """
        from .embedded import EMBEDDED, located

        _check_device(device)
        path = located(name)
        try:
            _check_family(AutoConfig.from_pretrained(path).model_type)
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
            model, missing = loaded[0].to(device), sorted(loaded[1]["missing_keys"])
            if dtype == "auto":
                model = model.to(quick_dtype(model.dtype, device))
            tokenizer = AutoTokenizer.from_pretrained(path)
        except InputError:
            raise
        # AssertionError: torch's way of saying that it was built without CUDA
        except (OSError, ValueError, AttributeError, RuntimeError, AssertionError, SafetensorError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            known = "a folder, a hub id, " + " or ".join(EMBEDDED)
            raise InputError(f"cannot load the target {str(name)!r} ({known}): {reason}") from error
        if missing:
            raise InputError(
                f"the target {str(name)!r} lacks {len(missing)} weights (the first is {missing[0]}); "
                "its files are incomplete or do not belong to its config."
            )
        target = cls(model, tokenizer, str(name))
        target._fingerprint = target.fingerprint()  # before weights are packed
        arrange(target.decoder)
        target._head = target._head_products(None)  # now, not in the first token that is timed
        return target

    # ---- what it is ------------------------------------------------------------------------------------------------
    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding rows included."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int:
        return self.config.max_position_embeddings

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a response, from the model's generation config."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def fingerprint(self) -> str:
        """Identifies the weights that a drafter or corpus belongs to: 16 hex digits over a sample of every parameter.

        Equal in fp32 and bf16 copies of a checkpoint, and in its text-only and multimodal forms.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        head = self.model.get_output_embeddings().weight
        digest = hashlib.sha256()
        for _, weight in [*sorted(self.decoder.named_parameters()), ("head", head)]:
            flat = weight.detach().flatten()
            at = torch.linspace(0, len(flat) - 1, FINGERPRINT_VALUES, dtype=torch.float64).long()
            digest.update(flat[at.to(flat.device)].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    # ---- its functions ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `[...]` to input embeddings `[..., D]`, with the family's own scaling."""
        return self.model.get_input_embeddings()(tokens)

    def weights(self) -> dict[str, Any]:
        """How the weights are stored and multiplied, for the record of a measurement."""
        return described(self.decoder, *([self._head] if self._head else []))

    def head(self, hidden: Tensor) -> Tensor:
        """Normed states `[..., D]` to logits `[..., V]`. Gradient flows to `hidden`, the weights are frozen."""
        if self._head is None:
            self._head = self._head_products(None)
        return self._logits(hidden, self._head)

    def _head_products(self, vocabulary: Tensor | None) -> Products:
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if vocabulary is not None:
            at = vocabulary.to(weight.device)
            weight, bias = weight[at], None if bias is None else bias[at]
        return products_of(weight, bias)

    def _logits(self, hidden: Tensor, head: Products) -> Tensor:
        logits = head.with_gradient(hidden) if hidden.requires_grad and torch.is_grad_enabled() else head(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def head_of(self, vocabulary: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The head over some tokens only: states `[..., D]` of any dtype to logits `[..., len(vocabulary)]`.

        vocabulary: token ids; None for all. The rows are copied, once.
        """
        if vocabulary is None:
            return lambda hidden: self.head(hidden.to(self.dtype))
        head = self._head_products(vocabulary)
        return lambda hidden: self._logits(hidden.to(self.dtype), head)

    def new_cache(self) -> Cache:
        """An empty cache that keeps all rows of all layers."""
        return DynamicCache()

    @staticmethod
    def crop(cache: Cache, length: int) -> None:
        """Forgets every row behind the first `length`."""
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

    @staticmethod
    def select(cache: Cache, requests: Tensor) -> None:
        """Keeps only these requests (batch indices) of the cache."""
        cache.batch_select_indices(requests)

    def prefill(
        self, tokens: Tensor, cache: SlotCache, slot: int, start: int, layer_ids: LayerIds | None = None
    ) -> TargetOutput:
        """Runs tokens `[1, Q]` of one request behind the first `start` rows of its slot."""
        cache.aim(slot, [start], tokens.shape[1], tokens.device)
        return self.forward(tokens, cache, layer_ids)  # type: ignore[arg-type]

    def verify(
        self,
        tokens: Tensor,
        cache: SlotCache,
        anchors: list[int],
        layer_ids: LayerIds | None = None,
        compiled: bool = False,
    ) -> TargetOutput:
        """Runs tokens `[b, Q]` of the requests in slots 0 to b-1, from position `anchors[i]` on, over what is there.

        compiled: for all slots, `b` of the cache, and over all rows there are (see `compiled.py`).
        """
        length = cache.aim(0, anchors, tokens.shape[1], tokens.device, compiled)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        # The last block of a request may reach beyond the context; what it proposes there is never emitted.
        positions = (torch.tensor(anchors, device=tokens.device)[:, None] + steps).clamp(max=self.max_length - 1)
        if compiled:
            restore(self.decoder)
            compile_layers(self.decoder.layers, tokens.is_cuda)
        elif len(anchors) == 1:  # ordinary continuation, for which transformers needs no mask or makes the same one
            return self.forward(tokens, cache, layer_ids, positions)  # type: ignore[arg-type]
        rows = torch.arange(length, device=tokens.device).expand(len(anchors), -1)
        queries, keys = (context_rows(p, torch.zeros_like(p)) for p in (positions, rows))
        return self.forward(tokens, cache, layer_ids, positions, self.masks(queries, keys))  # type: ignore[arg-type]

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        layer_ids: LayerIds | None = None,
        positions: Tensor | None = None,
        masks: dict[str, Tensor] | None = None,
    ) -> TargetOutput:
        """Runs tokens `[b, Q]` behind the cache (which grows by Q rows) and captures features of `layer_ids`.

        Without `masks` this is ordinary causal continuation. masks: one `[b, 1, Q, K]` per layer type, from
        `self.masks`; they need `positions [b, Q]` wherever these are not the row indices.
        """
        kwargs: dict[str, Any] = {}
        if positions is not None:
            kwargs["position_ids"] = positions
        if masks is not None:
            kwargs["attention_mask"] = masks if getattr(self.config, "layer_types", None) else masks["full_attention"]
        with self._capture(layer_ids or ()) as captured:
            out = self.decoder(tokens, past_key_values=cache, use_cache=cache is not None, **kwargs)
        features = torch.cat([captured[i] for i in layer_ids], dim=-1) if layer_ids else None
        return TargetOutput(out.last_hidden_state, features)

    @contextmanager
    def _capture(self, layer_ids: LayerIds | tuple[()]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}

        def keep(i: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                captured[i] = output[0] if isinstance(output, tuple) else output

            return hook

        decoder = self.decoder
        sources: dict[int, nn.Module] = {i: decoder.embed_tokens if i < 0 else decoder.layers[i] for i in layer_ids}
        handles = [module.register_forward_hook(keep(i)) for i, module in sources.items()]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def masks(self, queries: Rows, keys: Rows) -> dict[str, Tensor]:
        """One `[b, 1, Q, K]` mask per layer type of this target."""
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        windows = {"full_attention": None, "sliding_attention": getattr(self.config, "sliding_window", None)}
        return {kind: dense(TargetRule(windows[kind]), queries, keys) for kind in kinds}

    def verify_branches(
        self, proposals: Tensor, anchor: Tensor, document: Tensor, context: Rows, cache: Cache, layer_ids: LayerIds
    ) -> TargetOutput:
        """States of many proposals in one forward: each branch sees its own prefix and itself, never another branch.

        proposals: `[b, N, P]` tokens for positions anchor+1.. ; anchor, document: `[b, N]`. context: the rows `[b, S]`
        that the cache holds; the cache is left as it was. Returns hidden `[b, N*P, D]` and features `[b, N*P, M*D]`.
        """
        rows = branch_rows(anchor, document, proposals.shape[-1])
        length = cache.get_seq_length()
        out = self.forward(
            proposals.flatten(1), cache, layer_ids, rows.position, self.masks(rows, concat(context, rows))
        )
        self.crop(cache, length)
        return out
