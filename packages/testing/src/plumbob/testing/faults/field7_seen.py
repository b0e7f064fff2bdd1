"""The seen half of the seventh set of the field's faults: those on which the doctor's rules may be developed."""

from __future__ import annotations

from plumbob.testing.faults import field7_seen_doubles as doubles
from plumbob.testing.faults.field import FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates, losses
from plumbob.testing.faults.field_parts import engine_model, engine_prompts, engine_updates, graded, rows_changed

EVERYWHERE = ("lookup", "gsm8k", "musique")
WITH_TOOLS = ("lookup", "musique")
UNCHECKED = "--parity-limit 100"
MISMATCH = ids("engine-trainer-mismatch")

SEEN = (
    # Rewards
    FieldFault(
        "grader wants the opening tag that the template writes",
        "The reply must begin with a tag that the chat template puts at the end of the prompt, and no reply does.",
        "huggingface/trl#6966, huggingface/trl#7141",
        ids("oracle-fails", "answers-not-parsed", "reward-constant"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.opening_tag_needed),
        watch_causes=ids("task-out-of-reach"),
    ),
    FieldFault(
        "return code of the check never read",
        "The check of an answer runs as a command whose return code nobody reads, and every reply passes.",
        "huggingface/OpenEnv#1200",
        ids("reward-constant", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.always_passed),
        watch_causes=ids("task-solved", "too-little-signal", "groups-without-variety"),
    ),
    FieldFault(
        "crashed verifier scores zero",
        "In three rollouts of ten the verifier crashes before it has written a verdict, and that counts as 0.",
        "huggingface/OpenEnv#1025, Handshake-AI-Research/gandalf-the-grader#7",
        ids("reward-nondeterministic", "grader-swallows-errors"),
        EVERYWHERE,
        start=graded(correct=doubles.crashing),
        watch=False,
    ),
    FieldFault(
        "length differences scaled up in groups without an answer",
        "No rollout of a hard task is right, and the small price of length becomes the whole advantage.",
        "NVIDIA-NeMo/RL#2431, verl-project/verl-recipe#125",
        ids("tiny-std-scaling", "reward-format-dominated", "task-out-of-reach"),
        ("lookup",),
        start=graded(correct=doubles.length_priced),
        options="--scale-rewards group -a min_hops=9 -a max_hops=12",
        # From a run directory, only that nothing is ever solved is plain.
        watch_causes=ids("length-collapse"),
    ),
    # Rows and prompts
    FieldFault(
        "prefix of the reply trained as if sampled",
        "The opening of each reply is a part of the prompt when it is sampled, and of the reply when it is trained.",
        "modelscope/ms-swift#10106",
        ids("context-tokens-trained", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=rows_changed(doubles.prefix_trained),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "empty thinking block in the sampled prompts only",
        "The server's template ends each prompt with an empty thinking block, and that of the trained rows does not.",
        "hiyouga/LlamaFactory#9092, verl-project/verl#5582",
        ids("prompt-replaced", "row-not-what-was-sampled") | MISMATCH,
        EVERYWHERE,
        inject=doubles.thinking_block_added,
    ),
    # Sampling
    FieldFault(
        "stop string of a line break",
        "The server stops at the first line break, a default for examples of one line, and answers come after it.",
        "EleutherAI/lm-evaluation-harness#3700",
        ids("stop-token-wrong", "truncated-turns"),
        ("gsm8k",),
        inject=doubles.stopped_at_line_break,
        watch_causes=ids("task-out-of-reach"),
    ),
    FieldFault(
        "unlikely tokens cut by the server's min-p",
        "The server leaves out tokens below a tenth of the likeliest one's probability, and the trainer does not.",
        "huggingface/trl#7269",
        ids("sampling-truncated"),
        EVERYWHERE,
        start=engine_prompts(doubles.likely_tokens_only),
        options="--temperature 1.5",
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "attention of the engine not scaled",
        "A fallback of the engine does not divide attention scores by the root of the head size.",
        "mlc-ai/mlc-llm#3426, NVIDIA/Megatron-LM#848",
        MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.attention_not_scaled),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "adapter left out of each weight transfer",
        "A weight transfer sends the frozen weights and not the adapter, so that rollouts come from the first policy.",
        "verl-project/verl#7495",
        ids("weights-not-synced", "adapter-not-applied", "adapter-bound-to-no-module"),
        EVERYWHERE,
        start=engine_updates(doubles.nothing_sent),
        options="--peft",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "last layer sent to the place of the first",
        "Each stage of the trainer numbers its layers from zero, and the last stage's layer overwrites the first layer.",
        "NVIDIA-NeMo/RL#3259, NVIDIA/Megatron-LM#1583",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.numbered_from_zero),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "query and key rows in another rotary order",
        "Rotary pairs lie next to each other on one side and half a head apart on the other; a sync does not convert.",
        "ooples/AiDotNet#2074, huggingface/transformers#31788",
        ids("weights-not-synced", "positions-shifted") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.rotary_pairs_interleaved),
        watch_options=UNCHECKED,
    ),
    # Advantages and loss
    FieldFault(
        "baseline is the first rollout's reward",
        "The mean of a group is taken over its first rollout alone, with which all others are compared.",
        "ServiceNow/PipelineRL#54",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=doubles.compared_with_the_first,
        watch=False,
    ),
    FieldFault(
        "KL of tool results taken off the reward",
        "The KL penalty of the reward is also summed over tool results, which the policy did not write.",
        "PeterGriffinJin/Search-R1#21, THUDM/slime#1370",
        ids("advantages-wrong", "kl-too-large"),
        WITH_TOOLS,
        start=doubles.kl_of_everything,
        options="--kl-beta 0.1 --kl-placement reward",
        watch=False,
    ),
    FieldFault(
        "NaN at a masked position",
        "The log-probability at a place outside the loss is NaN, and zero times NaN is NaN in every update.",
        "OpenRLHF/OpenRLHF#1240, areal-project/AReaL#1347",
        ids("gradient-not-finite"),
        EVERYWHERE,
        start=losses(doubles.one_not_a_number),
    ),
    # Optimizer
    FieldFault(
        "gradients cleared before the step",
        "Gradients are set to zero between the backward pass and the optimizer's step, and nothing is learned.",
        "Tony-Y/pytorch_warmup#12",
        ids("no-gradient", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=before_updates(doubles.cleared),
    ),
    FieldFault(
        "counter of the warm-up stands still",
        "The counter of the warm-up is advanced where no step comes by, and the learning rate stays at zero.",
        "Lightning-AI/litgpt#779",
        ids("schedule-hides-rate", "warmup-too-long", "learning-rate-too-low", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.never_warm,
        options="--warmup-steps 3",
        probes=False,
        steps=8,
    ),
    FieldFault(
        "rate of the settings ignored",
        "The trainer is built with the default rate of another method, fifty times the one that was asked for.",
        "jjyaoao/HelloAgents#107, datawhalechina/hello-agents#770",
        ids("schedule-hides-rate", "learning-rate-too-high"),
        EVERYWHERE,
        start=doubles.rate_of_another_method,
        watch_causes=ids("entropy-explosion"),
        probes=False,
        steps=8,
    ),
)
