"""Probes that compute a part of the pipeline a second time name the stage of a fault that they were not written for."""

from types import SimpleNamespace

import pytest
from plumbob.testing.faults.field3_seen import SEEN as THIRD
from plumbob.testing.faults.field3_unseen import UNSEEN as THIRD_UNSEEN
from plumbob.testing.faults.field4_seen import SEEN as FOURTH
from plumbob.testing.faults.field4_unseen import UNSEEN as FOURTH_UNSEEN
from plumbob.testing.faults.field5_seen import SEEN as FIFTH
from plumbob.testing.faults.field19_seen import SEEN as NINETEENTH
from plumbob.testing.faults.field20_seen import SEEN as TWENTIETH
from plumbob.testing.faults.field_trial import tried
from plumbob.trainer.doctor.probes.movement import _overfits, _told_apart
from plumbob.trainer.doctor.run_probes import PROBES

SETS = (THIRD, THIRD_UNSEEN, FOURTH, FOURTH_UNSEEN, FIFTH, NINETEENTH, TWENTIETH)
FAULTS = {fault.name: fault for faults in SETS for fault in faults}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "probe", "cause"),
    [
        ("prompts rendered by the chat template twice", "tokens", "template-applied-twice"),
        ("attention outputs arrive as zeros", "weights", "engine-trainer-mismatch"),
        ("log-probabilities from the start of the row", "conditioning", "logprobs-permuted"),
        ("entropy bonus out of proportion", "training_step", "loss-differs-from-settings"),
        ("advantages averaged over the padding", "training_step", "loss-differs-from-settings"),
        ("reference policy is another checkpoint", "training_step", "reference-is-another-policy"),
        ("adapter saved with an alpha of zero", "saved", "saved-model-differs"),
        ("one of two replicas never gets new weights", "sync", "weights-not-synced"),
        ("half of the layers in no optimizer group", "gradient", "optimizer-moves-nothing"),
        ("half of the layers in no optimizer group", "movement", "optimizer-moves-nothing"),
        ("tool names arrive doubled", "tools", "calls-malformed"),
        ("dropout of the checkpoint on in training", "training_step", "dropout-in-training"),
        ("last character of tool arguments lost", "environment", "tool-arguments-changed"),
        ("format bonus five times the answer's reward", "environment", "reward-format-dominated"),
        ("end token forbidden at the start of a turn", "parity", "sampling-truncated"),
        ("system message lost in the server's template", "parity", "prompt-replaced"),
        ("gradients of two like matrices mixed in one bucket", "movement", "does-not-overfit"),
        ("episode goes on after the final answer", "signal", "truncated-rollouts"),
        ("adapter sent in every fourth step alone", "sync", "weights-not-synced"),
    ],
)
def test_a_probe_names_the_stage(name, probe, cause, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        named = [finding.cause for finding in PROBES[probe](subject) if finding.cause]
    assert named[0] == cause


@pytest.mark.slow
def test_a_healthy_run_passes_each_of_these_probes(tmp_path):
    import dataclasses

    plain = dataclasses.replace(FAULTS["adapter saved with an alpha of zero"], start=None)
    with tried(plain, tmp_path, groups=4) as subject:
        for probe in (
            "tokens",
            "tools",
            "weights",
            "conditioning",
            "gradient",
            "training_step",
            "movement",
            "saved",
            "sync",
        ):
            assert [f.cause for f in PROBES[probe](subject) if f.cause] == []


def test_rollouts_with_equal_tokens_are_not_told_apart():
    from plumbob.rollout import Sample

    rows = [Sample([1, i], [False, True], [0.0, -1.0], 0.0, "0/0", "", False) for i in (1, 1, 2, 3)]
    kept, advantages = _told_apart(rows, [1.0, -1.0, 0.5, -0.5])
    assert [row.token_ids[1] for row in kept] == [2, 3]
    assert advantages == [0.5, -0.5]


def test_rewards_drawn_by_lot_are_not_expected_to_be_learned():
    subject = SimpleNamespace(run=SimpleNamespace(config=SimpleNamespace(random_rewards=True)))
    assert _overfits(subject, [], []).verdict == "unsure"
