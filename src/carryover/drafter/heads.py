"""Heads on top of the block's hidden states: the first-order Markov correction and the confidence logit.

The Markov head turns a parallel drafter into a cheap sequential one: the logits of proposal i get a low-rank bias that
depends on the token before it. One walk over the head serves greedy and sampled drafting alike.

Letters: `b` batch, `P` proposals, `D` hidden, `V` vocabulary (of logits: the draft vocabulary), `r` rank.
Source: SPEC 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import DrafterConfig

Choose = Callable[[Tensor], Tensor]  # corrected logits [..., V], of the draft vocabulary -> target token ids [...]


class MarkovHead(nn.Module):
    """`logits_i + W2 f(W1[previous token], ...)`, f depending on the kind.

    vanilla: f = W1[y]. gated: f = sigmoid(W_g [o_i; W1[y]]) * W1[y]. rnn: a gated state of size r that starts at zero
    and reads [state; W1[y]; o_i] at every proposal.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        r, d = config.markov_rank, config.hidden_size
        self.kind = config.markov_kind
        self.rank = r
        self.markov_w1 = nn.Embedding(config.vocab_size, r)
        self.markov_w2 = nn.Linear(r, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + d, 3 * r)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Correction after tokens `previous [b]` at rows `hidden [b, D]`.

        Returns the factor `[b, r]` for W2 and the next state `[b, r]`.
        """
        e = self.markov_w1(previous)
        if self.kind == "vanilla":
            return e, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, e), dim=-1))) * e, state
        gate, candidate, out = self.joint_proj(torch.cat((state, e, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def bias(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced correction `[b, P, V]` for known previous tokens `[b, P]` and rows `[b, P, D]`."""
        if self.kind == "rnn":
            state, factors = self.start(hidden), []
            for i in range(previous.shape[1]):
                factor, state = self.step(previous[:, i], hidden[:, i], state)
                factors.append(factor)
            return self.markov_w2(torch.stack(factors, dim=1))
        return self.markov_w2(self.step(previous, hidden, hidden)[0])

    def start(self, hidden: Tensor) -> Tensor:
        """The zero state `[b, r]` before the first proposal."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def walk(self, logits: Tensor, hidden: Tensor, anchor_token: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
        """Chooses P tokens left to right, each conditioned on the one before it.

        logits: `[b, P, V]` before correction; hidden: `[b, P, D]`; anchor_token: `[b]`.
        Returns tokens `[b, P]` and the corrected logits they were chosen from, `[b, P, V]`.
        """
        previous, state = anchor_token, self.start(hidden)
        tokens, corrected = [], []
        for i in range(logits.shape[1]):
            factor, state = self.step(previous, hidden[:, i], state)
            corrected.append(logits[:, i] + self.markov_w2(factor))
            previous = choose(corrected[-1])
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(corrected, dim=1)


class ConfidenceHead(nn.Module):
    """Logit of the probability that the target accepts a proposal, from its row and the token before it. Stored and
    computed, not yet used for scheduling."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank * config.confidence_with_markov, 1)

    def forward(self, hidden: Tensor, previous_embedding: Tensor | None) -> Tensor:
        """Rows `[b, P, D]` (and W1 rows of the previous tokens `[b, P, r]`) to logits `[b, P]`."""
        x = hidden if previous_embedding is None else torch.cat((hidden, previous_embedding), dim=-1)
        return self.proj(x).squeeze(-1)
