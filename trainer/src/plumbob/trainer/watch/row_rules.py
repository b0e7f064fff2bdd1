"""The rules of the watch about training rows: are they the step's own rollouts, with their masks, groups and advantages?

What they judge is compared exactly (training/row_checks.py, training/step_checks.py) and is 0 in a correct run, so that one
step is enough.
"""

from __future__ import annotations

import itertools

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.history import WINDOW, History, Outcome, number, policy_change


def _worst(h: History, name: str) -> float | None:
    """The largest value of a metric in the last steps; None if none of them has it."""
    values = [number(row, name) for row in h.recent if name in row]
    return max(values) if values else None


def _none(h: History, name: str, cause: str, which: str) -> Outcome:
    """`cause` if a share, which is 0 in a correct run, is above 0 in one of the last steps. `which`: the evidence after it."""
    worst = _worst(h, name)
    return None if worst is None else ((cause if worst > 0 else None), f"up to {worst:.0%} {which}")


def own_rollouts(h: History) -> Outcome:
    """Are the rows that are trained on this step's rollouts, token by token?"""
    other, changed = _worst(h, "rollout/unmatched"), _worst(h, "rollout/changed")
    if other is None or changed is None:
        return None
    copied, scored = (_worst(h, f"rollout/{name}") or 0.0 for name in ("copied", "other_logprobs"))
    evidence = (
        f"up to {other:.0%} of a step's rows are no rollouts of that step, {changed:.0%} have other tokens than their "
        f"rollout, {scored:.0%} have log-probabilities that it does not have, in any order, and {copied:.0%} are copies of "
        "another row, in place of other rollouts"
    )
    if copied > thresholds.COPIED_ROWS:
        return "groups-without-variety", evidence
    if other or copied:
        return "rollouts-repeated", evidence
    return ("row-not-what-was-sampled" if changed or scored else None), evidence


def masks(h: History) -> Outcome:
    """Is the loss mask on the sampled tokens?"""
    missing, extra = _worst(h, "rollout/sampled_untrained"), _worst(h, "rollout/context_trained")
    if missing is None or extra is None:
        return None
    evidence = (
        f"the loss mask leaves out up to {missing:.1%} of a step's sampled tokens, and includes other tokens, "
        f"{extra:.1%} as many as sampled ones"
    )
    if extra and missing > thresholds.NONE_TRAINED:  # a mask that is shifted by one still covers most of a turn
        return "context-tokens-trained", evidence
    if missing and extra and 0.5 < missing / extra < 2:  # as many of the one as of the other
        return "loss-mask-shifted", evidence
    worse = "sampled-tokens-masked" if missing > extra else "context-tokens-trained"
    return (worse if missing or extra else None), evidence


def tools_shown(h: History) -> Outcome:
    """Do prompts begin with their messages, and name the tools that the rollouts have?"""
    if cut := _worst(h, "rollout/prompts_cut"):
        return (
            "truncated-context",
            f"up to {cut:.0%} of the prompts that were read in a step lack the beginning of their messages",
        )
    which = "of the prompts that were read in a step leave out the name of a tool"
    return _none(h, "rollout/tools_unshown", "tools-not-in-prompt", which)


def headers(h: History) -> Outcome:
    """Do first prompts end with the header of an assistant turn?"""
    return _none(
        h,
        "rollout/headless",
        "assistant-header-missing",
        "of the prompts that were read in a step do not end with the header of an assistant turn",
    )


def one_task(h: History) -> Outcome:
    """Are the rollouts of each group of one task?"""
    return _none(h, "groups/mixed", "groups-mixed", "of a step's groups have rollouts of several tasks")


def apart(h: History) -> Outcome:
    """Are held-out tasks not trained on?"""
    return _none(h, "tasks/held_out", "held-out-in-training", "of a step's tasks are held-out tasks as well")


def misplaced(h: History) -> Outcome:
    """Is each rollout trained with the reward that it earned?"""
    return _none(
        h,
        "reward/misplaced",
        "rewards-of-other-rollouts",
        "of a step's rollouts have another reward than the stored rollout with the same tokens",
    )


def advantages(h: History) -> Outcome:
    """Do advantages follow from the rewards as the settings say?"""
    return _none(
        h,
        "advantage/wrong",
        "advantages-wrong",
        "of a step's rows have another advantage than follows from the rewards and settings",
    )


def weights(h: History) -> Outcome:
    """Do tokens have the weights that --loss-type gives them?"""
    which = f"of a step's trained rows have another weight than --loss-type {h.config.loss_type} gives them beside the others"
    return _none(h, "loss/other_weights", "loss-differs-from-settings", which)


def weighed(h: History) -> Outcome:
    """Does the loss weigh each token as its row's advantage and weight say?"""
    # Slopes that are not finite are none of the advantages': that of a step whose update was skipped for it.
    taken = [row for row in h.recent if "loss/misweighted" in row and not number(row, "optimizer/skipped")]
    if not any(number(row, "train/rows") for row in taken):
        return None
    wrong = max(number(row, "loss/misweighted") for row in taken)
    evidence = f"the loss has another slope than the advantages say at up to {wrong:.1%} of a step's sampled tokens"
    if wrong <= thresholds.MISWEIGHTED:
        return None, evidence
    with_wrong = [row for row in taken if number(row, "loss/misweighted")]
    if h.spike is not None and all(number(row, "step") >= h.spike[0] for row in with_wrong):
        return None, f"{evidence}, and only from the step on in which the gradient norm exploded"
    nowhere = [number(row, "loss/without_policy_term") - number(row, "loss/unpulled_parts") for row in with_wrong]
    still = all(number(row, "optimizer/grad_norm") < thresholds.NO_GRADIENT for row in with_wrong)
    if not h.config.kl_in_loss and min(nowhere) == 1 and still:
        return "no-gradient", f"{evidence}; there it is 0, and no other token has one either"
    of_the_kl_term = (
        ("without_policy_term", "policy-term-missing", "that of the KL term alone"),
        ("stronger_kl_coefficient", "kl-too-large", "right but for the KL term, whose coefficient is above --kl-beta"),
        ("other_kl_coefficient", "kl-backwards", "right but for the KL term, whose coefficient is not --kl-beta"),
    )
    for name, cause, why in (
        ("negated", "gradient-backwards", "the right one with the opposite sign"),
        (
            "unratioed",
            "ratio-to-reference",
            "that of an importance ratio of 1, where the policy is another one than before",
        ),
        (
            "unpulled_parts",
            "loss-differs-from-settings",
            "0, or the KL term's, and right at others whose advantage has that sign",
        ),
        *(of_the_kl_term if h.config.kl_in_loss else ()),
    ):
        if min(number(row, f"loss/{name}") for row in with_wrong) > 1 - thresholds.MISWEIGHTED:
            return cause, f"{evidence}; there it is {why}"
    scaled = min(number(row, "loss/scaled") for row in with_wrong) > 1 - thresholds.MISWEIGHTED
    several = all(number(row, "train/rows") >= 2 * number(row, "train/microbatches") for row in with_wrong)
    spread = max(number(row, "loss/scale_spread") for row in with_wrong)
    if scaled and several and spread > thresholds.MISWEIGHTED:
        why = "in each microbatch the right one times a number, another one in each"
        return "normaliser-depends-on-microbatches", f"{evidence}; there it is {why}"
    if h.config.updates_per_step == 1 and not h.config.lora_dropout:
        clipped = min(number(row, "policy/clip_fraction") for row in with_wrong)
        if clipped > 0:
            why = (
                "with one update per batch the importance ratio should be 1, and some tokens are beyond the clip bounds"
            )
            return "loss-differs-from-settings", f"{evidence}; {why} ({clipped:.1%} or more in each of these steps)"
    return "loss-differs-from-settings", evidence


def reference(h: History) -> Outcome:
    """Is the reference policy the one with which the run begins? Then the KL term is 0 in the first step."""
    start = h.first[0] if h.first else {}
    # A penalty in the reward is computed before the step's updates, a term of the loss at each of them.
    at_start = h.config.kl_placement == "reward" or number(start, "optimizer/updates") == 1
    if not h.config.kl_beta or "policy/kl" not in start or number(start, "step") != 1 or not at_start:
        return None
    kl = number(start, "policy/kl")
    evidence = f"before the first update the policy is {kl:.2g} nats per token from the reference policy"
    if abs(kl) > thresholds.REFERENCE_KL[h.config.bf16]:
        return "reference-is-another-policy", evidence
    for before, row in itertools.pairwise(h.recent):
        apart, now = number(before, "policy/kl"), number(row, "policy/kl")
        change = policy_change(before) or 0.0
        vanished = "policy/kl" in row and abs(now) < thresholds.REFERENCE_KL[False] / 100
        alone = number(row, "optimizer/updates") == 1
        if alone and vanished and change > 10 * thresholds.REFERENCE_KL[h.config.bf16]:
            return "reference-is-another-policy", (
                f"step {number(before, 'step'):.0f} changes the policy by {change:.1e} nats per token, and in the next one it is "
                f"{now:.2g} from the reference policy: the reference changes with it"
            )
        if alone and abs(now) <= thresholds.REFERENCE_KL[h.config.bf16] < thresholds.KL_GONE * apart:
            step = number(row, "step")
            return "reference-is-another-policy", (
                f"the policy is {apart:.2g} nats per token from the reference policy in step {step - 1:.0f}, and {now:.2g} in step "
                f"{step:.0f}: the policy of that moment has become the reference"
            )
    return None, evidence


def ends(h: History) -> Outcome:
    """Do turns end where the policy ends them?"""
    beyond, unlikely = _worst(h, "rollout/run_on"), _worst(h, "rollout/unlikely_ends") or 0.0
    if beyond is None:
        return None
    limit = thresholds.SAMPLING_GAP[h.config.bf16]
    # Log-probabilities that are none of the policy's say nothing of ends, nor of anything else.
    if not h.config.max_staleness and any(number(row, "sync/sampling_gap") > limit for row in h.recent):
        unlikely = 0.0
    evidence = (
        f"up to {beyond:.0%} of a step's turns go on after an end token, and {unlikely:.0%} end with one that the policy gives "
        "a probability below 1e-5"
    )
    return ("stop-token-wrong" if max(beyond, unlikely) > thresholds.RUN_ON_SHARE else None), evidence


def kept(h: History) -> Outcome:
    """Does each step begin with the weights with which the step before ended?"""
    return _none(
        h,
        "optimizer/strayed_share",
        "weights-lost",
        "of the weights were others at a step's start than at the end of the step before",
    )


def steady(h: History) -> Outcome:
    """Do all microbatches of an update see the same weights?"""
    return _none(
        h,
        "optimizer/early_share",
        "normaliser-depends-on-microbatches",
        "of the weights changed while the gradient of an update was computed, before the update",
    )


def downhill(h: History) -> Outcome:
    """Did the run's first update move weights against the gradient that was computed?"""
    start = h.first[0] if h.first else {}
    if "optimizer/uphill_share" not in start:
        return None
    share = number(start, "optimizer/uphill_share")
    evidence = (
        f"the first update moved {share:.0%} of the weights with a large gradient along it, so that the loss grows"
    )
    if share > 1 - thresholds.UPHILL:
        return "gradient-backwards", evidence
    return ("does-not-overfit" if share > thresholds.UPHILL else None), evidence


def all_move(h: History) -> Outcome:
    """Does an update move every trained tensor?"""
    rows = [row for row in h.recent if number(row, "optimizer/updates") and "optimizer/still_tensors" in row]
    if len(rows) < WINDOW or not all(number(row, "optimizer/moved_share") for row in rows):
        return None
    still, without = (
        min(number(row, f"optimizer/{name}") for row in rows) for name in ("still_tensors", "no_gradient_share")
    )
    evidence = (
        f"in each of the last {len(rows)} steps at least {still:.0%} of the trained tensors did not move at all, and "
        f"{without:.0%} had no gradient"
    )
    if without > thresholds.STILL_TENSORS:
        return "no-gradient", evidence
    return ("optimizer-moves-nothing" if still > thresholds.STILL_TENSORS else None), evidence
