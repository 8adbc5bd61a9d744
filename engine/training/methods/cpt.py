"""Continued pre-training on every token of plain text."""

from engine.training.methods import Method

METHOD = Method(
    name="cpt",
    summary="Learn a domain's text: cross entropy on every token of packed documents.",
    rows=frozenset({"text", "chat"}),
    row_help='texts ({"text": ...}), or conversations, trained on every token',
    pack="windows",
    every_token=True,
    trainer="trl.SFTTrainer",
    objective="engine.training.runtime.objectives.tokens:build",
    learning_rate_factor=0.5,
    learning_rate_source="half of SFT's rate: many tokens, no instruction to anchor on (Ibrahim et al. 2024 re-warm to a part of the peak)",
    metrics=("num_trained_tokens", "perplexity"),
)
