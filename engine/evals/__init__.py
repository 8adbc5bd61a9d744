"""Evaluation: an adapter compared with its base on the same items, and the gate that decides what may be served; see README.md."""

from typing import TYPE_CHECKING

from core.doors import lazily

if TYPE_CHECKING:
    from engine.evals.config import MAX_SUITE_NAME, EvalConfig, parse_eval_config, short_config
    from engine.evals.gate.advice import Advice, LastRun, advise, combined_changes
    from engine.evals.gate.gates import judge
    from engine.evals.gate.verdict import PASSED, QUARANTINED, Finding, Verdict
    from engine.evals.run.run_file import (
        DATA_NAME,
        HOLDOUT_NAME,
        KNOWN_NAME,
        QUESTION_DIR,
        SAMPLES_NAME,
        SCORED_NAME,
        STAGED_PATHS,
        SUITES_DIR,
        TASKS_NAME,
        EvalRun,
        capability_id,
        known_answers_key,
        plain_suites,
    )
    from engine.evals.run.run_status import (
        EVAL_EXIT_BAD_INPUT,
        EVAL_EXIT_INTERNAL,
        EVAL_EXIT_OK,
        HEARTBEAT_NAME,
        RESULT_NAME,
        read_eval_result,
        read_heartbeat,
        read_milestones,
    )
    from engine.evals.scoring.judge import JudgeSettings
    from engine.evals.scoring.report import EvalReport, build_report, sample_rows, score_table
    from engine.evals.scoring.review import Review, Verdicts
    from engine.evals.scoring.scores import SCHEMA_VALID
    from engine.evals.suites.answer_metrics import (
        METRICS,
        NOT_JSON,
        WITHOUT_REFERENCE,
        answer_words,
        bleu,
        common_subsequence,
        parse_json,
        rouge_l,
    )
    from engine.evals.suites.answer_reader import AnswerReader
    from engine.evals.suites.safety import BUILTIN_CLASSIFIER, classifier_id
    from engine.evals.suites.suite_items import HOLDOUT, SCORED_PREFIX, Decoding, Item, holdout_items, is_literal, item_of, write_items
    from engine.evals.suites.task_files import add_suite_rows, check_suites, list_suites, suite_data_files

__getattr__, __dir__ = lazily(__name__)
