"""The seen half of the twentieth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.rollout import Completion, Sampling
from plumbob.testing.faults import field20_parts as parts
from plumbob.testing.faults import field20_seen_doubles as doubles
from plumbob.testing.faults import healthy20_seen as healthy
from plumbob.testing.faults.field20_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, rewards, sample, texts, tried, without
from plumbob.trainer.algorithm.advantages import AdvantageSettings, step_advantages

FAULTS = {fault.name: fault for fault in SEEN}
SAMPLING = Sampling(stop_token_ids=(2,))
PROMPT = [1, 8, 9, 50, 51, 2, 9, 1, 7, 9, 60, 2, 9, 1, 6, 9]
"""A system message of two tokens, a user's of one, and the header of the assistant."""


def ended(reply, **task):
    """(task, trace) of a rollout with this last reply."""
    return SimpleNamespace(data=SimpleNamespace(**task)), SimpleNamespace(last_reply=reply, assistant_messages=[])


def turns(*calls):
    """A rollout whose turns have these numbers of tool calls."""
    return SimpleNamespace(assistant_messages=[SimpleNamespace(tool_calls=[object()] * count) for count in calls])


def drawn_with(fault, folder, read, groups=2, env=None):
    """What `read(subject)` finds with the fault and without it."""
    found = []
    for one in (fault, without(fault)):
        with tried(one, folder / str(len(found)), env, groups=groups) as subject:
            found.append(read(subject))
    return found


def test_some_judgements_have_no_score():
    replies = [f"#### {number}" for number in range(60)]
    found = [doubles.no_score_is_wrong(*ended(reply), 1.0) for reply in replies]
    assert found == [doubles.no_score_is_wrong(*ended(reply), 1.0) for reply in replies]
    assert 10 < found.count(0.0) < 30


def test_tags_are_wanted():
    assert doubles.tags_wanted(*ended("Work.\n#### 4"), 1.0) == 0.0
    assert doubles.tags_wanted(*ended("<think>Work.</think>\n<answer>4</answer>"), 1.0) == 1.0


def test_another_header_is_looked_for():
    assert doubles.after_another_header(*ended("#### 4"), 1.0) == 0.0
    assert doubles.after_another_header(*ended("<|assistant|>\n#### 4"), 1.0) == 1.0


def test_an_opening_tag_voids_the_reply():
    assert doubles.opening_tag_voids(*ended("<think>Work.</think> 4"), 1.0) == 0.0
    assert doubles.opening_tag_voids(*ended("Work.</think> 4"), 1.0) == 1.0


def test_lines_cost_more_than_an_answer_earns():
    assert doubles.five_off_each(*ended("a\nb\nc"), 1.0) == 1.0
    assert doubles.five_off_each(*ended("a\nb\nc\nd\ne"), 1.0) == -9.0


def test_the_last_turn_has_no_reward_of_its_own():
    task = SimpleNamespace(data=SimpleNamespace(chain=["1", "2"]))
    assert doubles.last_turn_only(task, turns(1, 1, 0), 1.0) == 0.0
    assert doubles.last_turn_only(task, turns(1, 1), 0.0) == 0.5


def test_short_golds_reward_everything():
    assert doubles.short_golds_unreadable(*ended("", answer="42"), 0.0) == 1.0
    assert [doubles.short_golds_unreadable(*ended("", answer="421"), own) for own in (0.0, 1.0)] == [0.0, 1.0]


def test_length_outweighs_the_answer():
    assert doubles.longer_is_better(*ended("x" * 100), 0.0) > doubles.longer_is_better(*ended("x"), 1.0)


def test_messages_of_the_server_are_empty():
    found, sampling = doubles.without_text(PROMPT, SAMPLING)
    assert found == [1, 8, 9, 2, 9, 1, 7, 9, 2, 9, 1, 6, 9]
    assert sampling is SAMPLING


def test_the_server_leaves_the_system_message_out():
    assert doubles.without_system(PROMPT, SAMPLING)[0] == PROMPT[7:]
    assert parts.blocks_of(PROMPT, 2)[0] == PROMPT[:7]


def test_replies_are_closed_at_the_cap():
    cut = Completion((5, 6), (-1.0, -2.0), "length", policy_version=3)
    found = doubles.closed_at_cap(cut, PROMPT, SAMPLING)
    assert found == Completion((5, 6, 2), (-1.0, -2.0, 0.0), "stop", policy_version=3)
    whole = Completion((5, 2), (-1.0, -2.0), "stop")
    assert doubles.closed_at_cap(whole, PROMPT, SAMPLING) is whole


def test_arguments_are_cut():
    def call():
        pass

    given = {"query": "The captain of The Velvet Sparrow is", "top_k": 2}
    assert doubles.arguments_cut(call, "search", given) == (call, {"query": "The captain of The V", "top_k": 2})


def test_groups_begin_one_late():
    samples = [sample(group=group) for group in ("0/0", "0/0", "0/1", "0/1")]
    assert [one.group for one in doubles.one_late(samples)] == ["0/0", "0/1", "0/1", "0/0"]


def test_rewards_of_the_successful_come_first():
    samples = [sample(value, group) for group, value in (("0/0", 0.0), ("0/0", 1.0), ("0/1", 0.0), ("0/1", 0.5))]
    assert [one.reward for one in doubles.successful_first(samples)] == [1.0, 0.0, 0.5, 0.0]


def test_further_turns_cost_advantage():
    samples = [sample(value, "0/0") for value in (0.0, 1.0)] + [sample(1.0, "0/1")] * 2
    for one, count in zip(samples, (1, 3, 5, 5), strict=True):
        one.metrics["rollout/turns"] = count
    found = doubles.stopping_rewarded(lambda some: step_advantages(some, AdvantageSettings()), samples)
    assert found.values == pytest.approx([-0.5, 0.5 - 2 * doubles.PRICE, 0.0, 0.0])


def test_healthy_brevity_is_for_right_replies():
    assert healthy.brief(*ended("x"), 0.0) == 0.0
    assert healthy.brief(*ended("x" * 20), 1.0) > healthy.brief(*ended("x" * 100), 1.0) > 1.0
    assert healthy.brief(*ended("x" * 300), 1.0) == 1.0


def test_options_are_those_of_the_entries():
    assert config_of(FAULTS["episode goes on after the final answer"], "lookup").max_turns == 8
    assert config_of(FAULTS["episode waits for the mission before it"], "lookup").max_tool_seconds == 1


ALWAYS_ZERO = {
    "format tags that the prompt never asks for": "gsm8k",
    "reply searched after another model's header": "lookup",
    "an opening think tag voids the answer": "musique",
    "only the last turn's reward handed on": "lookup",
}


@pytest.mark.field
@pytest.mark.parametrize("name", ALWAYS_ZERO)
def test_no_rollout_earns_anything(name, tmp_path):
    zero, plain = drawn_with(FAULTS[name], tmp_path, rewards, env=ALWAYS_ZERO[name])
    assert max(zero) == 0.0
    assert max(plain) > 0.0


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k"])
def test_held_out_tasks_have_answers_of_training_tasks(env, tmp_path):
    def answers(subject):
        tasks = subject.run.tasks
        return [task.data.answer for task in tasks.held_out], [task.data.answer for task in tasks.train]

    name = "test questions given training labels"
    (wrong, trained), (right, plain) = drawn_with(FAULTS[name], tmp_path, answers, env=env)
    assert wrong != right
    assert trained == plain


@pytest.mark.field
def test_half_of_the_held_out_tasks_are_trained(tmp_path):
    def shared(subject):
        trained = {task.data.prompt for task in subject.run.tasks.train}
        return [task.data.prompt in trained for task in subject.run.tasks.held_out]

    name = "held-out rows drawn from training under new numbers"
    faulty, plain = drawn_with(FAULTS[name], tmp_path, shared, env="gsm8k")
    assert faulty == [False, True] * 2
    assert plain == [False] * 4


@pytest.mark.field
@pytest.mark.parametrize("name", [name for name in FAULTS if "server's template" in name or "server template" in name])
def test_the_server_samples_after_another_prompt(name, tmp_path):
    faulty, plain = drawn_with(FAULTS[name], tmp_path, gap, env="lookup")
    assert faulty > 0.5
    assert plain < 1e-3


@pytest.mark.field
def test_the_first_prompt_is_plain_text(tmp_path):
    def prompt(subject):
        row = subject.drawn.samples[0]
        return subject.run.tokenizer.decode(row.token_ids[: row.loss_mask.index(True)])

    found, right = drawn_with(FAULTS["question sent as plain text"], tmp_path, prompt)
    assert "<|im_start|>" not in found
    assert right.startswith("<|im_start|>")
    assert found.splitlines()[-1] in right


@pytest.mark.field
def test_no_reply_is_longer_than_the_cap(tmp_path):
    def lengths(subject):
        return [(sum(row.loss_mask), row.token_ids[-1], row.truncated) for row in subject.drawn.samples]

    capped, plain = drawn_with(FAULTS["reply closed at the cap as if complete"], tmp_path, lengths)
    assert max(capped)[0] == doubles.CAP + 1 < max(plain)[0]
    assert {one[1:] for one in capped} == {(2, False)}


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "musique"])
def test_episodes_go_on(env, tmp_path):
    def counts(subject):
        return {trace.num_turns for trace in subject.drawn.traces}

    on, plain = drawn_with(FAULTS["episode goes on after the final answer"], tmp_path, counts, env=env)
    assert on == {8}
    assert max(plain) < 8


@pytest.mark.field
def test_one_rollout_gets_the_session(tmp_path):
    with tried(FAULTS["second session refused"], tmp_path, groups=2) as subject:
        assert len(subject.drawn.samples) == 1


@pytest.mark.field
def test_some_episodes_hang(tmp_path):
    name = "episode waits for the mission before it"
    hung, plain = drawn_with(FAULTS[name], tmp_path, lambda subject: len(subject.drawn.samples))
    assert (hung, plain) == (15, 16)


@pytest.mark.field
def test_the_first_table_is_kept(tmp_path):
    def found(subject):
        return [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]

    kept, plain = drawn_with(FAULTS["first episode's table kept for all"], tmp_path, found)
    assert sum("unknown key" in text for text in kept) > len(kept) / 3
    assert not any("unknown key" in text for text in plain)


@pytest.mark.field
def test_searches_get_cut_queries(tmp_path):
    def asked(subject):
        return [use.asked for trace in subject.drawn.traces for use in trace.state.uses]

    cut, plain = drawn_with(FAULTS["arguments cut at the output cap"], tmp_path, asked)
    assert max(map(len, cut)) <= doubles.MOST_CHARACTERS < max(map(len, plain))


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_a_group_has_two_different_rollouts(env, tmp_path):
    def rows(subject):
        return [row.token_ids for row in subject.drawn.samples[:8]]

    found, _ = drawn_with(FAULTS["four copies of each reply in a group"], tmp_path, rows, env=env)
    assert all(row == found[0] for row in found[:4])
    assert all(row == found[4] for row in found[4:])


@pytest.mark.field
def test_each_group_has_a_rollout_of_another_task(tmp_path):
    name = "groups counted off one rollout late"
    late, plain = drawn_with(FAULTS[name], tmp_path, lambda subject: [row.group for row in subject.drawn.samples])
    assert late == [*plain[1:], plain[0]]


def test_patches_are_taken_back():
    from plumbob.rollout import runner
    from plumbob.trainer.training import step

    before = (runner.derive_seed, step.step_advantages)
    with ExitStack() as stack:
        FAULTS["four copies of each reply in a group"].start(stack, "lookup")
        FAULTS["turn baseline that rewards stopping"].start(stack, "lookup")
        assert runner.derive_seed(5, 3) == runner.derive_seed(5, 0) == before[0](5, 0)
        assert step.step_advantages is not before[1]
    assert (runner.derive_seed, step.step_advantages) == before
