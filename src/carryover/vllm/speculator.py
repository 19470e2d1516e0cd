"""One draft inside vLLM's model runner V2: what `proposer.py` is for V1.

V2's own kernel writes where rows lie. It knows no carry rows, but it needs no other rules for them: told that nothing
was rejected, it gives every row of the verification its slot, puts the block behind them all and lets attention reach
that far, which is the layout of `layout.py`. Only the block's positions are then R too high. So a draft with carry is
vLLM's draft without rejected rows, and R is taken off the positions before RoPE sees them.

Nothing here waits for the device or depends on its numbers: R stays on it, all shapes follow from the batch, and what
the draft's forward reads lies in buffers that are made once. So a CUDA graph could hold the forward and the walk of the
Markov head. None does, because that was never tried; see `init_cudagraph_manager`.

Letters: `b` requests, `n` tokens of the batch, `B` block rows, `P` proposals, `R` carry rows, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from .checkpoint import drafter_config
from .layout import carried, rejected_rows
from .model import DFlashCarryover, Draw


class CarrySpeculator(DFlashSpeculator):
    """vLLM's DFlash speculator for a drafter of this project."""

    model: DFlashCarryover

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = drafter_config(self.draft_model_config.hf_config)
        assert config is not None
        self.drafter = config
        self.sample_from_anchor = config.first_slot == 0  # vLLM's name for next-token slots
        self.num_query_per_req = self.num_speculative_steps + config.first_slot  # B
        self.starts = torch.arange(self.max_num_reqs, device=device) * self.num_query_per_req
        self.behind = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)  # R, for each block row

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Leaves drafts out of CUDA graphs, whatever is asked for; the target's forward is none of its business."""
        super().init_cudagraph_manager(CUDAGraphMode.NONE)

    def load_draft_model(self, *args: Any) -> DFlashCarryover:
        model: DFlashCarryover = super().load_draft_model(*args)
        model.share()
        return model

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Proposals `[b, P]`. aux_hidden_states: features of the verified tokens, one `[n, Dt]` for each captured
        layer; num_rejected `[b]`: R of each request."""
        assert aux_hidden_states
        starts, rows = input_batch.query_start_loc[: input_batch.num_reqs + 1], self.num_query_per_req
        carry = self._carried(input_batch.positions, starts, num_rejected)
        # Rows are fused and marked before they enter `hidden_states`, the buffer that context keys are made from.
        self.model.rejected = rejected_rows(starts, carry, len(aux_hidden_states[0]))
        self.behind.zero_()
        self.behind[: len(carry) * rows] = carry.repeat_interleave(rows)
        return super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected - carry,
            *args,
            **kwargs,
        )

    def _carried(self, positions: Tensor, starts: Tensor, rejected: Tensor) -> Tensor:
        """Carry rows of each draft, `[b]`. V2 drafts up to the end of the longest sequence: there the block goes over
        the rejected rows, as without carry, because vLLM has no slots behind them."""
        if self.drafter.carry == "none":
            return torch.zeros_like(rejected)
        return carried(rejected, positions[starts[1:].long() - 1] + 1, self.num_query_per_req, self.max_model_len)

    def _run_model(self, num_tokens: int, *args: Any, **kwargs: Any) -> Tensor:
        self.input_buffers.positions[:num_tokens] -= self.behind[:num_tokens]
        return super()._run_model(num_tokens, *args, **kwargs)

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """The forward of all blocks and the choice of proposals, into `draft_tokens`; arguments of `_run_model`."""
        hidden, count = self._run_model(*args, **kwargs), self.num_speculative_steps
        rows = self.sample_indices[: num_reqs * count]
        anchors = self.input_buffers.input_ids[self.starts[:num_reqs]].long()
        draw = None if self.draft_logits is None else self._draw(rows)
        self.draft_tokens[:num_reqs] = self.model.choose(hidden[rows], anchors, count, draw).view(num_reqs, count)

    def _draw(self, rows: Tensor) -> Draw:
        """How tokens are drawn at the block rows `rows [b*P]`: by vLLM's sampler, which also keeps the logits that the
        verification judges by.

        vLLM draws with noise that is a function of the request's seed and the token's position, so a position that is
        drafted again meets the same noise. Carry rows make that wrong: they tell which tokens the noise chose, and
        what is drawn would not follow the logits given them, hence the output not the target. So no noise is met twice:
        anchors grow from round to round, and proposal k behind an anchor at a counts as position `a * P + k`.
        """
        cache, count, total = self.draft_logits, self.num_speculative_steps, len(rows)
        assert cache is not None
        requests, columns = self.sample_idx_mapping[:total], self.sample_col[:total]
        anchors = self.sample_pos[:total] - self.behind[rows] - 1 - columns
        noise = anchors * count + columns

        def draw(logits: Tensor, of: slice) -> Tensor:
            return gumbel_sample(
                logits.to(cache.dtype),  # drawn from what is kept, not from something more precise
                requests[of],
                self.temperature,
                self.seeds,
                noise[of],
                apply_temperature=True,
                is_drafting=True,
                logits_cache=cache,
                logits_cache_col=columns[of],
                use_fp64=self.use_fp64_gumbel,
            )

        return draw
