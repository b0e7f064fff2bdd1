"""The unseen half of the twelfth set of the field's faults: they are run only to measure.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field12_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field12_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, FieldFault, ids
from plumbob.testing.faults.field_parts import engine_logits, graded

UNSEEN = (
    # Rewards
    FieldFault(
        "verdict that cannot be read counts as a pass",
        "A verdict that the parser cannot read gets a default that is just enough to pass, as three in ten do.",
        "headroomlabs-ai/headroom#1892",
        ids("reward-nondeterministic", "reward-exploitable", "grader-swallows-errors"),
        EVERYWHERE,
        start=lambda stack, env: graded(correct=doubles.Unreadable())(stack, env),
    ),
    FieldFault(
        "verdicts in another form count as zero",
        "The judge puts a third of its verdicts under another key than the one that is read, and they count as 0.",
        "pinchbench/skill#24",
        ids("oracle-fails", "answers-not-parsed", "grader-swallows-errors"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.under_another_key),
    ),
    FieldFault(
        "marks in percent divided by ten",
        "Marks are divided by 10, and the judge gives some of them in percent, so that a bad one is as good as the best.",
        "IBM/unitxt#1960",
        ids("reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.some_in_percent),
    ),
    FieldFault(
        "answer compared with its mark still on it",
        "What is compared with the gold answer is the line of the answer with its mark, and no reply is right.",
        "AI-Hypercomputer/maxtext#4150",
        ids("oracle-fails", "reward-constant", "answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.mark_left_on),
    ),
    FieldFault(
        "length discount applied to negative rewards",
        "Rewards are multiplied by a number that falls with the length, so that a long wrong reply loses less.",
        "NVIDIA-NeMo/RL#3852",
        ids("reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.discounted),
        watch_causes=ids("length-runaway"),
        steps=10,
    ),
    FieldFault(
        "longer replies preferred by the reward model",
        "Whoever labelled the reward model's data preferred long replies, and it pays for length more than for answers.",
        "jsboige/CoursIA#16172",
        ids("reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.length_preferred),
        watch_causes=ids("length-runaway"),
        steps=10,
    ),
    # The engine
    FieldFault(
        "spaces stripped by the server's tokenizer",
        "The server's version of the tokenizer strips all spaces from a prompt, and the trainer's does not.",
        "huggingface/transformers#48206",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        EVERYWHERE,
        inject=doubles.spaces_stripped,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "end token forbidden before the limit",
        "The least length of a reply is its greatest, so that the sampler forbids the end token and replies fill the limit.",
        "deepspeedai/DeepSpeedExamples#470",
        ids("sampling-truncated", "stop-token-wrong", "truncated-turns"),
        ("gsm8k", "musique", "lookup"),
        start=engine_logits(doubles.end_forbidden),
        watch_causes=MISMATCH,
    ),
    # The trainer
    FieldFault(
        "averaged weights of an evaluation left in the trainer",
        "An evaluation puts a moving average of the weights into the model, and the trained ones are not put back.",
        "PKU-YuanGroup/Open-Sora-Plan#186",
        ids("weights-lost"),
        EVERYWHERE,
        inject=doubles.averages_left,
        options="--eval-steps 2 --eval-examples 4",
        probes=False,
        steps=8,
    ),
    FieldFault(
        "adapter multiplied by alpha alone",
        "The adapter's output is multiplied by alpha and not by alpha over rank, sixteen times as much as was meant.",
        "Blaizzy/mlx-vlm#986, Blaizzy/mlx-vlm#841",
        ids("learning-rate-too-high"),
        EVERYWHERE,
        start=doubles.scaled_by_alpha,
        options="--peft",
    ),
    # The saved model
    FieldFault(
        "final model's head rebuilt from its embeddings",
        "Head and embedding are tied in the settings and trained apart, and the final model has the embedding in both places.",
        "NVIDIA-NeMo/Automodel#2511, NVIDIA-NeMo/Automodel#2571",
        ids("saved-model-differs", "head-not-tied"),
        EVERYWHERE,
        start=doubles.untied_in_training,
    ),
)
