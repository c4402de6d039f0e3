"""Estimates of KL(policy || reference), token by token, from log-probs of sampled tokens
(joschu.net/blog/kl-approx.html).

With d = logprob - reference_logprob:

    name       value           its gradient, in expectation over the policy's own samples
    k1         d               zero: a number to look at, and no pull to the reference
    k2         d^2 / 2         the gradient of KL(policy || reference)
    k3         e^-d - 1 + d    the gradient of KL(reference || policy); grows with e^-d. The value
                               is never negative
                               (GRPO: arXiv 2402.03300)
    k3_true    e^-d - 1 + d    the gradient of KL(policy || reference): k3's value, k2's gradient

A right value need not have the right gradient: arXiv 2506.09477. All estimates assume samples of
the present policy. With several updates per batch they are slightly off, as in every other trainer.

Beyond +-max_log_ratio a token has the value and the gradient of the bound, so the pull back to the
reference never ends, and e^-d stays finite.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    return _differences(logprobs_N, reference_logprobs_N, max_log_ratio)


def k2(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    return _differences(logprobs_N, reference_logprobs_N, max_log_ratio).square() / 2


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    differences_N = _differences(logprobs_N, reference_logprobs_N, max_log_ratio)
    return (-differences_N).expm1() + differences_N


def k3_true(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    gradient_N = k2(logprobs_N, reference_logprobs_N, max_log_ratio)
    value_N = k3(logprobs_N, reference_logprobs_N, max_log_ratio)
    return gradient_N + (value_N - gradient_N).detach()


def _differences(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    """Returns d `[N]`, clamped in value but not in gradient: its derivative by the log-probs is 1
    everywhere, except at a log-prob of -inf."""
    values_N = (logprobs_N.detach() - reference_logprobs_N).clamp(-max_log_ratio, max_log_ratio)
    return values_N + (logprobs_N - logprobs_N.detach()).nan_to_num()


KL: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_true": k3_true,
}
