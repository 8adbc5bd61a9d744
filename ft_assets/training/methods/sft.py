"""Supervised fine-tuning on the answers of conversations."""

from ft_assets.training.methods import Method

METHOD = Method(
    name="sft",
    summary="Imitate the answers: cross entropy on assistant tokens, over packed windows.",
    rows=frozenset({"chat", "text"}),
    row_help="conversations, prompts with completions, or texts",
    pack="windows",
    trainer="trl.SFTTrainer",
    objective="ft_assets.training.runtime.objectives.tokens:build",
    metrics=("num_trained_tokens",),
    failure_modes=(
        "validation loss rises while training loss falls: too many epochs; lower n_epochs or set early_stopping_patience",
        "answers do not end: the end-of-turn token carried no loss; the pack refuses such templates",
        "loss is flat from the start: learning rate too low for the adapter, or labels all masked",
    ),
)
