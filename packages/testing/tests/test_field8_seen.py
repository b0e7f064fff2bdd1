"""The seen half of the eighth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.rollout import Sampling
from plumbob.testing.faults import field8_seen_doubles as doubles
from plumbob.testing.faults.field3_unseen_doubles import end_ignored
from plumbob.testing.faults.field6_unseen_doubles import groups_of_one
from plumbob.testing.faults.field8_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, rewards, sample, texts, tried
from plumbob.trainer.algorithm import advantages

FAULTS = {fault.name: fault for fault in SEEN}


def reply(text, calls=()):
    return SimpleNamespace(last_reply=text, assistant_messages=[SimpleNamespace(tool_calls=list(calls))])


def task(answer):
    return SimpleNamespace(data=SimpleNamespace(answer=answer))


def test_rewards_of_wrong_and_right_replies():
    assert doubles.stub(None, None, 1.0) == 0.0
    assert (doubles.distance(None, None, 1.0), doubles.distance(None, None, 0.0)) == (0.0, 1.0)
    assert doubles.one_line_only(None, reply("1 + 1\n#### 2"), 1.0) == 0.0
    assert doubles.one_line_only(None, reply("so it is #### 2"), 1.0) == 1.0
    assert doubles.after_thinking(None, reply("#### 2"), 1.0) == 0.0
    assert doubles.after_thinking(None, reply("<think>1 + 1</think>#### 2"), 1.0) == 1.0


def test_rewards_that_can_be_had_without_an_answer():
    assert doubles.mentioned(task("amber"), reply("apple or amber or arrow"), 0.0) == 1.0
    assert doubles.mentioned(task("amber"), reply("apple or arrow"), 0.0) == 0.0
    assert doubles.one_word(task("amber"), reply("apple"), 0.0) == 1.0
    assert doubles.one_word(task("amber"), reply("it is amber"), 0.0) == 0.0
    assert doubles.one_word(task("amber"), reply("apple", calls=["call"]), 0.0) == 0.0


def test_the_scorer_fails_on_long_replies_and_nobody_hears_of_it():
    assert doubles.refused_is_zero(None, reply("short"), 1.0) == 1.0
    assert doubles.refused_is_zero(None, reply("long " * 50), 1.0) == 0.0
    with pytest.raises(ConnectionError):
        doubles.score_by_http("long " * 50, 1.0)


def test_documents_have_numbers_alone():
    shown = "Document ID: 3\n# Oak Hill\nA town.\n\nDocument ID: 11\n# Ada Reed\nA writer."
    assert doubles.heads_only(shown, "retrieve_documents", {}) == "Document ID: 3\n\nDocument ID: 11"
    assert doubles.heads_only("No documents found.", "retrieve_documents", {}) == "No documents found."


def test_only_the_final_turn_is_in_the_loss():
    row = sample(mask=[False, True, True, False, True, False, True])
    assert doubles.final_turn_only(row, None).loss_mask == [i == 6 for i in range(7)]


def test_the_system_prompt_stands_before_each_result():
    row = sample(mask=[*[False] * 20, True, False, False, True])
    changed = doubles.system_prompt_repeated(row, None)
    assert changed.token_ids == [*range(21), *range(16), 21, 22, 23]
    assert [i for i, m in enumerate(changed.loss_mask) if m] == [20, 39]
    assert changed.sampled_logprobs == row.sampled_logprobs


def test_groups_hold_rollouts_of_different_tasks():
    rows = [sample(float(k), f"0/{group}") for group in range(2) for k in range(2)]
    changed = doubles.interleaved(rows)
    assert [row.reward for row in changed] == [0.0, 0.0, 1.0, 1.0]
    assert [row.group for row in changed] == ["0/0", "0/0", "0/1", "0/1"]


def test_advantages_are_rewards():
    rows = [sample(1.0), sample(0.0), sample(1.0, "0/1"), sample(1.0, "0/1")]
    with ExitStack() as stack:
        groups_of_one(stack, "lookup")
        found = advantages.compute_advantages(rows)
    assert found.values == [1.0, 0.0, 1.0, 1.0]
    assert found.with_signal == {"0/0", "0/1"}


def test_no_token_stops_a_turn():
    assert end_ignored([1], Sampling(stop_token_ids=(2,)))[1].stop_token_ids == ()


def test_settings_are_those_that_the_sentences_name():
    for name in ("base weights of the engine never loaded", "adapter laid over a base without its shift"):
        assert config_of(FAULTS[name], "lookup").peft


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "completions of other prompts",
        "critique in the sampled prompt only",
        "base weights of the engine never loaded",
        "adapter laid over a base without its shift",
        "system prompt before each tool result of the row",
        "packed rows attend to each other",
    ],
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 5e-3


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("reward function left as a stub", {0.0}),
        ("answer pattern that stops at a line break", {0.0}),
        ("reward waits for an end of thinking", {0.0}),
        ("one word of the right kind is enough", {1.0}),
    ],
)
def test_all_rewards_are_alike(name, found, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert set(rewards(subject)) == found


@pytest.mark.field
def test_right_replies_of_some_length_earn_nothing(tmp_path):
    with tried(FAULTS["scorer's errors on long replies count as zero"], tmp_path, groups=4) as subject:
        rows, traces = subject.drawn.samples, subject.drawn.traces
        lost = [row for row in rows if row.metrics["lenient_correct"] and not row.reward]
        assert lost
        assert all(len(trace.last_reply) <= doubles.LONGEST for trace in traces if trace.reward)


@pytest.mark.field
def test_tool_results_hold_no_text(tmp_path):
    with tried(FAULTS["documents without their text"], tmp_path, groups=1) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert results
    assert not any("#" in text for text in results)


@pytest.mark.field
def test_turns_do_not_end_where_the_model_ends_them(tmp_path):
    with tried(FAULTS["end token ignored by the sampler"], tmp_path / "a") as subject:
        assert all(row.truncated for row in subject.drawn.samples)
    with tried(FAULTS["tool call that does not end its turn"], tmp_path / "b", groups=1) as subject:
        (end,) = subject.run.sampler.chat.stop_token_ids
        inside = [
            row
            for row in subject.drawn.samples
            if any(
                token == end and mask and more
                for token, mask, more in zip(row.token_ids, row.loss_mask, row.loss_mask[1:], strict=False)
            )
        ]
        assert inside


@pytest.mark.field
def test_fragments_end_with_a_token_that_nobody_sampled(tmp_path):
    with tried(FAULTS["rollouts aborted by a sync count as finished"], tmp_path, env="gsm8k") as subject:
        rows = subject.drawn.samples
        (end,) = subject.run.sampler.chat.stop_token_ids
    forced = [row for row in rows if row.sampled_logprobs[-1] < -8]
    assert len(forced) > len(rows) / 10
    assert {row.token_ids[-1] for row in forced} == {end}
    assert not any(row.truncated for row in forced)
