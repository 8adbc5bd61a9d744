"""Trees and families of texts: what is read once, and that nothing is lost."""

from __future__ import annotations

import random

from engine.evals.run import prefix_tree
from engine.evals.run.prefix_tree import Tree
from engine.evals.run.request_encoder import Scored


def scored(ids: tuple[int, ...], num_targets: int) -> Scored:
    return Scored(ids=ids[:-1], targets=ids[-num_targets:], cut=0)


def read_back(tree: Tree) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each leaf, what its last place sees (the stem and its own branch, up to itself), and its targets."""
    found = {}
    for leaf in tree.leaves:
        last = leaf.places[-1]
        seen = [at for at in range(last + 1) if tree.branches[at] in (0, tree.branches[last])]
        assert [tree.positions[at] for at in seen] == list(range(len(seen)))
        found[leaf.id] = (tuple(tree.ids[at] for at in seen), leaf.targets)
    return found


def test_every_text_of_a_tree_is_seen_whole() -> None:
    rng = random.Random(0)
    for _ in range(200):
        context = tuple(rng.choices(range(3), k=rng.randint(1, 6)))
        texts = {}
        for n in range(rng.randint(1, 5)):
            continuation = tuple(rng.choices(range(3), k=rng.randint(1, 4)))
            texts[f"t{n}"] = scored(context + continuation, len(continuation))
        tree = prefix_tree.tree(list(texts.items()))
        assert read_back(tree) == {id_: (t.ids, t.targets) for id_, t in texts.items()}
        assert {id_: back for one in prefix_tree.split_tree(tree) for id_, back in read_back(one).items()} == read_back(tree)
        assert len(tree.ids) <= sum(len(t.ids) for t in texts.values())


def test_choices_of_one_token_are_read_in_one_place() -> None:
    tree = prefix_tree.tree([(c, scored((1, 2, 3, 10 + n), 1)) for n, c in enumerate("abcd")])
    assert tree.ids == (1, 2, 3)
    assert {leaf.places for leaf in tree.leaves} == {(2,)}


def test_contexts_that_begin_alike_are_a_family_and_others_are_not() -> None:
    prefix, other = tuple(range(100)), tuple(range(500, 700))
    trees = [
        prefix_tree.tree([(f"{name}{q}", scored((*start, q, 7, 8), 1))]) for name, start in (("a", prefix), ("b", other)) for q in range(3)
    ]
    families = prefix_tree.families(trees)
    assert sorted((f.prefix, len(f.trees)) for f in families) == [(100, 3), (200, 3)]
    assert all(t.ids[: f.prefix] == f.trees[0].ids[: f.prefix] for f in families for t in f.trees)


def test_a_family_reads_nothing_ahead_that_something_is_predicted_from() -> None:
    same = tuple(range(100))
    trees = [prefix_tree.tree([("long", scored((*same, 1), 50))]), prefix_tree.tree([("short", scored((*same, 2, 3), 1))])]
    for family in prefix_tree.families(trees):
        assert all(t.first_place >= family.prefix for t in family.trees)


def test_every_tree_is_in_exactly_one_family() -> None:
    rng = random.Random(1)
    starts = [tuple(rng.choices(range(5), k=rng.randint(1, 150))) for _ in range(4)]
    trees = [prefix_tree.tree([(f"t{n}", scored((*rng.choice(starts), *rng.choices(range(5), k=9)), 2))]) for n in range(60)]
    found = [leaf.id for family in prefix_tree.families(trees) for t in family.trees for leaf in t.leaves]
    assert sorted(found) == sorted(f"t{n}" for n in range(60))
