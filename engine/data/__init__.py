"""From an uploaded file to a tokenized pack: read, validate, preview, split, pack; see README.md."""

from typing import TYPE_CHECKING

from core.doors import lazily

if TYPE_CHECKING:
    from engine.data.blocks.causes import CAUSE_EXAMPLES
    from engine.data.blocks.pass_progress import PassProgress
    from engine.data.checks import section_lines
    from engine.data.checks.contamination.benchmarks import field_of, field_text
    from engine.data.checks.contamination.contaminated_rows import contamination, contamination_line
    from engine.data.checks.contamination.overlap import SuiteGrams, SuiteIndex
    from engine.data.checks.contamination.shipped_suites import shipped_index, shipped_place, shipped_suites
    from engine.data.checks.quality import train_validation_overlap
    from engine.data.checks.quality_warnings import quality_warnings
    from engine.data.checks.tool_usage import tools_problem
    from engine.data.checks.turn_order import order_problems
    from engine.data.conversation import Conversation, normalize_request, own_template_kwargs, read_request
    from engine.data.fields import MAX_MESSAGES, TEMPLATE_KWARGS
    from engine.data.ingest import IngestResult, validate_file
    from engine.data.mixture import (
        MAX_FILES,
        MIXTURE_FIELD,
        USEFUL_READS,
        MixedFile,
        check_repeats,
        described_mixture,
        mixture_params,
        mixture_refusal,
        mixture_repeats,
        parse_mixture,
        repetition_warning,
        rows_per_epoch,
    )
    from engine.data.packs.best_fit import window_for
    from engine.data.packs.build import build_pack
    from engine.data.packs.manifest import PackManifest, verify_pack
    from engine.data.packs.pack_settings import PackSettings, pack_fingerprint
    from engine.data.packs.recount import recounted_differences
    from engine.data.packs.source import has_own_split
    from engine.data.packs.token_shard_build import PackProgress
    from engine.data.packs.workers import suitable_workers
    from engine.data.pipeline.pass_one import PARALLEL_FROM_BYTES
    from engine.data.policies import MIN_TRAINING_EXAMPLES, READING_POLICIES, Policies, too_few_to_train
    from engine.data.problems import Problem
    from engine.data.readers.column_map import parse_column_map
    from engine.data.readers.containers import MAX_COMPRESSION_RATIO, MAX_DECODED_BYTES, RATIO_FLOOR_BYTES
    from engine.data.readers.encodings import ENCODING_LABELS, ENCODINGS, UTF8
    from engine.data.readers.hub.hub_client import HubAnswer, HubRequest, ListedFile, ask_hub
    from engine.data.readers.hub.hub_dataset import HubId, fetch_from_hub, parse_hub_id
    from engine.data.readers.hub.hub_session import guard_hub_session, restrict_hub_session
    from engine.data.readers.row_stream import open_rows
    from engine.data.report.histogram import histogram_svg, markdown_picture
    from engine.data.report.report_text import report_lines
    from engine.data.report.validation_report import DatasetReport, counting_tokenizer, problems_of, report_in_order
    from engine.data.row_preview import Preview, preview, preview_lines, preview_pieces
    from engine.data.schema import REASONING_FIELDS, Example, TemplateValue, parse_canonical
    from engine.data.shapes import detect_shape, to_example
    from engine.data.split import automatic_fraction, held_out, part_of
    from engine.data.stored_rows import content_digest, load_rows, load_stored
    from engine.data.tokens.assistant_turns import END_OF_THINKING, THINK
    from engine.data.tokens.call_form import CALL_ID, CALL_ID_PATTERN, CallForm, CallText, RenderedCall, rendered_call
    from engine.data.tokens.chat_tokenizer import ChatTokenizer, TokenizedExample
    from engine.data.tokens.encoders import UNCUT
    from engine.data.tokens.reasoning_probe import THINK_MARKS, TemplateOpenings, ThinkingSwitch, ThinkMarks
    from engine.data.tokens.templates import NO_KWARGS, load_template
    from engine.data.tokens.token_shards import EncodingTally, encode_or_drop
    from engine.data.tokens.tool_probe import TemplateTools, template_tools

__getattr__, __dir__ = lazily(__name__)
