"""Probes of what a model does with tools, penalties and groups, on the real trainer."""

import dataclasses
import itertools
from collections import Counter
from contextlib import contextmanager
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from plumbob.rollout import Chat, EngineError, Sample
from plumbob.testing.examinations import causes
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.earned import earned
from plumbob.trainer.doctor.probes import (
    conditioning,
    data,
    empty_turns,
    needed_tools,
    parity,
    penalties,
    signal,
    tools,
)
from plumbob.trainer.doctor.subject import Subject, draw

# Tools


LOOKUP = SimpleNamespace(name="lookup", parameters={"properties": {"key": {}}})


def trace_of(*texts: str, info: dict[str, Any] | None = None) -> Any:
    messages = [SimpleNamespace(content=text, tool_calls=None) for text in texts]
    return SimpleNamespace(info=info or {}, tools=[LOOKUP], assistant_messages=messages)


@pytest.mark.parametrize(
    "text",
    [
        '<tools>{"name": "lookup", "arguments": {"key": "4711"}}</tools>',
        '```json\n{"function": "lookup", "parameters": {"key": "4711"}}\n```',
        "lookup('4711')",
        "I will call lookup(key=4711).",
        'Action: lookup\nAction Input: {"key": "4711"}',
        '<function_call name="lookup">{"key": "4711"}</function_call>',
    ],
)
def test_a_reply_that_names_a_tool_and_its_arguments_is_quoted(text):
    found = tools.unread_reply(trace_of("Let me see.", text))
    assert "lookup" in found and "4711" in found


@pytest.mark.parametrize(
    "text",
    ["amber", "I can use lookup to find the key, but I know it: amber.", "The key 4711 is in the lookup table.",
     "A lookup (see above) is needed.", "lookups(4711)", '{"name": "search", "arguments": {"key": "1"}}'],
)  # fmt: skip
def test_prose_about_a_tool_is_no_call(text):
    assert tools.unread_reply(trace_of(text)) == ""


def test_what_the_reader_noted_is_quoted_first():
    noted = {"unread_calls": [{"turn": 0, "text": "<call>lookup 4711</call>", "explained": False}]}
    assert tools.unread_reply(trace_of("amber", info=noted)) == "<call>lookup 4711</call>"


def rewritten_turns(monkeypatch, change) -> None:
    """The reader is given another text than the model wrote, as if the model had another dialect."""
    parse = Chat.parse

    def parsed(self, ids, schemas, **given):
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        other = self.tokenizer(change(text), add_special_tokens=False)["input_ids"]
        return parse(self, tuple(other), schemas, **given)

    monkeypatch.setattr(Chat, "parse", parsed)


def test_calls_in_another_dialect_are_named_and_quoted(subject_of, monkeypatch):
    opening = '{"name": "lookup", "arguments": '
    rewritten_turns(monkeypatch, lambda text: text.replace("tool_call>", "use>").replace(opening, "lookup: "))
    findings = list(tools.probe(subject_of(max_turns=2)))
    assert causes(findings)[:1] == ["calls-in-unread-form"], findings
    assert "lookup" in findings[2].evidence


def test_a_model_that_never_calls_is_named(subject_of, monkeypatch):
    rewritten_turns(monkeypatch, lambda text: "amber<|im_end|>")
    findings = list(tools.probe(subject_of()))
    assert causes(findings) == ["tools-never-used"] and "amber" in findings[-1].evidence


@pytest.mark.slow
def test_a_tool_for_the_answer_that_is_never_called_is_named(subject_of):
    """The bundled policy writes its answer into its last message, and the environment takes it from a tool."""
    given = {"env": "musique", "model": "tiny-musique", "datasets": "synthetic", "max_tokens": 128}
    for style, cause in (("complete", ["tools-never-used"]), ("tags", [])):
        subject = subject_of(**given, env_args=("hops=2", "num_examples=60", f"answer_style={style}"))
        (finding,) = needed_tools.probe(subject)
        assert causes([finding]) == cause
        assert ("complete in 0" in finding.evidence) == (style == "complete")


# The engine


def refusing(subject: Subject, refuses) -> None:
    """The engine raises an error for the requests, (prompt, number of its earlier requests), that `refuses` is true of."""
    engine: Any = subject.run.engine
    generate, count = engine.generate, itertools.count()

    async def generated(prompt_ids, sampling):
        if refuses(prompt_ids, next(count)):
            raise EngineError("400: too long")
        return await generate(prompt_ids, sampling)

    engine.generate = generated


@pytest.mark.slow
def test_an_engine_that_always_refuses_the_same_requests_is_named_however_few(subject_of):
    subject = subject_of()
    lengths = sorted(len(calls[-1].prompt_ids) for calls in draw(subject, 1).calls)
    refusing(subject, lambda prompt, number: len(prompt) >= lengths[-1])
    finding = next(data.probe(subject))
    assert finding.cause == "engine-fails" and "sent again" in finding.evidence


def test_an_engine_that_fails_once_is_no_fault(subject_of):
    subject = subject_of()
    refusing(subject, lambda prompt, number: number == 3)
    assert next(data.probe(subject)).cause is None


@pytest.mark.slow
def test_results_that_are_cut_on_their_way_into_the_prompt_are_named(subject_of, monkeypatch):
    suffix = Chat.suffix

    def cut(self, messages):
        return suffix(self, [{**m, "content": m["content"][:6]} if m["role"] == "tool" else m for m in messages])

    assert causes(tools.probe(subject_of())) == []
    monkeypatch.setattr(Chat, "suffix", cut)
    assert causes(tools.probe(subject_of()))[:1] == ["tool-results-cut"]


# Penalties


@contextmanager
def generating(subject: Subject, change):
    """The engine's completions are changed by a function of (prompt, completions of several seeds)."""
    engine: Any = subject.run.engine
    generate = engine.generate

    async def changed(prompt_ids, sampling):
        tries = [await generate(prompt_ids, sampling)]
        for k in range(1, 6):
            tries.append(await generate(prompt_ids, dataclasses.replace(sampling, seed=(sampling.seed or 0) + k)))
        return change(list(prompt_ids), tries)

    engine.generate = changed
    yield
    engine.generate = generate


def lowered(prompt: list[int], tries: list[Any]) -> Any:
    """Tokens that the text has are less likely in the engine, and all others a little more."""
    ids, seen, logprobs = tries[0].token_ids, set(prompt), []
    for token, logprob in zip(ids, tries[0].logprobs, strict=True):
        logprobs.append(logprob - 0.2 if token in seen else logprob + 0.05)
        seen.add(token)
    return dataclasses.replace(tries[0], logprobs=tuple(logprobs))


@pytest.mark.slow
@pytest.mark.long
def test_tokens_that_no_penalty_makes_less_likely_are_told_from_a_temperature(subject_of):
    """What the engine lowers is not what a penalty of any size would: only that it differs is known."""
    healthy = subject_of()
    assert causes(penalties.probe(healthy)) == []
    subject = subject_of()
    with generating(subject, lowered):
        assert causes(penalties.probe(subject)) == ["engine-trainer-mismatch"]
    cold = subject_of()
    with generating(
        cold, lambda prompt, tries: dataclasses.replace(tries[0], logprobs=tuple(0.7 * p for p in tries[0].logprobs))
    ):
        assert causes(penalties.probe(cold)) == []


@pytest.mark.slow
def test_a_healthy_engine_samples_as_it_reports(subject_of):
    anew, asked = penalties.probe(subject_of(env="gsm8k", model="tiny-gsm8k", datasets="synthetic", max_tokens=120))
    assert anew.verdict == asked.verdict == "pass" and "times as likely as that it samples" in asked.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"temperature": 0.6}, "temperature-not-applied"),
        ({"top_k": 3}, "sampling-truncated"),
        ({"seed": 42}, "groups-without-variety"),
    ],
)
def test_an_engine_that_samples_with_other_settings_than_it_reports(subject_of, monkeypatch, settings, cause):
    """As vLLM does with the defaults of generation_config.json and raw log-probabilities: nothing else differs."""
    subject = subject_of(env="gsm8k", model="tiny-gsm8k", datasets="synthetic", max_tokens=80)
    generate = subject.run.engine.generate

    async def other(prompt_ids, sampling):
        reply = await generate(prompt_ids, dataclasses.replace(sampling, **settings))
        n = len(prompt_ids)
        mask = [False] * n + [True] * len(reply.token_ids)
        row = Sample([*prompt_ids, *reply.token_ids], mask, [0.0] * len(mask), 0.0, "", "", False)
        return dataclasses.replace(reply, logprobs=tuple(subject.score([row], sampling.temperature)[0].tolist()))

    monkeypatch.setattr(subject.run.engine, "generate", other)
    assert causes(penalties.probe(subject)) == [cause]


# Empty completions


@pytest.mark.slow
def test_completions_that_come_back_empty_are_named(subject_of):
    """Every fourth request is answered with the end token, which is said to have been certain, or with nothing."""
    subject, number = (
        subject_of(env="gsm8k", model="tiny-gsm8k", datasets="synthetic", max_tokens=80),
        itertools.count(),
    )
    ends = subject.run.sampler.chat.stop_token_ids[:1]

    def emptied(prompt: list[int], tries: list[Any]) -> Any:
        if next(number) % 4:
            return tries[0]
        return dataclasses.replace(tries[0], token_ids=ends, logprobs=(0.0,) * len(ends), finish_reason="stop")

    with generating(subject, emptied):
        assert causes(empty_turns.probe(subject)) == ["empty-completions"]
        ends = ()  # as vLLM does for a request without end tokens
        for module in (conditioning, parity):
            assert "error" not in [finding.verdict for finding in module.probe(subject)]


@pytest.mark.slow
def test_a_model_that_ends_turns_at_once_by_itself_is_no_fault(subject_of, monkeypatch):
    """The most frequent first token of turns is made the end token, so that real samples are empty turns."""
    subject = subject_of(8, env="gsm8k", model="tiny-gsm8k", datasets="synthetic", max_tokens=80)
    firsts = Counter(call.completion.token_ids[0] for turns in subject.drawn.calls for call in turns)
    end = max(firsts, key=lambda token: firsts[token])
    sampler = subject.run.sampler
    chat = dataclasses.replace(sampler.chat, stop_token_ids=(end,))
    run = dataclasses.replace(subject.run, sampler=dataclasses.replace(sampler, chat=chat))
    monkeypatch.setattr(subject, "run", run)
    del subject.__dict__["drawn"]
    (finding,) = empty_turns.probe(subject)
    assert finding.verdict == "pass" and "probability of at most" in finding.evidence


# Signal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({"num_generations": 2, "env_args": ("min_hops=5", "max_hops=5"), "batch_size": 8}, "fail"),
        ({"num_generations": 8, "batch_size": 8, "gradient_accumulation_steps": 1}, "fail"),
        ({"num_generations": 8}, "pass"),
    ],
    ids=["groups of two at low success", "one task per step", "healthy"],
)
def test_too_little_signal_is_named_with_the_size_that_would_give_one(subject_of, settings, verdict):
    finding = signal._groups(subject_of(groups=8, **settings))
    assert finding.verdict == verdict, finding.evidence
    assert verdict == "pass" or "by group size: 2:" in finding.evidence


@pytest.mark.slow
def test_a_policy_that_succeeds_half_of_the_time_has_not_solved_its_tasks(subject_of, monkeypatch):
    """Tasks have different best rewards: what one task's oracle earns says nothing of another."""
    subject = subject_of(groups=8)
    task = type(subject.drawn.tasks[0])
    own = task.correct

    async def worth(self, trace):
        return (await own(self, trace)) * (0.1 if len(self.data.chain) <= 1 else 1.0)

    worth.__name__ = "correct"
    monkeypatch.setattr(task, "correct", vf.reward(weight=1.0)(worth))
    assert fmean(share >= 0.95 for share in earned(subject)) < 0.95


@pytest.mark.parametrize(
    ("stops", "truncated", "verdict", "cause"),
    [
        (["agent_completed"] * 8, False, "pass", None),
        (["agent_completed"] * 8, True, "unsure", None),  # marked, and no limit ended them
        (["max_turn_tokens"] * 5 + ["own_stop"] * 3, True, "fail", "truncated-turns"),
        (["agent_timeout"] * 2 + ["own_stop"] * 6, True, "unsure", None),
    ],
)
def test_rollouts_that_are_marked_as_cut_off_count_by_the_limit_that_ended_them(stops, truncated, verdict, cause):
    samples = [SimpleNamespace(stop=stop, truncated=truncated, token_ids=[1, 2]) for stop in stops]
    drawn = SimpleNamespace(samples=samples, traces=[SimpleNamespace(nodes=[]) for _ in stops])
    subject = SimpleNamespace(drawn=drawn, run=SimpleNamespace(config=TrainConfig()))
    found = signal._truncation(subject)
    assert (found.verdict, found.cause) == (verdict, cause)
