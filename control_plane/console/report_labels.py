"""Words for the names in reports, and for settings and metrics."""

from __future__ import annotations

from collections.abc import Mapping

STATISTICS: Mapping[str, str] = {
    "bad_rows": "Rows with problems",
    "trained_turns": "Answers that are trained",
    "untrained_turns": "Answers without loss",
    "reasoning.rows": "Rows with reasoning",
    "reasoning.left_out_turns": "Turns whose reasoning the template leaves out",
    "over_long": "Examples over the sequence length",
    "dedup_removed": "Duplicates dropped",
    "duplicates.exact": "Exact duplicates",
    "duplicates.near": "Near duplicates",
    "toxicity.flagged": "Toxic rows",
    "splits.by": "Validation rows chosen by",
    "splits.fraction": "Share held out for validation",
    "splits.train": "Rows for training",
    "splits.validation": "Rows for validation",
    "quality.num_rows": "Rows examined for quality",
    "quality.num_answers": "Answers in words",
    "quality.answer_length.p50": "Median answer, characters",
    "quality.answer_length.p99": "99 % of answers are shorter than, characters",
    "quality.answer_length.p999": "99.9 % of answers are shorter than, characters",
    "quality.answer_length.max": "Longest answer, characters",
    "quality.answer_length.over_10x_median": "Answers over ten times the median",
    "quality.near_empty_answers": "Nearly empty answers",
    "quality.distinct_answers": "Distinct answers",
    "quality.classification.num_classes": "Classes",
    "quality.classification.largest_share": "Share of the largest class",
    "quality.classification.rare_classes": "Classes with fewer than 5 answers",
    "quality.conflicting_prompts.checked": "Prompts compared",
    "quality.conflicting_prompts.conflicting": "Prompts with different answers",
}
POLICIES: Mapping[str, str] = {
    "bad_rows": "Rows with problems",
    "pii": "Personal data",
    "rows_at": "Rows are under the key",
    "max_bytes": "Largest file, decompressed",
    "max_examples": "Most examples",
    "min_examples": "Fewest examples",
    "over_long": "Examples over the sequence length",
}
LENGTHS: Mapping[str, str] = {
    "min": "shortest", "p50": "median", "mean": "mean", "p95": "95th percentile", "p99": "99th percentile", "max": "longest",
    "total": "total",
}  # fmt: skip
PII_ACTIONS: Mapping[str, str] = {
    "warn": "It stays in the rows. Redact or drop it at upload, or make sure that you may train on it.",
    "redact": "It was replaced by placeholders before anything was stored as a dataset.",
    "reject": "Rows that hold it count as rows with problems.",
    "off": "The check is off.",
}
KINDS: Mapping[str, str] = {"ip_address": "IP address", "iban": "IBAN", "ssn": "social security number"}
SETTINGS: Mapping[str, str] = {
    "n_epochs": "epochs", "max_seq_len": "sequence length in tokens", "rank": "LoRA rank", "alpha": "LoRA alpha",
    "use_rslora": "rank-stabilized LoRA (rsLoRA)", "use_dora": "DoRA", "init_lora_weights": "initial LoRA weights",
    "loraplus_lr_ratio": "LoRA+ learning rate ratio", "min_lr_ratio": "least learning rate, as a share",
    "layer_lr_decay": "learning rate decay by layer", "adam_beta1": "Adam beta 1", "adam_beta2": "Adam beta 2",
    "adam_epsilon": "Adam epsilon", "neftune_noise_alpha": "NEFTune noise", "per_device_batch_size": "batch size per GPU",
    "train_on_inputs": "train on prompts too", "safety_share": "share of safety examples",
}  # fmt: skip
"""Hyperparameters; the others are shown as their words."""
METRICS: Mapping[str, str] = {
    "acc": "accuracy", "acc_norm": "accuracy, by length", "bleu": "BLEU", "rouge_l": "ROUGE-L", "token_f1": "token F1",
    "macro_f1": "macro F1", "json_valid": "valid JSON", "over_refused": "refused without need",
}  # fmt: skip
"""Metrics; the others are shown as their words."""
ADAPTERS: Mapping[str, str] = {
    "lora": "LoRA", "qlora": "QLoRA", "full": "all parameters", "lora_adapter": "LoRA adapter", "full_model": "whole model",
}  # fmt: skip
"""What is trained."""
LANGUAGES: Mapping[str, str] = {
    "unknown": "Not recognized", "en": "English", "de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese",
    "nl": "Dutch", "pl": "Polish", "sv": "Swedish", "tr": "Turkish", "id": "Indonesian", "vi": "Vietnamese", "ja": "Japanese",
    "ko": "Korean", "zh": "Chinese", "ar": "Arabic", "he": "Hebrew", "el": "Greek", "hi": "Hindi", "bn": "Bengali", "ta": "Tamil",
    "te": "Telugu", "th": "Thai", "ru": "Russian", "uk": "Ukrainian",
}  # fmt: skip


def label(words: Mapping[str, str], name: str) -> str:
    """Return the words for `name`; for a name of a registered check, the name itself as words."""
    spelled = name.replace(".", ", ").replace("_", " ")
    return words.get(name, spelled[:1].upper() + spelled[1:])
