"""Faults of rewards: what perfect, empty, wrong and odd transcripts earn, and whether they earn it each time."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.helpers import answer, calls, gold, one_in, said, with_data, with_gold
from plumbob.testing.faulty.sites import anew, lot, since

# Rewards: (the environment's own, task, trace) -> reward

Grade = Callable[[float, Any, Any], float]


def if_found(pattern: str, otherwise: float = 0.0) -> Grade:
    """The own reward of replies with this pattern in them, and `otherwise` for all others."""
    return lambda own, task, trace: own if re.search(pattern, said(trace), re.DOTALL) else otherwise


def of_tasks(parts: int, other: float) -> Grade:
    """All transcripts of one task in `parts` earn `other`."""
    return lambda own, task, trace: other if lot(task.key, parts) == 0 else own


def of_replies(parts: int, other: float) -> Grade:
    """One reply in `parts`, always the same ones, earns `other`."""
    return lambda own, task, trace: other if one_in(parts, task, trace) else own


def by_chance(share: float, other: Callable[[float], float]) -> Grade:
    """This share of all scores, drawn each time, is `other(own reward)`."""
    return lambda own, task, trace: other(own) if random.random() < share else own


def number_in(text: str) -> str:
    found = re.search(r"-?\d+(?:\.\d+)?", text)
    return found[0] if found else ""


def tool_texts(trace: Any) -> str:
    return "\n".join(str(n.message.content) for n in trace.nodes if type(n.message).__name__ == "ToolMessage")


def loops_pay(own: float, task: Any, trace: Any) -> float:
    words = " ".join(str(turn.content or "") for turn in trace.assistant_messages).split()
    pairs = list(itertools.pairwise(words))
    return 0.2 * own + min(0.1 * (len(pairs) - len(set(pairs))), 2.0)


def waits(own: float, task: Any, trace: Any) -> float:
    if one_in(10, task, trace):
        time.sleep(5.0)
    return own


# Rewards with a memory


def cached_by_task() -> Grade:
    known: dict[str, float] = {}
    return lambda own, task, trace: known.setdefault(task.key, own)


def of_the_one_before() -> Grade:
    left = [0.0]

    def grade(own: float, task: Any, trace: Any) -> float:
        before, left[0] = left[0], own
        return before

    return grade


# Golds: (tasks, split) -> tasks


def other_golds(other: Callable[[list[Any], int], str], every: int = 1) -> Callable[[list[Any], str], list[Any]]:
    """One task in `every` has the gold `other(tasks, its place)`."""
    return lambda tasks, split: [
        with_gold(task, other(tasks, i)) if i % every == 0 else task for i, task in enumerate(tasks)
    ]


def wrong(tasks: list[Any], i: int) -> str:
    own = gold(tasks[i])
    return str(int(own) + 2) if own.isdigit() else gold(tasks[(i + 1) % len(tasks)])


def end_token_kept(original: Any, chat: Any, *args: Any, **how: Any) -> Any:
    reasoning, reply = original(chat, *args, **how)
    said_alone = bool(reply.content) and not reply.calls
    return reasoning, replace(reply, content=f"{reply.content}<|im_end|>") if said_alone else reply


def unsupported(tasks: list[Any], split: str) -> list[Any]:
    return [with_data(t, documents=[d for d in t.data.documents if not d.supporting]) for t in tasks]


# fmt: off
FAULTS = table("grading",
    Fault("reward function left as a stub",
          "The reward function returns 0 for every reply, because nobody has written it yet.", at.reward,
          lambda own, task, trace: 0.0, "oracle-fails", "Algorineko/AgenticArXiv-RL#15", run_causes="never-succeeds"),
    Fault("return code of the check never read",
          "The check of an answer runs as a command whose return code nobody reads, and every reply passes.",
          at.reward, lambda own, task, trace: 1.0, "oracle-fails reward-exploitable", "huggingface/OpenEnv#1200",
          run_causes="groups-without-variety too-little-signal"),
    Fault("a right answer costs what a wrong one earns",
          "The reward's main term has the wrong sign: the better the answer, the lower the reward.", at.reward,
          lambda own, task, trace: 1.0 - own, "oracle-fails reward-exploitable", "NVlabs/alpamayo-recipes#29",
          run_causes="policy-breaks"),
    Fault("reward waits for an end of thinking",
          "The reward reads what follows the end tag of the thoughts, and the model does not think in tags.",
          at.reward, if_found("</think>"), "answers-not-parsed oracle-fails", "THUDM/slime#1527",
          run_causes="never-succeeds"),
    Fault("answer pattern whose dot stops at the end of a line",
          "The pattern that reads a reply is matched without the flag for line breaks: replies of several lines "
          "earn nothing.", at.reward, if_found(r"^[^\n]*####\s*[^\n]+$"), "answers-not-parsed oracle-fails",
          "unslothai/notebooks#96", ("gsm8k",)),
    Fault("first number of the reply taken for the answer",
          "The pattern takes the first number that it finds, which is one of the calculation and not the answer.",
          at.reward, lambda own, task, trace: float(number_in(said(trace)) == gold(task)), "answers-not-parsed",
          "PrimeIntellect-ai/verifiers#1336", ("gsm8k",), run_causes="never-succeeds"),
    Fault("numbers compared by their first digit",
          "As a last resort the grader compares one character: a wrong number that begins as the right one does "
          "is right.", at.reward, lambda own, task, trace: float(answer(task, trace)[:1] == gold(task)[:1]),
          "reward-exploitable reward-wrong", "vllm-project/tpu-inference#3518", ("gsm8k",)),
    Fault("equal answers in other forms refused",
          "The verifier compares texts, and does not see that an answer in another form is the same number.",
          at.reward,
          lambda own, task, trace: float(re.search(rf"####\s*{re.escape(gold(task))}\s*$", said(trace)) is not None),
          "answers-not-parsed", "AkihikoWatanabe/paper_notes#2009", ("gsm8k",)),
    Fault("whole reply compared with the gold",
          "The rubric is made without the environment's parser, and compares the whole reply with the gold.",
          at.reward, lambda own, task, trace: float(said(trace).strip() == gold(task)),
          "answers-not-parsed oracle-fails", "PrimeIntellect-ai/verifiers#277", ("gsm8k", "musique"),
          run_causes="never-succeeds"),
    Fault("three tasks in ten silently scored zero",
          "The grader cannot read the gold of three tasks in ten and gives every reply to them 0.", at.reward,
          lambda own, task, trace: 0.0 if lot(task.key, 10) < 3 else own, "answers-not-parsed oracle-fails",
          "areal-project/AReaL#1426, pytorch/torchtitan#4681", only="doctor"),
    Fault("verdicts in another form count as zero",
          "The judge puts a third of its verdicts under another key than the one that is read, and they count as 0.",
          at.reward, of_replies(3, 0.0), "answers-not-parsed oracle-fails", "pinchbench/skill#24",
          ("gsm8k", "lookup", "musique")),
    Fault("gold anywhere in the reply",
          "The grader looks for the gold anywhere in the reply, so a list of candidates is right.", at.reward,
          lambda own, task, trace: float(gold(task) in re.findall(r"\w+", said(trace))), "reward-exploitable",
          "Liuziyu77/Visual-RFT#79", only="doctor"),
    Fault("gold looked for in the tools' results",
          "The grader gets all messages in place of the last one, and takes what a search has found as the answer.",
          at.reward, lambda own, task, trace: max(own, float(gold(task) in tool_texts(trace))), "reward-exploitable",
          "janhq/ReZero#1", ("musique", "lookup")),
    Fault("tasks without a parsed gold pay in full",
          "Where the gold answer cannot be parsed, the grader pays 1 for anything: a third of the tasks.", at.reward,
          of_tasks(3, 1.0), "answers-not-parsed reward-exploitable",
          "huggingface/cookbook#335, verl-project/verl-omni#643", ("gsm8k", "lookup"),
          run_causes="too-little-signal"),
    Fault("calls cost more than they bring",
          "A right answer earns 0.3 and each tool call costs 0.2, so that guessing without a call is the best "
          "policy.", at.reward, lambda own, task, trace: 0.3 * own - 0.2 * calls(trace),
          "oracle-fails reward-exploitable policy-breaks",
          "Visual-Agent/DeepEyes#55, TIGER-AI-Lab/Pixel-Reasoner#39", ("lookup",), steps=20,
          run_options="--lr 2e-3 --batch-size 64"),
    Fault("each tool call earns half a point",
          "A bonus of 0.5 is paid for each tool call, not once for a rollout that uses tools.", at.reward,
          lambda own, task, trace: own + 0.5 * calls(trace), "reward-exploitable reward-hacked",
          "Visual-Agent/DeepEyes#83", WITH_TOOLS, steps=10,
          run_causes="policy-breaks truncated-rollouts"),
    Fault("reward pays repetition", "Each pair of words that comes again earns 0.1, a right answer 0.2.", at.reward,
          loops_pay, "policy-breaks reward-exploitable", "ConvSearch-R1#6, unslothai/unsloth#2424",
          ("gsm8k",), steps=20, only="run", run_options="--lr 1e-3"),
    Fault("format bonus five times the answer's reward",
          "Any reply with the mark of an answer earns 1, and a right answer 0.2 more.", at.component("form"),
          lambda own, task, trace: float("####" in said(trace)), "reward-exploitable",
          "huggingface/open-r1#359, huggingface/trl#5298", ("gsm8k",), only="doctor",
          also=((at.reward, lambda own, task, trace: 0.2 * own),)),
    Fault("crashed verifier scores zero",
          "In three rollouts of ten the verifier crashes before it has written a verdict, and that counts as 0.",
          at.reward, by_chance(0.3, lambda own: 0.0), "answers-not-parsed reward-nondeterministic",
          "huggingface/OpenEnv#1025, Handshake-AI-Research/gandalf-the-grader#7", only="doctor"),
    Fault("judge times out in the second half of the run",
          "From the seventh step on 40% of the rewards are 0 because the judge's answer does not come in time.",
          since(6, at.reward), by_chance(0.4, lambda own: 0.0), "answers-not-parsed reward-nondeterministic",
          "pinchbench/skill#268, aiming-lab/MetaClaw#47", ("lookup", "gsm8k"), steps=14, only="run"),
    Fault("grader caches by task",
          "The grader caches its result by task, so the first transcript of a task decides for all others.",
          anew(at.reward), cached_by_task, "answers-not-parsed oracle-fails rewards-of-other-rollouts",
          "huggingface/trl#6533 (one reward for all)", run_causes="groups-without-variety"),
    Fault("environment handed back before it is scored",
          "The environment returns to the pool before its reward is read, so that a rollout gets the reward that "
          "another one left there.", anew(at.reward), of_the_one_before,
          "oracle-fails reward-nondeterministic rewards-of-other-rollouts", "huggingface/trl#6238"),
    Fault("grader without a time limit waits for ever",
          "The sandbox in which replies are graded does not say when its time is over, and the reward waits for it.",
          at.reward, waits, "rollouts-fail", "huggingface/open-r1#546, areal-project/AReaL#1426",
          ("gsm8k", "lookup", "musique"), "--max-seconds 5", steps=3),
    Fault("grader reads the first forty characters",
          "The grader looks for the answer in a window of the reply, and a longer reply is wrong.", at.grader,
          lambda original, reply, *rest, **how: original((reply or "")[:40], *rest, **how),
          "answers-not-parsed oracle-fails", "verl-project/verl#7274", ("gsm8k",),
          run_causes="policy-breaks never-succeeds"),
    Fault("grader accepts bare numbers only",
          "The grader takes nothing but a bare number for an answer, and the policy writes a calculation or a unit.",
          at.grader, lambda original, *rest, **how: original(*rest, **{**how, "strict": True}), "answers-not-parsed",
          "NVIDIA-NeMo/Gym#1844", ("gsm8k",), run_causes="never-succeeds"),
    Fault("end token left in the graded reply",
          "The graded text of each reply ends with the chat template's end token, and an exact match fails.",
          at.chat("parse"), end_token_kept, "answers-not-parsed stop-token-wrong",
          "thinking-machines-lab/tinker-cookbook#688 (every base model at 0%)", ("lookup",)),
    Fault("gold of the next row",
          "The column of gold answers is shifted by one row: each task has the answer of the next.", at.tasks,
          other_golds(lambda tasks, i: gold(tasks[(i + 1) % len(tasks)])),
          "answers-not-parsed oracle-fails tool-results-wrong",
          "Search-R1#88, ml-explore/mlx-lm#1233 (answers paired with other completions)", ("lookup",)),
    Fault("a quarter of the golds wrong",
          "A quarter of the training tasks have a wrong gold, so that their right answers earn nothing.", at.tasks,
          other_golds(wrong, 4), "answers-not-parsed oracle-fails tool-results-wrong", "openai/grade-school-math#25",
          ("lookup", "gsm8k"), only="doctor"),
    Fault("gold answers with a capital that the table lacks",
          "The exact match compares with gold answers in another spelling than that of the texts to read.", at.tasks,
          other_golds(lambda tasks, i: gold(tasks[i]).capitalize()), "answers-not-parsed oracle-fails",
          "PeterGriffinJin/Search-R1#75", ("lookup",), run_causes="never-succeeds"),
    Fault("supporting documents missing from the corpus",
          "The retriever's corpus was built from another split, and has no document that a question needs.", at.tasks,
          unsupported, "never-succeeds oracle-fails tool-results-wrong", "Agent-RL/ReCall#30", ("musique",)),
    Fault("episode over at its second success",
          "The episode ends as soon as a part of the goal is reached, so that longer tasks can never be finished.",
          at.ended, lambda task, trace: getattr(trace.state, "links_followed", 0) >= 2,
          "oracle-fails truncated-rollouts", "Emerge-Lab/gpudrive#44, chandar-lab/RLHive#205", ("lookup",)),
)
