"""Kahneman-Tversky optimization (Ethayarajh et al. 2024): single answers labeled good or bad."""

from engine.training.methods import Limit, Method, Setting

METHOD = Method(
    name="kto",
    summary="Raise the probability of answers labelled good and lower that of bad ones, relative to the frozen base; no pairs needed.",
    rows=frozenset({"kto"}),
    row_help="rows of an answer with a label (true: good, false: bad)",
    pack="judged",
    trainer="trl.KTOTrainer",
    objective="engine.training.runtime.objectives.kto_loss:build",
    needs_reference=True,
    learning_rate_factor=0.025,
    learning_rate_source="TRL's KTO guide (first version), 5e-7 to 5e-6 for both: the low end for full, the high end for LoRA",
    settings={
        "beta": Setting(default=0.1, source="KTO paper, section 4.1", limit=Limit(kind="float", low=0, high=10, above_low=True)),
        "desirable_weight": Setting(default=1.0, source="KTO paper, equation 8",
                                    limit=Limit(kind="float", low=0, high=100, above_low=True)),
        "undesirable_weight": Setting(default=1.0, source="KTO paper, equation 8: weigh so that good and bad count alike",
                                      limit=Limit(kind="float", low=0, high=100, above_low=True)),
    },
    metrics=("rewards/chosen", "rewards/rejected", "rewards/margins", "kl", "logps/chosen", "logps/rejected"),
)  # fmt: skip
