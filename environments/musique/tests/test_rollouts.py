"""Whole rollouts through the real runner: what they are paid, and what is reported of them."""

import asyncio
import json
import random

import pytest
import verifiers.v1 as vf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verifiers.v1.trace import WireTrace
from vf_musique import MusiqueTaskset
from vf_musique.official import score_predictions

STYLES = ["tags", "complete"]


@pytest.mark.parametrize("style", STYLES)
def test_the_oracle_is_perfect_on_every_real_record(kit, real, style):
    tasks = kit.tasks(datasets=real, answer_style=style, **MusiqueTaskset.oracle_settings)

    async def run():
        return await asyncio.gather(*(kit.rollout(task, task.oracle()) for task in tasks))

    traces = asyncio.run(run())
    assert len(traces) == 100 and all(trace.ok for trace in traces)
    assert [trace.reward for trace in traces] == [1.0] * 100
    for task, trace in zip(tasks, traces, strict=True):
        perfect = (
            "exact_match",
            "f1",
            "retrieval_recall",
            "retrieval_precision",
            "citation_f1",
            "support_f1",
            "format",
        )
        assert all(trace.metrics[name] == 1.0 for name in perfect)
        assert trace.metrics["searches"] == trace.metrics["hops"] == task.data.hops
        assert trace.metrics["rollout/tool_errors"] == 0
        assert trace.stop_condition == ("completed" if style == "complete" else "agent_completed")
    with open(real) as file:
        gold = {row["id"]: row for row in map(json.loads, file)}
    scores = score_predictions(
        [gold[task.data.question_id] for task in tasks],
        [task.prediction(trace) for task, trace in zip(tasks, traces, strict=True)],
    )
    assert set(scores.values()) == {1.0}


@pytest.mark.parametrize("style", STYLES)
def test_the_oracle_is_perfect_on_twins(kit, style):
    tasks = kit.tasks(datasets="synthetic,full", num_examples=60, answer_style=style, shuffle=False, retriever="golden")
    traces = [kit.play(task, task.oracle()) for task in tasks]
    assert [task.data.answerable for task in tasks] == [True, False] * 30
    assert len({task.key for task in tasks}) == 60
    assert [trace.reward for trace in traces] == [1.0] * 60
    assert all(trace.metrics["sufficiency"] == 1 for trace in traces)
    assert [task.prediction(trace)["predicted_answerable"] for task, trace in zip(tasks, traces, strict=True)] == [
        True,
        False,
    ] * 30


def test_the_oracle_asks_with_earlier_answers_filled_in(small):
    first, second, last = small().oracle()
    assert [json.loads(turn.tool_calls[0].arguments)["query"] for turn in (first, second)] == [
        "Who wrote The Long Song?",
        "Where was Ada Reed born?",
    ]
    assert "<cite>1, 3</cite>\n<answer>Oak Hill</answer>" in last.content


def test_the_oracle_without_a_decomposition_asks_the_question(small, kit):
    task = small({"question_decomposition": []}, retriever="golden")
    assert kit.play(task, task.oracle()).reward == 1.0


@pytest.mark.parametrize("style", STYLES)
def test_the_attacks_as_rollouts(kit, small, style):
    """The same as the reward's table, through tools and parsers; noise 0 leaves nothing but support."""
    task, bare = (small(answer_style=style, max_top_k=20, noise=noise) for noise in (1.0, 0.0))
    everything, half, support = kit.search(top_k=20), [1], [1, 3]

    def reward(task, *turns):
        return kit.play(task, list(turns)).reward

    def final(answer, cited):
        return kit.final(answer, cited, style)

    assert reward(task, kit.say("", everything), final("Oak Hill", support)) == 1
    assert reward(task, kit.say("", kit.get(1), kit.get(3)), final("Oak Hill", support)) == pytest.approx(0.42)
    assert reward(task, kit.say("", everything), final("Pine Moor", range(4))) <= 0.25
    assert reward(bare, kit.say("", everything), final("Pine Moor", range(4))) <= 0.25
    assert reward(bare, kit.say("", everything), final("Pine Moor", support)) <= 0.25
    assert reward(task, final("Oak Hill", support)) == pytest.approx(0.42)
    assert reward(task, final("Oak Hill", [])) == pytest.approx(0.42)
    assert reward(task, kit.say("", everything), final("Oak Hill", half)) == pytest.approx(0.8333, abs=1e-3)


CALLS = st.sampled_from(
    [
        ("retrieve_documents", {"query": "Reed", "top_k": 4}),
        ("retrieve_documents", {"query": "long song"}),
        ("get_document", {"doc_id": 3}),
        ("get_document", {"doc_id": "seven"}),
        ("complete", {"reasoning": "", "final_answer": "Oak Hill", "cited_doc_ids": "1, 3, 9"}),
        ("complete", {"reasoning": "so", "final_answer": "unanswerable", "cited_doc_ids": []}),
        ("complete", "{"),
        ("answer", {"answer": "Oak Hill"}),
    ]
)
CONTENTS = st.sampled_from(
    [
        "",
        "Oak Hill",
        "<answer>Oak Hill</answer>",
        "<think>x</think><cite>1, 3</cite><answer>oak hill</answer>",
        "<cite>2",
    ]
)
WEIGHTS = st.sampled_from(["", "f1=0", "exact_match=0,f1=0", "retrieval_precision=1", "citation=3,format=2"])


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(CONTENTS, st.lists(CALLS, max_size=3)), min_size=1, max_size=5),
    st.sampled_from(STYLES),
    WEIGHTS,
    st.sampled_from([0, 0.5, 1]),
    st.booleans(),
)
def test_any_transcript_is_scored_between_0_and_1(kit, small, turns, style, weights, noise, answerable):
    chosen = {"answer_style": style, "weights": weights, "noise": noise, "max_top_k": 3}
    task = small({"answerable": answerable}, **chosen)
    script = [kit.say(content, *calls) for content, calls in turns] + [kit.say("done")]
    trace = kit.play(task, script, max_turns=6)
    assert 0 <= trace.reward <= 1
    assert task.prediction(trace)["id"] == "2hop__1_2"
    bounded = set(trace.metrics) & {"exact_match", "f1", "format", "sufficiency", "citation_f1", "support_f1"}
    assert all(0 <= trace.metrics[name] <= 1 for name in bounded)


def test_tags_count_in_a_last_message_without_calls_alone(kit, small):
    good = "<think>so</think><cite>1, 3</cite><answer>Oak Hill</answer>"
    cut = kit.play(small(retriever="golden"), [kit.say(good, kit.search())], max_turns=1)
    assert cut.metrics["answered"] == cut.metrics["format"] == 0 and cut.metrics["retrieval_recall"] == 1
    over = kit.play(small(retriever="golden"), [kit.say(good, kit.search()), kit.say("I am done.")])
    assert over.metrics["answered"] == 0
    assert kit.play(small(), [kit.say("")]).reward == 0


def test_in_the_complete_style_the_first_call_counts_and_ends_the_rollout(kit, small):
    def complete(answer, cited=(1, 3)):
        return ("complete", {"reasoning": "so", "final_answer": answer, "cited_doc_ids": list(cited)})

    task = small(answer_style="complete", retriever="golden")
    trace = kit.play(task, [kit.say("", kit.search()), kit.say("", complete("Oak Hill"), complete("Pine Moor"))])
    assert trace.reward == 1 and trace.stop_condition == "completed"
    # What is retrieved after the answer does not support it.
    late = kit.play(task, [kit.say("", complete("Oak Hill"), kit.search())])
    assert late.metrics["unretrieved_citations"] == 2 and late.metrics["searches"] == 0
    # Tags are no answer in this style.
    tags = kit.play(task, [kit.say("", kit.search()), kit.final("Oak Hill", [1, 3])])
    assert tags.metrics["answered"] == 0 and tags.stop_condition == "agent_completed"
    # A call that cannot be read is answered with an error, and the next one is the first.
    bad = ("complete", {"final_answer": "Pine Moor"})
    again = kit.play(task, [kit.say("", kit.search()), kit.say("", bad), kit.say("", complete("Oak Hill"))])
    assert again.reward == 1 and again.metrics["rollout/tool_errors"] == 1


@pytest.mark.parametrize("cited", [[1, 3], ["1", "3"], "1, 3", "[1, 3]", ["Document 1", "[3]"], [[1], 3.0], "1 and 3"])
def test_citations_of_complete_in_any_form(kit, small, cited):
    task = small(answer_style="complete", retriever="golden")
    last = ("complete", {"reasoning": "so", "final_answer": "Oak Hill", "cited_doc_ids": cited})
    assert kit.play(task, [kit.say("", kit.search()), kit.say("", last)]).reward == 1


def test_numeric_answers_of_complete(kit, small):
    task = small({"answer": "1905"}, answer_style="complete", retriever="golden")
    last = ("complete", {"reasoning": "so", "final_answer": 1905, "cited_doc_ids": [1, 3]})
    assert kit.play(task, [kit.say("", kit.search()), kit.say("", last)]).reward == 1


def test_reasoning_kept_apart_counts_as_thinking(kit, small):
    last = vf.AssistantMessage(content="<cite>1, 3</cite><answer>Oak Hill</answer>", reasoning_content="so")
    assert kit.play(small(retriever="golden"), [kit.say("", kit.search()), last]).reward == 1


def test_metrics_tell_what_happened(kit, small):
    turns = [
        kit.say("", kit.search("the LONG song"), kit.search(" The long  song ")),
        kit.say("", kit.get(99), kit.get(1)),
        kit.final("Oakhill in Pine Moor", [1, 2, 19]),
    ]
    trace = kit.play(small(max_top_k=1), turns)
    expected = {
        "exact_match": 0,
        "f1": 0.4,
        "retrieval_recall": 0.5,
        "retrieval_precision": 1,
        "citation_precision": 1 / 3,
        "citation_recall": 0.5,
        "citation_f1": 0.4,
        "support_f1": 0.4,
        "format": 1,
        "sufficiency": 1,
        "hops": 2,
        "answered": 1,
        "n_retrieved": 1,
        "n_cited": 3,
        "unretrieved_citations": 2,
        "searches": 2,
        "repeated_queries": 1,
        "unknown_documents": 1,
    }
    assert {name: trace.metrics[name] for name in expected} == pytest.approx(expected)
    assert small().prediction(trace) == {
        "id": "2hop__1_2",
        "predicted_answer": "Oakhill in Pine Moor",
        "predicted_support_idxs": [1, 2, 19],
        "predicted_answerable": True,
    }


def test_an_unanswerable_question_has_no_answer_metrics(kit, small):
    task = small({"answerable": False})
    assert task.key == "2hop__1_2/unanswerable" and task.data.question_id == "2hop__1_2"
    trace = kit.play(task, [kit.say("", kit.search()), kit.final("Unanswerable.")])
    assert trace.reward == 1 and trace.metrics["sufficiency"] == 1
    assert "exact_match" not in trace.metrics and "support_f1" not in trace.metrics
    assert kit.play(task, [kit.final("unanswerable")]).reward == pytest.approx(0.52)
    everything = kit.search(top_k=4)
    found, invented = ([kit.say("", everything), kit.final("unanswerable", [i])] for i in (1, 19))
    assert kit.play(task, found).reward == pytest.approx(0.88)
    blind = [kit.say("", *map(kit.get, range(4))), kit.say("", everything), kit.final("unanswerable")]
    assert kit.play(task, blind).reward == pytest.approx(0.52)  # as without a search
    assert kit.play(task, invented).reward == pytest.approx(0.46)
    assert kit.play(task, [kit.say("", kit.search()), kit.final("Oak Hill", [1, 3])]).reward <= 0.25


def test_the_original_reward(kit, small):
    task = small({"answer": "Nine"}, reward="original", max_top_k=20)
    trace = kit.play(task, [kit.say("", kit.search(top_k=20)), kit.final("9", [1, 3])])
    assert trace.reward == pytest.approx((1 + 0.9 + 1 + 0.4 * 0.5 + 0.6 + 0.1) / 4)
    assert trace.metrics["exact_match"] == 0  # the official one knows no digits
    with pytest.raises(ValueError, match="reward=original is not defined for unanswerable questions"):
        small({"answerable": False}, reward="original")


def test_the_original_reads_the_last_message_at_its_commas(kit, small):
    task = small(reward="original", retriever="golden")
    tags = "<think>so</think><cite>{}</cite><answer>Oak Hill</answer>"
    for cite, reward in (("1, 3", 1), ("Document 1, [3]", 3.4 / 4)):
        trace = kit.play(task, [kit.say("", kit.search()), kit.say(tags.format(cite))])
        assert trace.reward == pytest.approx(reward) and trace.metrics["citation_f1"] == 1
    assert kit.play(task, [kit.say(tags.format("1, 3"), kit.search())], max_turns=1).reward == pytest.approx(1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("last", ["", "no tags", "<cite>1, 3", "<think>cut off <answer>Oak Hill</answer>"])
def test_what_cannot_be_read_is_an_empty_prediction_with_all_metrics(kit, small, style, last):
    task = small(answer_style=style)
    trace = kit.play(task, [kit.say("", kit.search()), kit.say(last)])
    assert task.prediction(trace) == {
        "id": "2hop__1_2",
        "predicted_answer": "",
        "predicted_support_idxs": [],
        "predicted_answerable": True,
    }
    none = ("exact_match", "f1", "citation_f1", "support_f1", "format", "sufficiency", "answered", "n_cited")
    assert [trace.metrics[name] for name in none] == [0] * len(none)
    assert trace.metrics["n_retrieved"] == 2


@pytest.mark.parametrize("style", STYLES)
def test_a_rollout_that_did_not_finish_has_a_prediction_too(kit, small, style):
    """One that fails before `finalize` keeps nothing of the tools on its record."""
    task = small(answer_style=style)
    trace = kit.play(task, [kit.say("", kit.search()), kit.say("")])
    del trace.info["musique"]
    again = WireTrace.model_validate(json.loads(json.dumps(trace.model_dump(mode="json"))))
    assert task.prediction(again) == task.prediction(trace)
    assert task.prediction(again)["predicted_answer"] == ""


def test_weights_grounding_and_hop_factor_reach_the_reward(kit, small):
    turns = [kit.say("", kit.search(top_k=20)), kit.final("Oak Hill", [1])]
    assert kit.play(small(weights="exact_match=1,f1=0,citation=0,retrieval_recall=0,format=0"), turns).reward < 1
    chosen = {"weights": "exact_match=1,f1=0,citation=0,retrieval_recall=0,format=0", "grounding": 0}
    assert kit.play(small(**chosen), turns).reward == 1
    assert kit.play(small(**chosen, hop_factor=True), turns).reward == 0.5


def test_a_record_that_is_read_back_scores_the_same(kit, small):
    """The tools' record is on the trace itself, so scoring again needs no rollout."""
    for style in STYLES:
        task = small(answer_style=style)
        trace = kit.play(task, [kit.say("", kit.search()), kit.final("Oak Hill", [1, 3], style)])
        again = WireTrace.model_validate(json.loads(json.dumps(trace.model_dump(mode="json"))))
        again.rewards.clear()
        asyncio.run(task.score(again))
        assert again.reward == trace.reward > 0.5
        assert task.prediction(again) == task.prediction(trace)


def test_many_rollouts_at_once_keep_their_own_records(kit, real):
    tasks = kit.tasks(datasets=real, num_examples=20)
    rng = random.Random(0)
    scripts = []
    for task in tasks * 5:
        read = rng.sample([d.id for d in task.data.documents], 3)
        scripts.append((task, [kit.say("", *map(kit.get, read)), kit.final("x", read[:1])], set(read)))

    async def run():
        return await asyncio.gather(*(kit.rollout(task, turns) for task, turns, _ in scripts))

    for trace, (task, _, read) in zip(asyncio.run(run()), scripts, strict=True):
        support = set(task.data.supporting)
        assert trace.metrics["n_retrieved"] == 3 and trace.metrics["unretrieved_citations"] == 0
        assert trace.metrics["retrieval_recall"] == len(read & support) / len(support)
