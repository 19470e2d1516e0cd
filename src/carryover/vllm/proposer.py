"""One draft inside vLLM: which rows are carry rows, where the block goes, and how proposals are chosen.

vLLM's own proposer runs the round; the three steps it leaves to a subclass are here. Nothing is kept from one draft to
the next, so requests may come, go, be preempted and share cached prefixes in any way.

Letters: `b` requests, `n` tokens of the batch, `B` block rows, `P` proposals, `D` hidden, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from .checkpoint import drafter_config
from .layout import layout, rejected_rows


class CarryProposer(DFlashProposer):
    """vLLM's DFlash proposer for a drafter of this project."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        config = drafter_config(self.draft_model_config.hf_config)
        assert config is not None
        self.drafter = config
        self.rows = self.num_speculative_tokens + config.first_slot  # B

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.inner = self.model.unwrap() if hasattr(self.model, "unwrap") else self.model
        self.inner.share()

    def propose(  # type: ignore[override]
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        *args: Any,
        common_attn_metadata: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Proposals `[b, P]`. num_rejected_tokens_gpu `[b]`: R of each request; None where nothing was verified."""
        starts = common_attn_metadata.query_start_loc
        rejected = torch.zeros_like(starts[1:]) if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu
        self.inner.rejected = rejected_rows(starts, rejected, len(target_token_ids))
        return super().propose(
            num_speculative_tokens,
            target_token_ids,
            *args,
            common_attn_metadata=common_attn_metadata,
            num_rejected_tokens_gpu=rejected,
            **kwargs,
        )

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Fills the buffers that the model reads: context rows `[n, D]` with their positions and slots, and the blocks.

        next_token_ids `[b]`: the anchors. Returns b*B, the indices of the proposing rows `[b*P]`, and the metadata of
        the blocks' attention.
        """
        assert num_rejected_tokens_gpu is not None
        requests, n, rows = cad.batch_size(), len(target_token_ids), self.rows
        places = layout(
            cad.query_start_loc,
            target_positions,
            num_rejected_tokens_gpu,
            cad.seq_lens,
            cad.block_table_tensor,
            self.block_size,
            rows,
            self.drafter.first_slot,
            self.drafter.carry != "none",
        )
        total = requests * rows
        self._dflash_num_context, self._dflash_hidden_states = n, target_hidden_states
        self._context_positions_buffer[:n] = target_positions
        self._context_slot_mapping_buffer[:n] = places.context_slots
        self.positions[:total] = places.positions
        self._slot_mapping_buffer[:total] = places.slots
        block = self.input_ids[:total].view(requests, rows)
        block.fill_(self.parallel_drafting_token_id)
        block[:, 0] = next_token_ids
        self.anchors = next_token_ids.long()

        upper = cad.seq_lens_cpu_upper_bound
        metadata = CommonAttentionMetadata(
            query_start_loc=self.arange[: requests + 1] * rows,
            query_start_loc_cpu=torch.arange(requests + 1, dtype=torch.int32) * rows,
            seq_lens=places.lengths.to(cad.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if upper is None else upper + rows,
            num_reqs=cad.num_reqs,
            num_actual_tokens=total,
            max_query_len=rows,
            max_seq_len=cad.max_seq_len + rows,
            block_table_tensor=cad.block_table_tensor,
            slot_mapping=self._slot_mapping_buffer[:total],
            causal=self.dflash_causal,
        )
        return total, places.proposing, metadata

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Proposals `[b*P]` from the proposing rows `[b*P, D]`, and the distributions `[b*P, V]` of the corrected
        logits that they were drawn from, if any were (`draft_sample_method` probabilistic, above temperature 0).

        Chosen by argmax there is no distribution; vLLM then judges with a one-hot one, which is as lossless.
        """
        drawn: list[Tensor] = []

        def draw(logits: Tensor, rows: slice) -> Tensor:
            # A copy: vLLM's sampler divides by the temperature in place.
            tokens, q = self._sample_from_logits(logits.float().clone(), sampling_metadata)
            assert q is not None
            drawn.append(q)
            return tokens

        draws = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        count = self.num_speculative_tokens
        tokens = self.inner.choose(hidden_states, self.anchors, count, draw if draws else None)
        return tokens, torch.stack(drawn, dim=1).flatten(0, 1) if drawn else None
