"""The seen half of the field's faults does what each entry says: on rollouts, rows, weights and files, not on findings."""

import dataclasses
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample
from plumbob.rollout.tool_formats import named
from plumbob.testing.faults import field_seen_doubles as doubles
from plumbob.testing.faults import field_seen_environment as environment
from plumbob.testing.faults.field_seen import SEEN
from plumbob.testing.faults.field_trial import gap, texts, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.learning_rate import learning_rate
from plumbob.trainer.policy.merged_weights import merged_state
from plumbob.trainer.training import step

FAULTS = {fault.name: fault for fault in SEEN}
DIFFERENT = (
    "decoded positions one too high in the engine",
    "trainer counts positions of sampled tokens only",
    "rotary frequencies rounded to bfloat16 in the engine",
    "engine replaces the system prompt by its default",
    "engine cuts the end of long prompts",
    "engine drops earlier tool results",
    "weights served in bfloat16 from the start",
    "repetition penalty of the server's defaults",
    "temperature of the generation config from the start",
    "loss mask as attention mask from the start",
    "sampling log-probabilities rolled by one",
)
"""Faults with which engine and trainer differ from the first rollout on."""


def samples_of(*groups: list[float]) -> list[Sample]:
    """Rows with these rewards, by group."""
    return [
        Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -2.0], reward, f"0/{g}", "", False, rewards={"r": reward})
        for g, rewards in enumerate(groups)
        for reward in rewards
    ]


def test_rewards_are_rotated_and_broadcast_within_their_groups():
    drawn = samples_of([1, 2, 3], [4, 5, 6])
    assert [s.reward for s in doubles.rotated(drawn)] == [2, 3, 1, 5, 6, 4]
    assert [s.reward for s in doubles.broadcast(drawn)] == [1, 1, 1, 4, 4, 4]
    assert [s.rewards["r"] for s in doubles.rotated(drawn)] == [2, 3, 1, 5, 6, 4]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (doubles.over_the_batch, [-0.75, 0.25, 0.25, 0.25]),
        (doubles.strided, [-0.5, 0.0, 0.5, 0.0]),
        (doubles.only_positive, [0.0, 0.5, 0.0, 0.0]),
    ],
)
def test_advantages_are_wrong_as_described(change, expected):
    with ExitStack() as stack:
        doubles.advantages_of(change)(stack, "lookup")
        found = advantages.step_advantages(samples_of([0, 1], [1, 1]), advantages.AdvantageSettings())
    assert found.values == expected
    assert advantages.compute_advantages(samples_of([0, 1], [1, 1])).values == [-0.5, 0.5, 0.0, 0.0]


def test_log_probabilities_are_rolled_over_sampled_tokens_alone():
    row = dataclasses.replace(samples_of([1])[0], loss_mask=[False, True, True])
    assert doubles.rolled_logprobs(row, SimpleNamespace()).sampling_logprobs == [0.0, -2.0, -1.0]


def test_schedule_ends_after_a_quarter_of_the_run():
    with ExitStack() as stack:
        doubles.early_end(stack, "lookup")
        rates = [step.learning_rate_of("linear", 1.0, k, warmup=0, total=16) for k in range(16)]
    assert rates[:2] == [1.0, 0.75]
    assert not any(rates[4:])
    assert learning_rate("linear", 1.0, 4, warmup=0, total=16) == 0.75


def test_penalties_lower_the_logits_of_tokens_that_were_seen():
    request = SimpleNamespace(prompt=torch.tensor([0]), token_ids=[2])
    logits = torch.tensor([[2.0, 2.0, -2.0]])
    assert doubles.repeated_less(2.0)(None, [request], logits).tolist() == [[1.0, 2.0, -4.0]]
    assert doubles.present_less(1.5)(None, [request], logits).tolist() == [[0.5, 2.0, -3.5]]


def test_calls_in_other_tags_are_not_read():
    text = environment.as_function_call('<tool_call>{"name": "lookup", "arguments": {"key": "1234"}}</tool_call>')
    assert text == '<function_call name="lookup">{"key": "1234"}</function_call>'
    assert not any(type(c).__name__ == "ParsedCall" for c in named("hermes").read(text, {"lookup": {}}).calls)


@pytest.mark.field
@pytest.mark.parametrize("name", DIFFERENT)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 1e-5  # a healthy run has 5e-7


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "factor"), [("adapter served at half its scale", 0.5), ("rank-stabilised scale in the engine only", 4)]
)
def test_adapter_has_another_scale_in_the_engine(name, factor, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        served = [m for m in subject.run.engine.model.modules() if isinstance(m, LoraLinear)]
        trained = [m for m in subject.run.policy.model.modules() if isinstance(m, LoraLinear)]
        assert served
        for one, other in zip(served, trained, strict=True):
            assert one.scaling["default"] == pytest.approx(factor * other.scaling["default"])


@pytest.mark.field
def test_presence_penalty_is_invisible_in_log_probabilities(tmp_path):
    with tried(FAULTS["presence penalty with raw log-probabilities"], tmp_path) as subject:
        assert gap(subject) < 1e-4


@pytest.mark.field
def test_rollouts_of_a_group_are_equal(tmp_path):
    with tried(FAULTS["all rollouts of a group share one seed"], tmp_path) as subject:
        rows = {(s.group, tuple(s.token_ids)) for s in subject.drawn.samples}
        assert len(rows) == 2


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["tools answer every call alike", "half of the tool calls answer with a gateway error as text"]
)
def test_tool_results_are_what_the_entry_says(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        results = Counter(text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage"))
    if "alike" in name:
        assert set(results) == {"next=1000"}
    else:
        assert 0.1 < results["Error: 502 Bad Gateway"] / results.total() < 0.9


@pytest.mark.field
def test_calls_as_function_call_tags_are_in_the_text_and_not_run(tmp_path):
    with tried(FAULTS["calls as function_call tags"], tmp_path) as subject:
        replies = [text for trace in subject.drawn.traces for text in texts(trace, "AssistantMessage")]
        assert sum("<function_call" in reply for reply in replies) > len(replies) / 2
        assert not any(texts(trace, "ToolMessage") for trace in subject.drawn.traces)


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "end token left in the graded reply",
        "gold of the next row",
        "grader fails outside the main thread and returns zero",
    ],
)
def test_no_rollout_is_right(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        assert sum(t.reward for t in subject.drawn.traces) <= 1


@pytest.mark.field
def test_rewards_of_trained_rows_are_other_rollouts(tmp_path):
    with tried(FAULTS["rewards rotated within each group"], tmp_path) as subject:
        drawn = subject.drawn
        assert [s.reward for s in drawn.samples] != [t.reward for t in drawn.traces]
        assert Counter(s.reward for s in drawn.samples) == Counter(t.reward for t in drawn.traces)


@pytest.mark.field
def test_long_rollouts_leave_their_groups(tmp_path):
    with tried(FAULTS["long rollouts time out and leave their groups"], tmp_path) as subject:
        assert subject.drawn.batch.errored > 0
        assert all(t.num_turns <= 3 for t in subject.drawn.traces)


@pytest.mark.field
def test_only_the_last_microbatch_is_in_the_gradient(tmp_path):
    with tried(FAULTS["only the last microbatch counts"], tmp_path) as subject:
        rows = subject.drawn.samples[:8]
        found = []
        for limit in (1 << 14, max(len(r.token_ids) for r in rows)):
            subject.run.state.microbatch_tokens = limit
            subject.gradient(rows, [1.0, -1.0] * 4)
            trained = subject.run.policy.trainable.values()
            found.append(torch.cat([p.grad.flatten().clone() for p in trained if p.grad is not None]))
        whole, last = found
        assert (whole - last).norm() > 0.05 * whole.norm()


@pytest.mark.field
def test_prompt_has_no_tools(tmp_path):
    with tried(FAULTS["tools absent from both prompts from the start"], tmp_path) as subject:
        row = subject.run.tokenizer.decode(subject.drawn.samples[0].token_ids)
        assert "# Tools" not in row


@pytest.mark.field
def test_saved_models_are_the_base(tmp_path):
    with tried(FAULTS["merge skipped in the final model"], tmp_path) as subject:
        model = subject.run.policy.model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        state, right = subject.run.policy.save_final, merged_state(model)
        state(tmp_path / "model")
        from safetensors.torch import load_file

        saved = load_file(tmp_path / "model/model.safetensors")
        differing = [n for n, t in saved.items() if not torch.allclose(t, right[n])]
        assert differing


@pytest.mark.field
def test_final_model_is_that_of_the_beginning(tmp_path):
    with tried(FAULTS["final model is the base model"], tmp_path) as subject:
        policy = subject.run.policy
        first = {n: p.detach().clone() for n, p in policy.trainable.items()}
        with torch.no_grad():
            for parameter in policy.trainable.values():
                parameter.add_(1.0)
        policy.save_final(tmp_path / "model")
        from safetensors.torch import load_file

        saved = load_file(tmp_path / "model/model.safetensors")
        assert all(torch.equal(saved[n], t) for n, t in first.items() if n in saved)
        assert all(torch.equal(p, first[n] + 1.0) for n, p in policy.trainable.items())


@pytest.mark.field
def test_frozen_matrix_is_lost_at_the_second_sync(tmp_path):
    with tried(FAULTS["frozen weights lost at the second sync"], tmp_path) as subject:
        run = subject.run
        before = torch.tensor(run.engine.score(run.parity_row.token_ids))
        run.engine.update(run.policy.sharding.stream())
        assert (torch.tensor(run.engine.score(run.parity_row.token_ids)) - before).abs().mean() > 0.01


def test_price_of_calls_is_below_zero_for_two_calls():
    trace = SimpleNamespace(assistant_messages=[SimpleNamespace(tool_calls=[1]), SimpleNamespace(tool_calls=[2])])
    assert environment.price_of_calls(None, trace, 1.0) == pytest.approx(-0.1)


def test_tasks_are_sorted_by_hops():
    tasks = [SimpleNamespace(data=SimpleNamespace(chain="x" * n)) for n in (3, 1, 2)]
    assert [len(t.data.chain) for t in environment.easy_first(tasks, "train")] == [1, 2, 3]
