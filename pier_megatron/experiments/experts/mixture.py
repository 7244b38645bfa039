r"""An ensemble's likelihood from its experts' likelihoods, without the experts.

With ``w_e(t) = softmax_e(log prior_e + sum_{s<t} log p_e(x_s))``, the posterior over experts after the tokens before ``t`` of
the same sequence, the mixture is ``p(x_t | x_<t) = sum_e w_e(t) p_e(x_t | x_<t)`` (branch-train-merge, arXiv 2208.03306; HDEE,
arXiv 2502.19385). Only the likelihood of the token that came is needed of each expert, so that experts of any size and layout
are mixed after each has been scored alone.

All arrays are ``[experts, sequences, tokens]`` in nats, float64.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CACHED_SEQUENCES = 100
"""Sequences from which the cached prior is learned, at most."""

_DECAY = 0.3


def uniform_prior(experts: int) -> Array:
    """Log-prior without a preference, ``[experts]``."""
    return np.full(experts, -np.log(experts))


def cached_prior(scores: Array) -> Array:
    """Log-prior of a domain, learned from the first sequences of its text.

    As the public code of HDEE has it (gensyn-ai/hdee, ``eval_ensemble.py``): from ``log prior = 0`` on, after sequence ``k``,
    counted from 0, ``log prior <- log(0.3^(k+1) prior + posterior)`` with the posterior after the whole sequence under the
    prior before it. There the prior restarts with every batch; here it does not.

    Args:
        scores: Log-likelihoods of the sequences; the first :data:`CACHED_SEQUENCES` are used.

    Returns:
        Normalised, ``[experts]``.
    """
    log_prior = np.zeros(len(scores))
    for number, of_sequence in enumerate(scores.sum(axis=2).T[:CACHED_SEQUENCES]):
        posterior = _log_normalised(log_prior + of_sequence)
        log_prior = np.logaddexp((number + 1) * np.log(_DECAY) + log_prior, posterior)
    return _log_normalised(log_prior)


def mixed(scores: Array, log_prior: Array) -> Array:
    """Log-likelihoods of the mixture, ``[sequences, tokens]``, under a log-prior ``[experts]``."""
    before = np.cumsum(scores, axis=2) - scores
    weights = _log_normalised(log_prior[:, None, None] + before)
    found: Array = np.logaddexp.reduce(weights + scores, axis=0)
    return found


def averaged(scores: Array) -> Array:
    """Log-likelihoods of HDEE's "simple average": the experts' mean log-likelihood, ``[sequences, tokens]``.

    A geometric mean that is not renormalised: its probabilities sum to less than 1, and its perplexity is higher
    than with renormalisation.
    """
    found: Array = scores.mean(axis=0)
    return found


def perplexity(scores: NDArray[np.float64]) -> float:
    """``exp`` of the mean negative log-likelihood."""
    return float(np.exp(-scores.mean()))


def _log_normalised(values: Array) -> Array:
    """Values less the logarithm of the sum of their exponentials over experts."""
    found: Array = values - np.logaddexp.reduce(values, axis=0)
    return found
