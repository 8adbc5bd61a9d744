"""Simple preference optimization (Meng et al. 2024): mean log-probability as reward, a target margin, no reference."""

from engine.training.methods import Limit, Method, Setting

METHOD = Method(
    name="simpo",
    summary="Prefer the chosen answer by mean log-probability, with a target margin and without a reference.",
    rows=frozenset({"preference"}),
    row_help="rows of prompt, chosen and rejected",
    pack="pairs",
    trainer="trl.experimental.cpo.CPOTrainer",
    objective="engine.training.runtime.objectives.simpo_loss:build",
    reward_per_token=True,
    learning_rate_factor=0.025,
    learning_rate_source="SimPO repository: 3e-7 to 1e-6 full; ten times that for LoRA, the ratio of TRL (examples/scripts/cpo.py)",
    settings={
        "beta": Setting(default=2.0, source="SimPO paper, table 7 (2.0 to 2.5)",
                        limit=Limit(kind="float", low=0, high=100, above_low=True)),
        "gamma": Setting(default=1.0, source="SimPO paper: gamma/beta of 0.5", limit=Limit(kind="float", low=0, high=100),
                         help="target margin of chosen over rejected"),
        "cpo_alpha": Setting(default=0.0, source="0 is SimPO; above it CPO-SimPO adds imitation",
                             limit=Limit(kind="float", low=0, high=10)),
    },
    metrics=("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"),
)  # fmt: skip
