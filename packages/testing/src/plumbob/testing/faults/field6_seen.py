"""The seen half of the sixth set of the field's faults: those on which the doctor's rules may be developed."""

from __future__ import annotations

from plumbob.testing.faults import field6_seen_doubles as doubles
from plumbob.testing.faults.doubles import rewritten
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import (
    all_of,
    engine_logits,
    engine_model,
    engine_updates,
    graded,
    rows_changed,
    tasks_changed,
)

SEEN = (
    # Rewards and tasks
    FieldFault(
        "rewards rounded down to whole numbers",
        "Rewards are put into a tensor of integers, and every part of the credit is lost.",
        "YangRui2015/RiC#11, facebookresearch/rlmeta#103",
        # No cause says that rewards are rounded; these are its effects.
        ids("oracle-fails", "reward-constant", "too-little-signal", "never-succeeds"),
        ("musique",),
        start=graded(correct=doubles.rounded_down),
        watch=False,
    ),
    FieldFault(
        "grader reads the example in the prompt",
        "The grader searches the whole conversation for the first answer, which is the example in the system prompt.",
        "PeterGriffinJin/Search-R1#79",
        ids("oracle-fails", "answers-not-parsed", "grader-reads-other-part", "reward-constant"),
        ("musique",),
        start=graded(correct=doubles.example_read),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "a quarter of the golds wrong",
        "A quarter of the training tasks have a wrong gold, so that their right answers earn nothing.",
        "openai/grade-school-math#25",
        # No cause says that golds are wrong. The oracle of lookup answers with what no tool returns.
        ids("oracle-fails", "answers-not-parsed", "tools-return-nothing"),
        ("lookup", "gsm8k"),
        start=tasks_changed(doubles.a_quarter_wrong),
        watch=False,
    ),
    # Rows
    FieldFault(
        "another date in the trained prompt",
        "The template writes a date into the prompt that the trainer renders, and none into that of the engine.",
        "sgl-project/sglang#3296, mosaicml/llm-foundry#1474",
        ids("row-not-what-was-sampled", "prompt-replaced") | MISMATCH,
        EVERYWHERE,
        inject=rewritten(doubles.dated),
    ),
    FieldFault(
        "rows cut at a length of the trainer's own",
        "A row of several turns is cut at the most tokens of one reply, and its later turns are not trained.",
        "rllm-org/rllm#575",
        ids("sampled-tokens-masked", "row-not-what-was-sampled", "truncated-context"),
        ("lookup", "musique"),
        start=rows_changed(doubles.rows_cut),
    ),
    FieldFault(
        "every reply taken for a cut one",
        "The trainer knows another end token than the template's, takes every reply for a cut one, and masks it.",
        "huggingface/trl#7039",
        ids("signal-masked", "no-gradient", "truncated-turns", "stop-token-wrong"),
        EVERYWHERE,
        start=rows_changed(doubles.taken_for_cut),
        options="--overlong mask",
    ),
    # Tools
    FieldFault(
        "simulated tool invents a fifth of its results",
        "A language model plays the tool, and one result in five is made up.",
        "Alibaba-NLP/ZeroSearch#22",
        ids("tools-fail", "tool-results-mixed", "tools-return-nothing"),
        ("lookup",),
        start=tools_called(doubles.invented),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "search reads the first two words of a query",
        "The retriever's encoder cuts a query after a few tokens, and the words that matter come later.",
        "AnswerDotAI/RAGatouille#99, deepset-ai/FARM#629",
        ids("tool-arguments-changed", "tools-return-nothing"),
        ("musique",),
        start=tools_called(doubles.two_words),
        watch_causes=ids("never-succeeds", "tools-fail"),
    ),
    FieldFault(
        "answers by a tool that the model never calls",
        "An answer must be given by calling a tool, and the model writes it into its last message.",
        "datacurve-ai/deep-swe#25, UKGovernmentBEIS/inspect_ai#1774",
        ids("never-succeeds", "answers-not-parsed", "too-little-signal", "groups-without-variety", "tools-never-used"),
        ("musique",),
        options="-a answer_style=complete",
    ),
    # The engine
    FieldFault(
        "long requests refused by the server",
        "The server refuses prompts that leave too little room for a reply, and the groups of long rollouts are lost.",
        "TIGER-AI-Lab/verl-tool#85, PrimeIntellect-ai/prime-rl#1938",
        ids("engine-fails", "drops-are-biased", "long-rollouts-discarded", "truncated-context"),
        ("lookup",),
        start=doubles.long_refused,
    ),
    FieldFault(
        "logits capped in the engine only",
        "One side applies the soft cap of the logits that the model's settings have, and the other does not.",
        "vllm-project/vllm#52173, vllm-project/vllm-metal#665",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.capped),
    ),
    FieldFault(
        "attention biases missing in the engine",
        "The engine loads the matrices of attention without their biases, at its start and in each weight sync.",
        "sbryngelson/ANEForge#253, EricLBuehler/candle-vllm#167",
        ids("weights-not-synced") | MISMATCH,
        ("lookup",),
        start=all_of(engine_model(doubles.without_biases), engine_updates(doubles.biases_skipped)),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "square matrices arrive transposed",
        "One side stores matrices transposed, and nothing refuses those that are square.",
        "lablup/mlxcel#925",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.transposed),
        watch_options=UNCHECKED,
    ),
    # Advantages and loss
    FieldFault(
        "KL penalty of the reward never applied",
        "The KL divergence is computed for the reward and never subtracted from it, whatever its coefficient is.",
        "THUDM/slime#397",
        ids("advantages-wrong", "kl-backwards"),
        EVERYWHERE,
        start=doubles.kl_left_out,
        options="--kl-beta 0.1 --kl-placement reward",
        watch=False,
    ),
    FieldFault(
        "batch scaling done by groups",
        "Advantages are to be divided by the deviation of the whole batch, and are divided by that of their group.",
        "huggingface/trl#3991",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=doubles.scaled_by_group,
        options="--scale-rewards batch",
        watch=False,
    ),
    FieldFault(
        "KL estimate k1 in the loss",
        "The KL term of the loss is the k1 estimate, whose gradient is zero on average: it adds noise and holds nothing.",
        "allenai/open-instruct#534, NovaSky-AI/SkyRL#1445",
        # No cause says that a KL term has no effect; the advice for a wrong estimator stands at the first one.
        ids("kl-backwards", "kl-too-large"),
        EVERYWHERE,
        options="--kl-beta 0.5 --kl-estimator k1",
        watch=False,
    ),
    FieldFault(
        "clip bounds of GSPO with token ratios",
        "Ratios of single tokens are clipped at bounds for the mean of a reply, and later passes lose their gradient.",
        "verl-project/verl#2775, XueZeyue/DanceGRPO#47",
        ids("ratio-clipped"),
        EVERYWHERE,
        options="--epsilon 0.0003 --epsilon-high 0.0004 --num-iterations 4",
    ),
    # Optimizer and adapters
    FieldFault(
        "gradients underflow in half precision",
        "The loss scale has been lowered to a thousandth, and in half precision most of the gradient is zero.",
        "engichang1467/Open-Rig3R#35, warner-benjamin/optimi#15",
        ids("no-gradient", "gradient-clipped-to-nothing", "optimizer-moves-nothing", "weights-in-bf16"),
        EVERYWHERE,
        start=before_updates(doubles.underflowing),
        watch_causes=ids("schedule-hides-rate", "learning-rate-too-low"),
    ),
    FieldFault(
        "adapter of zeros on both sides",
        "Both matrices of the adapter are zero at first, and each multiplies the gradient of the other.",
        "nvidia-cosmos/cosmos-predict2.5#15, Lightning-AI/litgpt#1229",
        ids("no-gradient", "optimizer-moves-nothing", "update-without-effect"),
        EVERYWHERE,
        start=doubles.zeros_on_both_sides,
        options="--peft",
    ),
    FieldFault(
        "alpha of one at rank 64",
        "The adapter's output is multiplied by a 64th, because alpha was left at one when the rank was raised.",
        "bmaltais/kohya_ss#1511",
        ids("learning-rate-too-low", "update-without-effect"),
        EVERYWHERE,
        options="--peft --lora-r 64 --lora-alpha 1",
    ),
    FieldFault(
        "warm-up longer than the run",
        "The learning rate rises over many more steps than the run has.",
        "PeterGriffinJin/Search-R1#28, PrimeIntellect-ai/prime-rl#968",
        ids("warmup-too-long", "learning-rate-too-low"),
        EVERYWHERE,
        options="--warmup-steps 1000",
    ),
    FieldFault(
        "best checkpoint chosen by its entropy",
        "The final model is the checkpoint with the highest entropy, which is one of the first.",
        "huggingface/transformers#31142",
        # No cause says that a metric was chosen for which less is better.
        ids("saved-model-differs"),
        EVERYWHERE,
        options="--keep-best policy/entropy",
        probes=False,
        steps=8,
    ),
)
