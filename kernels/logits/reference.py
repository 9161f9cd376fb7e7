"""Changes to logits in plain torch, in place; on a device without one look at a value from the host.

Owns: the arithmetic of penalties, biases, masks and bans. Never does: count tokens, know what a request is, or keep a
row drawable: a row of which everything was forbidden is -inf throughout, and whoever forbids must see to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from procengine.kernels import host_reads

__all__ = ["add_rows", "apply_penalties", "apply_token_bitmask", "ban_sequences", "ban_tokens_before"]


def apply_penalties(
    logits: Tensor, rows: Tensor, output_counts: Tensor, prompt_mask: Tensor, slots: Tensor, penalties: Tensor
) -> None:
    """Make tokens that were there before less likely, or more. Changes `rows`, int64 [n], of `logits`, float32 [S, V].

    Of the tables, `slots`, int64 [n], are looked at: output_counts: int32 [*, V], how often each token was generated.
    prompt_mask: bool [*, V], whether the prompt holds it. penalties: float32 [n, 3], repetition, frequency, presence;
    the values 1, 0 and 0 leave a row as it is, bit for bit.

    Repetition is that of CTRL (Keskar et al. 2019, arXiv:1909.05858) as transformers has it: over prompt and output,
    positive logits are divided and negative ones multiplied. Then frequency (once for each time) and presence (once)
    are subtracted over the output alone, as OpenAI's API reference defines them.
    """
    some = logits[rows]
    counts, (repetition, frequency, presence) = output_counts[slots], penalties.unbind(1)
    seen = prompt_mask[slots] | (counts > 0)
    if host_reads.are_free(logits):  # few tokens were seen: look at those alone
        used = (repetition != 1) | (frequency != 0) | (presence != 0)
        of, tokens = (seen & used.unsqueeze(1)).nonzero(as_tuple=True)
        some[of, tokens] = _penalised(some[of, tokens], counts[of, tokens], repetition[of], frequency[of], presence[of])
    else:
        columns = (repetition.unsqueeze(1), frequency.unsqueeze(1), presence.unsqueeze(1))
        torch.where(seen, _penalised(some, counts, *columns), some, out=some)
    logits[rows] = some


def _penalised(logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Logits of tokens that were seen; all of one shape, or of shapes that broadcast."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return repeated - counts * frequency - (counts > 0) * presence


def add_rows(logits: Tensor, rows: Tensor, table: Tensor, slots: Tensor) -> None:
    """Add rows `slots`, int64 [n], of `table`, float32 [*, V], to `rows`, int64 [n], of `logits`, float32 [S, V].

    OpenAI's `logit_bias`, one row for each request that has any.
    """
    logits.index_add_(0, rows, table[slots])


def apply_token_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Forbid in the named rows what the bits do not allow: -inf in `logits`, float32 [S, V].

    rows: int64 [m], each once. words: int32 [m, W]; bit i of word w, counted from the lowest, allows token 32 * w + i.
    Tokens beyond the words are forbidden, bits beyond the vocabulary mean nothing. The format is that of llguidance
    and xgrammar.
    """
    vocab_size = logits.shape[1]
    shifts = torch.arange(8, device=logits.device)
    is_set = (torch.arange(256, device=logits.device).unsqueeze(1) >> shifts) & 1
    bounds_by_byte = torch.where(is_set > 0, torch.inf, -torch.inf)  # float32 [256, 8]
    octets = words.contiguous().view(torch.uint8)  # the bytes of a word, lowest first: all our machines are so
    bounds = bounds_by_byte.index_select(0, octets.reshape(-1).to(torch.int32)).view(len(words), 32 * words.shape[1])
    bounds = F.pad(bounds[:, :vocab_size], (0, max(0, vocab_size - bounds.shape[1])), value=-torch.inf)
    logits.index_copy_(0, rows, torch.minimum(logits.index_select(0, rows), bounds))


def ban_sequences(logits: Tensor, rows: Tensor, recent: Tensor, prefixes: Tensor, last: Tensor) -> None:
    """Forbid the last token of a sequence where a row ends with what stands before it (`bad_words`).

    Changes `logits`, float32 [S, V], contiguous. For each of E entries: rows, int64 [E]; recent, int32 [E, W], the
    newest tokens of the row, right-aligned, padded with an id that no prefix has; prefixes, int32 [E, W],
    right-aligned, where -1 matches anything; last, int64 [E], the token to be forbidden. Several entries may name the
    same row, or the same row and token. An entry that does not match changes nothing.
    """
    matches = ((recent == prefixes) | (prefixes < 0)).all(dim=1)
    _forbid(logits, rows, last, matches)


def ban_tokens_before(logits: Tensor, rows: Tensor, stop_ids: Tensor, is_early: Tensor) -> None:
    """Forbid the tokens that would end a row which has not its `min_tokens` yet.

    Changes `logits`, float32 [S, V], contiguous. rows: int64 [m]. stop_ids: int64 [m, K], padded with -1; what is not
    of the vocabulary bans nothing. is_early: bool [m]; rows where it is false keep their logits.
    """
    last = logits.shape[1] - 1
    is_banned = (stop_ids >= 0) & (stop_ids <= last) & is_early.unsqueeze(1)
    named = rows.unsqueeze(1).expand_as(stop_ids)
    _forbid(logits, named.reshape(-1), stop_ids.clamp(0, last).reshape(-1), is_banned.reshape(-1))


def _forbid(logits: Tensor, rows: Tensor, token_ids: Tensor, is_banned: Tensor) -> None:
    """-inf at the entries (rows, token_ids), int64 [E], where is_banned, bool [E].

    The minimum with -inf or +inf: unlike writing the old value back, it is right when two entries name one place and
    only one of them bans it.
    """
    bounds = torch.where(is_banned, -torch.inf, torch.inf).to(logits.dtype)
    logits.view(-1).scatter_reduce_(0, rows * logits.shape[1] + token_ids, bounds, "amin")
