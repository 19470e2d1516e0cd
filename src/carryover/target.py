"""The target: a frozen Hugging Face causal LM that yields features of chosen layers, and verifies proposals.

Features come from forward hooks on the captured decoder layers, never from `output_hidden_states`; logits come from the
model's own final norm, LM head and soft-capping. All cache handling of transformers lives here: caches keep every row of
every layer (sliding layers are masked, not truncated), so that verification can always be undone by cropping.

Letters: `b` batch, `S` sequence, `Q` new tokens, `N` anchors, `P` proposals, `M` captured layers, `D` target hidden size,
`V` vocabulary. Source: SPEC 1.2, 6.2 (stage 0 and 2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .errors import InputError
from .layer_ids import LayerIds
from .rows import Rows, TargetRule, branch_rows, concat, dense

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


class TargetOutput(NamedTuple):
    """hidden: `[b, Q, D]` after the final norm; features: `[b, Q, M*D]` of the captured layers, raw, or None."""

    hidden: Tensor
    features: Tensor | None


class Target:
    """A frozen target. Every method runs without gradient; weights are never changed."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None = None, name: str = "") -> None:
        """Wraps a loaded model. Raises InputError for a model family whose masks and head are not known to be exact."""
        family = model.config.model_type
        if family not in FAMILIES:
            raise InputError(f"the target family {family!r} is not supported; supported are {', '.join(FAMILIES)}.")
        self.model = model.eval().requires_grad_(False)
        self.decoder: nn.Module = getattr(model.model, "language_model", model.model)
        self.config = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path

    @classmethod
    def load(cls, name: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu") -> Target:
        """Loads a folder, a hub id, or an embedded target (`smollm2`, `lab`).

        dtype: `auto` keeps the checkpoint's; `float32` is what exactness tests use. Raises InputError when there is no such
        model or its family is not supported.
        """
        from .embedded import EMBEDDED

        path = EMBEDDED[str(name)]() if str(name) in EMBEDDED else name
        try:
            family = AutoConfig.from_pretrained(path).model_type
            if family not in FAMILIES:
                raise InputError(f"the target family {family!r} is not supported; supported are {', '.join(FAMILIES)}.")
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"cannot load the target {str(name)!r} (a folder, a hub id, smollm2 or lab): {reason}") from error
        return cls(model.to(device), tokenizer, str(name))  # type: ignore[arg-type]

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
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a response, from the model's generation config."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def fingerprint(self) -> str:
        """Identifies the weights a drafter or corpus belongs to; equal in fp32 and bf16 copies of the same checkpoint."""
        rows = self.model.get_input_embeddings().weight
        sample = rows[torch.linspace(0, len(rows) - 1, min(64, len(rows)), device=rows.device).long()]
        last = next(p for n, p in list(self.decoder.named_parameters())[::-1] if n.startswith("layers."))
        digest = hashlib.sha256()
        for part in (sample, last.flatten()[:65536], self.decoder.norm.weight):
            digest.update(part.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    # ---- its functions ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `[...]` to input embeddings `[..., D]`, with the family's own scaling."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Normed states `[..., D]` to logits `[..., V]`. Gradient flows to `hidden`, the weights are frozen."""
        logits = self.model.get_output_embeddings()(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def new_cache(self) -> Cache:
        """An empty cache that keeps all rows of all layers."""
        return DynamicCache()

    @staticmethod
    def crop(cache: Cache, length: int) -> None:
        """Forgets every row behind the first `length`."""
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

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

        Without `masks` this is ordinary causal continuation. masks: one `[b, 1, Q, K]` per layer type, from `self.masks`.
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

        sources = {i: self.decoder.embed_tokens if i < 0 else self.decoder.layers[i] for i in layer_ids}
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

        proposals: `[b, N, P]` tokens for positions anchor+1.. ; anchor, document: `[b, N]`. context: the rows `[b, S]` that
        the cache holds; the cache is left as it was. Returns hidden `[b, N*P, D]` and features `[b, N*P, M*D]`.
        """
        rows = branch_rows(anchor, document, proposals.shape[-1])
        length = cache.get_seq_length()
        out = self.forward(
            proposals.flatten(1), cache, layer_ids, rows.position, self.masks(rows, concat(context, rows))
        )
        self.crop(cache, length)
        return out
