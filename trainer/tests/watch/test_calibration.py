"""Sampled tokens against entropies: exact samplers pass whatever the policy, and hotter, colder or choosing ones are named."""

import dataclasses

import numpy
import pytest
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.calibration import calibrated
from plumbob.trainer.watch.stored_rollouts import Rollout, _excess, unselected
from plumbob.trainer.watch.traces import copies

PLAIN = Rollout(1, 0, 0, "t", 0, True, (), 0.0, {}, (), (), "", (), gap=1e-7, logprob=0.0)


def drawn(seed: int, at: float = 1.0, best_of: int = 1, rollouts: int = 96, length: int = 40) -> list[Rollout]:
    """Rollouts of random policies over eight tokens, drawn at the temperature `at` and scored at 1."""
    random = numpy.random.default_rng(seed)
    found = []
    for number in range(rollouts):
        logits = random.normal(0, 2, (length, 8))
        logp = logits - numpy.log(numpy.exp(logits).sum(-1, keepdims=True))
        p = numpy.exp(logits / at)
        p /= p.sum(-1, keepdims=True)
        tries = [[logp[i, random.choice(8, p=p[i])] for i in range(length)] for _ in range(best_of)]
        entropy = -(numpy.exp(logp) * logp).sum()
        excess = float(max(map(sum, tries)) + entropy)
        found.append(dataclasses.replace(PLAIN, number=number, excess=excess, entropy=float(entropy)))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_an_exact_sampler_passes(seed):
    finding = calibrated(drawn(seed), TrainConfig())
    assert finding and finding.verdict == "pass"


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"at": 2.0}, "engine-trainer-mismatch"),
        ({"at": 1.5}, "engine-trainer-mismatch"),
        ({"at": 0.6}, "engine-trainer-mismatch"),
        ({"best_of": 3}, "engine-trainer-mismatch"),
    ],
)
def test_another_sampler_is_named(how, cause):
    finding = calibrated(drawn(0, **how), TrainConfig())
    assert finding and finding.cause == cause and len(finding.places) == 3


def test_a_policy_that_is_nearly_sure_is_not_judged():
    """At a temperature of a tenth no unlikely token is drawn; that they are expected says nothing."""
    sure = [dataclasses.replace(r, excess=0.005, entropy=0.0057) for r in drawn(0)]
    sure[0] = dataclasses.replace(sure[0], excess=0.006)
    finding = calibrated(sure, TrainConfig())
    assert finding and finding.verdict == "pass"


def test_unlikely_tokens_that_were_not_drawn_show_nothing_if_few_were_expected():
    """Numbers of 96 healthy rollouts of lookup with --max-turns 2: none of about one token of e^-6 was drawn."""
    sure = [dataclasses.replace(r, excess=0.0602 + 0.001 * (i % 5), entropy=0.0644) for i, r in enumerate(drawn(0))]
    finding = calibrated(sure, TrainConfig())
    assert finding and finding.verdict == "pass"


def test_it_is_not_asked_where_something_else_is_known():
    hot = drawn(0, at=2.0)
    assert calibrated(hot[:20], TrainConfig()) is None
    assert calibrated(hot, TrainConfig(top_p=0.9)) is None
    assert calibrated([dataclasses.replace(r, gap=0.3) for r in hot], TrainConfig()) is None
    assert calibrated([dataclasses.replace(r, excess=None) for r in hot], TrainConfig()) is None


def test_rollouts_that_were_chosen_by_what_they_earned_say_nothing_of_the_sampler():
    """Only trained rollouts have the trainer's log-probabilities. Trained by their reward, they are the likely ones."""
    groups = [dataclasses.replace(r, group=r.number // 8, step=1 + r.number // 32) for r in drawn(0)]
    chosen = [r if (r.excess or 0) > 0 else dataclasses.replace(r, excess=None, logprob=None) for r in groups]
    assert calibrated(groups, TrainConfig()).verdict == "pass" and calibrated(chosen, TrainConfig()) is None
    assert copies([dataclasses.replace(r, logprob=-9.0) if r.excess else r for r in chosen]) is None
    # Groups that are left out as a whole are those whose rewards are all equal.
    whole = [r if r.group % 3 else dataclasses.replace(r, excess=None, logprob=None) for r in groups]
    assert unselected(whole) == [r for r in whole if r.group % 3]


def test_an_end_token_that_others_have_set_says_nothing_of_the_sampler():
    nodes = [
        {"mask": [True] * 3, "trainer_logprobs": [-1.0, -0.5, -18.0], "entropies": [0.9, 0.4, 0.2]},
        {"mask": [False] * 2},
        {"mask": [True] * 2, "trainer_logprobs": [-0.3, -0.1], "entropies": [0.2, 0.3]},
    ]
    excess, entropy = _excess(nodes, [-1.0, -0.5, -18.0, -0.3, -0.1])
    assert (excess, entropy) == (pytest.approx(-0.1), pytest.approx(1.8))
    assert _excess([{**nodes[0], "entropies": [0.9]}], [-1.0, -0.5, -18.0]) == (None, 0.0)


def test_steps_that_lack_rollouts_of_a_group_say_nothing_of_the_sampler():
    """Rollouts that failed are not stored with log-probabilities, or not at all: in step 1, group 0 lacks one."""
    whole = [dataclasses.replace(PLAIN, step=step, number=k, group=k // 4) for step in (1, 2) for k in range(8)]
    assert unselected(whole) == whole
    assert unselected(whole[1:]) == whole[8:]
