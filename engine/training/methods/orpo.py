"""Odds ratio preference optimization (Hong et al. 2024): no reference model."""

from engine.training.methods import Limit, Method, Setting

METHOD = Method(
    name="orpo",
    summary="Imitate the chosen answer and push its odds above the rejected one's, in one stage and without a reference.",
    rows=frozenset({"preference"}),
    row_help="rows of prompt, chosen and rejected",
    pack="pairs",
    trainer="trl.experimental.orpo.ORPOTrainer",
    objective="engine.training.runtime.objectives.orpo_loss:build",
    reward_per_token=True,
    learning_rate_factor=0.4,
    learning_rate_source="ORPO paper, appendix C: 8e-6 full; TRL, examples/scripts/orpo.py: 8e-6 full, 8e-5 LoRA",
    settings={
        "beta": Setting(default=0.1, source="ORPO paper, lambda in equation 6",
                        limit=Limit(kind="float", low=0, high=10, above_low=True), help="weight of the odds ratio loss"),
    },
    metrics=("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "nll_loss", "log_odds_ratio"),
)  # fmt: skip
