"""Direct preference optimization (Rafailov et al. 2023)."""

from engine.training.methods import Limit, Method, Setting

LOSSES = ("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sigmoid_norm")

METHOD = Method(
    name="dpo",
    summary="Prefer the chosen answer to the rejected one, measured against the frozen base.",
    rows=frozenset({"preference"}),
    row_help="rows of prompt, chosen and rejected",
    pack="pairs",
    trainer="trl.DPOTrainer",
    objective="engine.training.runtime.objectives.dpo_loss:build",
    needs_reference=True,
    learning_rate_factor=0.025,
    learning_rate_source="alignment-handbook, Zephyr 7B DPO: 5e-7 full, 5e-6 QLoRA; DPO at SFT rates collapses both log-probabilities",
    settings={
        "beta": Setting(default=0.1, source="DPO paper, section 6", limit=Limit(kind="float", low=0, high=10, above_low=True),
                        help="penalty for deviating from the base"),
        "loss_type": Setting(default="sigmoid", source="DPO paper, equation 7", limit=Limit(kind="word", words=LOSSES)),
        "label_smoothing": Setting(default=0.0, source="cDPO; 0 trusts every label", limit=Limit(kind="float", low=0, high=0.49),
                                   only_with=("loss_type", ("sigmoid", "robust"))),
    },
    metrics=("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"),
)  # fmt: skip
