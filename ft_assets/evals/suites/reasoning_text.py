"""What a model thinks before it answers is no part of its answer: scores, controls, classifiers and judges are given the answer alone."""

from __future__ import annotations

from ft_assets.datasets.tokens.assistant_turns import END_OF_THINKING, THINK


def without_reasoning(text: str) -> str:
    """`text` after its leading ``<think>...</think>``; as it is where there is none, or where the reasoning has no end.

    Some templates write ``<think>`` at the end of the prompt, so the model writes its end alone: on a line of its own, or it is text.
    """
    reasoning, end, answer = text.partition(END_OF_THINKING)
    begins = reasoning.lstrip().startswith(THINK)
    if not end or reasoning.count(THINK) != begins or not (begins or _ends_line(reasoning, answer)):
        return text
    return answer.lstrip()


def _ends_line(before: str, after: str) -> bool:
    """Whether only white space stands between the end of the reasoning and the ends of its line."""
    return not before.rpartition("\n")[2].strip() and not after.partition("\n")[0].strip()
