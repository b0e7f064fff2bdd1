"""Are tokens as likely, over stored rollouts, as the policy's own entropies say that they should be?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.watch.stored_rollouts import Rollout, unselected

FEWEST = 32
"""Fewest rollouts by which this is judged."""
FEWEST_NATS = 5.0
"""Smallest sum of all entropies by which it is judged: a policy that is nearly sure hardly ever draws unlikely tokens."""
FEWEST_LIKELY = 128.0
"""The same sum where tokens are too likely: as of sixteen tokens of e^-8. If none of a few was drawn, that is chance, and the
spread of the rollouts, which have none, says nothing of it."""


def calibrated(rollouts: Sequence[Rollout], config: TrainConfig) -> Finding | None:
    """Compare sampled tokens' log-probabilities with entropies; None with few rollouts that have both.

    The expected log-probability of a token that is drawn from the policy is minus the entropy of the policy there. What a rollout's
    tokens exceed it by has mean 0, whatever the policy, and rollouts are independent given their prompts. A sampler that is hotter
    or colder than it reports, or that leaves tokens out, shows in the mean over rollouts, also where engine and trainer agree on
    every log-probability.
    """
    known = [r for r in unselected(rollouts) if r.excess is not None and r.gap is not None]
    if len(known) < FEWEST or config.top_p < 1 or config.top_k or config.min_p:
        return None
    if fmean(r.gap or 0.0 for r in known) > thresholds.SAMPLING_GAP[config.bf16]:
        return None  # the tokens are those of another policy, which is named
    excess = [r.excess or 0.0 for r in known]
    mean, entropy, error = fmean(excess), fmean(r.entropy for r in known), stdev(excess) / math.sqrt(len(known))
    check = "sampled tokens are as likely as the policy's entropy says"
    apart = f"{mean / error:+.1f} standard errors" if error else "in each of them"
    evidence = (
        f"over {len(known)} stored rollouts, the sampled tokens' log-probabilities sum up to {mean:+.3g} nats per rollout more "
        f"than entropies lead to expect ({apart}), which sum up to {entropy:.3g}"
    )
    if len(known) * entropy < (FEWEST_LIKELY if mean > 0 else FEWEST_NATS):
        return Finding(check, "pass", f"{evidence}: too little chance to judge it by")
    if not error or abs(mean) <= max(thresholds.CALIBRATED * error, thresholds.CALIBRATED_SHARE * entropy):
        return Finding(check, "pass", evidence)
    # They can be so for many reasons: another temperature, tokens left out, penalties, drafts, noise.
    worst = sorted(known, key=lambda r: -abs(r.excess or 0.0))[:3]
    return Finding(check, "fail", evidence, "engine-trainer-mismatch", worst[0].step, tuple(r.place() for r in worst))
