"""Problems of a row or a file: a stable code each, and its position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from core.storable_text import printable

CODES: Mapping[str, str] = {
    # file
    "empty_file": "the file holds no bytes, or no rows",
    "file_too_large": "the file is larger, once decompressed, than a dataset may be",
    "too_many_rows": "more rows than a file of its stored size can hold as examples",
    "binary_file": "the file is not a dataset (image, archive, executable)",
    "unsupported_container": "an archive or a spreadsheet, which is not read (zip, xlsx, tar, 7z)",
    "truncated_container": "a gzip, zstd or Parquet file that ends early or is damaged",
    "unsupported_encoding": "UTF-16 or UTF-32 text, read as UTF-8",
    "wrong_encoding": "bytes that the encoding named for the file does not have",
    "rows_in_object": "one JSON object that holds its rows under a key",
    "unknown_format": "text that is neither JSONL, nor a JSON array, nor CSV",
    "unknown_column": "the column map names a column that the file does not have",
    "too_few_examples": "fewer good examples than training needs",
    "too_many_examples": "more examples than the tier allows",
    # row
    "invalid_utf8": "bytes that are not UTF-8",
    "nul_character": "a NUL character",
    "lone_surrogate": "half of a surrogate pair, which cannot be encoded",
    "line_too_long": "a row over 16 MiB",
    "truncated_json": "JSON that ends early",
    "invalid_json": "JSON that cannot be parsed",
    "duplicate_key": "an object that has the same key twice",
    "non_finite_number": "NaN or Infinity, which JSON does not have",
    "too_deep": "nesting deeper than 64",
    "invalid_csv": "a CSV record that cannot be parsed",
    "column_count": "a CSV record with more or fewer fields than the header",
    "not_an_object": "a row that is not a JSON object",
    "unknown_row_shape": "a row of an unknown shape",
    "transcript_text": "a whole conversation written as one text, without the mapping that splits it",
    "mixed_formats": "a row of another shape than the rows before it",
    "missing_field": "a required field is missing or null",
    "wrong_type": "a field holds a value of the wrong type",
    "invalid_role": "a role that does not exist",
    "invalid_weight": "a weight of a message or a row other than 0 or 1",
    "invalid_label": "a label that says neither that the answer is good nor that it is bad",
    "invalid_tool_call": "a tool call without a name or with arguments that are not a JSON object",
    "invalid_reasoning": "reasoning on a message that is not the assistant's, or two texts of it that differ",
    "invalid_response_format": "a form of the answer that is not one of OpenAI's, or a schema that is too large",
    "invalid_template_kwargs": "variables for the chat template that it must not be given, or in two ways that differ",
    "unsupported_content": "content of a kind that is not trained on (images, audio)",
    "empty_messages": "a conversation without messages",
    "too_many_messages": "a conversation of more than 10,000 messages",
    "more_problems": "a row that has more than 100 problems: the first 100 are reported, the rest of the row was not read",
    "empty_content": "an empty answer or text",
    "system_not_first": "a system message after the first",
    "no_user_before_assistant": "an assistant turn without a preceding user turn",
    "unexpected_tool_message": "a tool message without a tool call",
    "last_not_assistant": "a conversation that does not end with the assistant",
    "nothing_to_train": "every assistant message has weight 0",
    "identical_preference": "chosen and rejected are the same",
}
"""Error codes of files and of the shapes of rows, with their meaning; those of checks are in ``checks.all_codes``."""


@dataclass(frozen=True, slots=True)
class Problem:
    code: str
    """One of :data:`CODES`, or of a check's findings."""
    message: str
    _: KW_ONLY
    path: str = ""
    """Path of the field, such as ``messages[2].content``; empty for the whole row."""
    fix: str
    options: str = ""
    """Options of ``ft check`` and ``ft upload`` that would read the row or the file; empty if none would."""

    def __post_init__(self) -> None:
        """Escapes what is quoted from a file: a report is stored where NUL and lone surrogates are refused."""
        for name in ("path", "message", "fix", "options"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    def at(self, *, row: int | None, byte_offset: int | None) -> RowError:
        """Returns the problem as an error of a report."""
        return RowError(row=row, byte_offset=byte_offset, path=self.path, code=self.code, message=self.message, fix=self.fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """A problem and its place, as an error of a report."""

    row: int | None
    """1-based line of a JSONL file, element of an array, record of a CSV or Parquet file; None for the whole file."""
    byte_offset: int | None
    """Of the row in the decompressed file; None if that has no meaning (Parquet)."""
    path: str
    code: str
    message: str
    fix: str
