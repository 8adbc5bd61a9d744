"""Supervised fine-tuning on the assistant's answers in conversations."""

from engine.training.methods import Method

METHOD = Method(
    name="sft",
    summary="Imitate the answers: cross entropy on assistant tokens, over packed windows.",
    rows=frozenset({"chat", "text"}),
    row_help="conversations, prompts with completions, or texts",
    pack="windows",
    trainer="trl.SFTTrainer",
    objective="engine.training.runtime.objectives.tokens:build",
    metrics=("num_trained_tokens",),
)
