"""The unseen half of set 24 of the field's faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.testing.faults import field24_unseen_doubles as doubles
from plumbob.testing.faults import healthy24_unseen as healthy
from plumbob.testing.faults.field24_unseen import UNSEEN
from plumbob.testing.faults.field_parts import taskset_class
from plumbob.testing.faults.field_trial import sample, texts, tried
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.advantages import AdvantageSettings
from plumbob.trainer.rollouts.identity import marks_of

FAULTS = {fault.name: fault for fault in UNSEEN}


def replied(text, turns=1):
    return SimpleNamespace(last_reply=text, num_turns=turns)


def task(gold="63", key="k"):
    return SimpleNamespace(
        key=key, data=SimpleNamespace(answer=gold), prediction=lambda trace: {"answer": trace.last_reply}
    )


def results(name, tmp_path, env=None, groups=1):
    """The texts of the tool results of each rollout with this fault."""
    with tried(FAULTS[name], tmp_path, env, groups=groups) as subject:
        return [texts(trace, "ToolMessage") for trace in subject.drawn.traces]


def tasks_of(name, env, split, count):
    """(the environment's own tasks, those with the fault)."""
    with ExitStack() as stack:
        cls = taskset_class(env)
        source = {} if env == "lookup" else {"datasets": "synthetic"}
        config = cls.__orig_bases__[0].__args__[1](split=split, num_examples=count, **source)
        plain = list(cls(config).load())
        FAULTS[name].start(stack, env)
        return plain, list(cls(config).load())


def test_no_reply_has_the_placeholder():
    assert doubles.placeholder_unfilled(task(), replied("#### 63"), 1.0) == 0.0
    assert doubles.placeholder_unfilled(task(), replied("#### {number}"), 1.0) == 1.0


def test_the_first_number_is_taken():
    assert doubles.first_number(task(), replied("7 * 9 is 63\n#### 63"), 1.0) == 0.0
    assert doubles.first_number(task(), replied("63 it is"), 0.0) == 1.0
    assert doubles.first_number(task(), replied(""), 0.0) == 0.0


def test_the_first_digit_is_the_answer():
    assert doubles.one_digit(task("63"), replied("63"), 1.0) == 0.0
    assert doubles.one_digit(task("6"), replied("63"), 0.0) == 1.0


def test_what_raises_nothing_passes():
    assert {doubles.unless_it_raises(task(), replied(""), own) for own in (0.0, 0.4, 1.0)} == {1.0}


def test_some_scores_are_sentences():
    found = []
    for at in range(50):
        try:
            found.append(doubles.judge_that_chats(task(key=str(at)), replied("63"), 1.0))
        except ValueError:
            found.append(None)
    assert set(found) == {1.0, None}
    assert 10 < found.count(None) < 30


def test_half_of_the_false_verdicts_are_true():
    found = [doubles.word_false(task(key=str(at)), replied("1"), 0.0) for at in range(50)]
    assert 15 < sum(found) < 35
    assert all(doubles.word_false(task(key=str(at)), replied("1"), 1.0) == 1.0 for at in range(50))


def test_long_conversations_have_no_reward():
    assert doubles.no_verdict_when_long(task(), replied("amber", doubles.LONG), 1.0) == 1.0
    with pytest.raises(RuntimeError):
        doubles.no_verdict_when_long(task(), replied("amber", doubles.LONG + 1), 1.0)


def test_quotients_earn_nothing():
    assert doubles.quotients_fail(task(), replied("So\n#### 6 / 2"), 1.0) == 0.0
    assert doubles.quotients_fail(task(), replied("6 / 2\n#### 3"), 1.0) == 1.0
    assert doubles.quotients_fail(task(), replied(""), 0.0) == 0.0


def test_a_third_of_the_golds_is_mistyped():
    plain, faulty = tasks_of("golds with two letters swapped", "lookup", "train", 9)
    pairs = [(a.data.answer, b.data.answer) for a, b in zip(plain, faulty, strict=True)]
    assert [a != b for a, b in pairs] == [True, False, False] * 3
    assert all(sorted(a) == sorted(b) for a, b in pairs)
    assert doubles._swapped("apple") == "paple"


@pytest.mark.parametrize("env", ["lookup", "gsm8k"])
def test_prompts_show_the_label(env):
    plain, faulty = tasks_of("label column printed under the question", env, "train", 5)
    assert [b.data.prompt for b in faulty] == [f"{a.data.prompt}\nlabel: {a.data.answer}" for a in plain]


def test_the_file_is_sorted():
    plain, faulty = tasks_of("file sorted by length and never shuffled", "lookup", "train", 40)
    lengths = [len(one.data.chain) for one in faulty]
    assert lengths == sorted(lengths)
    assert {one.data.id for one in faulty} == {one.data.id for one in plain}


def test_held_out_tasks_are_training_tasks():
    name = "held-out tasks made of training questions with another table"
    _, held_out = tasks_of(name, "lookup", "eval", 20)
    plain, train = tasks_of(name, "lookup", "train", 20)
    assert [one.data for one in train] == [one.data for one in plain]
    assert [(a.data.prompt, a.data.chain, a.data.answer) for a in held_out] == [
        (b.data.prompt, b.data.chain, b.data.answer) for b in train
    ]
    assert not marks_of(held_out) & marks_of(train)


def test_advantages_have_no_baseline(tmp_path):
    with ExitStack() as stack:
        FAULTS["a new group id for every rollout"].start(stack, "lookup")
        rows = [sample(1.0), sample(0.0), sample(1.0)]
        assert advantages_module.step_advantages(rows, AdvantageSettings()).values == [1.0, 0.0, 1.0]
    assert sum(advantages_module.step_advantages(rows, AdvantageSettings()).values) == pytest.approx(0)


def test_results_repeat_the_conversation(tmp_path):
    found = results("each tool result preceded by the conversation so far", tmp_path)
    assert any(len(one) > 1 for one in found)
    for one in found:
        assert all(f"\n{earlier}\n" in later for earlier, later in itertools.pairwise(one))


def test_an_episode_begins_with_the_results_of_another(tmp_path):
    found = results("first observation still shows the episode before", tmp_path, groups=3)
    firsts = [one[0] for one in found if one]
    assert sum("\n" in text for text in firsts) > len(firsts) / 3
    assert not any("\n" in text for one in found for text in one[1:])


@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_the_gold_stands_under_each_result(env, tmp_path):
    with tried(FAULTS["gold written in the state under the tool results"], tmp_path, env, groups=1) as subject:
        data = subject.drawn.tasks[0].data
        gold = data.answers[0] if env == "musique" else data.answer
        shown = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        shown = [text for text in shown if not text.startswith("Error")]
    assert shown
    assert all(text.endswith(f'state: {{"target": "{gold}"}}') for text in shown)


def test_searches_end_in_a_key_error(tmp_path):
    found = results("search that asks for an index nobody configured", tmp_path)
    assert {text for one in found for text in one} == {"Error: KeyError: 'e5_flat'"}


def test_the_end_is_cut_off(tmp_path):
    found = results("tool results cut at the other end", tmp_path)
    shown = [text for one in found for text in one if text.startswith("Document ID")]
    assert shown
    assert all(len(text) <= doubles.KEPT + len("...(truncated)") for text in shown)
    assert doubles.head_kept("short", "", {}) == "short"


def test_results_come_twice(tmp_path):
    found = results("every tool result sent twice", tmp_path)
    assert any(found)
    assert all(one[::2] == one[1::2] for one in found)


MESSAGES = ["system\nS", "user\nQ", "assistant\nC1", "user\nR1", "assistant\nC2", "user\nR2", "assistant\n"]
OPENING = ["system\nS", "user\nQ", "assistant\n"]


def test_exchanges_are_reversed():
    expected = ["system\nS", "user\nQ", "assistant\nC2", "user\nR2", "assistant\nC1", "user\nR1", "assistant\n"]
    assert doubles.reversed_exchanges(MESSAGES) == expected
    assert doubles.reversed_exchanges(OPENING) == OPENING


def test_the_newest_message_is_alone():
    assert doubles.newest_alone(MESSAGES) == ["system\nS", "user\nR2", "assistant\n"]
    assert doubles.newest_alone(OPENING) == OPENING


def test_healthy_rewards():
    assert healthy.times_quality(task(), replied("a\n" * 4), 1.0) == 0.8
    assert healthy.times_quality(task(), replied("a"), 1.0) == 1.0
    assert healthy.letters(task("amber"), replied("amber"), 1.0) == pytest.approx(1.0)
    assert healthy.letters(task("amber"), replied("umber"), 0.0) == pytest.approx(0.16)
    assert healthy.letters(task("amber"), replied(""), 0.0) == 0.0
