"""Shares the common parts of scored texts, so that a model reads them once.

Continuations of one context become a **tree**: its stem is read once, its branches see the stem and themselves. Trees whose stems begin
alike (the examples of a few-shot prompt) become a **family**: their common prefix is read once and its keys and values are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.evals.run.request_encoder import Scored

MIN_PREFIX = 64
"""Shorter prefixes cost more to pass on than to read again."""

MAX_LEAVES = 64
"""Most continuations of one tree: what each token attends to grows with the tree."""

Ids = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One scored text in its tree."""

    id: str
    places: tuple[int, ...]
    """Positions in the tree from which the targets are predicted."""
    targets: Ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Token ids, each with its position in its text and its branch (0: the stem)."""

    ids: Ids
    positions: tuple[int, ...]
    branches: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @property
    def first_place(self) -> int:
        """First position from which something is predicted."""
        return min(place for leaf in self.leaves for place in leaf.places)

    @property
    def stem(self) -> Ids:
        return self.ids[: self.branches.index(1)] if 1 in self.branches else self.ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Trees that begin with the same tokens."""

    prefix: int
    """Number of common tokens that are read once; 0 if sharing would not pay."""
    trees: tuple[Tree, ...]


def tree(texts: Sequence[tuple[str, Scored]]) -> Tree:
    """Builds one tree of the texts (request id, tokens); texts of the same tokens share a branch."""
    distinct = sorted({text.ids for _, text in texts})
    stem = common(distinct[0], distinct[-1])
    ids, places, branches = [*distinct[0][:stem]], [*range(stem)], [0] * stem
    begins: dict[Ids, int] = {}
    for number, row in enumerate((row for row in distinct if len(row) > stem), start=1):
        begins[row] = len(ids)
        ids += row[stem:]
        places += range(stem, len(row))
        branches += [number] * (len(row) - stem)
    leaves = []
    for id_, text in texts:
        shift = begins.get(text.ids, stem) - stem
        at = tuple(place if place < stem else place + shift for place in range(text.start, len(text.ids)))
        leaves.append(Leaf(id=id_, places=at, targets=text.targets))
    return Tree(ids=tuple(ids), positions=tuple(places), branches=tuple(branches), leaves=tuple(leaves))


def families(trees: Sequence[Tree]) -> list[Family]:
    """Groups trees in families, longest work last.

    1. Trees are sorted by their tokens, so that those that begin alike are neighbors.
    2. A neighbor joins while the common prefix is worth it, and at least half of what the family had in common without it.
    3. A prefix ends before the first position from which something is predicted.
    """
    found: list[Family] = []
    run: list[Tree] = []
    shared = 0
    for one in sorted(trees, key=lambda t: (t.ids, t.leaves[0].id)):
        joined = _prefix(run[0], one, shared) if run else 0
        if run and joined >= MIN_PREFIX and 2 * joined >= shared:
            run, shared = [*run, one], joined
            continue
        found += _closed(run, shared)
        run, shared = [one], min(len(one.stem), one.first_place)
    return sorted([*found, *_closed(run, shared)], key=lambda f: (f.prefix + max(len(t.ids) for t in f.trees), f.trees[0].ids))


def _prefix(first: Tree, other: Tree, limit: int) -> int:
    return common(first.ids[:limit], other.stem[: other.first_place])


def _closed(run: Sequence[Tree], shared: int) -> Iterator[Family]:
    if not run:
        return
    yield Family(prefix=shared if len(run) > 1 else 0, trees=tuple(by_length(run)))


def common(a: Ids, b: Ids) -> int:
    """Returns the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def bounded(texts: Sequence[T]) -> Iterator[Sequence[T]]:
    """Splits continuations of one context into groups, each of which becomes a tree."""
    return (texts[at : at + MAX_LEAVES] for at in range(0, len(texts), MAX_LEAVES))


def split_tree(one: Tree) -> list[Tree]:
    """Splits a tree into one tree per text, for a model that cannot share."""
    found: dict[Ids, list[tuple[str, Scored]]] = {}
    for leaf in one.leaves:
        branch = one.branches[leaf.places[-1]]
        ids = tuple(i for i, b in zip(one.ids, one.branches, strict=True) if b in (0, branch))
        ids = ids[: one.positions[leaf.places[-1]] + 1]
        found.setdefault(ids, []).append((leaf.id, Scored(ids=ids, targets=leaf.targets, cut=0)))
    return [tree(texts) for texts in found.values()]


def by_length(trees: Sequence[Tree]) -> list[Tree]:
    return sorted(trees, key=lambda t: (len(t.ids), t.ids))


def places(trees: Sequence[Tree]) -> list[int]:
    """Returns every position from which something is predicted in one of the trees."""
    return sorted({place for one in trees for leaf in one.leaves for place in leaf.places})
