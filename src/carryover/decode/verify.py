"""Which proposals the target accepts, and the token that follows them: every acceptance rule of the project.

All rules are lossless: whatever the drafter does, the tokens they emit are distributed as the target's own.

* Drafts chosen by argmax (`draft_sampling="greedy"`): the target chooses a token at every row, and proposals are
  accepted while they equal it. At temperature 0 this is the greedy rule. Above it, it is sample-and-match, which is
  also rejection sampling with a one-hot draft distribution: a proposal is accepted with probability `p(proposal)`.
* Drafts drawn from the drafter's distribution q (`draft_sampling="probabilistic"`): rejection sampling. A proposal is
  accepted with probability `min(1, p/q)`; the first rejected one is replaced by a draw from `max(p - q, 0)`.

Letters: `b` batch, `P` proposals, `V` vocabulary. Source: SPEC 5.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .processors import History
from .sampling import Generators, Sampling, draw, uniform

DraftSampling = Literal["greedy", "probabilistic"]


class Verdict(NamedTuple):
    """accepted: how many proposals, n, `[b]`; next_token: the correction (n < P) or the bonus (n = P), `[b]`."""

    accepted: Tensor
    next_token: Tensor


def matched_prefix(proposals: Tensor, reference: Tensor) -> Tensor:
    """Length `[...]` of the longest prefix in which proposals `[..., P]` equal the reference `[..., P]`."""
    return _leading(proposals == reference)


def verify(
    proposals: Tensor,
    logits: Tensor,
    sampling: Sampling,
    draft_probabilities: Tensor | None = None,
    generator: Generators = None,
) -> Verdict:
    """Applies the rule that fits how the proposals were made.

    proposals: `[b, P]`, P may be 0. logits: the target's, `[b, P+1, V]`; row 0 is the anchor's and judges proposal 1,
    the last row gives the bonus. draft_probabilities: `[b, P, V]`, the fp32 distributions that the proposals were drawn
    from, after all corrections and processors (`Chooser` records them); None if they were chosen by argmax.
    """
    if sampling.greedy or draft_probabilities is None:
        return sample_and_match(proposals, sampling.choose(logits, generator))
    return rejection_sampling(proposals, sampling.probabilities(logits), draft_probabilities, generator)


def sample_and_match(proposals: Tensor, chosen: Tensor) -> Verdict:
    """proposals `[b, P]` against the target's own choice at every row, `[b, P+1]`."""
    accepted = matched_prefix(proposals, chosen[:, :-1])
    return Verdict(accepted, chosen.gather(1, accepted[:, None])[:, 0])


def rejection_sampling(proposals: Tensor, p: Tensor, q: Tensor, generator: Generators = None) -> Verdict:
    """proposals `[b, P]` drawn from q `[b, P, V]`, judged by the target's distributions p `[b, P+1, V]`.

    The bonus row counts as one where q is zero, so that its residual is p itself.
    """
    at = proposals[..., None]
    p_at, q_at = p[:, :-1].gather(2, at)[..., 0], q.gather(2, at)[..., 0]
    # In fp64, u < 1 implies u * q < q: a proposal with p >= q is accepted without exception.
    u = uniform(tuple(q_at.shape), q.device, generator)
    accepted = _leading(u * q_at < p_at)

    row = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, row)[:, 0]
    q_next = torch.cat((q, torch.zeros_like(p[:, :1])), dim=1).gather(1, row)[:, 0]
    residual = (p_next - q_next).clamp(min=0)
    # A rejection proves p < q somewhere, hence p > q elsewhere; rounding may hide that when they nearly agree.
    enough = residual.sum(-1, keepdim=True) > 1e-8
    return Verdict(accepted, draw(torch.where(enough, residual, p_next), generator))


class Chooser:
    """How the drafter of one round chooses its proposals; it remembers the distributions it drew from.

    Called with logits `[b, P, V]` once (DFlash) or `[b, V]` for every proposal in turn (Markov); returns token ids.
    With a history the proposals are chosen one by one in either case, each processed behind the ones before it.

    vocabulary: ids of the tokens that the logits are of; None: of all `vocab_size` tokens.
    """

    def __init__(
        self,
        sampling: Sampling,
        draft_sampling: DraftSampling,
        generator: Generators,
        history: History | None = None,
        vocabulary: Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.sampling, self.generator, self.history = sampling, generator, history
        self.vocabulary, self.vocab_size = vocabulary, vocab_size
        self.draws = draft_sampling == "probabilistic" and not sampling.greedy
        self._drawn: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        if self.vocabulary is not None and (self.draws or self.history is not None):
            everything = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
            return self._processed(everything.index_copy(-1, self.vocabulary, logits))
        chosen = self._processed(logits)
        return chosen if self.vocabulary is None else self.vocabulary[chosen]

    def _processed(self, logits: Tensor) -> Tensor:
        if self.history is None:
            return self._choose(logits)
        if logits.dim() == 3:
            return torch.stack([self._processed(row) for row in logits.unbind(1)], dim=1)
        before = (
            torch.stack(self._chosen, dim=1) if self._chosen else logits.new_empty(len(logits), 0, dtype=torch.long)
        )
        self._chosen.append(self._choose(self.history.row(logits, before)))
        return self._chosen[-1]

    def _choose(self, logits: Tensor) -> Tensor:
        if not self.draws:
            return logits.argmax(-1)
        self._drawn.append(self.sampling.probabilities(logits))
        return draw(self._drawn[-1], self.generator)

    @property
    def probabilities(self) -> Tensor | None:
        """The fp32 distributions of all proposals so far, `[b, P, V]`; None if they were chosen by argmax."""
        if not self.draws:
            return None
        return torch.cat([q if q.dim() == 3 else q[:, None] for q in self._drawn], dim=1)


def _leading(flags: Tensor) -> Tensor:
    """How many leading entries of `[..., P]` are true, `[...]`."""
    return flags.long().cumprod(-1).sum(-1)
